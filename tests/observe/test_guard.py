"""`gradilocks run --guard`: no optimizer of the script takes a step with NaN or Inf."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from gradilocks import BadStep, read_run
from gradilocks.report import examine
from tests.observe.sessions import SCRIPTS, forked, write

BASE = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def one(number, bad=(3,)):
    optimizer.zero_grad()
    x = torch.randn(2, 4)
    if number in bad:
        x[0, 0] = float("nan")
    model(x).square().mean().backward()
    optimizer.step()

def good():
    return all(p.isfinite().all() for p in model.parameters())
"""


def both(script: str, folder: Path) -> tuple[dict[str, object], dict[str, object], str]:
    """What the script leaves that skips by itself; what `--guard skip` leaves, and what it says."""
    name = str(SCRIPTS / script)
    alone = forked("--no-trace", "-o", "alone.jsonl", name, "reference", cwd=folder)
    assert alone.status == 0, alone.err
    held = forked("--guard", "skip", "-o", "held.jsonl", name, cwd=folder)
    assert held.status == 0, held.err
    left = [dict(map(json.loads, each.out.splitlines())) for each in (alone, held)]
    return left[0], left[1], held.err


def test_a_step_that_is_held_back_leaves_no_trace_whichever_optimizer_it_is(tmp_path):
    alone, held, said = both("guarded_optimizers.py", tmp_path)
    assert len(alone) == 23
    assert {name for name in alone if alone[name] != held[name]} == set()
    run = read_run(tmp_path / "held.jsonl")
    skipped = [step for step in run.steps if step.skipped]
    assert all(step.reason == "nonfinite" for step in skipped)
    assert "taken with NaN or Inf" not in said
    assert "--guard skip held back 72 steps with NaN or Inf" in said


def test_lightning_and_accelerate_are_held_back_too(tmp_path):
    alone, held, said = both("guarded_frameworks.py", tmp_path)
    assert set(alone) == {"lightning", "accelerate"}
    assert alone == held
    assert "held back 2 steps with NaN or Inf" in said


def test_a_healthy_script_trains_as_without_a_guard(tmp_path):
    write(tmp_path, "train.py", BASE + "for n in range(5): one(n, ())\nprint(model.state_dict())")
    shown = forked("--guard", "stop", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.out == forked("--no-trace", "-o", "b.jsonl", "train.py", cwd=tmp_path).out
    assert not list(tmp_path.glob("*.pt"))
    assert "guard" not in shown.err


STOPPED = {
    "plainly": "for n in range(9): one(n)\nprint('never')",
    "under except Exception": """
for n in range(9):
    try:
        one(n)
    except Exception:
        print("never")
""",
    "under a bare except": """
for n in range(9):
    try:
        one(n)
    except:
        pass
print("never")
""",
    "under a bare except, in its last step": """
for n in range(4):
    try:
        one(n)
    except:
        pass
""",
    "in a line search": """
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
evaluations = 0
def closure():
    global evaluations
    evaluations += 1
    optimizer.zero_grad()
    loss = (model(torch.ones(2, 4)) - 1).square().mean() * (float("nan") if evaluations == 9 else 1)
    loss.backward()
    return loss
atexit.register(lambda: None if before == [p.tolist() for p in model.parameters()] else print("no"))
for _ in range(9):
    before = [p.tolist() for p in model.parameters()]
    optimizer.step(closure)
print("never")
""",
    "in a thread": """
import threading
thread = threading.Thread(target=lambda: [one(n) for n in range(9)])
thread.start()
thread.join()
""",
    "with workers": """
from torch.utils.data import DataLoader
data = [torch.full((4,), float("nan") if n == 6 else 1.0) for n in range(40)]
for x in DataLoader(data, batch_size=2, num_workers=1):
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()
""",
    "in backward": """
def step(p):
    every[p].step()
    every[p].zero_grad()
every = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
for p in model.parameters():
    p.register_post_accumulate_grad_hook(step)
for n in range(9):
    (model(torch.randn(2, 4)).mean() * (float("nan") if n == 3 else 1.0)).backward()
print("never")
""",
}


@pytest.mark.parametrize("how", STOPPED)
def test_stop_ends_the_script_with_70_before_the_step_is_taken(how, tmp_path):
    script = BASE + "import atexit\natexit.register(lambda: print(bool(good())))\n" + STOPPED[how]
    write(tmp_path, "train.py", script)
    shown = forked("--guard", "stop", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 70, shown.err
    # The exit by force, after a bare `except`, runs no farewell.
    assert shown.out == ("" if how == "under a bare except" else "True\n")
    assert any("stopped by --guard stop" in line for line in shown.told)
    assert any("the first bad step is in a-first-bad-step.pt (" in line for line in shown.told)
    assert shown.told[-1].startswith("gradilocks: in trouble. The run was stopped at step ")
    if how == "with workers":
        assert "which had NaN or Inf: it was in the input (certain). " in shown.told[-1]
    run = read_run(tmp_path / "a.jsonl")
    assert run.end is not None
    assert (run.end.exit, run.end.error is None) == (70, False)
    assert [s.skipped for s in run.steps if s.optimizer == run.steps[-1].optimizer][-1]
    (found,) = [each for each in examine(run).findings if each.rule == "stopped-by-guard"]
    assert "was not taken" in found.sentence


def test_every_later_step_may_be_bad_too_and_the_last_line_says_so(tmp_path):
    write(tmp_path, "train.py", BASE + "for n in range(12): one(n, range(3, 99))\nprint(good())")
    shown = forked("--guard", "skip", "--no-snapshot", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0
    assert shown.out == "True\n"
    assert (
        "since step 4 of 12; the steps since then were skipped and changed no weight"
        in (shown.told[-1])
    )
    assert not list(tmp_path.glob("*.pt"))


def test_a_compiled_step_cannot_be_held_back_which_is_said(tmp_path):
    script = """
step = torch.compile(lambda: optimizer.step(), backend="eager")
for n in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).square().mean().backward()
    step()
"""
    write(tmp_path, "train.py", BASE + script)
    shown = forked("--guard", "skip", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert [line for line in shown.told if "--guard" in line] == [
        "gradilocks: --guard: a step of AdamW is compiled, and compiled steps cannot be held back"
    ]


def test_an_optimizer_that_nobody_has_made_is_held_back_from_its_second_step_on(tmp_path):
    script = """
made = torch.optim.Optimizer.__new__(torch.optim.Adadelta)  # As one that comes out of a file.
made.__setstate__({"defaults": {}, "state": {}, "param_groups": [
    {"params": list(model.parameters()), "lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0,
     "foreach": None, "maximize": False, "capturable": False, "differentiable": False}]})
from collections import defaultdict
made.state = defaultdict(dict)
optimizer = made
for n in range(5):
    one(n)
print(good())
"""
    write(tmp_path, "train.py", BASE + script)
    shown = forked("--guard", "skip", "--no-snapshot", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert (shown.status, shown.out) == (0, "True\n"), shown.err
    assert sum("the first step of Adadelta could not be held" in line for line in shown.told) == 1


def test_a_loss_of_nan_with_finite_gradients_is_no_bad_step(tmp_path):
    script = """
for n in range(6):
    optimizer.zero_grad()
    (model(torch.randn(2, 4)).mean() + torch.tensor(float("nan"))).backward()
    optimizer.step()
print(good())
"""
    write(tmp_path, "train.py", BASE + script)
    shown = forked("--guard", "stop", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert (shown.status, shown.out) == (0, "True\n")
    assert "since step 1 of 6; the gradients stayed finite" in shown.told[-1]


def test_the_guard_goes_on_where_watching_has_failed(tmp_path):
    """Its own listeners are not those of the recorder."""
    script = """
from gradilocks.observe.step_recorder import StepRecorder
def broken(*_):
    raise OSError("no more")
StepRecorder._read = broken
for n in range(6):
    one(n)
print(good())
"""
    write(tmp_path, "train.py", BASE + script)
    shown = forked("--guard", "skip", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert (shown.status, shown.out) == (0, "True\n"), shown.err
    assert any("watching ended" in line for line in shown.told)


# --- the file of the first bad step ---------------------------------------------------------------


def test_the_file_holds_the_first_bad_step_and_runs_again(tmp_path):
    script = """
import os
os.mkdir("elsewhere")
os.chdir("elsewhere")
class Hot(nn.Module):
    def forward(self, x):
        return x * (float("inf") if (x.detach() > 1.5).any() else 1.0)
model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Dropout(0.5), Hot(), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for n in range(40):
    one(n, ())
"""
    write(tmp_path, "train.py", BASE + script)
    shown = forked("--guard", "stop", "-o", "runs/a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 70, shown.err
    bad = BadStep.load(tmp_path / "runs" / "a-first-bad-step.pt")
    run = read_run(tmp_path / "runs" / "a.jsonl")
    assert bad.step == run.steps[-1].step == run.traces[0].step > 1
    assert bad.found == run.traces[0].text
    assert str(bad).startswith(f"<BadStep step={bad.step}, loss={bad.loss}, found={bad.found!r}")
    assert "tensor(" not in str(bad)
    assert bad.loss == float("inf") or bad.loss != bad.loss
    assert bad.gradients["0.weight"]["nan"] > 0
    assert bad.optimizers[0]["state"][0]["step"] == bad.step - 1

    class Hot(nn.Module):
        def forward(self, x):
            return x * (float("inf") if (x.detach() > 1.5).any() else 1.0)

    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Dropout(0.5), Hot(), nn.Linear(4, 1))
    bad.load_into(model)
    found = bad.run(model)
    assert (found.module, found.kind, found.text) == ("3", "Hot", bad.found)


def test_the_file_of_an_earlier_run_is_lost_only_with_its_run_file(tmp_path):
    write(tmp_path, "train.py", BASE + "for n in range(5): one(n)")
    command = ("--guard", "skip", "--no-trace", "-o", "a.jsonl")
    for more, names in (
        ((), ["a-first-bad-step.pt"]),
        (("--append",), ["a-first-bad-step-2.pt", "a-first-bad-step.pt"]),
        (("--force",), ["a-first-bad-step-2.pt", "a-first-bad-step.pt"]),
    ):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.pt")}
        shown = forked(*command, *more, "train.py", cwd=tmp_path)
        assert sorted(path.name for path in tmp_path.glob("*.pt")) == names
        changed = [p.name for p in tmp_path.glob("*.pt") if before.get(p) != p.stat().st_mtime_ns]
        assert len(changed) == 1
        assert f"the first bad step is in {changed[0]} (" in shown.err


@pytest.mark.parametrize("guard", ["skip", "stop"])
def test_a_file_that_cannot_be_written_is_a_warning(guard, tmp_path):
    (tmp_path / "a-first-bad-step.pt.partial").mkdir()
    write(tmp_path, "train.py", BASE + "for n in range(6): one(n, (2, 3))\nprint(good())")
    shown = forked("--guard", guard, "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert (shown.status, shown.out) == ((0, "True\n") if guard == "skip" else (70, ""))
    assert sum("could not be written to" in line for line in shown.told) == 1
    assert not list(tmp_path.glob("*.pt"))


def test_what_a_scaler_skips_to_find_its_scale_is_no_bad_step(tmp_path):
    script = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 120)
for n in range(8):
    optimizer.zero_grad()
    x = torch.randn(2, 4) * (float("nan") if n == 5 else 1.0)
    scaler.scale(model(x).square().mean() * 1e6).backward()
    scaler.step(optimizer)
    scaler.update(2.0 ** 10)
"""
    write(tmp_path, "train.py", BASE + script)
    shown = forked("--guard", "stop", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0, shown.err
    assert [s.step for s in read_run(tmp_path / "a.jsonl").steps if s.skipped] == [1, 6]
    assert BadStep.load(tmp_path / "a-first-bad-step.pt").step == 6


def test_no_snapshot_without_a_guard_is_refused(tmp_path):
    shown = forked("--no-snapshot", "train.py", cwd=tmp_path)
    assert shown.status == 2
    assert "--no-snapshot needs --guard" in shown.err
