"""Memory that is freed, replaced or moved between steps is noticed or refused, never read at its old address."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from control.given_gradients import MAKERS, OWN_OPTIMIZERS, PATHS, loss_giving, params_of
from gradilocks import GradientControl, kernels

EVERY = MAKERS | {"own SGD": OWN_OPTIMIZERS["own SGD"]}


def fill_freed_memory(params):
    """Tensors in the memory that was just freed, so that a read at an old address gives a wrong number."""
    return [torch.full_like(p, 1e6) for p in params for _ in range(3)]


def free_gradients(optimizer):
    for p in params_of(optimizer)[::2]:
        p.grad = None


def replace_gradients(optimizer):
    for p in params_of(optimizer)[::2]:
        p.grad = p.grad.clone()


def replace_parameter_storage(optimizer):
    for p in params_of(optimizer):
        p.data = p.data.clone()


def replace_state(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)


def move_to_shared_memory(optimizer):
    for p in params_of(optimizer):
        if p.device.type == "cpu":
            p.data = p.data.clone().share_memory_()
            p.grad = p.grad.clone().share_memory_()


def change_layout(optimizer):
    p = params_of(optimizer)[0]
    p.data = p.data.t().contiguous().t()
    p.grad = p.grad.t().contiguous().t()


CHANGES = [
    free_gradients,
    replace_gradients,
    replace_parameter_storage,
    replace_state,
    move_to_shared_memory,
    change_layout,
]


def train(make, change, device):
    torch.manual_seed(5)
    params = [nn.Parameter(torch.randn(shape).to(device)) for shape in ((6, 4), (5,), (3, 2))]
    optimizer = make(params)
    control = GradientControl(optimizer, clip=0.5, scale=64.0)
    kept, norms = [], []
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        control.backward(loss_giving(*((p, torch.randn(p.shape, generator=generator)) for p in params)))
        if step >= 2:
            change(optimizer)
            kept.append(fill_freed_memory(params))
        norms.append(control.step().norm)
        control.zero_grad()
    return norms, [p.detach().cpu().clone() for p in params]


@pytest.mark.parametrize("device", PATHS[1:], indirect=True)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", EVERY)
def test_changes_between_backward_and_step_are_noticed(name, change, device, monkeypatch):
    found = train(EVERY[name], change, device)
    monkeypatch.setitem(kernels.BACKENDS, device, kernels.reference)
    expected = train(EVERY[name], change, device)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for p, q in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", PATHS[1:], indirect=True)  # torch's own operations crash.
@pytest.mark.parametrize(
    ("name", "what", "step"),
    [
        ("SGD momentum", "gradient", 2),
        ("own AdamW", "gradient", 2),
        *(("own AdamW", what, step) for what in ("parameter", "state") for step in (0, 2)),
    ],
)
def test_a_tensor_whose_storage_was_freed_is_refused(name, what, step, device):
    p, q = nn.Parameter(torch.ones(1000, device=device)), nn.Parameter(torch.ones(10, device=device))
    optimizer = EVERY[name]([p, q])
    if what == "state":
        optimizer.state[p] = {"exp_avg": torch.zeros_like(p.detach()), "exp_avg_sq": torch.zeros_like(p.detach())}
    control = GradientControl(optimizer, clip=1.0)
    for number in range(step + 1):
        control.zero_grad()
        control.backward(loss_giving((p, 1.0), (q, 1.0)))
        if number < step:
            control.step()
    tensor = {"gradient": p.grad, "parameter": p}.get(what, optimizer.state[p].get("exp_avg"))
    tensor.untyped_storage().resize_(0)
    before = q.detach().clone()
    with pytest.raises(RuntimeError, match="has no memory"):
        control.step()
    assert torch.equal(q, before)


@pytest.mark.parametrize("name", ["own AdamW", "own SGD"])
def test_state_that_was_replaced_by_hand_is_not_read_after_it_is_freed(name, device):
    p = nn.Parameter(torch.ones(1000, device=device))
    optimizer = EVERY[name]([p])
    control = GradientControl(optimizer)
    key = "exp_avg" if "Adam" in name else "momentum_buffer"
    for step in range(4):
        control.zero_grad()
        control.backward(loss_giving((p, 1.0)))
        if step == 2:
            optimizer.state[p][key] = torch.zeros_like(p)
            junk = fill_freed_memory([p])
        control.step()
    assert p.detach().abs().max() < 10.0
    assert all(bool((tensor == 1e6).all()) for tensor in junk)
