"""What ranks have found of a bad step, put together on rank 0."""

from __future__ import annotations

import json

from gradilocks.lab.trace.rank_answers import Answer, concluded
from gradilocks.runfile import Trace


def trace(where: str = "module", module: str = "head", text: str = "NaN there") -> Trace:
    return Trace(3, 1.5, "forward", module, "Linear", "NaN", ({"name": "x"},), text, (), where)


NOTHING = Answer(3, gradients=trace("gradients", "", "NaN in the gradients of 4 parameters"))


def test_an_answer_comes_out_of_its_letter_as_it_was():
    for answer in (NOTHING, Answer(3, trace(), doubt="so", driver=2, is_last=False)):
        assert Answer.from_plain(json.loads(json.dumps(answer.to_plain()))) == answer


def test_one_process_tells_what_it_found_without_a_rank():
    assert concluded({0: [Answer(3, trace())]}, (0,)) == [trace()]
    (found,) = concluded({0: [NOTHING]}, (0,))
    assert (found.ranks, found.certainty) == ((), "certain")
    assert "but in no module: likely it gets there after backward" in found.text
    assert concluded({0: [NOTHING._replace(doubt="no call was seen")]}, (0,)) == []


def test_a_place_that_several_ranks_found_is_told_once():
    first, second = Answer(3, trace("input")), Answer(3, trace())
    found = concluded({0: [second, second], 1: [first], 3: [second]}, (0, 1, 2, 3))
    assert [(each.where, each.ranks) for each in found] == [("module", (0, 3)), ("input", (1,))]
    assert found[0].text == "On ranks 0, 3: NaN there"


def test_a_loss_is_not_blamed_where_another_rank_names_the_cause():
    lost = Answer(3, trace("after"))
    (found,) = concluded({0: [lost], 1: [Answer(3, trace("input"))]}, (0, 1))
    assert (found.where, found.ranks) == ("input", (1,))
    (found,) = concluded({0: [lost], 1: [NOTHING]}, (0, 1))
    assert (found.where, found.ranks) == ("after", (0,))


def test_nothing_is_claimed_of_a_rank_that_has_not_answered():
    (found,) = concluded({0: [NOTHING], 2: [NOTHING]}, (0, 1, 2))
    assert (found.where, found.certainty, found.ranks) == ("gradients", "unknown", ())
    assert "what was found on rank 1 has not been told" in found.text
    assert "after backward" not in found.text
    (found,) = concluded({0: [NOTHING], 1: [NOTHING._replace(doubt="it meets others")]}, (0, 1))
    assert found.certainty == "unknown"
    assert found.text.endswith("where it arose is not known: it meets others (on rank 1)")
    (found,) = concluded({0: [NOTHING], 1: [NOTHING]}, (0, 1))
    assert (found.certainty, found.ranks) == ("certain", (0, 1))
    assert found.text.startswith("On all 2 ranks: NaN in the gradients of 4 parameters, but in no")
