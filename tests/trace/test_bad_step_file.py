"""The file of a bad step: what is in it, and that the step can be run again from it."""

from __future__ import annotations

import collections
import dataclasses
import logging
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import BadStep, GradientControl
from gradilocks.errors import GradilocksError, NonFiniteGradient
from gradilocks.step.lr_schedule import Flag


class Hot(nn.Module):
    """Divides by zero if the noise of a dropout falls out as it does at one step only."""

    def forward(self, x):
        return x / (x.mean() - x.mean().detach() + (0.0 if x[0, 0] == 0 else 1.0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(4), persistent=False)
        self.first, self.drop, self.hot = nn.Linear(4, 4), nn.Dropout(0.5), Hot()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x, scale=1.0):
        noise = random.random() + np.random.rand()
        return self.last(self.norm(self.hot(self.drop(self.first(x + self.shift) * scale + noise))))


def trained(folder, *, model=None, batches=None, steps=60, call=None, **options):
    """Steps until one was bad; the model, the optimizer, and the control."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = {"scale": None, "keep_bad_step": folder / "bad.pt", **options}
    control = GradientControl(optimizer, model=model, **options)
    for number in range(steps):
        x = torch.randn(6, 4) if batches is None else batches(number)
        loss = model(x) if call is None else call(model, x)
        control.backward(loss.square().mean())
        outcome = control.step()
        control.zero_grad()
        if outcome.skipped:
            break
    return model, optimizer, control


def test_a_fault_that_comes_once_is_found_again_from_the_file(tmp_path, caplog):
    def call(model, x):
        model.shift += 0.01
        with torch.autocast("cpu", torch.bfloat16):
            return model(x, scale=2.0).float()

    with caplog.at_level(logging.WARNING, "gradilocks"):
        model, optimizer, _ = trained(tmp_path, call=call)
    assert "was bad and is kept in" in caplog.text
    raw = torch.load(tmp_path / "bad.pt", weights_only=True)
    assert raw["gradilocks"] == 1
    bad = BadStep.load(tmp_path / "bad.pt")
    assert (bad.doubt, bad.not_kept, bad.missing) == ("", [], "")
    assert bad.step == optimizer.state[model.first.weight]["step"] + 1
    random.seed(7)
    fresh = Net().eval()
    again = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    bad.load_into(fresh, again)
    assert fresh.training
    assert torch.equal(fresh.shift, model.shift)
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)
    assert str(again.state_dict()) == str(optimizer.state_dict())
    before = torch.get_rng_state(), random.getstate(), str(fresh.state_dict())
    found = bad.run(fresh)
    assert (found.step, found.module, found.certainty) == (bad.step, "hot", "certain")
    assert "bfloat16" in found.text
    assert str(before) == str((torch.get_rng_state(), random.getstate(), str(fresh.state_dict())))
    # Once more, by hand: the loss of the step.
    (call_,) = bad.calls
    assert (call_.module, call_.kwargs) == ("", {"scale": 2.0})
    call_.generators.restore()
    with torch.autocast("cpu", torch.bfloat16):
        assert not fresh(*call_.args, **call_.kwargs).isfinite().all()


def test_gradients_are_told_in_numbers(tmp_path):
    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 1))
    trained(tmp_path, model=model, batches=lambda n: torch.zeros(2, 4), steps=1)
    bad = BadStep.load(tmp_path / "bad.pt")
    assert list(bad.gradients) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert bad.gradients["0.weight"]["nan"] + bad.gradients["0.bias"]["inf"] > 0
    assert bad.gradients["0.weight"]["norm"] is None
    last = bad.gradients["2.bias"]
    assert (last["nan"], last["inf"]) == (0, 0)
    assert last["norm"] == pytest.approx(last["largest"], rel=1e-6) != 0
    assert bad.run(model).phase == "backward"


def test_a_small_view_of_a_large_tensor_is_kept_alone_and_tied_weights_stay_tied(tmp_path):
    large = torch.full((1 << 20, 4), float("nan"))
    model = Net()
    model.register_buffer("window", torch.zeros(1 << 22)[:3])
    trained(tmp_path, model=model, batches=lambda n: large[:6])
    assert (tmp_path / "bad.pt").stat().st_size < 100_000
    state = BadStep.load(tmp_path / "bad.pt").models[""]["state"]
    weights = state["first.weight"], state["last.weight"]
    assert weights[0].data_ptr() == weights[1].data_ptr()


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str = "one"


class Pair(NamedTuple):
    x: torch.Tensor


class Graph:
    def __init__(self, x):
        self.x = x


class Output(collections.OrderedDict):
    pass


@pytest.mark.parametrize(
    ("wrap", "unwrap", "kept"),
    [
        (Batch, lambda b: b.x, "Batch, is kept as a dict of its attributes"),
        (Pair, lambda b: b.x, "Pair, is kept as a tuple"),
        (Graph, lambda b: b.x, "Graph, is kept as a dict of its attributes"),
        (lambda x: Output(x=x), lambda b: b["x"], "Output, is kept as a dict"),
        (lambda x: x.numpy(), torch.as_tensor, "ndarray, is kept as a tensor"),
        (lambda x: lambda: x, lambda b: b(), "function, is not kept"),
        (lambda x: {"x": [x, (x, 1j)], 3: {"deep": x}}, lambda b: b["x"][1][0], ""),
    ],
    ids=["dataclass", "named tuple", "object", "mapping", "numpy", "function", "plain"],
)
def test_what_a_file_cannot_hold_is_said_in_it(wrap, unwrap, kept, tmp_path):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch):
            return self.linear(unwrap(batch))

    x = torch.full((2, 4), float("inf"))
    model, _, _ = trained(tmp_path, model=Takes(), batches=lambda n: wrap(x))
    bad = BadStep.load(tmp_path / "bad.pt")
    assert ("".join(bad.not_kept) if not kept else bad.not_kept[0]).endswith(kept)
    if kept.endswith(("attributes", "tuple", "not kept")):
        with pytest.raises(GradilocksError, match=r"bad\.calls\[0\]\.args = ") as caught:
            bad.run(model)
        assert kept in str(caught.value)
        bad.calls[0].args = (wrap(x),)
    found = bad.run(model)
    assert (found.phase, found.what, found.certainty) == ("forward", "Inf", "certain")


def test_several_models_are_given_as_a_mapping(tmp_path):
    torch.manual_seed(0)
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    models = {"one": one, "two": two}
    control = GradientControl(optimizer, model=models, keep_bad_step=tmp_path / "bad.pt")
    control.backward(two(one(torch.ones(1, 2)) * float("inf")).sum())
    control.step()
    bad = BadStep.load(tmp_path / "bad.pt")
    assert [call.module for call in bad.calls] == ["one", "two"]
    with pytest.raises(GradilocksError, match="of 2 models: give a mapping from 'one', 'two'"):
        bad.load_into(one)
    fresh = {"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)}
    bad.load_into(fresh)
    assert torch.equal(fresh["two"].weight, two.weight)
    found = bad.run(fresh)
    assert (found.module, found.where) == ("two", "outside")


def test_another_model_or_file_is_refused_in_words(tmp_path):
    trained(tmp_path, model=nn.Linear(4, 2), batches=lambda n: torch.full((1, 4), float("inf")))
    bad = BadStep.load(tmp_path / "bad.pt")
    with pytest.raises(GradilocksError, match=r"bias is only in the file\."):
        bad.load_into(nn.Linear(4, 2, bias=False))
    with pytest.raises(GradilocksError, match=r"weight has the shape \(3, 4\) in the model"):
        bad.load_into(nn.Linear(4, 3))
    with pytest.raises(GradilocksError, match="is not there"):
        BadStep.load(tmp_path / "none.pt")
    (tmp_path / "text.pt").write_text("no")
    torch.save({"weights": 1}, tmp_path / "other.pt")
    torch.save({"gradilocks": 99}, tmp_path / "new.pt")
    for name, words in (("text", "is no file"), ("other", "is no file"), ("new", "version 99")):
        with pytest.raises(GradilocksError, match=words):
            BadStep.load(tmp_path / f"{name}.pt")


# --- GradientControl(keep_bad_step=...) ---------------------------------------------------------


def bad_at(*numbers):
    return lambda n: torch.full((3, 4), float("nan") if n in numbers else 1.0)


def test_keeping_changes_no_number_and_leaves_no_hook(tmp_path):
    left = []
    for kept in (tmp_path / "new" / "bad.pt", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        control = GradientControl(optimizer, model=model, clip=1.0, keep_bad_step=kept)
        hooked = []
        for number in range(8):
            control.backward(model(bad_at(3, 6)(number) + torch.rand(3, 4)).square().mean())
            hooked.append(len(model._forward_hooks))
            control.step()
            control.zero_grad()
        left.append(str([model.state_dict(), optimizer.state_dict(), control.state_dict()]))
        assert hooked == ([1, 1, 1, 1, 0, 0, 0, 0] if kept else [0] * 8)
    assert left[0] == left[1]
    assert BadStep.load(tmp_path / "new" / "bad.pt").step == 4


def test_a_file_that_is_there_stays(tmp_path):
    (tmp_path / "bad.pt").write_text("mine")
    trained(tmp_path, model=nn.Linear(4, 1), batches=bad_at(0))
    trained(tmp_path, model=nn.Linear(4, 1), batches=bad_at(1))
    assert (tmp_path / "bad.pt").read_text() == "mine"
    steps = [BadStep.load(tmp_path / name).step for name in ("bad-2.pt", "bad-3.pt")]
    assert steps == [1, 2]


def test_a_file_that_cannot_be_written_is_a_warning_and_training_goes_on(tmp_path, caplog):
    (tmp_path / "bad.pt.partial").mkdir()
    with caplog.at_level(logging.WARNING, "gradilocks"):
        model, _, control = trained(tmp_path, model=nn.Linear(4, 1), batches=bad_at(0))
    assert "could not be kept" in caplog.text
    assert not (tmp_path / "bad.pt").exists()
    control.backward(model(bad_at()(1)).sum())
    assert not control.step().skipped


def test_it_is_written_before_a_control_raises_and_beside_a_trace(tmp_path):
    with pytest.raises(NonFiniteGradient):
        trained(tmp_path, model=nn.Linear(4, 1), batches=bad_at(2), on_nonfinite="raise")
    assert BadStep.load(tmp_path / "bad.pt").step == 3
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control = GradientControl(optimizer, model=model, keep_bad_step=tmp_path / "traced.pt")
    with gradilocks.trace(model, control=control) as tracer:
        control.backward(model(bad_at(0)(0)).sum())
        control.step()
    assert tracer.findings[0].where == BadStep.load(tmp_path / "traced.pt").run(model).where


def test_a_step_that_is_known_to_be_bad_later_says_that_parameters_have_moved_on(tmp_path):
    """As on a GPU, where a step's numbers are on their way."""
    model, _, control = trained(tmp_path, model=nn.Linear(4, 1), batches=bad_at(), steps=1)
    assert len(control._events.own) == 1
    arrived = []
    late = Flag.overflowed
    try:
        Flag.overflowed = lambda flag, **_: late(flag) if arrived else None
        for number in range(3):
            control.backward(model(bad_at(0)(number)).sum())
            control.step()
            control.zero_grad()
            arrived += [True] * (number == 1)
    finally:
        Flag.overflowed = late
    assert control._events.own == ()
    bad = BadStep.load(tmp_path / "bad.pt")
    assert (bad.step, bad.gradients) == (2, {})
    assert "later steps had changed the parameters" in bad.doubt
    found = bad.run(model)
    assert (found.where, found.certainty) == ("input", "likely")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"keep_bad_step": 3}, TypeError, "keep_bad_step must be the path of a file.*got int"),
        ({"keep_bad_step": True}, TypeError, "got bool"),
        ({"keep_bad_step": ""}, ValueError, "must be the path of a file"),
        ({"keep_bad_step": "."}, ValueError, "got the folder"),
        ({"keep_bad_step": "/dev/null/bad.pt"}, ValueError, "cannot be written: /dev/null"),
        (
            {"keep_bad_step": "a.pt", "model": None},
            ValueError,
            "model=model, keep_bad_step=",
        ),
    ],
)
def test_a_wrong_place_is_refused_at_once(options, error, words):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=words):
        GradientControl(optimizer, **{"model": model, **options})
