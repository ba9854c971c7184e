"""A control goes when nobody holds it, pickles whenever asked, and keeps no model alive."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    ClipPerGroup,
    GradientControl,
    GradScaler,
    HeadroomScale,
    QuantileClip,
    ZScoreClip,
    optim,
)
from gradilocks.errors import NeverFinite, NonFiniteGradient
from gradilocks.step.outcome import Streak
from gradilocks.values import StepRecord
from tests.engine.backends import DEVICES, INF, plain_and_served, serve

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(params=[pytest.param(None, id="plain torch"), *DEVICES])
def device(request, monkeypatch):
    return "cpu" if request.param is None else serve(request.param, monkeypatch)


def trained(device, *, steps=2, cleared=True):
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    control = GradientControl(optim.AdamW(model.parameters(), lr=0.1), clip=1.0)
    for _ in range(steps):
        control.zero_grad()
        control.backward(model(torch.ones(2, 4, device=device)).sum())
        control.step()
    if cleared:
        control.zero_grad()
    return model, control


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


class Trained:
    """A control after three steps, in one of the ways in which a control is used."""

    def __init__(self, device, make, **options):
        self.device = device
        self.model = net().to(device)
        self.optimizer = make(self.model.parameters())
        self.control = GradientControl(self.optimizer, **options)
        self.kept = []

    def loss(self, factor=1.0):
        return self.model(torch.ones(2, 4, device=self.device)).square().sum() * factor

    def train(self, factors=(1.0, INF, 1.0)):
        for factor in factors:
            self.control.backward(self.loss(factor))
            self.control.step()
            self.control.zero_grad()
        return self


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "our AdamW": lambda params: optim.AdamW(params, lr=0.1),
}


CASES = pytest.mark.parametrize(
    ("device", "name"),
    plain_and_served(OPTIMIZERS, served=["AdamW fused", "our AdamW"]),
    indirect=["device"],
)


def unused(device, make, path):
    return Trained(device, make)


def stepped(device, make, path):
    return Trained(device, make, clip=1.0).train()


def not_cleared(device, make, path):
    run = Trained(device, make).train()
    run.control.backward(run.loss())
    return run


def unscaled(device, make, path):
    run = not_cleared(device, make, path)
    run.control.unscale_()
    return run


def naming_by_a_model(device, make, path):
    run = stepped(device, make, path)
    run.control = GradientControl(run.optimizer, model=run.model)
    return run.train()


def recorded(device, make, path):
    return Trained(device, make, record=path / "run.jsonl").train()


def with_a_schedule(device, make, path):
    run = Trained(device, make)
    schedule = run.control.scheduler(torch.optim.lr_scheduler.LinearLR(run.optimizer))
    run.train()
    schedule.step()
    run.kept.append(schedule)
    return run


def with_an_outcome_kept(device, make, path):
    run = Trained(device, make).train()
    for factor in (1.0, INF):
        run.control.backward(run.loss(factor))
        run.kept.append(run.control.step())
        run.control.zero_grad()
    assert run.kept[1].culprits
    return run


def with_a_closure(device, make, path):
    run = Trained(device, make).train()
    for factor in (1.0, INF):

        def closure(factor=factor):
            run.control.zero_grad()
            loss = run.loss(factor)
            run.control.backward(loss)
            return loss

        run.control.step(closure)
    run.control.zero_grad()
    return run


def whose_clip_learns(device, make, path):
    for clip in (AdaGC(warmup=1), QuantileClip(window=4), ZScoreClip(warmup=1)):
        run = Trained(device, make, clip=clip, scale=HeadroomScale()).train()
    return run


def whose_clip_asks_for_names(device, make, path):
    return Trained(device, make, clip=ClipPerGroup({0: 0.5})).train()


def that_has_raised(device, make, path):
    run = Trained(device, make, on_nonfinite="raise")
    try:
        run.train()
    except NonFiniteGradient:
        run.control.zero_grad()
    else:
        raise AssertionError("nothing was raised")
    return run


def that_has_given_up(device, make, path):
    run = Trained(device, make, give_up_after=1)
    for _ in range(300):  # On a GPU the host learns of it late.
        try:
            run.train((INF,))
        except NeverFinite:
            run.control.zero_grad()
            return run
    raise AssertionError("the control never gave up")


def that_was_loaded(device, make, path):
    run = stepped(device, make, path)
    run.control.load_state_dict(run.control.state_dict())
    return run.train()


def whose_update_failed(device, make, path):
    run = stepped(device, make, path)

    def fail(*_):
        raise RuntimeError("out of memory")

    handle = run.optimizer.register_step_pre_hook(fail)
    try:
        run.train((1.0,))
    except RuntimeError:
        handle.remove()
        run.control.zero_grad()
    return run


WAYS_OF_USE = [
    unused,
    stepped,
    not_cleared,
    unscaled,
    naming_by_a_model,
    recorded,
    with_a_schedule,
    with_an_outcome_kept,
    with_a_closure,
    whose_clip_learns,
    whose_clip_asks_for_names,
    that_has_raised,
    that_has_given_up,
    that_was_loaded,
    whose_update_failed,
]


@contextlib.contextmanager
def without_the_cycle_collector():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@CASES
@pytest.mark.parametrize("use", WAYS_OF_USE, ids=lambda use: use.__name__)
def test_a_control_that_nobody_holds_is_gone_at_once(device, use, name, tmp_path):
    with without_the_cycle_collector():
        run = use(device, OPTIMIZERS[name], tmp_path)
        there = [weakref.ref(run.control), weakref.ref(run.control._engine)]
        del run.control
        assert [ref() for ref in there] == [None, None]


def scaler_run(device, make, *, named=True, **options):
    model = net().to(device)
    optimizer = make(model.parameters())
    scaler = GradScaler(device, model=model if named else None, **options)
    for factor in (1.0, INF, 1.0):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, device=device)).square().sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, optimizer, scaler


SCALERS = {
    "torch's rule": {},
    "policy": {"policy": HeadroomScale()},
    "clip": {"clip": 1.0},
    "policy and clip": {"policy": HeadroomScale(), "clip": 1.0},
    "a clip that learns": {"policy": "dynamic", "clip": AdaGC(warmup=1)},
}


@pytest.mark.parametrize("kept", [False, True], ids=["nothing kept", "outcome kept"])
@CASES
@pytest.mark.parametrize("options", SCALERS.values(), ids=SCALERS)
def test_a_scaler_that_nobody_holds_is_gone_at_once(device, options, name, kept):
    with without_the_cycle_collector():
        model, optimizer, scaler = scaler_run(device, OPTIMIZERS[name], **options)
        outcome = scaler.outcome if kept else None
        there = [weakref.ref(scaler), weakref.ref(scaler._engines)]
        there += [weakref.ref(scaler._engines.of(optimizer))]
        del scaler
        assert [ref() for ref in there] == [None, None, None]
    if kept:
        assert not outcome.skipped
    del model


@CASES
@pytest.mark.parametrize("options", SCALERS.values(), ids=SCALERS)
def test_a_scaler_keeps_no_parameters_of_an_optimizer_that_is_gone(device, options, name):
    model, optimizer, scaler = scaler_run(device, OPTIMIZERS[name], named=False, **options)
    outcome = scaler.outcome
    params = [weakref.ref(param) for param in model.parameters()]
    del model, optimizer
    gc.collect()  # torch's own optimizers are in a cycle with their hooks.
    assert [param() for param in params] == [None, None]
    assert not outcome.skipped
    assert scaler.state_dict()


def test_a_control_whose_clip_learns_can_be_pickled_too():
    model = nn.Linear(2, 1)
    control = GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), clip=AdaGC(warmup=1))
    control.backward(model(torch.ones(1, 2)).sum())
    control.step()
    again = pickle.loads(pickle.dumps(control))
    assert again.state_dict() == control.state_dict()


def test_a_control_keeps_no_replaced_parameter(device):
    model, control = trained(device)
    old = weakref.ref(model.weight)
    new = nn.Parameter(torch.ones(3, 4, device=device))
    group = control._optimizers[0].param_groups[0]
    group["params"][0] = model.weight = new
    control._optimizers[0].state.clear()
    for _ in range(2):
        control.backward(model(torch.ones(2, 4, device=device)).sum())
        control.step()
        control.zero_grad()
    gc.collect()
    assert old() is None


COPIERS = {"deepcopy": copy.deepcopy, "pickle": lambda it: pickle.loads(pickle.dumps(it))}


@pytest.mark.parametrize("copied", COPIERS.values(), ids=COPIERS)
@CASES
@pytest.mark.parametrize("options", [{}, {"clip": 1.0}, {"clip": AdaGC(warmup=1)}], ids=str)
def test_a_control_that_has_stepped_can_be_copied_and_goes_on_alike(device, options, name, copied):
    run = Trained(device, OPTIMIZERS[name], **options).train()
    run.control.backward(run.loss())
    run.control.step()
    other = Trained(device, OPTIMIZERS[name], **options)
    other.model, other.optimizer, other.control = copied((run.model, run.optimizer, run.control))
    assert other.control.state_dict() == run.control.state_dict()
    for each in (run, other):
        each.control.zero_grad()
        each.train((1.0, INF))
        each.control.backward(each.loss())
        assert each.control.step().step == 7
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert one is not two
        if name == "AdamW fused":  # A copy of torch's forgets that it takes decisions.
            torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(one, two)
    assert run.control.state_dict() == other.control.state_dict()


class _Arrived:
    """An event that no copy can be made of, as a CUDA event is."""

    def query(self):
        return True

    def __reduce__(self):
        raise TypeError("an event cannot be pickled")


@pytest.mark.parametrize("copied", COPIERS.values(), ids=COPIERS)
def test_a_count_on_its_way_to_the_host_does_not_travel_with_a_copy(copied):
    streak = Streak(3)
    row = torch.zeros(12, dtype=torch.float64)
    for _ in range(2):
        assert not streak.note(StepRecord(row, torch.tensor(1.0), lambda: None))
    streak._coming = torch.zeros((), dtype=torch.int32), _Arrived()
    twin = copied(streak)
    assert twin.count.item() == 2
    assert twin.note(StepRecord(row, torch.tensor(1.0), lambda: None))


@pytest.mark.gpu
@pytest.mark.parametrize("copied", COPIERS.values(), ids=COPIERS)
@pytest.mark.parametrize("name", ["AdamW fused", "our AdamW"])
def test_on_a_gpu_a_control_is_copied_while_a_count_is_on_its_way(name, copied):
    Trained("cuda", OPTIMIZERS[name], clip=1.0).train((1.0, 1.0, 1.0))  # Compiles the kernels.
    run = Trained("cuda", OPTIMIZERS[name], clip=1.0, give_up_after=2).train((1.0,))
    for factor in (1.0, INF):
        torch.cuda._sleep(200_000_000)
        run.control.backward(run.loss(factor))
        run.control.step()
        run.control.zero_grad()
    assert run.control._engine.streak._coming is not None
    other = Trained("cuda", OPTIMIZERS[name])
    other.model, other.optimizer, other.control = copied((run.model, run.optimizer, run.control))
    for each in (run, other):
        each.train((1.0, INF, 1.0))
    assert run.control.state_dict() == other.control.state_dict()
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
