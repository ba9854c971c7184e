"""Memory that runs out while the first step makes its state, and the step that is tried again."""

from __future__ import annotations

import pytest
import torch

from gradilocks import optim
from tests.optim.twins import both_kinds, close, give, ours, parameters


class Full(Exception):
    pass


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("make", [optim.SGD, optim.AdamW])
def test_a_first_step_that_ran_out_of_memory_is_tried_again_as_if_nothing_had_been(
    make, after, kernel_device, monkeypatch
):
    settings = {"momentum": 0.9, "dampening": 0.5} if make is optim.SGD else {}
    mine, theirs = (parameters([(5,), (2, 3), (4,)], device=kernel_device) for _ in range(2))
    optimizers = [make(params, lr=0.1, **settings) for params in (mine, theirs)]
    real, left = torch.zeros_like, [after]

    def scarce(*args, **kwargs):
        if not left[0]:
            raise Full
        left[0] -= 1
        return real(*args, **kwargs)

    give(mine, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", scarce)
        with pytest.raises(Full):
            optimizers[0].step()
    if make is optim.SGD:
        assert optimizers[0].state_dict()["state"] == {}
    for number in range(3):
        for params, optimizer in zip((mine, theirs), optimizers, strict=True):
            give(params, number)
            optimizer.step()
    close(mine, theirs)


@both_kinds
def test_a_state_that_was_taken_after_loading_stays_alive(kind, device):
    params = parameters([(5,)], device=device)
    optimizer = ours(kind, params)
    give(params, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[params[0]]
    give(params, 1)
    optimizer.step()
    assert optimizer.state[params[0]] is state
    name = next(key for key in state if key != "step")
    state[name] = torch.full_like(state[name], 7.0)
    assert optimizer.state[params[0]][name][0].item() == 7.0
    before = params[0].detach().clone()
    give(params, 2)
    optimizer.step()
    assert (params[0] - before).abs().min().item() > 0.01
