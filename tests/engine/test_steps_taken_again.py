"""A step that is as the last one was is taken by the same launches; what has changed is noticed.

Each change is made between two steps of a run and of its twin, which goes the whole way at every
step; all that can be seen of the two must be the same, and where something has changed the bound
step must not have been taken.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from gradilocks import GradientControl, clip_grad_norm_, kernels, optim
from gradilocks.errors import ScaleMisuse, SharedParameter
from gradilocks.kernels import native
from gradilocks.step.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAKERS = {
    "AdamW": lambda params: optim.AdamW(params, lr=0.05),
    "Adam, amsgrad": lambda params: optim.Adam(params, lr=0.05, amsgrad=True),
    "SGD": lambda params: optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
}


@pytest.fixture(autouse=True)
def compiled(request):
    """Steps are bound where C++ makes the launches."""
    if native.library() is None:
        pytest.skip("the native library is not built here")


@pytest.fixture
def again(monkeypatch):
    """How often a bound step was tried, and how often taken."""
    counts = {"tried": 0, "taken": 0}
    real = Engine.again

    def counted(engine, bound):
        counts["tried"] += 1
        verdict = real(engine, bound)
        counts["taken"] += verdict is not None
        return verdict

    monkeypatch.setattr(Engine, "again", counted)
    return counts


class Run:
    """A small model under a control, stepped on gradients of its own."""

    def __init__(self, make=MAKERS["AdamW"], *, device="cpu", whole=False, **settings):
        generator = torch.Generator().manual_seed(0)
        shapes = [(5,), (2, 3), (4, 4), ()]
        values = [torch.randn(shape, generator=generator) for shape in shapes]
        self.params = [nn.Parameter(value.to(device)) for value in values]
        self.optimizer = make(self.params)
        self.control = GradientControl(self.optimizer, clip=0.7, **settings)
        self.whole, self.number, self.device = whole, 0, device
        self.told = []

    def loss(self, factor=1.0):
        self.number += 1
        return (
            sum((param * (k + self.number)).square().sum() for k, param in enumerate(self.params))
            * factor
        )

    def step(self, factor=1.0, clear=True):
        if clear:
            self.control.zero_grad()
        self.control.backward(self.loss(factor))
        return self.conclude()

    def conclude(self):
        if self.whole:
            self.control._bound = None
        outcome = self.control.step()
        self.told.append(
            (outcome.step, outcome.skipped, outcome.clipped, outcome.norm, outcome.scale)
        )
        return outcome

    def seen(self):
        state = copy.deepcopy(self.optimizer.state_dict())
        return self.told, self.control.state_dict(), [p.detach().cpu() for p in self.params], state


def assert_same(one, two):
    assert repr(one[0]) == repr(two[0])
    assert one[1] == two[1]
    for a, b in zip(one[2], two[2], strict=True):
        assert torch.equal(a, b)
    for number, entries in one[3]["state"].items():
        for name, value in entries.items():
            assert torch.equal(value.cpu(), two[3]["state"][number][name].cpu()), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("scale", ["dynamic", None, 256.0])
def test_a_run_has_the_bits_of_one_that_goes_the_whole_way(kind, scale, device, again):
    run = Run(MAKERS[kind], device=device, scale=scale)
    for number in range(12):
        run.step(float("nan") if number in (3, 7, 8) else 1.0)
    assert again["taken"] >= 8
    taken = again["taken"]
    twin = Run(MAKERS[kind], device=device, scale=scale, whole=True)
    for number in range(12):
        twin.step(float("nan") if number in (3, 7, 8) else 1.0)
    assert again["taken"] == taken
    assert_same(run.seen(), twin.seen())


def lr(run):
    run.optimizer.param_groups[0]["lr"] *= 0.5


def betas(run):
    run.optimizer.param_groups[0]["betas"] = (0.8, 0.99)


def lr_tensor(run):
    run.optimizer.param_groups[0]["lr"] = torch.full((), 0.01)


def frozen(run):
    run.params[1].requires_grad_(False)
    run.params[1].grad = None


def data_replaced(run):
    run.params[1].data = run.params[1].detach().clone() * 2


def moments_replaced(run):
    state = run.optimizer.state[run.params[2]]
    state["exp_avg"] = torch.full_like(state["exp_avg"], 0.25)


def moments_moved(run):
    entries = run.optimizer.state[run.params[2]]
    entries["exp_avg"].data = entries["exp_avg"].detach().clone() + 1.0


def added_group(run):
    run.params.append(nn.Parameter(torch.ones(3, device=run.device)))
    run.optimizer.add_param_group({"params": [run.params[-1]], "lr": 0.3})


def loaded(run):
    run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def control_loaded(run):
    run.control.load_state_dict(run.control.state_dict())


def another_clip(run):
    run.control.set_clip(0.1)


def hook(run):
    run.optimizer.register_step_pre_hook(lambda *_: None)


def amsgrad(run):
    run.optimizer.param_groups[0]["maximize"] = True


def another_class(run):
    class Own(type(run.optimizer)):
        def step(self, closure=None):
            return super().step(closure)

    run.optimizer.__class__ = Own


def own_step(run):
    real = run.optimizer.step
    run.optimizer.step = lambda *args: real(*args)


def scaled_by_hand(run):
    run.optimizer.grad_scale = torch.full((), 2.0, device=run.device)


def scheduled(run):
    torch.optim.lr_scheduler.StepLR(run.optimizer, 1)


CHANGES = [
    lr, betas, lr_tensor, frozen, data_replaced, moments_replaced, moments_moved, added_group,
    loaded, control_loaded, another_clip, hook, amsgrad, another_class, own_step, scheduled,
    scaled_by_hand,
]  # fmt: skip
TAKEN_OVER = {"lr", "betas", "lr_tensor"}
"""Changes that a bound step takes over."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_a_change_between_two_steps_is_seen(change, device, again):
    run, twin = Run(device=device), Run(device=device, whole=True)
    for each in (run, twin):
        for _ in range(4):
            each.step()
        if each is run:
            assert run.control._bound is not None
        each.control.zero_grad()
        change(each)
        before = again["taken"]
        each.step()
        if change.__name__ in TAKEN_OVER and each is run:
            assert again["taken"] == before + 1
        elif change.__name__ not in TAKEN_OVER:
            assert again["taken"] == before
        for _ in range(3):
            each.step()
    assert_same(run.seen(), twin.seen())


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_lie_elsewhere_at_every_step_are_found(device, again):
    run, twin = Run(device=device), Run(device=device, whole=True)
    held = []
    for each in (run, twin):
        for _ in range(8):
            held.append([param.grad for param in each.params])  # So that nothing is given again.
            each.step()
    assert again["taken"] >= 5
    assert_same(run.seen(), twin.seen())


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_stay_where_they_are_and_one_that_moves(device, again):
    run, twin = Run(device=device), Run(device=device, whole=True)
    for each in (run, twin):
        for number in range(10):
            each.control.zero_grad(set_to_none=False)
            each.control.backward(each.loss())
            if number in (4, 5):
                each.params[2].grad = each.params[2].grad.clone()
            each.conclude()
    assert again["taken"] >= 4
    assert_same(run.seen(), twin.seen())


def test_a_gradient_that_two_parameters_share_is_refused_as_ever():
    run = Run()
    for _ in range(4):
        run.step()
    run.control.zero_grad()
    run.control.backward(run.loss())
    shared, other = torch.ones(2, 3), nn.Parameter(torch.ones(2, 3))
    run.params[1].grad = other.grad = shared
    run.optimizer.param_groups[0]["params"].append(other)
    with pytest.raises(SharedParameter, match="one tensor as their gradient"):
        run.control.step()


def test_gradients_that_come_to_be_one_tensor_are_refused_as_ever():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    control = GradientControl(optim.AdamW(params, lr=0.1), clip=1.0)
    for number in range(6):
        control.zero_grad()
        control.backward((params[0] * params[1]).square().sum())
        if number == 5:
            params[1].grad = params[0].grad
            with pytest.raises(SharedParameter, match="one tensor as their gradient"):
                control.step()
            return
        control.step()


def test_a_step_without_a_loss_is_refused_as_ever():
    run = Run()
    for _ in range(4):
        run.step()
    with pytest.raises(ScaleMisuse, match="without a backward"):
        run.control.step()
    run.step()
    assert run.told[-1][0] == 5


def test_gradients_that_are_left_from_the_last_step_are_refused_as_ever():
    run = Run()
    for _ in range(4):
        run.step()
    with pytest.raises(ScaleMisuse, match="still there"):
        run.control.backward(run.loss())


def test_after_unscale_it_goes_the_whole_way_and_back(again):
    run, twin = Run(), Run(whole=True)
    for each in (run, twin):
        for number in range(9):
            each.control.zero_grad()
            each.control.backward(each.loss())
            if number in (4, 6):
                each.control.unscale_()
                clip_grad_norm_(each.params, 0.5)
            each.conclude()
    assert again["taken"] >= 2
    assert_same(run.seen(), twin.seen())


def test_a_loss_of_another_dtype_and_several_losses(again):
    run, twin = Run(), Run(whole=True)
    for each in (run, twin):
        for number in range(9):
            each.control.zero_grad()
            loss = each.loss()
            each.control.backward(loss.double() if number == 4 else loss)
            if number == 6:
                each.control.backward(each.loss())
            each.conclude()
    assert again["taken"] >= 4
    assert_same(run.seen(), twin.seen())


def test_float32_masters_follow_what_is_written_to_the_parameters(again):
    def make(params):
        return optim.AdamW(params, lr=0.05, master_weights=True)

    runs = []
    for whole in (False, True):
        run = Run(make, whole=whole)
        for param in run.params:
            param.data = param.data.to(torch.bfloat16)
        for number in range(8):
            run.step()
            if number == 5:
                with torch.no_grad():
                    run.params[2].mul_(0.5)
        runs.append(run.seen())
    assert again["taken"] >= 4
    assert_same(*runs)


@pytest.mark.parametrize("device", DEVICES)
def test_settings_that_were_others_for_a_step_of_the_optimizer_itself(device, again):
    run, twin = Run(device=device, scale=None), Run(device=device, scale=None, whole=True)
    for each in (run, twin):
        for _ in range(4):
            each.step()
        each.control.zero_grad()
        each.control.backward(each.loss())
        group = each.optimizer.param_groups[0]
        before, group["lr"] = group["lr"], 0.5
        each.optimizer.step()
        group["lr"] = before  # The very object that the bound step knows.
        each.conclude()
        each.step()
    assert again["taken"] >= 3
    assert_same(run.seen(), twin.seen())


def test_settings_that_were_others_for_a_step_of_another_control():
    def trained(whole):
        params = [nn.Parameter(torch.ones(3))]
        optimizer = optim.AdamW(params, lr=0.05)
        controls = [GradientControl(optimizer, clip=clip, scale=None) for clip in (1.0, 0.5)]
        group = optimizer.param_groups[0]
        before = group["lr"]
        for number in range(12):
            group["lr"] = 0.5 if number == 9 else before
            control = controls[number in (7, 8, 9)]
            control.zero_grad()
            control.backward((params[0] * number).square().sum())
            if whole:
                control._bound = None
            control.step()
        return params[0].detach()

    assert torch.equal(trained(False), trained(True))


def test_an_interrupt_after_the_step_was_taken_leaves_it_taken(monkeypatch):
    """Ctrl-C while the step is being bound: parameters, state, scale and count go together."""
    run, twin = Run(), Run()
    for each in (run, twin):
        for _ in range(4):
            each.step()
    run.control._bound = None
    run.control.zero_grad()
    run.control.backward(run.loss())
    with monkeypatch.context() as patched:

        def interrupted(*_args, **_kwargs):
            raise KeyboardInterrupt

        patched.setattr(Engine, "bound", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.control.step()
    twin.step()
    run.told, twin.told = [], []
    assert_same(run.seen(), twin.seen())
    with pytest.raises(ScaleMisuse, match="without a backward"):
        run.control.step()
    for each in (run, twin):
        each.step()
    assert_same(run.seen(), twin.seen())


def test_a_control_of_two_steps_alone_binds_each(again):
    def trained(whole):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
        optimizers = [optim.AdamW([param], lr=0.1) for param in params]
        control = GradientControl(*optimizers, clip=0.5)
        for _ in range(6):
            for param, optimizer in zip(params, optimizers, strict=True):
                control.zero_grad(only=optimizer)
                control.backward(param.square().sum())
                if whole:
                    for part in control._parts.values():
                        part._bound = None
                control.step(only=optimizer)
        return [param.detach().clone() for param in params], control.state_dict()

    one = trained(False)
    assert again["taken"] >= 6
    two = trained(True)
    assert all(map(torch.equal, one[0], two[0]))
    assert one[1] == two[1]


def test_recording_tells_the_same_of_steps_that_are_taken_again(tmp_path, again):
    def lines(whole):
        path = tmp_path / f"{whole}.jsonl"
        run = Run(whole=whole, record=str(path))
        for number in range(12):
            run.step(float("inf") if number == 6 else 1.0)
        run.control.recorder.close()
        return [line for line in path.read_text().splitlines() if '"step"' in line[:40]]

    one = lines(False)
    assert again["taken"] >= 6
    two = lines(True)

    def numbers(text):
        import json

        told = json.loads(text)
        return {k: v for k, v in told.items() if k not in ("time", "seconds", "memory", "t")}

    assert len(one) == len(two) > 0
    for mine, other in zip(one, two, strict=True):
        first, second = numbers(mine), numbers(other)
        assert first.keys() == second.keys()
        for name in ("norm", "scale", "skipped", "loss"):
            assert repr(first.get(name)) == repr(second.get(name))


def test_a_kernel_that_has_failed_is_not_launched_again(monkeypatch, again):
    run = Run()
    for _ in range(4):
        run.step()
    before = again["taken"]
    monkeypatch.setitem(kernels.BACKENDS, "cpu", kernels.reference)
    run.step()
    assert again["taken"] == before


def test_a_copy_and_a_pickle_of_a_control_begin_anew():
    run = Run()
    for _ in range(4):
        run.step()
    assert run.control._bound is not None
    other = copy.deepcopy(run.control)
    assert other._bound is None


def test_nothing_is_kept_alive_by_a_bound_step():
    run = Run()
    for _ in range(4):
        run.step()
    assert run.control._bound is not None
    control, optimizer = weakref.ref(run.control), weakref.ref(run.optimizer)
    gc.collect()
    gc.disable()
    try:
        run.control = None
        assert control() is None  # At once: nothing refers to it in a circle.
    finally:
        gc.enable()
    run.optimizer = None
    run.params = []
    gc.collect()
    assert optimizer() is None


def test_the_moments_of_a_loaded_optimizer_go_at_once():
    run = Run()
    for _ in range(4):
        run.step()
    moment = weakref.ref(run.optimizer.state[run.params[2]]["exp_avg"].untyped_storage())
    state = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(state)
    gc.collect()
    assert moment() is None


def test_a_list_of_parameters_that_another_thread_changes_is_never_walked_blindly():
    run = Run()
    for _ in range(3):
        run.step()
    groups, stop = run.optimizer.param_groups, threading.Event()

    def meddle():
        while not stop.is_set():
            groups[0]["params"] = list(groups[0]["params"])

    thread = threading.Thread(target=meddle)
    thread.start()
    try:
        for _ in range(300):
            run.step()
    finally:
        stop.set()
        thread.join()
    assert len(run.told) == 303


# --- the comparisons themselves -------------------------------------------------------------------


class Thing:
    pass


def test_guards_hold_as_long_as_everything_is_the_same_object():
    from gradilocks.kernels.guards import attribute, empty, item

    thing, table, held = Thing(), {"a": 1}, []
    thing.one, thing.two = object(), None
    guards = native.library().guards(
        [*attribute(thing, "one", "two"), *item(table, "a", "missing"), *empty(held)]
    )
    assert guards()
    for change, undo in [
        (lambda: setattr(thing, "one", object()), None),
        (lambda: setattr(thing, "two", 0), lambda: setattr(thing, "two", None)),
        (lambda: table.update(a=object()), lambda: table.update(a=1)),
        (lambda: table.update(missing=1), lambda: table.pop("missing")),
        (lambda: held.append(1), held.clear),
        (lambda: delattr(thing, "two"), lambda: setattr(thing, "two", None)),
    ]:
        before = thing.one
        change()
        assert not guards()
        thing.one = before
        if undo is not None:
            undo()
        assert guards()


def test_guards_tell_of_an_error_that_is_none_of_theirs():
    class Odd:
        good = True

        @property
        def value(self):
            if Odd.good:
                return None
            raise OSError("a disk is full")

    guards = native.library().guards([(0, Odd(), "value", None)])
    assert guards()
    Odd.good = False
    with pytest.raises(OSError, match="a disk is full"):
        guards()


@pytest.mark.parametrize(
    "given", [None, [1], [(0, 1)], [(7, 1, "a", 1)], [(1, [], "a", 1)]], ids=repr
)
def test_guards_that_make_no_sense_are_refused(given):
    with pytest.raises((TypeError, ValueError)):
        native.library().guards(given)


def test_guards_and_watches_are_collected_with_what_they_hold():
    thing = Thing()
    thing.value = 1
    thing.guards = native.library().guards([(0, thing, "value", thing.value)])
    gone = weakref.ref(thing)
    del thing
    gc.collect()
    assert gone() is None
