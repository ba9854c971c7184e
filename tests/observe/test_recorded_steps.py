"""What a run file says of scripts that know nothing of Gradilocks."""

from __future__ import annotations

import math

import pytest
import torch

from gradilocks import read_run
from tests.observe.sessions import SCRIPTS, forked, write


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Runs one habit of habits.py; the steps of each of its optimizers."""
    folder = tmp_path_factory.mktemp("habits")
    shown = forked("-o", "a.jsonl", "--detail-every", "2", str(SCRIPTS / "habits.py"), cwd=folder)
    assert shown.status == 0, shown.err
    run = read_run(folder / "a.jsonl")
    steps = [[s for s in run.steps if s.optimizer == o.index] for o in run.optimizers]
    return run, steps


# The order in which habits.py makes its optimizers.
PLAIN, SCALED, CLIPPED, BY_VALUE, ACCUMULATED, CRITIC, GENERATOR, LBFGS, SPARSE = range(9)
FOREACH, FUSED, TWICE, RAISES, CONTROL, CONTROL_FUSED, OWN_SCALER = range(9, 16)


def test_every_step_of_every_optimizer_is_counted_once(recorded):
    run, steps = recorded
    kinds = [info.kind for info in run.optimizers]
    first = "SGD AdamW AdamW SGD AdamW RMSprop Adam LBFGS SGD"
    assert kinds == f"{first} AdamW AdamW Twice SGD AdamW AdamW AdamW".split()
    assert [len(each) for each in steps] == [12, 12, 12, 6, 4, 6, 6, 3, 5, 6, 6, 4, 3, 6, 6, 6]


@pytest.mark.parametrize(
    ("which", "skipped"),
    [
        (PLAIN, []),
        (SCALED, [6]),
        (CLIPPED, [5]),
        (FOREACH, [3]),
        (FUSED, [3]),
        (CONTROL, [3]),
        (CONTROL_FUSED, [3]),
        (OWN_SCALER, [3]),
    ],
)
def test_skipped_steps_are_recorded_with_their_culprits_and_scale(recorded, which, skipped):
    _, steps = recorded
    assert [s.step for s in steps[which] if s.skipped] == skipped
    for step in steps[which]:
        assert step.skipped == bool(step.culprits)
        assert (step.norm is None) == step.skipped
        assert step.reason == ("nonfinite" if step.skipped else None)


def test_one_bad_element_is_named_although_the_clip_has_spread_it(recorded):
    _, steps = recorded
    (bad,) = (s for s in steps[CLIPPED] if s.skipped)
    assert [tuple(culprit) for culprit in bad.culprits] == [("0.bias", 0, 1)]
    assert bad.scale == 65536.0
    assert steps[CLIPPED][bad.step].scale == 32768.0


def test_norms_are_unscaled_and_before_clipping(recorded):
    _, steps = recorded
    first = [steps[which][0] for which in (PLAIN, SCALED, CLIPPED, BY_VALUE, FUSED, CONTROL)]
    for step in first:  # The same model, the same batch.
        assert step.norm == pytest.approx(first[0].norm, rel=1e-5)
        assert step.loss == pytest.approx(first[0].loss, rel=1e-6)
        assert step.detail.norm == pytest.approx(first[0].detail.norm, rel=1e-5)
        assert step.detail.largest == pytest.approx(first[0].detail.largest, rel=1e-5)
    assert [step.scale for step in first] == [1.0, 65536.0, 65536.0, 1.0, 65536.0, 65536.0]


def test_limits_and_clipped_steps_are_recorded(recorded):
    _, steps = recorded
    assert {s.limit for s in steps[CLIPPED]} == {0.05}
    assert [s.clipped for s in steps[CLIPPED]] == [n != 4 for n in range(12)]
    assert all(s.clipped and s.limit is None for s in steps[BY_VALUE])
    assert {s.limit for s in steps[OWN_SCALER]} == {0.05}
    assert sum(s.clipped for s in steps[OWN_SCALER]) == 5
    assert not any(s.clipped for s in steps[PLAIN])


def test_the_loss_is_unscaled_and_summed_over_micro_batches(recorded):
    _, steps = recorded
    assert all(0 < s.loss < 10 for s in steps[SCALED] if not s.skipped)
    assert all(s.loss is not None for s in steps[ACCUMULATED])
    single, summed = steps[PLAIN][0].loss, steps[ACCUMULATED][0].loss
    assert summed != pytest.approx(single / 3, rel=0.05)  # More than the first of three.
    assert steps[CRITIC][0].loss != steps[GENERATOR][0].loss
    assert all(s.loss is not None and s.norm > 0 for s in steps[LBFGS])


def test_detail_tells_weights_and_how_far_they_moved(recorded):
    run, steps = recorded
    detailed = [s for s in steps[PLAIN] if s.detail is not None]
    assert [s.step for s in detailed] == [1, 3, 5, 7, 9, 11]
    assert all(update > 0 for s in detailed for update in s.detail.update)
    (bad,) = (s for s in steps[CLIPPED] if s.skipped)
    assert bad.detail.update == [0.0] * 4
    assert all(math.isfinite(w) for s in detailed for w in s.detail.weight)
    assert steps[SPARSE][0].norm > 0
    assert run.header.settings["detail_every"] == 2


UNSEEN = {
    "nothing": ("pass", 2.0),
    "halved through .data": ("p.grad.data /= 2", 0.25),
    "halved through NumPy": ("p.grad.numpy()[...] /= 2", 0.25),
    "one NaN through .data": ("p.grad.data[0] = float('nan')", None),
    "halved in place": ("p.grad.mul_(0.5)", 0.25),
    "replaced": ("p.grad = p.grad / 2", 0.25),
}


@pytest.mark.parametrize(("write_it", "norm"), UNSEEN.values(), ids=UNSEEN)
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_what_is_written_after_a_clip_is_recorded(tmp_path, write_it, norm, clip):
    """Before the clip the norm is 2, after it 0.5; a norm that is not finite is None."""
    call = {"norm": "clip_grad_norm_([p], 0.5)", "value": "clip_grad_value_([p], 0.25)"}[clip]
    write(
        tmp_path,
        "train.py",
        f"""
import torch
p = torch.nn.Parameter(torch.zeros(4))
optimizer = torch.optim.SGD([p], lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    p.sum().backward()
    torch.nn.utils.{call}
    {write_it}
    optimizer.step()
""",
    )
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    first = read_run(tmp_path / "a.jsonl").steps[0]
    assert first.norm == (None if norm is None else pytest.approx(norm, rel=1e-5))
    assert bool(first.culprits) == (norm is None)


def test_a_write_to_one_of_the_clipped_gradients_makes_no_mixed_norm(tmp_path):
    """Clipped from 50 to 1, the second halved: 0.6 and 0.4, not 30 from before beside 0.4."""
    write(
        tmp_path,
        "train.py",
        """
import torch
a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in "ab")
optimizer = torch.optim.SGD([a, b], lr=0.1)
(30 * a + 40 * b).sum().backward()
torch.nn.utils.clip_grad_norm_([a, b], 1.0)
b.grad.data /= 2
optimizer.step()
""",
    )
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    (step,) = read_run(tmp_path / "a.jsonl").steps
    assert step.norm == pytest.approx(math.hypot(0.6, 0.4), rel=1e-5)


def test_a_clip_tells_of_its_own_step_alone(tmp_path):
    """One NaN is clipped at the third step; gradients are kept, and not clipped from then on."""
    write(
        tmp_path,
        "train.py",
        """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(5):
    optimizer.zero_grad(set_to_none=False)
    model(torch.ones(2, 3)).sum().backward()
    if number == 2:
        model[0].weight.grad[0, 0] = float("nan")
    if number < 3:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
""",
    )
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert [step.nan for step in read_run(tmp_path / "a.jsonl").steps] == [
        0,
        0,
        1,
        15,
        15,
    ]  # All but the last bias.


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize(("limit", "clipped"), [(0.5, True), (100.0, False)])
def test_a_clip_of_sharded_gradients_is_recorded_as_what_it_did(tmp_path, limit, clipped):
    """torch's norm is a DTensor there, and reading it would be a collective."""
    write(
        tmp_path,
        "train.py",
        f"""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), {limit})
    assert hasattr(norm, "full_tensor")
    optimizer.step()
dist.destroy_process_group()
""",
    )
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert [step.clipped for step in read_run(tmp_path / "a.jsonl").steps] == [clipped] * 2


def test_a_model_that_is_done_with_is_let_go(tmp_path):
    write(
        tmp_path,
        "train.py",
        """
import gc, weakref
import torch

def train():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 4)).mean() * float("inf")).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return weakref.ref(model), weakref.ref(model.weight)

refs = [ref for _ in range(2) for ref in train()]
gc.collect()
print([ref() is None for ref in refs])
""",
    )
    shown = forked("--trace", "train.py", cwd=tmp_path)
    assert shown.out == "[True, True, True, True]\n", shown.err


def test_parameters_carry_the_names_that_their_models_give_them(tmp_path):
    write(
        tmp_path,
        "train.py",
        """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(2, 2)
        self.tied = self.proj

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

net, other = nn.DataParallel(Net()), nn.Linear(2, 1)
loose = torch.zeros(3, requires_grad=True)
together = torch.optim.SGD([*net.parameters(), *other.parameters(), loose], lr=0.1)
alone = torch.optim.SGD(net.parameters(), lr=0.1)
def backward():
    out = net.module.blocks[1].proj(net.module.blocks[0].proj(torch.ones(1, 2)))
    (other(out).sum() + loose.sum()).backward()
backward(); together.step(); alone.step()
""",
    )
    shown = forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    together, alone = read_run(tmp_path / "a.jsonl").optimizers
    assert together.names == (
        "net.blocks.0.proj.weight",
        "net.blocks.0.proj.bias",
        "net.blocks.1.proj.weight",
        "net.blocks.1.proj.bias",
        "other.weight",
        "other.bias",
        "param_groups[0]['params'][6]",
    )
    assert alone.names == together.names[:4]  # One parameter, one name.
