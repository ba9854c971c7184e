"""Mistakes that users made with the control, each with the error or the number they should get."""

from __future__ import annotations

import copy
import gc
import json
import pickle

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, GradScaler
from gradilocks.errors import ScaleMisuse


def make(**options) -> tuple[nn.Linear, GradientControl]:
    model = nn.Linear(4, 1)
    return model, GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)


def test_a_loss_that_is_scaled_twice_raises():
    model, control = make()
    with pytest.raises(ScaleMisuse, match="already multiplied by the scale"):
        control.backward(control.scale_loss(model(torch.ones(2, 4)).sum()))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_that_would_move_the_scale_of_the_original_raises(duplicate):
    model, control = make()
    control.backward(model(torch.ones(2, 4)).sum())
    control.step()
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        duplicate(control)


def test_a_run_file_is_complete_although_nobody_holds_the_control(tmp_path):
    path = tmp_path / "run.jsonl"

    def train() -> None:
        model, control = make(record=path)
        for _ in range(7):
            control.backward(model(torch.ones(2, 4)).square().mean())
            control.step()
            control.zero_grad()

    train()
    gc.collect()
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds.count("step") == 7
    assert kinds[-1] == "end"


def test_a_state_without_scaling_leaves_the_initial_scale():
    _, control = make()
    control.load_state_dict(make(scale=None)[1].state_dict())
    assert control.scale == 65536.0


@pytest.mark.parametrize("scale", [float("nan"), 0.0, -4.0, float("inf")])
def test_the_drop_in_rejects_an_impossible_new_scale(scale):
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="new_scale must be"):
        scaler.update(scale)
    assert scaler.get_scale() == 65536.0


def test_an_unfused_step_of_ours_does_not_unscale_in_float16():
    param = nn.Parameter(torch.ones(4, dtype=torch.float16))
    control = GradientControl(gradilocks.optim.SGD([param], lr=0.1, fused=False), scale=1024.0)
    control.backward((param * 1e-3).sum())
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        control.step()


def test_unscaling_first_does_not_change_what_the_headroom_is_measured_from():
    scales = []
    for unscales in (False, True):
        param = nn.Parameter(torch.ones(4))
        control = GradientControl(torch.optim.SGD([param], lr=0.0), scale=gradilocks.HeadroomScale())
        for _ in range(4):
            control.backward(param.sum())
            if unscales:
                control.unscale_()
            control.step()
            control.zero_grad()
        scales.append(control.scale)
    assert scales == [2048.0, 2048.0]


def test_a_parameter_that_shrinks_in_place_does_not_write_past_its_end():
    memory = torch.ones(3000)
    param = nn.Parameter(memory)
    optimizer = gradilocks.optim.SGD([param], lr=0.1)
    param.grad = torch.ones(3000)
    optimizer.step()
    after_first = memory[10:].clone()
    param.grad = None
    param.data = memory[:10]
    param.grad = torch.ones(10)
    optimizer.step()
    assert torch.equal(memory[10:], after_first)
    torch.testing.assert_close(memory[:10], torch.full((10,), 0.8))


def test_a_parameter_that_is_replaced_by_a_smaller_one_is_measured_within_its_end():
    p, q = nn.Parameter(torch.ones(3000, 1000)), nn.Parameter(torch.ones(1))
    control = GradientControl(torch.optim.SGD([p, q], lr=0.1))
    for size in (3_000_000, 3, 30):
        p.data = torch.ones(size)
        control.zero_grad()
        control.backward(p.sum() + q.sum())
        assert control.step().norm == pytest.approx((size + 1) ** 0.5)


@pytest.mark.parametrize("make", [gradilocks.optim.SGD, torch.optim.SGD])
def test_a_gradient_that_was_replaced_by_a_smaller_one_is_refused(make):
    param = nn.Parameter(torch.ones(3000, 1000))
    control = GradientControl(make([param], lr=0.1))
    for _ in range(2):
        control.zero_grad()
        control.backward(param.sum())
        if control.outcome is None:
            control.step()
    param.grad.data = torch.ones(3)
    with pytest.raises(RuntimeError, match="a gradient has 3 elements and its parameter 3000000"):
        control.step()


def test_a_late_first_gradient_of_sgd_with_momentum_is_stepped():
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = gradilocks.optim.SGD(params, lr=0.1, momentum=0.9, maximize=True)
    params[0].grad = torch.ones(3)
    optimizer.step()
    params[1].grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(params[1].detach(), torch.full((3,), 1.1))


def test_master_weights_of_single_groups_survive_a_checkpoint():
    params = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    groups = [{"params": params[:1]}, {"params": params[1:], "master_weights": False}]
    optimizer = gradilocks.optim.AdamW(groups, master_weights=True)
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["master_weights"] for group in optimizer.param_groups] == [True, False]


def test_a_state_with_another_plain_clip_is_loaded():
    _, control = make(clip=None)
    control.load_state_dict({**make(clip=1.0)[1].state_dict(), "scale": 128.0})
    assert control.scale == 128.0


class WrongPolicy:
    """A clip policy of a user with one of several mistakes."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake

    def init(self):
        return {"count": torch.zeros(())}

    def limit(self, norms, total, state):
        if self.mistake == "number":
            return 0.5
        factor = {"field": 0.5, "shape": torch.ones(3)}.get(self.mistake, torch.ones_like(total))
        return gradilocks.clip.Limit(factor, total, total > torch.inf)

    def update(self, norms, total, limit, state):
        return {"none": None, "key": {"x": total}}.get(self.mistake, state)


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        ("number", r"limit\(\) of WrongPolicy must return a gradilocks.clip.Limit .* got 0.5 and None"),
        ("field", r"a gradilocks.clip.Limit of tensors, .* got Limit\(factor=0.5, "),
        ("shape", "with one factor or 1, .* got Limit"),
        ("none", r"update\(\) a dict with the keys of init\(\), \['count'\]; got Limit.* and None"),
        ("key", r"\['count'\]; got .* and {'x': "),
    ],
)
def test_a_policy_with_a_mistake_is_named_before_the_weights_change(mistake, text):
    model, control = make(clip=WrongPolicy(mistake))
    before = model.weight.detach().clone()
    control.backward(model(torch.ones(2, 4)).sum())
    with pytest.raises(TypeError, match=text):
        control.step()
    assert torch.equal(model.weight, before)
