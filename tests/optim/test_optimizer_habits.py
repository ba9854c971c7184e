"""Hooks, closures, torch.compile and DTensors around the optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from gradilocks import kernels, optim
from gradilocks.optim.fused_step import FusedStep
from optim import twins


def test_step_hooks_run_once(extension):
    """Also if torch has wrapped its own class, as it does for the first instance."""
    torch.optim.AdamW(twins.parameters([(3,)]))
    calls = []
    for amsgrad in (False, True):
        optimizer = optim.AdamW(twins.parameters([(3,)]), amsgrad=amsgrad)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        twins.run(optimizer, 1)
    assert calls == ["before", "after"] * 2


def test_a_closure_is_evaluated_with_gradients(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = optim.SGD([param], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure).item() == 3.0
    assert param.eq(0.0).all()


def test_wrapped_steps_run_the_kernels(extension):
    """Some frameworks replace `step` on the instance."""
    optimizer = optim.AdamW(twins.parameters([(3,)]))
    step = optimizer.step
    optimizer.step = lambda closure=None: step(closure)
    twins.run(optimizer, 1)
    assert twins.uses_kernels(optimizer)


def test_a_compiled_function_calls_the_optimizer(extension):
    params = twins.parameters([(3,)])
    optimizer = optim.SGD(params, lr=1.0)

    @torch.compile(backend="eager")
    def step(x):
        optimizer.step()
        return x + 1

    expected = params[0].detach() - 1.0
    params[0].grad = torch.ones(3)
    assert step(torch.ones(())).item() == 2.0
    assert torch.equal(params[0], expected)


def test_one_fused_step_serves_adam_and_sgd(device):
    optimizers, expected = [], []
    for namespace, collected in ((optim, optimizers), (torch.optim, expected)):
        collected.append(namespace.AdamW(twins.parameters(device=device), lr=0.01))
        collected.append(namespace.SGD(twins.parameters(device=device), lr=0.05, momentum=0.9))
    scale, skip = torch.full((), 8.0, device=device), torch.zeros((), device=device)
    for step in range(3):
        for optimizer in optimizers:
            twins.fill_gradients(twins.params_of(optimizer), step, factor=8.0)
        if step == 0:
            fused = FusedStep.make(optimizers)
        assert fused.is_current()
        fused.run([param.grad for param in fused.params], scale, skip)
        for optimizer in expected:
            twins.run(optimizer, 1, first=step)
    for own, other in zip(optimizers, expected, strict=True):
        twins.assert_close(own, other, rtol=2e-6, atol=2e-7)


def test_nothing_is_made_for_optimizers_without_parameters_or_on_several_devices(extension):
    params = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, device="meta"))]
    assert FusedStep.make([]) is None
    assert FusedStep.make([optim.SGD(params, lr=0.1)]) is None


@pytest.fixture
def mesh(device):
    """A mesh of this process alone."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.device_mesh.init_device_mesh(device, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("master_weights", [False, True])
def test_distributed_tensors_are_stepped_like_plain_ones(master_weights, device, mesh):
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dtype = torch.float16 if master_weights else torch.float32
    plain = twins.parameters([(5,), (3, 4)], dtype=dtype, device=device)
    sharded = [torch.nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [Shard(0)])) for param in plain]
    optimizers = [optim.AdamW(params, lr=0.01, master_weights=master_weights) for params in (plain, sharded)]
    for step in range(3):
        twins.fill_gradients(plain, step)
        for param, other in zip(sharded, plain, strict=True):
            param.grad = distribute_tensor(other.grad.clone(), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert list(map(twins.uses_kernels, optimizers)) == [dtype in kernels.backend_for(device).TYPES] * 2
    state = optimizers[1].state[sharded[0]]
    assert isinstance(state["exp_avg"], DTensor)
    assert state["exp_avg"].placements == (Shard(0),)
    for param, other in zip(sharded, plain, strict=True):
        assert torch.equal(param.to_local(), other)


def test_a_partial_gradient_does_not_reach_the_kernels(extension, mesh):
    """It is not the gradient yet: the ranks' parts must be added first."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    param = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    optimizer = optim.SGD([param], lr=0.1)
    param.grad = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    fused = FusedStep.make([optimizer])
    assert fused.reader.read_gradients([param.grad]) is not None
    assert fused.reader.read_gradients([DTensor.from_local(torch.ones(4), mesh, [Partial()])]) is None
