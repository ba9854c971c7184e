"""What ranks have counted is added up where they train one model, and kept apart elsewhere."""

from __future__ import annotations

import json
from typing import Any, cast

from gradilocks.lab.audit import script
from gradilocks.lab.audit.counted import Counted, counted_together
from gradilocks.lab.audit_record import Histogram, ModuleGradients, Outputs
from gradilocks.lab.formats import FORMATS


def one_rank(exponent: int, *, largest: float = 2.0, precision: str = "float32") -> Counted:
    seen = Histogram.of({exponent: 3}, zeros=1, largest=1.5 * 2.0**exponent, smallest=2.0**exponent)
    modules = (
        ModuleGradients("up", "Linear", seen, None, Outputs(largest, 1, ("down",))),
        ModuleGradients("down", "Linear", None, seen),
    )
    return Counted(modules, precision, 4.0, passes=5, lost_passes=1)


def test_partners_add_up():
    partners = {0: [0, 1], 1: [0, 1]}
    both = counted_together({0: one_rank(-3), 1: one_rank(2, largest=9.0)}, partners, ranks=2)
    up, down = both.modules
    assert up.name == "up"
    assert up.parameters is not None
    assert dict(up.parameters.bins()) == {-3: 3, -2: 0, -1: 0, 0: 0, 1: 0, 2: 3}
    assert (up.parameters.zeros, up.parameters.smallest, up.parameters.largest) == (2, 0.125, 6.0)
    assert up.activations is None
    assert up.outputs == Outputs(9.0, 2, ("down",))
    assert down.parameters is None
    assert (both.precision, both.loss_scale) == ("float32", 4.0)
    assert (both.passes, both.lost_passes) == (10, 2)


def test_a_chain_of_partners_is_one_team():
    """Tensor parallel pairs 0, 1 and 2, 3, and data parallel 0, 2 and 1, 3."""
    partners = {0: [0, 1, 2], 1: [0, 1, 3], 2: [2, 3, 0], 3: [2, 3, 1]}
    every = counted_together({r: one_rank(r) for r in range(4)}, partners, ranks=4)
    assert [module.name for module in every.modules] == ["up", "down"]
    assert every.modules[0].parameters is not None
    assert every.modules[0].parameters.values == 12


def test_teams_stay_apart():
    """Two stages of a pipeline, each on two ranks."""
    partners = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    every = counted_together({r: one_rank(r) for r in range(4)}, partners, ranks=4)
    names = [module.name for module in every.modules]
    assert names == [
        "up on ranks 0, 1", "down on ranks 0, 1", "up on ranks 2, 3", "down on ranks 2, 3"
    ]  # fmt: skip
    assert every.modules[2].outputs == Outputs(2.0, 2, ("down on ranks 2, 3",))


def test_ranks_without_partners_stay_apart_and_differences_are_told():
    counted = {0: one_rank(0), 2: one_rank(0, precision="float16 autocast")}
    some = counted_together(counted, {}, ranks=3)
    assert [module.name for module in some.modules][::2] == ["up on rank 0", "up on rank 2"]
    assert some.precision == "float32 and float16 autocast"


def test_it_survives_json():
    made = one_rank(-7)
    assert Counted.from_plain(json.loads(json.dumps(made.to_plain()))) == made


def test_a_module_without_gradients_is_judged_if_a_format_cannot_hold_what_it_returns():
    outputs = [Outputs(1e5), Outputs(10.0)]
    silent = [ModuleGradients(str(at), "Linear", None, None, out) for at, out in enumerate(outputs)]
    audit = Counted(tuple(silent), "float32", 1.0).judged(steps=1, formats=[FORMATS["fp16"]])
    assert [module.name for module in audit.modules] == ["0"]


class Letters:
    """A post by which these have come."""

    def __init__(self, *letters: Any) -> None:
        self._letters = list(letters)

    def received(self) -> list[Any]:
        """The next of them."""
        return [self._letters.pop()] if self._letters else []


def test_an_audit_says_whose_gradients_it_lacks(monkeypatch):
    monkeypatch.setattr(script, "_PATIENCE_WITH_RANKS", 0.3)
    monkeypatch.setattr("gradilocks.ranks.layout.world_size", lambda: 4)
    post = Letters(
        {"rank": 2, "partners": [0, 2], "counted": one_rank(1).to_plain()},
        {"rank": 3, "counted": None},  # It failed.
    )
    whole, said = script._with_other_ranks(one_rank(0), [0, 2], cast("Any", post))
    assert said.startswith("Counted on ranks 0, 2 of 4: the others have told of nothing.")
    assert whole.modules[0].parameters is not None
    assert whole.modules[0].parameters.values == 6
