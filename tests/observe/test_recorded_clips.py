"""A step is recorded as clipped if its own gradients were, and by nothing else."""

from __future__ import annotations

import pytest
import torch

from gradilocks import read_run
from gradilocks.observe.torch_hooks import TorchHooks
from tests.observe.sessions import forked, write

PROBES = """
import torch
from torch import nn

def probe(model):
    model(torch.ones(2, 4)).sum().backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.125)

{before}
for trial in range(10):
    probe(nn.Linear(4, 4))  # Freed at once: the next model may get its ids, and its memory.
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

KNOWN_BEFORE = """
first = nn.Linear(4, 1)
steps = torch.optim.SGD(first.parameters(), lr=0.01)
first(torch.ones(2, 4)).sum().backward()
steps.step()
"""

CLEARED = """
import torch
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def clear():
    {clear}

for number in range(4):
    if number % 2 == 0:  # Looks at the norm, and throws the gradients away.
        model(torch.ones(2, 4)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.125)
        clear()
    model(torch.ones(2, 4)).sum().backward()
    if number == 3:
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    clear()
"""

ONE_AFTER_ANOTHER = """
import torch
from torch import nn

for trial in range(10):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        print(float(nn.utils.clip_grad_norm_(model.parameters(), 0.125)))
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
"""


def recorded(script, folder):
    """The limit and the flag of each step that the run file has."""
    write(folder, "train.py", script)
    shown = forked("-o", "a.jsonl", "train.py", cwd=folder)
    assert shown.status == 0, shown.err
    assert not any("could not" in line or "Error" in line for line in shown.told), shown.told
    return [(step.limit, step.clipped) for step in read_run(folder / "a.jsonl").steps]


@pytest.mark.parametrize("before", ["", KNOWN_BEFORE])
def test_a_model_that_is_gone_leaves_its_clip_to_no_other(before, tmp_path):
    steps = recorded(PROBES.format(before=before), tmp_path)
    assert len(steps) == 20 + bool(before)
    assert not any(limit is not None or clipped for limit, clipped in steps)


@pytest.mark.parametrize(
    "clear",
    [
        "optimizer.zero_grad()",
        "optimizer.zero_grad(set_to_none=False)",
        "model.zero_grad(set_to_none=False)",
    ],
)
def test_a_clip_goes_with_the_gradients_that_it_was_of(clear, tmp_path):
    steps = recorded(CLEARED.format(clear=clear), tmp_path)
    assert [limit for limit, _ in steps] == [None, None, None, 0.25]
    assert [bool(clipped) for _, clipped in steps] == [False, False, False, True]


def test_a_model_after_another_has_its_norms_from_before_the_clip(tmp_path):
    """Its first step is recorded in detail, though the optimizer before it was past that."""
    write(tmp_path, "train.py", ONE_AFTER_ANOTHER)
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    norms = [step.norm for step in read_run(tmp_path / "a.jsonl").steps]
    assert norms == pytest.approx([float(line) for line in shown.out.splitlines()])


NAN_BY_CLIP = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for number in range(1, 9):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    limit = float("nan") if number == 5 else 0.01
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    optimizer.step()
"""


@pytest.mark.parametrize("guard", [(), ("--guard", "skip")])
def test_nan_that_a_clip_has_made_is_that_of_its_own_step(guard, tmp_path):
    write(tmp_path, "train.py", NAN_BY_CLIP)
    shown = forked(*guard, "-o", "a.jsonl", "train.py", cwd=tmp_path)
    steps = read_run(tmp_path / "a.jsonl").steps
    first = next(step for step in steps if step.nan)
    assert (first.step, first.skipped, len(first.culprits)) == (5, bool(guard), 4)
    assert steps[3].norm > 0.01  # As it was before the clip.
    said = "step 5 skipped" if guard else "step 5 taken though not finite"
    assert f"{said}: NaN in all 4 gradients" in shown.err
    assert "another rank" not in shown.err
    assert "in no module: likely it gets there after backward" in shown.err


SCALED = """
import sys
import torch
from torch import nn
import gradilocks

order, kind = sys.argv[1:]
torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = (gradilocks if kind == "ours" else torch.amp).GradScaler("cpu", init_scale=1024.0)
for number in range(4):
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 4) * (number + 1)).sum()).backward()
    if order != "unscaled first":
        nn.utils.clip_grad_norm_(model.parameters(), 16.0 * 1024.0)
    if order == "written between":
        for param in model.parameters():
            param.grad.data.mul_(0.5)
    if order != "not unscaled":
        scaler.unscale_(optimizer)
    if order == "unscaled first":
        nn.utils.clip_grad_norm_(model.parameters(), 16.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_a_clip_of_scaled_gradients_is_told_without_the_scale(kind, tmp_path):
    write(tmp_path, "train.py", SCALED)
    told = {}
    for order in ("unscaled first", "unscaled later", "not unscaled", "written between"):
        path = f"{order}.jsonl"
        words = ("-o", path, "--detail-every", "1", "train.py", order, kind)
        shown = forked(*words, cwd=tmp_path)
        assert shown.status == 0, shown.err
        told[order] = [
            (step.norm, step.limit, step.clipped, step.detail.norm, step.detail.largest)
            for step in read_run(tmp_path / path).steps
        ]
    truth = told["unscaled first"]
    assert [clipped for _, _, clipped, *_ in truth] == [False, True, True, True]
    assert told["unscaled later"] == told["not unscaled"] == truth
    # Here the step finds half of what the clip has left, and tells what it finds.
    for (norm, limit, clipped, *_), (before, *_) in zip(
        told["written between"], truth, strict=True
    ):
        assert norm == pytest.approx(min(before, 16.0) / 2, rel=1e-5)
        assert (limit, clipped) == (16.0, before > 16.0)


IN_ANY_ORDER = """
import torch
from torch import nn
from gradilocks.observe.gradient_reader import GradientReader

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
{made}
for number in range(4):
    if number == 1 and not {apart}:  # Its gradients are known: none is looked at by itself.
        del GradientReader._read_parts
    model(torch.full((2, 4), 3.0 - number)).square().sum().backward()
    nn.utils.clip_grad_norm_({clipped}, 2.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""

ONE_GROUP = "optimizers = [torch.optim.SGD(model.parameters(), lr=0.01)]"
TWO_GROUPS = """
many = [p for p in model.parameters() if p.dim() > 1]
few = [p for p in model.parameters() if p.dim() == 1]
optimizers = [torch.optim.SGD([{"params": few}, {"params": many}], lr=0.01)]
"""
WITH_FROZEN = """
model.requires_grad_(False)[2].requires_grad_(True)
optimizers = [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)]
"""


def told_of_clips(folder, made, clipped="model.parameters()", apart=False):
    """What the run file says of each step, and of its tensors by name."""
    folder.mkdir()
    limits = recorded(IN_ANY_ORDER.format(made=made, clipped=clipped, apart=apart), folder)
    run = read_run(folder / "a.jsonl")
    details = [
        sorted(zip(run.optimizers[step.optimizer].names, *step.detail[:3], strict=True))
        for step in run.steps
        if step.detail is not None
    ]
    return limits, [step.norm for step in run.steps], details


@pytest.mark.parametrize(
    ("made", "clipped", "alone"),
    [
        (TWO_GROUPS, "model.parameters()", "few + many"),
        (WITH_FROZEN, "model.parameters()", "model[2].parameters()"),
        (ONE_GROUP, "list(model.parameters())[::-1]", "model.parameters()"),
    ],
    ids=["two groups", "frozen ones among them", "backwards"],
)
def test_a_clip_of_parameters_in_another_order_is_recorded_alike(made, clipped, alone, tmp_path):
    told = told_of_clips(tmp_path / "a", made, clipped)
    assert told == told_of_clips(tmp_path / "b", made, alone)
    limits, norms, details = told
    assert all(limit == 2.0 for limit, _ in limits)
    assert [clipped for _, clipped in limits] == [norm > 2.0 for norm in norms]
    assert details


def test_a_clip_of_two_optimizers_gradients_is_recorded_of_each(tmp_path):
    apart = "optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]"
    limits, norms, _ = told_of_clips(tmp_path / "a", apart, apart=True)
    assert len(limits) == 12
    assert all(limit == 2.0 for limit, _ in limits)
    (tmp_path / "b").mkdir()
    unclipped = IN_ANY_ORDER.replace("    nn.utils.clip_grad_norm_", "    pass  #")
    assert recorded(unclipped.format(made=apart, clipped="", apart=True), tmp_path / "b")
    first = [step.norm for step in read_run(tmp_path / "b" / "a.jsonl").steps][:3]
    assert norms[:3] == first  # Before the clip.


def test_a_clip_is_called_as_the_script_calls_it():
    """By place stays by place: what somebody has put around torch's may have other names."""
    seen = []

    def clip_grad_norm_(parameters, max_norm, norm_type=2.0):
        raise AssertionError("never called by these names")

    def mine(*args, **kwargs):
        seen.append((args[1:], kwargs))
        return torch.ones(())

    mine.__wrapped__ = clip_grad_norm_
    hooks = TorchHooks.__new__(TorchHooks)
    hooks._is_clipping = False
    param = torch.nn.Parameter(torch.ones(2))
    hooks._clip(mine, [param], 1.0)
    hooks._clip(mine, [param], max_norm=1.0)
    assert seen == [((1.0,), {}), ((), {"max_norm": 1.0})]
