"""Steps of `gradilocks.optim` and settled steps by the CPU's own kernels: the same bits, always.

That they agree with torch and with the other back ends is tested where these are (tests/optim,
tests/engine); here is what only threads, processes and the C++ can do to them.
"""

from __future__ import annotations

import faulthandler
import os
import sys

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, kernels, optim
from gradilocks.kernels import native
from gradilocks.optim import fused_optimizer
from tests.forks import fork

if native.library() is None:
    pytest.skip("the native library is not there", allow_module_level=True)

from gradilocks.kernels import native_backend

MAKERS = {
    "AdamW": lambda params: optim.AdamW(params, lr=0.1),
    "Adam with all": lambda params: optim.Adam(
        params, lr=0.1, weight_decay=0.1, amsgrad=True, maximize=True
    ),
    "masters": lambda params: optim.AdamW(params, lr=0.1, master_weights=True),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}
SHAPES = [(3,), (90_001,), (300, 200), (0,), ()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, "cpu", native_backend)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def trained(make, *, steps=4, bad=None, clip=1.0):
    """Everything that steps by a control leave behind; at step `bad` a gradient is not finite."""
    generator = torch.Generator().manual_seed(3)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]
    optimizer = make(params)
    control = GradientControl(optimizer, clip=clip, scale=256.0)
    for number in range(steps):
        given = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]
        if number == bad:
            given[1][70_000] = float("nan")
        control.backward(sum((p * g).sum().float() for p, g in zip(params, given, strict=True)))
        outcome = control.step()
        assert outcome.skipped == (number == bad)
        control.zero_grad()
    return [p.detach() for p in params] + [
        value for p in params for value in optimizer.state[p].values() if torch.is_tensor(value)
    ]


def same(one, other):
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", MAKERS)
def test_any_number_of_threads_steps_alike(name, threads):
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(trained(MAKERS[name], bad=2))
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize("name", MAKERS)
def test_where_tensors_are_cut_for_the_threads_changes_no_bit(name, threads, monkeypatch):
    # A thread steps what follows each other of a tensor in one run, up to where another one begins.
    threads(2)
    expected = trained(MAKERS[name])
    for chunk in (64, 1 << 20):
        monkeypatch.setattr(fused_optimizer, "CHUNK", chunk)
        assert same(trained(MAKERS[name]), expected)


@pytest.mark.parametrize("name", MAKERS)
def test_a_first_step_that_is_skipped_leaves_nothing_behind(name):
    generator = torch.Generator().manual_seed(3)
    fresh = [
        torch.randn(shape, generator=generator).to(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]
    left = trained(MAKERS[name], steps=1, bad=0)
    assert same(left[: len(fresh)], fresh)
    # Counts and moments are 0; a master is its parameter, which is none of them.
    zero = {"masters": 0}.get(name, 1)
    assert not zero or all(not value.any() for value in left[len(fresh) :])


def test_a_child_of_a_fork_steps_as_its_parent_does():
    expected = trained(MAKERS["AdamW"])
    child = fork()
    if not child:
        code = 1
        try:
            code = 0 if same(trained(MAKERS["AdamW"]), expected) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("walk", ["C++", "Python"])
def test_a_child_of_a_process_that_has_run_threads_takes_small_steps(threads, monkeypatch, walk):
    # libgomp hangs in the next parallel region, and plain torch opens none for tensors so small.
    if walk == "Python":
        monkeypatch.setattr(native, "library", lambda: None)
    threads(2)
    torch.ones(1 << 20).sum()
    child = fork(threads=None)
    if not child:
        faulthandler.dump_traceback_later(20, exit=True, file=sys.__stderr__)
        code = 1
        try:
            weights = [nn.Parameter(torch.ones(4)) for _ in range(4)]
            for weight in weights:
                weight.grad = torch.ones(4)
            right = gradilocks.get_total_norm([weight.grad for weight in weights]).item() == 4.0
            gradilocks.clip_grad_norm_(weights, 1.0)
            right &= weights[0].grad.tolist() == pytest.approx([0.25] * 4)
            gradilocks.clip_grad_value_(weights, 0.125)
            right &= weights[3].grad.tolist() == [0.125] * 4
            for make in (*MAKERS.values(), lambda params: torch.optim.AdamW(params, lr=0.1)):
                model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
                before = model[0].weight.detach().clone()
                control = GradientControl(make(model.parameters()), clip=1.0, model=model)
                for _ in range(3):
                    control.backward(model(torch.ones(2, 3)).sum())
                    right &= not control.step().skipped
                    control.zero_grad()
                right &= not torch.equal(before, model[0].weight)
            code = 0 if right else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


FIRST_IN_A_CHILD = """
import faulthandler, os, sys, torch
from gradilocks.kernels import native

torch.set_num_threads(2)
torch.ones(1 << 20).sum()
assert native._HERE._module is None
child = os.fork()
if not child:
    faulthandler.dump_traceback_later(60, exit=True)
    tensors = [torch.empty(1 << 16) for _ in range(8)]
    from gradilocks.kernels import native_backend

    native_backend.multiply_(tensors, torch.zeros(()))
    native_backend.measure(tensors)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_such_a_process_may_be_the_first_to_load_the_library(script_server, tmp_path):
    script = tmp_path / "first_in_a_child.py"
    script.write_text(FIRST_IN_A_CHILD)
    done = script_server.run(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shapes", [[(4,)] * 300, [(20_000,)] * 8])
def test_what_torch_computes_on_one_thread_in_such_a_child_is_the_parents_bits(threads, shapes):
    def stepped():
        weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = optim.AdamW(weights, lr=0.1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.full(weight.shape, 0.3)
            gradilocks.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        return [weight.detach() for weight in weights]

    threads(2)
    torch.ones(1 << 20).sum()
    expected = stepped()
    child = fork(threads=None)
    if not child:
        faulthandler.dump_traceback_later(20, exit=True, file=sys.__stderr__)
        code = 1
        try:
            code = 0 if same(stepped(), expected) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_steps_of_tensors_that_lie_otherwise_are_those_of_a_contiguous_twin():
    torch.manual_seed(0)
    values, gradient = torch.randn(4, 6, 5, 5), torch.randn(4, 6, 5, 5)
    layouts = [
        (values.clone(), gradient.clone()),
        (values.to(memory_format=torch.channels_last), gradient.clone()),
        (values.clone(), gradient.to(memory_format=torch.channels_last)),
        (values.transpose(0, 1).contiguous().transpose(0, 1), gradient.clone()),
    ]
    params = []
    for value, grad in layouts:
        params.append(nn.Parameter(value))
        params[-1].grad = grad
    optimizer = optim.AdamW(params, lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert all(torch.equal(param, params[0]) for param in params[1:])


def test_a_gradient_that_two_parameters_share_is_stepped_by_both_and_left_alone():
    first, second = nn.Parameter(torch.ones(40_000)), nn.Parameter(torch.ones(40_000))
    first.grad = second.grad = torch.linspace(-1.0, 1.0, 40_000)
    before = first.grad.clone()
    optim.SGD([first, second], lr=0.5).step()
    assert torch.equal(first, second)
    assert torch.equal(first, 1.0 - 0.5 * before)
    assert torch.equal(first.grad, before)


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_the_limit_is_what_measuring_and_the_formula_give(order):
    from gradilocks.kernels.chunks import AddressedTensors, Addresses, kinds_of
    from gradilocks.kernels.reference import summarize

    tensors = [torch.randn(n) * scale for n, scale in ((5, 1.0), (70_000, 1e-3), (0, 1.0))]
    addresses = [tensor.data_ptr() for tensor in tensors]
    sizes = tuple(tensor.numel() for tensor in tensors)
    numbers = torch.tensor(addresses)
    at = Addresses(numbers, kinds_of(tensors, addresses), sizes, torch.device("cpu"))
    for bound in (0.0, 1e-3, 1e3, float("inf")):
        norm, coefficient = native_backend.limit(AddressedTensors(tensors, at), bound, order)
        expected = summarize(
            native_backend.measure(tensors, order=order), order=order, double=False
        )
        assert norm.dtype == coefficient.dtype == torch.float64
        assert norm.item() == expected.norm.item()
        assert coefficient.item() == min(1.0, bound / (norm.item() + 1e-6))


def test_state_that_lies_elsewhere_by_now_is_found_wherever_it_is_in_the_list():
    weights = [nn.Parameter(torch.ones(3)) for _ in range(200)]
    optimizer = optim.AdamW(weights, lr=0.1)

    def step():
        for weight in weights:
            weight.grad = torch.ones(3)
        optimizer.step()

    step()
    moved = [optimizer.state[weight]["exp_avg"] for weight in weights[-10:]]
    for tensor in moved:
        tensor.data = torch.zeros(3)  # Of which nobody is told.
    step()
    assert all(tensor.tolist() == pytest.approx([0.1] * 3) for tensor in moved)


def test_memory_that_an_offloader_has_freed_and_brought_back_is_not_written_to_in_the_old_place():
    weights = [nn.Parameter(torch.ones(20_000)) for _ in range(100)]
    optimizer = optim.AdamW(weights, lr=0.1)

    def step():
        for weight in weights:
            weight.grad = torch.ones(20_000)
        optimizer.step()

    step()
    average = optimizer.state[weights[-1]]["exp_avg"]
    storage, kept = average.untyped_storage(), average.clone()
    size = storage.nbytes()
    storage.resize_(0)
    mine = [torch.full((20_000,), 7.0) for _ in range(3)]  # Likely where it was.
    storage.resize_(size)
    average.copy_(kept)
    step()
    assert all(tensor.unique().tolist() == [7.0] for tensor in mine)
    assert average.unique().tolist() == pytest.approx([0.19])


@pytest.mark.parametrize("walk", ["C++", "Python"])
@pytest.mark.parametrize("who", ["control", "clip", "optimizer"])
def test_a_gradient_whose_memory_was_freed_is_refused_by_name(who, walk, monkeypatch):
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    acts = {
        "control": lambda: control.step(),
        "clip": lambda: gradilocks.clip_grad_norm_(model.parameters(), 1.0),
        "optimizer": optimizer.step,
    }
    if who == "control":  # Else a clip would be told that one will step on these gradients.
        control = GradientControl(optimizer, model=model, scale=None)
    if walk == "Python":
        monkeypatch.setattr(native, "library", lambda: None)

    def gradients():
        for param in model.parameters():
            param.grad = torch.ones_like(param)

    for _ in range(2):
        gradients()
        acts[who]()
    gradients()
    model.weight.grad.untyped_storage().resize_(0)
    before = model.bias.detach().clone()
    with pytest.raises((ValueError, RuntimeError), match=r"no memory|not allocated"):
        acts[who]()
    assert torch.equal(before, model.bias.detach())
