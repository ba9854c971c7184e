"""What else happens to a model while it is trained: never a wrong address, and never a crash.

Another thread changes the lists, a hook frees a gradient, the model is moved, a parameter has a
`grad` of its own. Each with plain torch, with the C++ kernels and a walk in Python, and with a walk
in C++: all three leave the same. Under `make sanitize` each address is checked.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, GradScaler, kernels, optim
from gradilocks.kernels import native, reference

if native.library() is None:
    pytest.skip("the native library is not there", allow_module_level=True)

from gradilocks.kernels import native_backend

LIBRARY = native.library()
WAYS = {
    "plain torch": (reference, None),
    "walk in Python": (native_backend, None),
    "walk in C++": (native_backend, LIBRARY),
}


class Run:
    """A model of two groups in training; what is to happen, happens at one point of the third step.

    Args:
        driver: who clips and steps.
        meddle: what happens; gets the run.
        when: "before" the backward pass, "after" it, or "inside" the optimizer's step.
    """

    def __init__(self, driver, meddle, when):
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20), nn.Linear(20, 9)
        )
        self.kept, self.happened = [], False
        self.meddle, self.when = meddle, when
        params = list(self.model.parameters())
        groups = [{"params": params[:3]}, {"params": params[3:]}]
        make = optim.AdamW if driver.endswith("optim") else torch.optim.AdamW
        self.optimizer = make(groups, lr=0.1)
        self.step = getattr(self, "_by_" + driver.partition(",")[0])
        if driver.startswith("control"):
            self.control = GradientControl(self.optimizer, clip=0.5, scale=64.0)
        if driver.startswith("scaler"):
            self.scaler = GradScaler("cpu", init_scale=64.0)

    def train(self):
        for number in range(5):
            if number == 2:
                self._meddle_at("before")
            weight = self.model[0].weight
            given = torch.full((3, 40), 0.1, dtype=weight.dtype, device=weight.device)
            given[1] = torch.linspace(-1.0, 1.0, 40)
            self.number = number
            self.step(self.model(given).square().mean())
            for param in self.params():
                param.grad = None
        return [param.detach().clone() for param in self.params()]

    def params(self):
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def _meddle_at(self, point):
        if point != self.when:
            return
        if point == "inside":
            handle = self.optimizer.register_step_pre_hook(lambda *_: self._now(handle))
        else:
            self._now()

    def _now(self, handle=None):
        if handle is not None:
            handle.remove()
        self.meddle(self)
        self.happened = True

    def _after_backward(self):
        if self.number == 2:
            self._meddle_at("after")
            self._meddle_at("inside")

    def _by_control(self, loss):
        self.control.backward(loss)
        self._after_backward()
        self.control.step()

    def _by_scaler(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self._after_backward()
        gradilocks.clip_grad_norm_(self.params(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _by_clip(self, loss):
        loss.backward()
        self._after_backward()
        gradilocks.clip_grad_norm_(self.params(), 0.5)
        gradilocks.clip_grad_value_(self.params(), 0.1)
        self.optimizer.step()


DRIVERS = ("control", "control, optim", "scaler", "scaler, optim", "clip", "clip, optim")


def fill_freed_memory(run):
    """So that what is read or written at an old address is seen."""
    gc.collect()
    run.kept += [torch.full_like(param, 1e6) for param in run.params() for _ in range(3)]


# --- what happens ---------------------------------------------------------------------------------


def in_another_thread(act):
    def meddle(run):
        thread = threading.Thread(target=act, args=(run,))
        thread.start()
        thread.join()

    meddle.__name__ = f"{act.__name__}_in_another_thread"
    return meddle


def one_leaves_the_list(run):
    del run.optimizer.param_groups[1]["params"][-1]


def the_list_is_turned(run):
    run.optimizer.param_groups[0]["params"].reverse()


def one_takes_the_place_of_another(run):
    group = run.optimizer.param_groups[0]["params"]
    group[1] = nn.Parameter(torch.ones_like(group[1]))
    group[1].grad = torch.ones_like(group[1])
    run.model[0].bias = group[1]
    fill_freed_memory(run)


def a_gradient_is_freed(run):
    for param in run.params()[::2]:
        param.grad = None
    fill_freed_memory(run)


def a_gradient_is_replaced(run):
    for param in run.params()[::2]:
        if param.grad is not None:
            param.grad = param.grad.clone()
    fill_freed_memory(run)


def it_is_moved_to_shared_memory(run):
    run.model.share_memory()
    fill_freed_memory(run)


def it_is_moved_to_another_dtype(run):
    run.model.double()
    for param in run.params():
        for name, value in run.optimizer.state[param].items():
            if torch.is_tensor(value) and value.dim():
                run.optimizer.state[param][name] = value.double()
    fill_freed_memory(run)


def it_is_moved_away_and_back(run):
    params = list(run.model.parameters())
    kept = [[t if t is None else t.detach().clone() for t in (p, p.grad)] for p in params]
    run.model.to_empty(device="cpu")
    fill_freed_memory(run)
    for param, (value, grad) in zip(params, kept, strict=True):
        param.data.copy_(value)
        if grad is not None:
            param.grad.copy_(grad)


def it_is_moved_to_new_parameters(run):
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        run.model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    fill_freed_memory(run)


class Elsewhere(nn.Parameter):
    """A Parameter that keeps its gradient in a place of its own."""

    @property
    def grad(self):
        return self.__dict__.get("elsewhere")

    @grad.setter
    def grad(self, value):
        self.__dict__["elsewhere"] = value


def one_has_a_grad_of_its_own(run):
    group = run.optimizer.param_groups[1]["params"]
    old, group[0] = group[0], Elsewhere(group[0].detach().clone())
    group[0].grad = torch.full_like(old, 0.01)
    run.kept.append(old)


CASES = [
    *((act, when) for act in (
        in_another_thread(one_leaves_the_list),
        in_another_thread(the_list_is_turned),
        in_another_thread(one_takes_the_place_of_another),
        a_gradient_is_freed,
        a_gradient_is_replaced,
        it_is_moved_to_shared_memory,
        it_is_moved_away_and_back,
        one_has_a_grad_of_its_own,
    ) for when in ("before", "after", "inside")),
    (it_is_moved_to_another_dtype, "before"),
    (it_is_moved_to_new_parameters, "before"),
]  # fmt: skip


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(("act", "when"), CASES, ids=lambda it: getattr(it, "__name__", it))
def test_all_ways_leave_the_same(driver, act, when, monkeypatch):
    left = {}
    for way, (backend, library) in WAYS.items():
        monkeypatch.setitem(kernels.BACKENDS, "cpu", backend)
        monkeypatch.setattr(native, "library", lambda library=library: library)
        run = Run(driver, act, when)
        left[way] = run.train()
        assert run.happened
    expected = left.pop("plain torch")
    for way, found in left.items():
        assert len(found) == len(expected), way
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), way


# --- memory that is not all there -----------------------------------------------------------------


def shrink(tensor, bytes_left):
    tensor.untyped_storage().resize_(bytes_left)


TAKEN = {
    "a gradient's, freed": lambda p, o: shrink(p[1].grad, 0),
    "a gradient's, smaller": lambda p, o: shrink(p[1].grad, 8),
    "that of a view with an offset": lambda p, o: shrink(p[0].grad, 0),
    "a parameter's, freed": lambda p, o: shrink(p[1].data, 0),
    "a parameter's, smaller": lambda p, o: shrink(p[1].data, 8),
    "a moment's, freed": lambda p, o: shrink(o.state[p[1]]["exp_avg"], 0),
    "a moment's, smaller": lambda p, o: shrink(o.state[p[1]]["exp_avg"], 8),
}


@pytest.mark.parametrize("what", TAKEN)
@pytest.mark.parametrize("at", [1, 2, 5])
def test_memory_that_is_gone_is_refused_by_name_and_never_read(what, at):
    params = [nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(32, 3))]
    optimizer = optim.AdamW(params, lr=0.05)
    control = GradientControl(optimizer, clip=1.0)
    for number in range(at + 1):
        control.zero_grad()
        control.backward(sum(param.square().sum() for param in params))
        flat = torch.empty(4 + 64)  # As buckets of several gradients are.
        flat[4:] = params[0].grad
        params[0].grad = flat[4:]
        if number == at:
            before = control.state_dict()
            TAKEN[what](params, optimizer)
            with pytest.raises(ValueError, match="has no memory"):
                control.step()
            assert control.state_dict() == before
        else:
            control.step()


def test_freed_memory_of_a_view_is_refused_without_cpp_too(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setitem(kernels.BACKENDS, "cpu", reference)
    param = nn.Parameter(torch.ones(64))
    control = GradientControl(torch.optim.SGD([param], lr=0.05), clip=1.0)
    for number in range(3):
        control.zero_grad()
        control.backward(param.square().sum())
        param.grad = torch.cat([torch.ones(4), param.grad])[4:]
        if number == 2:
            shrink(param.grad, 0)
            with pytest.raises(ValueError, match="has no memory"):
                control.step()
        else:
            control.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_that_is_an_inference_tensor_is_stepped_on(way, monkeypatch):
    backend, library = WAYS[way]
    monkeypatch.setitem(kernels.BACKENDS, "cpu", backend)
    monkeypatch.setattr(native, "library", lambda: library)
    param = nn.Parameter(torch.ones(4))
    control = GradientControl(optim.AdamW([param], lr=0.1), scale=None, clip=1.0)
    for _ in range(4):
        before = param.detach().clone()
        with torch.inference_mode():
            made = torch.ones(4)
        param.grad = made
        control.step()
        assert not torch.equal(param.detach(), before)
