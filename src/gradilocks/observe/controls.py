"""A script's own GradientControls: they tell of their steps by a journal, as with `record=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from gradilocks.control import GradientControl
from gradilocks.names import Names, name_parameters
from gradilocks.observe.models import owners_of
from gradilocks.observe.watching import Watch
from gradilocks.record.journal import Journal, NoJournal
from gradilocks.step.gradients import every_parameter
from gradilocks.values import StepRecord

__all__ = ["Controls"]


class Controls:
    """Gives every control that is used a journal of ours, beside its own."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def calling(
        self, original: Callable[..., Any], control: GradientControl, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `backward` and `scale_loss`."""
        self._attach(control)
        return original(control, *args, **kwargs)

    def stepping(
        self, original: Callable[..., Any], control: GradientControl, *args: Any, **kwargs: Any
    ) -> Any:
        """Around `step`: what it does to its optimizers is told once, by the control."""
        self._attach(control)
        with self._watch.driving(control._optimizers):
            return original(control, *args, **kwargs)

    def _attach(self, control: GradientControl) -> None:
        journal = control._journal
        if isinstance(journal, (_Ours, _Both)):
            return
        ours = self._watch.safely(lambda: _Ours(self._watch, control))
        if ours is not None:
            control._journal = ours if type(journal) is NoJournal else _Both(journal, ours)


class _Ours(Journal):
    """Records in the session's run file; whatever fails there does not reach the script."""

    def __init__(self, watch: Watch, control: GradientControl) -> None:
        self._watch = watch
        optimizers = control._optimizers
        names = control._names if control._names.has_model else _FoundNames(optimizers)
        super().__init__(watch.recorder_now(), optimizers, names)

    def note_loss(self, loss: Tensor, *, first: bool) -> None:
        self._watch.safely(lambda: super(_Ours, self).note_loss(loss, first=first))

    def before_step(self, judge: Any, *, unscaled: bool) -> None:
        def begin() -> None:
            if self._loss is None and not judge.scales:
                # Not by way of the control: what `loss.backward()` was called on has no scale here.
                self._loss = self._watch.losses.take()
            super(_Ours, self).before_step(judge, unscaled=unscaled)

        self._watch.safely(begin)

    def after_step(self, record: StepRecord, judge: Any) -> None:
        self._watch.safely(lambda: super(_Ours, self).after_step(record, judge))
        params = list(every_parameter(self._optimizers))
        self._watch.safely(lambda: self._watch.notice(params, record.row[:1]))


class _Both(NoJournal):
    """The control's own journal and ours."""

    def __init__(self, own: NoJournal, ours: NoJournal) -> None:
        self._own, self._ours = own, ours
        self.recorder = own.recorder

    def __reduce__(self) -> Any:
        return NoJournal, ()

    def note_loss(self, loss: Tensor, *, first: bool) -> None:
        self._own.note_loss(loss, first=first)
        self._ours.note_loss(loss, first=first)

    def before_step(self, judge: Any, *, unscaled: bool) -> None:
        self._own.before_step(judge, unscaled=unscaled)
        wanted, judge.detail = judge.detail, False
        self._ours.before_step(judge, unscaled=unscaled)
        judge.detail = judge.detail or wanted

    def after_step(self, record: StepRecord, judge: Any) -> None:
        self._own.after_step(record, judge)
        self._ours.after_step(record, judge)


class _FoundNames(Names):
    """Names from the models that are alive, for a control that was given none."""

    def __init__(self, optimizers: Any) -> None:
        super().__init__(None, optimizers)

    def _named_parameters(self) -> Iterable[tuple[str, Tensor]]:
        params = list(every_parameter(self._optimizers))
        found = name_parameters(owners_of(params), params)
        return [(name, param) for param, name in found.items()]
