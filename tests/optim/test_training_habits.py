"""Hooks, closures, averaged weights, old graphs: what training loops do around a step."""

from __future__ import annotations

import pytest
import torch
from torch.optim import swa_utils

import gradilocks
from tests.optim.twins import both_kinds, close, copies, give, ours, parameters, run, same, torchs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SHAPES = [(70,), (3, 4), ()]


@both_kinds
def test_hooks_are_called_once_a_step(kind, device):
    params = parameters(SHAPES, device=device)
    run(torchs(kind, parameters(SHAPES, device=device)), 1)  # torch has put hooks on its own class.
    optimizer = ours(kind, params)
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append("after"))
    run(optimizer, 2)
    assert calls == ["before", "after"] * 2


@both_kinds
def test_a_hook_that_changes_gradients_is_honoured(kind, device):
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        optimizer = make(kind, params)

        def negate(opt, args, kwargs, params=params):
            for param in params:
                param.grad = -param.grad

        optimizer.register_step_pre_hook(negate)
        run(optimizer, 3)
        ends.append(params)
    close(*ends)


@both_kinds
def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned(kind, device):
    params = parameters(SHAPES, device=device)
    optimizer = ours(kind, params)
    asked = []

    def closure():
        asked.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    with torch.no_grad():
        losses = [optimizer.step(closure) for _ in range(3)]
    assert asked == [True] * 3
    assert losses[2] < losses[0]
    assert optimizer.step() is None


@both_kinds
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_cleared_either_way(kind, set_to_none, device):
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        optimizer = make(kind, params)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            if not set_to_none and step:
                assert not any(param.grad.any() for param in params)
            sum((param * (step + 1)).square().sum() for param in params).backward()
            optimizer.step()
        ends.append(params)
    close(*ends)


@both_kinds
def test_a_graph_from_before_the_step_cannot_be_used_after_it(kind, device):
    (param,) = parameters([(70,)], device=device)
    optimizer = ours(kind, [param])
    for step in range(3):
        version = param._version
        loss = (param * param).sum()
        give([param], step)
        optimizer.step()
        assert param._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@both_kinds
def test_averaged_models_and_their_batch_norm_work(kind, device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).to(device)
    batches = [torch.randn(8, 4, device=device) for _ in range(3)]
    average = swa_utils.AveragedModel(model)
    moving = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = ours(kind, model.parameters())
    seen = []
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)
        moving.update_parameters(model)
        seen.append(model[0].weight.detach().clone())
    swa_utils.update_bn(batches, average)
    close([average.module[0].weight], [torch.stack(seen).mean(0)])
    assert not torch.equal(moving.module[0].weight, model[0].weight)


@both_kinds
def test_weights_that_are_swapped_for_an_evaluation_come_back(kind, device):
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        optimizer = make(kind, params)
        for step in range(3):
            run(optimizer, 1, first=step)
            kept = [param.data for param in params]
            for param in params:
                param.data = torch.zeros_like(param)
            for param, data in zip(params, kept, strict=True):
                param.data = data
        ends.append(params)
    close(*ends)


@both_kinds
def test_gradients_kept_from_step_to_step_are_read_anew(kind, device):
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        optimizer = make(kind, params)
        for param in params:
            param.grad = torch.zeros_like(param)
        for step in range(3):
            for param in params:
                param.grad.add_(step + 1.0)
            optimizer.step()
        ends.append(params)
    close(*ends)


@both_kinds
def test_a_frozen_layer_may_thaw(kind, device):
    ends = []
    for make in (ours, torchs):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 70), torch.nn.Linear(70, 1)).to(device)
        optimizer = make(kind, model.parameters(), **({} if make is ours else {"fused": False}))
        for step in range(4):
            model[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            model(torch.ones(2, 4, device=device)).square().sum().backward()
            optimizer.step()
        ends.append(list(model.parameters()))
    close(*ends)


@both_kinds
def test_default_settings_are_torchs(kind, device):
    params = parameters(SHAPES, device=device)
    mine = getattr(gradilocks.optim, kind)(params)
    theirs = getattr(torch.optim, kind)(params)
    speed = {"foreach", "fused", "master_weights"}
    assert {k: v for k, v in mine.defaults.items() if k not in speed} == {
        k: v for k, v in theirs.defaults.items() if k not in speed
    }
    assert isinstance(mine, getattr(torch.optim, kind))
    assert mine._step_supports_amp_scaling
    assert "lr: 0.001" in repr(mine)


@both_kinds
def test_a_subclass_with_a_constructor_of_its_own_works(kind, device):
    class Mine(getattr(gradilocks.optim, kind)):
        def __init__(self, params):
            super().__init__(params, lr=0.5)
            self.seen = 0

        def step(self, closure=None):
            self.seen += 1
            return super().step(closure)

    params = parameters(SHAPES, device=device)
    before = copies(params)
    optimizer = Mine(params)
    run(optimizer, 2)
    assert optimizer.seen == 2
    assert not same(copies(params), before)


def test_two_optimizers_may_hold_the_same_parameters(device):
    """As a pre-training and a fine-tuning optimizer do, one after the other."""
    ends = []
    for make in (ours, torchs):
        params = parameters(SHAPES, device=device)
        first, second = make("AdamW", params), make("SGD", params)
        for step in range(4):
            run(first if step % 2 else second, 1, first=step)
        ends.append(params)
    close(*ends)


def test_a_step_is_the_same_with_and_without_no_grad(device):
    ends = []
    for mode in (torch.enable_grad, torch.no_grad):
        params = parameters(SHAPES, device=device)
        optimizer = ours("AdamW", params)
        with mode():
            run(optimizer, 2)
        assert all(param.requires_grad for param in params)
        ends.append(copies(params))
    assert same(*ends)


def test_another_default_dtype_or_device_changes_nothing(device):
    ends = []
    for dtype in (torch.float32, torch.float64):
        params = parameters(SHAPES, device=device)
        torch.set_default_dtype(dtype)
        try:
            optimizer = ours("AdamW", params)
            run(optimizer, 2)
            sgd = ours("SGD", params)
            run(sgd, 2)
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append(copies(params))
    assert same(*ends)
    give(params, 5)
    with torch.device("meta"):
        for kind in ("AdamW", "SGD"):
            ours(kind, params).step()
    assert all(param.isfinite().all() for param in params)
