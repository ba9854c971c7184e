"""A kernel that does not compile: plain torch goes on, once warned of, and nothing is lost.

Compiled, the failure is a real one: Triton refuses a block that is no power of two. Interpreted,
where nothing is compiled, it is pretended where the compiler would be asked.
"""

from __future__ import annotations

import importlib
import re
import warnings

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, kernels
from gradilocks.kernels import chunks

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")
triton_backend = importlib.import_module("gradilocks.kernels.triton_backend")
triton_measure = importlib.import_module("gradilocks.kernels.triton_measure")
launch = importlib.import_module("gradilocks.kernels.triton_launch")
launches = importlib.import_module("gradilocks.kernels.triton_optimizers")

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

triton_settle = importlib.import_module("gradilocks.kernels.triton_settle")
triton = importlib.import_module("triton")


@triton.jit
def broken_kernel(skip_ptr, rules_ptr, scale_ptr, tracker_ptr, hysteresis_ptr):
    """Refused by the compiler."""
    nothing_of_this_name(skip_ptr)  # noqa: F821


CPU = pytest.param(
    "cpu",
    marks=pytest.mark.skipif(
        torch.cuda.is_available(), reason="with a GPU the kernels are compiled, not read"
    ),
)
MAKERS = {
    "our AdamW": lambda params: gradilocks.optim.AdamW(params, lr=0.1),
    "our SGD": lambda params: gradilocks.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "unfused": lambda params: torch.optim.AdamW(params, lr=0.1),
}


@pytest.fixture(params=[CPU, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    chunks._chunkings.clear()
    monkeypatch.setitem(kernels.BACKENDS, request.param, triton_backend)
    yield request.param
    chunks._chunkings.clear()


@pytest.fixture
def fail(device, monkeypatch):
    """Lets a kernel fail to compile from here on, by its name."""

    def start(name):
        for layout in chunks._chunkings.values():
            layout.launches.clear()
        if device == "cuda":
            odd = {
                "measure_kernel": (triton_measure, "TILE"),
                "change_kernel": (triton_measure, "CHANGE_TILE"),
            }
            odd |= {"adam_kernel": (launches, "TILE"), "sgd_kernel": (launches, "TILE")}
            odd |= dict.fromkeys(("adam_rates_kernel", "sgd_rates_kernel"), (launches, "_LANES"))
            if name == "advance_kernel":  # It has no block that could be odd.
                monkeypatch.setattr(triton_settle, "advance_kernel", broken_kernel)
            elif name == "settle_kernel":
                monkeypatch.setattr(triton_settle, "lanes_for", lambda layout: 100)
            else:
                monkeypatch.setattr(*odd[name], 100)
            return
        real = launch.Launch.prepare

        def prepare(self, on, *args):
            if self._kernel.__name__ == name:
                raise self.failed(on, ValueError("no power of two"))
            real(self, on, *args)

        monkeypatch.setattr(launch.Launch, "prepare", prepare)
        call = launch.Launch.__call__

        def prepared(self, programs, on, *args):  # As where there is something to compile.
            self.prepare(on, *args)
            call(self, programs, on, *args)

        monkeypatch.setattr(launch.Launch, "__call__", prepared)

    return start


def trained(device, make, *, before_step=None, at=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).to(device)
    optimizer = make(model.parameters())
    control = GradientControl(optimizer, model=model, scale=1024.0, clip=0.5)
    told, norms = [], []
    for number in range(5):
        inputs = torch.full((4, 7), 0.1 * (number + 1), device=device)
        if number == 2:
            inputs[0, 0] = float("inf")
        control.backward(model(inputs).square().sum())
        if number == at:
            before_step()
            # As where tensors of other kinds have come: launches are made anew.
            control._engine._settler = control._bound = None
            if getattr(optimizer, "_plan", None) is not None:
                optimizer._plan._kept.clear()
        outcome = control.step()
        told.append((outcome.step, outcome.skipped, outcome.clipped))
        norms.append(outcome.norm)
        control.zero_grad()
    steps = {float(s["step"]) for s in optimizer.state.values() if "step" in s}
    return [*(p.detach().cpu() for p in model.parameters()), torch.tensor(norms)], told, steps


def warned(caught):
    return [str(w.message) for w in caught if "goes on with plain torch" in str(w.message)]


CASES = [
    ("our AdamW", "measure_kernel", (0, 3)),
    ("our AdamW", "settle_kernel", (0, 3)),
    ("our AdamW", "adam_rates_kernel", (0,)),  # Later the kernel that settles works them out.
    ("our AdamW", "adam_kernel", (0, 3)),
    ("our SGD", "sgd_kernel", (0, 3)),
    ("fused", "settle_kernel", (0, 3)),
    ("unfused", "change_kernel", (0, 3)),
]


@pytest.mark.parametrize(
    ("kind", "name", "at"), [(kind, name, at) for kind, name, ats in CASES for at in ats]
)
def test_training_goes_on_with_plain_torch(device, fail, monkeypatch, kind, name, at):
    with monkeypatch.context() as patch:
        patch.setitem(kernels.BACKENDS, device, kernels.reference)
        params, told, steps = trained(device, MAKERS[kind])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(device, MAKERS[kind], before_step=lambda: fail(name), at=at)
    assert found[1:] == (told, steps)
    for mine, theirs in zip(found[0], params, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    (message,) = warned(caught)
    assert name in message or device == "cuda"  # A block's size breaks more than one.
    assert "does not compile" in message
    assert not kernels.BACKENDS[device].BY_ADDRESS
    assert kernels.describe()[device] == f"reference: {message.split('slower: ')[1]}"


@pytest.mark.parametrize(
    "name", ["measure_kernel", "settle_kernel", "change_kernel", "advance_kernel"]
)
def test_the_drop_ins_go_on_with_plain_torch(device, fail, name):
    params = [nn.Parameter(torch.zeros(n, device=device)) for n in (3, 70)]
    params.append(nn.Parameter(torch.zeros(4, dtype=torch.float64, device=device)))
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = gradilocks.GradScaler(device, init_scale=8.0)
    scaler.scale(torch.ones((), device=device))
    for param in params:
        param.grad = torch.full_like(param, 16.0)
    fail(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.unscale_(optimizer)
        norm = gradilocks.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
    expected = 2.0 * 77**0.5
    assert norm.item() == pytest.approx(expected)
    for param in params:
        assert torch.allclose(param, torch.full_like(param, -2.0 / expected))
    assert len(warned(caught)) == 1


def test_of_several_dtypes_none_is_multiplied_if_one_fails(device, fail, monkeypatch):
    tensors = [torch.ones(3, device=device), torch.ones(3, dtype=torch.float64, device=device)]
    fail("change_kernel")
    seen = []
    real = kernels.reference.multiply_

    def noted(given, multiplier):
        seen.extend(tensor.tolist() for tensor in given)
        real(given, multiplier)

    monkeypatch.setattr(kernels.reference, "multiply_", noted)
    with pytest.warns(RuntimeWarning, match="goes on with plain torch"):
        triton_backend.multiply_(tensors, torch.full((), 2.0, device=device))
    assert seen == [[1.0] * 3] * 2
    assert [tensor.tolist() for tensor in tensors] == [[2.0] * 3] * 2


def test_a_warning_that_is_an_error_leaves_everything_as_it_was(device, fail):
    tensors = [torch.ones(3, device=device)]
    fail("measure_kernel")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="goes on with plain torch"):
            triton_backend.multiply_and_check_(tensors, torch.full((), 2.0, device=device))
    assert tensors[0].tolist() == [1.0] * 3
    triton_backend.multiply_and_check_(tensors, torch.full((), 2.0, device=device))
    assert tensors[0].tolist() == [2.0] * 3


def test_a_first_use_inside_a_capture_is_refused_and_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(kernels, "capturing", lambda: True)
    monkeypatch.setattr(kernels, "BACKENDS", kernels._Backends())
    monkeypatch.setattr(kernels, "_without_native", lambda: "no library")
    with pytest.raises(RuntimeError, match="Run a step or two before the capture"):
        kernels.BACKENDS["cuda"]
    assert "cuda" not in kernels.BACKENDS
    assert kernels.BACKENDS["cpu"] is kernels.reference


@pytest.mark.parametrize("words", ["CUDA out of memory", "Triton Error [CUDA]: illegal address"])
def test_what_is_not_the_compilers_fault_gives_nothing_up(monkeypatch, words):
    """No memory, or what somebody else's kernel has done."""
    monkeypatch.setitem(kernels.BACKENDS, "cuda", triton_backend)

    class Kernel:
        arg_names = ()

        def warmup(self, *args, **options):
            raise RuntimeError(words)

    monkeypatch.setattr(torch.cuda, "device", lambda index: warnings.catch_warnings())
    with pytest.raises(RuntimeError, match=re.escape(words)):
        launch.Launch(Kernel(), 4, ()).prepare(torch.device("cuda", 0))
    assert kernels.BACKENDS["cuda"] is triton_backend
