"""What each rank found of a bad step enters; what all of them know of it together leaves on rank 0.

Data-parallel ranks average their gradients, so that all of them see NaN that one has made. Each
runs the step once more by itself; only the guilty one finds something. So a rank that finds nothing
says nothing before the others have answered. Answers travel by letters (`observe/rank_post.py`): no
collective, and nobody waits for them but the end of a run, for a few seconds.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gradilocks.lab.trace.finding import lost
from gradilocks.observe.rank_post import RankPost
from gradilocks.ranks.all_parameters import on_ranks
from gradilocks.ranks.layout import my_rank, world_size
from gradilocks.runfile import Trace
from gradilocks.runfile.lines import loads, trace_from, trace_line

__all__ = ["Answer", "RankAnswers", "concluded"]

_OFTEN = 0.25
"""Seconds between two looks of rank 0 at what others have answered."""
_PATIENCE = 15.0
"""Seconds that an answer is waited for, on the host and beside the training."""
_FAREWELL = 5.0
"""Seconds likewise at the end of a run, which waits so long."""
_FOLLOWS = ("after", "outside")
"""Where NaN is found that another rank may have made."""
_AFTER_BACKWARD = (
    ", but in no module: likely it gets there after backward, where gradients are added up, "
    "reduced over ranks or written by the script"
)


_NOT_ALL = ". Likely, not certain: what was run again does not make up these gradients"


class Answer(NamedTuple):
    """What one rank has found of one bad step."""

    step: int
    found: Trace | None = None
    """Where it arose; None if that was not seen."""
    gradients: Trace | None = None
    """If it was not seen: which gradients are NaN or Inf, of this rank's; its text says no more."""
    doubt: str = ""
    """Why it was not seen, in half a sentence; "" if all was finite when the step was run again."""
    driver: int = 0
    """Tells the optimizers of a script apart, which count their steps each by itself."""
    is_last: bool = True
    """Whether this rank tells no more of this step."""
    is_gone: bool = False
    """Whether the step was taken all the same: no later one can tell."""
    time: float = 0.0
    """When it was found, as a run file counts it."""

    def to_plain(self) -> dict[str, Any]:
        """As JSON holds it."""
        traces = {name: getattr(self, name) for name in ("found", "gradients")}
        lines = {name: each and trace_line(each) for name, each in traces.items()}
        return {**self._asdict(), **lines}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Answer:
        """From `to_plain`."""
        lines = {name: plain[name] for name in ("found", "gradients")}
        traces = {name: each and trace_from(loads(each)) for name, each in lines.items()}
        return cls(**{**plain, **traces})


def concluded(answers: Mapping[int, Sequence[Answer]], ranks: Sequence[int]) -> list[Trace]:
    """What is to be told of a bad step; of one process just what it found.

    Args:
        answers: by rank.
        ranks: that were asked; those that have no answer have not told in time.
    """
    told = [(rank, answer) for rank, each in sorted(answers.items()) for answer in each]
    places: dict[tuple[str, ...], tuple[Trace, list[int]]] = {}
    for rank, answer in told:
        if answer.found is not None:
            _, whose = places.setdefault(_place(answer.found), (answer.found, []))
            whose.extend({rank}.difference(whose))
    # A loss that ranks compute together, and what a pipeline's stages hand each other, are NaN
    # because of what another rank's module has made.
    named = {place: each for place, each in places.items() if each[0].where not in _FOLLOWS}
    found = sorted((named or places).values(), key=lambda each: each[0].where != "module")
    if found:
        return [_told(trace, whose, ranks) for trace, whose in found]
    gradients = [(rank, answer.gradients) for rank, answer in told if answer.gradients is not None]
    gone = [answer for _, answer in told if answer.is_gone]
    if not gradients:
        return [_lost(gone[0])] if gone else []
    first = gradients[0][1]
    silent = [rank for rank in ranks if rank not in answers]
    doubts: dict[str, list[int]] = {}
    for rank, answer in told:
        if answer.doubt:
            doubts.setdefault(answer.doubt, []).append(rank)
    if not silent and not doubts:
        doubt = "" if first.certainty == "certain" else _NOT_ALL
        text = f"{first.text}{_AFTER_BACKWARD}{doubt}"
        return [_told(dataclasses.replace(first, text=text), [r for r, _ in gradients], ranks)]
    if len(ranks) == 1:
        # Else the next step is followed as it trains, and tells.
        return [_lost(gone[0])] if gone else []
    why = [
        f"{doubt} ({on_ranks(whose, len(ranks))})" if len(whose) < len(ranks) else doubt
        for doubt, whose in doubts.items()
    ]
    if not why:
        where = on_ranks(silent, len(ranks))
        why = [f"what was found {where} has not been told, and it may have been made there"]
    text = f"{first.text}; where it arose is not known: {'; '.join(why)}"
    return [dataclasses.replace(first, text=text, certainty="unknown")]


def _lost(answer: Answer) -> Trace:
    why = lost(answer.doubt or "run once more, all of it was finite")
    return dataclasses.replace(why, step=answer.step, time=answer.time)


def _place(found: Trace) -> tuple[str, ...]:
    return found.where, found.module, found.phase, found.what


def _told(found: Trace, whose: Sequence[int], ranks: Sequence[int]) -> Trace:
    """A finding with the ranks on which it was made."""
    if len(ranks) == 1:
        return found
    where = on_ranks(whose, len(ranks))
    text = f"{where[0].upper()}{where[1:]}: {found.text}"
    return dataclasses.replace(found, text=text, ranks=tuple(whose))


class _Asked:
    """A bad step that ranks answer of."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = ranks
        self.since = time.monotonic()
        self.answers: dict[int, list[Answer]] = {}

    def waits_for(self) -> set[int]:
        """The ranks that have more to tell."""
        done = {rank for rank, each in self.answers.items() if any(a.is_last for a in each)}
        return set(self.ranks) - done


class RankAnswers:
    """Brings what ranks have found to rank 0; made on every rank, once they have met.

    Args:
        tell: on rank 0, told what is known of a step once all ranks have answered, or some have
            not in time.

    Attributes:
        rank: which one this is.
        ranks: all of them.
    """

    def __init__(self, tell: Callable[[Trace], None]) -> None:
        self._tell = tell
        self.rank, self.ranks = my_rank(), tuple(range(world_size()))
        self._post = RankPost(self.rank, len(self.ranks), "trace", often=_OFTEN)
        self._asked: dict[tuple[int, int], _Asked] = {}
        self._has_sent = False

    def give(self, answer: Answer, partners: Sequence[int]) -> None:
        """What this rank has found; `partners` have the same bad step, and this rank is one."""
        if self.rank:
            self._has_sent = True
            self._post.send({"rank": self.rank, "answer": answer.to_plain()})
            return
        self._take(0, answer).ranks = partners
        self.settle()

    def alone(self, answer: Answer) -> list[Trace]:
        """What this rank, which is not the first, can say by itself of a step."""
        if answer.found is not None:
            return concluded({self.rank: [answer]}, self.ranks)
        if answer.gradients is None:
            return []
        text = (
            f"{answer.gradients.text}, but in no module on rank {self.rank}, as far as it could be "
            "run again there: what other ranks found is told by rank 0"
        )
        return [dataclasses.replace(answer.gradients, text=text, certainty="unknown")]

    def _take(self, rank: int, answer: Answer) -> _Asked:
        asked = self._asked.setdefault((answer.driver, answer.step), _Asked(self.ranks))
        asked.answers.setdefault(rank, []).append(answer)
        return asked

    def settle(self, *, patience: float = _PATIENCE) -> None:
        """On rank 0: tells of the steps of which all have answered; does not wait."""
        for came in self._post.received():
            self._take(came["rank"], Answer.from_plain(came["answer"]))
        for key, asked in list(self._asked.items()):
            is_late = time.monotonic() >= asked.since + patience
            if is_late or not asked.waits_for():
                del self._asked[key]
                for trace in concluded(asked.answers, asked.ranks):
                    self._tell(trace)

    def close(self) -> None:
        """The run ends: waits a few seconds for answers, or until its own have left."""
        if self.rank:
            self._post.close(_FAREWELL if self._has_sent else 0.0)
            return
        until = time.monotonic() + _FAREWELL
        self.settle()
        while self._asked and time.monotonic() < until:
            time.sleep(0.02)
            self.settle()
        self.settle(patience=0.0)
        self._post.close(0.0)
