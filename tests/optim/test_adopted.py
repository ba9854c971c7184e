"""An optimizer of torch's that was adopted goes on as ours would that has loaded its state_dict."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from gradilocks import GradientControl, optim
from gradilocks.step.own_step import is_ours
from gradilocks.step.update import takes_decision
from tests.integrations.framework_optimizers import (
    WRAPPERS,
    around_zero,
    in_a_container,
    in_accelerate,
    no_group_is_left,
)


@pytest.fixture(autouse=True)
def _no_group():
    yield
    no_group_is_left()


KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}),
    "AdamW foreach amsgrad": (torch.optim.AdamW, {"lr": 0.1, "foreach": True, "amsgrad": True}),
    "AdamW fused maximize": (torch.optim.AdamW, {"lr": 0.1, "fused": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.5, 0.7)}),
    "Adam not foreach": (torch.optim.Adam, {"lr": 0.1, "foreach": False}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
}
each_kind = pytest.mark.parametrize("name", KINDS)


def parameters():
    return [nn.Parameter(torch.tensor([1.0, -2.0])), nn.Parameter(torch.tensor([[0.5], [0.25]]))]


def groups_of(params):
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.05, "weight_decay": 0.0}]


def made(name):
    kind, settings = KINDS[name]
    params = parameters()
    return params, kind(groups_of(params), **settings)


def take(params, optimizer, steps=range(3)):
    for step in steps:
        for place, param in enumerate(params):
            param.grad = torch.full_like(param, 0.3 * (step + 1) - place)
        optimizer.step()


def copied(params):
    return [param.detach().clone() for param in params]


def twin(params, optimizer):
    """A new optimizer of ours, over copies of the parameters, with the state of `optimizer`."""
    kind = getattr(optim, type(optimizer).__name__)
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    wanted = {"lr": 0.7, "momentum": 0.9} if kind is optim.SGD else {"lr": 0.7}
    ours = kind(groups_of(copies), **wanted)
    ours.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return copies, ours


def same_state(one, other):
    """The state_dicts of two optimizers, to the bit."""
    assert str(one["param_groups"]) == str(other["param_groups"])
    assert one["state"].keys() == other["state"].keys()
    for key, entries in one["state"].items():
        assert entries.keys() == other["state"][key].keys()
        for each, value in entries.items():
            theirs = other["state"][key][each]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(theirs)), each


@each_kind
@pytest.mark.parametrize("before", [0, 3], ids=["fresh", "after steps"])
def test_it_goes_on_as_ours_that_has_loaded_its_state(name, before):
    params, optimizer = made(name)
    take(params, optimizer, range(before))
    copies, ours = twin(params, optimizer)
    groups = optimizer.param_groups
    assert optim.adopt(optimizer) is optimizer
    assert type(optimizer) is type(ours)
    assert optimizer.param_groups is groups
    assert is_ours(optimizer)
    for step in range(3):
        take(params, optimizer, [step])
        take(copies, ours, [step])
        assert all(map(torch.equal, params, copies))
    same_state(optimizer.state_dict(), ours.state_dict())


@each_kind
def test_a_control_skips_and_clips_with_it(name):
    params, optimizer = made(name)
    take(params, optimizer)
    copies, ours = twin(params, optimizer)
    optim.adopt(optimizer)
    assert takes_decision(optimizer)
    for these, each in ((params, optimizer), (copies, ours)):
        control = GradientControl(each, scale=1024.0, clip=0.5)
        for factor in (float("nan"), 1.0, float("inf"), 2.0):
            control.zero_grad()
            control.backward(sum((param * param).sum() for param in these) * factor)
            control.step()
    assert all(map(torch.equal, params, copies))
    same_state(optimizer.state_dict(), ours.state_dict())


@each_kind
def test_torchs_loads_its_state_back(name):
    params, optimizer = made(name)
    take(params, optimizer)
    optim.adopt(optimizer)
    take(params, optimizer)
    kind, settings = KINDS[name]
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    theirs = kind(groups_of(copies), **settings)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # It shares what it is given.
    take(copies, theirs)
    take(params, optimizer)
    for one, other in zip(params, copies, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_counts_that_are_numbers_are_taken():
    """As checkpoints of old versions of torch have them."""
    params, optimizer = made("AdamW")
    take(params, optimizer)
    for param in params:
        optimizer.state[param]["step"] = 3
    copies, ours = twin(params, optimizer)
    optim.adopt(optimizer)
    take(params, optimizer)
    take(copies, ours)
    assert all(map(torch.equal, params, copies))


def test_one_that_is_ours_stays_as_it_is():
    ours = optim.AdamW(parameters())
    state, marks = ours.state, dict(vars(ours))
    assert optim.adopt(ours) is ours
    assert ours.state is state
    assert dict(vars(ours)) == marks


# --- schedules, hooks, frameworks -----------------------------------------------------------------


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


@each_kind
@pytest.mark.parametrize("schedules", [1, 2])
def test_schedules_that_were_there_go_on_around_our_step(name, schedules):
    params, optimizer = made(name)
    made_before = [schedule_of(optimizer) for _ in range(schedules)]
    copies, ours = twin(params, optimizer)
    theirs = [schedule_of(ours) for _ in range(schedules)]
    ran = []
    optim.adopt(optimizer)
    optimizer.register_step_post_hook(lambda each, *_: ran.append(type(each)))
    assert is_ours(optimizer)
    with warnings.catch_warnings():  # Schedules warn if they see no step before theirs.
        warnings.simplefilter("error")
        for step in range(3):
            for these, each, all_of_them in (
                (params, optimizer, made_before),
                (copies, ours, theirs),
            ):
                take(these, each, [step])
                for schedule in all_of_them:
                    schedule.step()
    assert ran == [type(ours)] * 3
    assert all(map(torch.equal, params, copies))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in ours.param_groups]


def test_a_schedule_that_sees_no_step_still_warns():
    _, optimizer = made("AdamW")
    schedule = schedule_of(optimizer)
    optim.adopt(optimizer)
    with pytest.warns(UserWarning, match=r"lr_scheduler.step\(\)` before"):
        schedule.step()


def test_hooks_that_were_there_are_called():
    params, optimizer = made("AdamW")
    told = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    optimizer.register_state_dict_post_hook(lambda _, saved: told.append("saved") or saved)
    optim.adopt(optimizer)
    take(params, optimizer, [0])
    optimizer.state_dict()
    assert told == ["before", "after", "saved"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum"])
def test_the_one_inside_a_wrapper_is_adopted(wrap, name):
    kind, settings = KINDS[name]
    ends = []
    for bare in (False, True):
        params = parameters()
        optimizer = kind(params, **settings)
        if bare:
            optimizer = getattr(optim, kind.__name__)(params, **settings)
            if around_zero(wrap):
                optimizer.param_groups[0]["dampening"] = optimizer.defaults["dampening"] = 0
        else:
            optimizer = wrap(optimizer)
            assert optim.adopt(optimizer) is optimizer
            assert is_ours(optim.unwrapped(optimizer))
            assert takes_decision(optimizer)
        control = GradientControl(optimizer, clip=0.5)
        for factor in (1.0, float("nan"), 2.0, 0.5):
            control.zero_grad()
            control.backward(sum((param * param).sum() for param in params) * factor)
            control.step()
        ends.append(copied(params))
    assert all(map(torch.equal, *ends))


def test_all_optimizers_of_a_container_are_adopted(monkeypatch):
    pair = [torch.optim.AdamW([param]) for param in parameters()]
    container = in_a_container(pair, monkeypatch)
    for group in container.param_groups:
        group["fused"] = False
    optim.adopt(container)
    assert all(map(is_ours, container.optimizers))
    assert takes_decision(container)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stepped", [False, True], ids=["before a step", "after a step"])
@pytest.mark.parametrize("scheduled", [False, True], ids=["alone", "with a schedule"])
def test_accelerate_with_a_scaler_goes_on_with_our_step(stepped, scheduled):
    """It keeps the optimizer's step twice, and puts one of the two in place around each step."""

    def train(wrapper, params, steps):
        for step in steps:
            wrapper.zero_grad()
            loss = sum((param * param).sum() for param in params) * (0.1 * step + 0.1)
            wrapper.scaler.scale(loss).backward()
            wrapper.step()

    ends = []
    for adopted in (True, False):
        params = parameters()
        optimizer = torch.optim.AdamW(params, lr=0.1, fused=not adopted)
        if scheduled:
            schedule_of(optimizer)
        wrapper = in_accelerate(optimizer, scaler=torch.amp.GradScaler("cpu"))
        train(wrapper, params, range(stepped))
        ran = []
        if adopted:
            optim.adopt(wrapper)
            optimizer.register_step_pre_hook(lambda each, *_, ran=ran: ran.append(each))
        train(wrapper, params, range(1, 4))
        assert ran == ([optimizer] * 3 if adopted else [])
        assert not wrapper.step_was_skipped
        ends.append(copied(params))
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore")
def test_who_goes_on_with_the_old_step_is_refused_before_anything_moves():
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    wrapper = in_accelerate(optimizer, scaler=torch.amp.GradScaler("cpu"))
    optim.adopt(optimizer)  # And not the wrapper, which holds the step from before.
    wrapper.scaler.scale(params[0].sum()).backward()
    with pytest.raises(RuntimeError, match="held it since before adopt"):
        wrapper.step()
    assert params[0].tolist() == [1.0, -2.0]


# --- copies ---------------------------------------------------------------------------------------


class Tuned(torch.optim.AdamW):
    """A class of somebody's own, that says what to optimize and how."""

    def __init__(self, model, lr=0.1):
        self.model_name = type(model).__name__
        super().__init__(model.parameters(), lr=lr)


def test_a_subclass_that_has_a_constructor_only_is_adopted():
    model = nn.Linear(2, 1)
    optimizer = Tuned(model)
    optim.adopt(optimizer)
    assert isinstance(optimizer, Tuned)
    assert isinstance(optimizer, optim.AdamW)
    assert is_ours(optimizer)
    assert optimizer.model_name == "Linear"
    assert type(optimizer).__name__ == "Tuned"
    again = Tuned(nn.Linear(2, 1))  # The class itself is what it was.
    assert not isinstance(again, optim.AdamW)


@pytest.mark.parametrize("kind", ["AdamW", "SGD momentum", "a subclass"])
def test_an_adopted_one_is_copied_and_pickled(kind):
    if kind == "a subclass":
        model = nn.Linear(2, 1)
        params, optimizer = list(model.parameters()), Tuned(model)
    else:
        params, optimizer = made(kind)
    schedule_of(optimizer)
    optim.adopt(optimizer)
    take(params, optimizer)
    held = io.BytesIO()
    torch.save(optimizer, held)
    held.seek(0)
    for each in (
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
        torch.load(held, weights_only=False),
    ):
        copies = [param for group in each.param_groups for param in group["params"]]
        assert type(each) is type(optimizer)
        assert is_ours(each)
        assert all(map(torch.equal, params, copies))
        same_state(each.state_dict(), optimizer.state_dict())
        before = copied(copies)
        take(copies, each)
        assert not any(map(torch.equal, before, copies))


# --- what is refused ------------------------------------------------------------------------------


class Halves(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.5)
        return super().step(closure)


class Freezes(torch.optim.SGD):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)


def replaced(optimizer):
    real = optimizer.step
    optimizer.step = lambda *args: real(*args)
    return optimizer


def bound(optimizer):
    optimizer.step = type(replaced).__get__(lambda self, closure=None: None, optimizer)
    return optimizer


REFUSED = {
    "another optimizer": (
        lambda params: torch.optim.Adagrad(params),
        TypeError,
        "Adam, AdamW or SGD, or a known wrapper around one, got Adagrad",
    ),
    "no optimizer": (lambda params: nn.Linear(1, 1), TypeError, "got Linear"),
    "a step of its own": (lambda params: Halves(params), TypeError, "with step of its own"),
    "a method of its own": (
        lambda params: Freezes(params),
        TypeError,
        "add_param_group of its own",
    ),
    "a replaced step": (
        lambda params: replaced(torch.optim.SGD(params)),
        TypeError,
        "put another function in the place",
    ),
    "a bound function": (
        lambda params: bound(torch.optim.SGD(params)),
        TypeError,
        "put another function in the place",
    ),
    "differentiable": (
        lambda params: torch.optim.Adam(params, differentiable=True),
        ValueError,
        "differentiable=True",
    ),
    "complex numbers": (
        lambda params: torch.optim.Adam([*params, nn.Parameter(torch.ones(1, dtype=torch.cfloat))]),
        TypeError,
        "complex64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_adopted_is_refused_and_stays_as_it_was(name):
    make, error, text = REFUSED[name]
    optimizer = make(parameters())
    kind, attributes = type(optimizer), dict(vars(optimizer))
    groups = str(getattr(optimizer, "param_groups", None))
    with pytest.raises(error, match=text):
        optim.adopt(optimizer)
    assert type(optimizer) is kind
    assert dict(vars(optimizer)) == attributes
    assert str(getattr(optimizer, "param_groups", None)) == groups


def test_of_several_inside_one_wrapper_none_is_changed_if_one_is_refused(monkeypatch):
    one, other = parameters()
    pair = [torch.optim.AdamW([one]), torch.optim.Adagrad([other])]
    container = in_a_container(pair, monkeypatch)
    with pytest.raises(TypeError, match="Adagrad"):
        optim.adopt(container)
    assert type(container.optimizers[0]) is torch.optim.AdamW


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_groups_may_be_added_afterwards(make):
    found = []
    for adopts in (False, True):
        torch.manual_seed(0)
        first, second = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizer = make(first.parameters(), lr=0.1)
        if adopts:
            optim.adopt(optimizer)
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.2})
        for _ in range(2):
            optimizer.zero_grad()
            (first(torch.ones(1, 3)) + second(torch.ones(1, 3))).square().sum().backward()
            optimizer.step()
        found.append([*first.parameters(), *second.parameters()])
    for ours, torchs in zip(*found, strict=True):
        assert torch.allclose(ours, torchs, rtol=1e-6)
