"""Scripts that do what somebody's script does: copy a traced model, wrap an optimizer, freeze."""

from __future__ import annotations

import os

import pytest

from gradilocks import read_run
from tests.observe.sessions import TRAIN, forked, watched, write

COPIES = """
import builtins, copy, gc, io
import torch

assert __builtins__ is builtins

class Scaler(torch.amp.GradScaler):
    def step(self, optimizer, *args, **kwargs):
        return super().step(optimizer, *args, **kwargs)

model = torch.nn.Sequential(torch.nn.Linear(3, 2))
gc.collect()
gc.freeze()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = Scaler("cpu", init_scale=8.0)
inputs = torch.ones(2, 3)
for number in range(10):
    optimizer.zero_grad()
    loss = model(inputs).sum() * (float("inf") if number == 3 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), copy.deepcopy(model)):
        twin(inputs * float("nan")).sum().backward()  # Nobody's business.
print("ok")
"""

WRAPPED = """
import torch

class Around(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()

param = torch.nn.Parameter(torch.ones(3))
absent = torch.nn.Parameter(torch.ones(3, device="meta"))
around = Around(torch.optim.SGD([param], lr=0.1))
mixed = torch.optim.SGD([param, absent], lr=0.1)
for number in range(5):
    param.grad = None
    param.sum().backward()
    around.step()
for number in range(3):
    param.sum().backward()
    mixed.step()
"""


def test_a_traced_model_can_be_saved_and_copied_and_a_scaler_may_be_somebodys_own(tmp_path):
    write(tmp_path, "train.py", COPIES)
    shown = forked("--trace", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert (shown.out, shown.status) == ("ok\n", 0)
    run = read_run(tmp_path / "a.jsonl")
    assert [step.step for step in run.steps] == list(range(1, 11))
    assert [step.step for step in run.steps if step.skipped] == [4]
    assert run.optimizers[0].names == ("0.weight", "0.bias")  # Also after gc.freeze().


def test_a_step_inside_another_counts_once_and_a_meta_parameter_harms_nobody(tmp_path):
    write(tmp_path, "train.py", WRAPPED)
    shown = forked("--detail-every", "1", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0
    run = read_run(tmp_path / "a.jsonl")
    assert [(step.optimizer, step.step) for step in run.steps] == [
        *((0, number) for number in range(1, 6)),
        *((1, number) for number in range(1, 4)),
    ]
    detail = run.steps[-1].detail
    assert detail.weight[0] > 0
    assert detail.update[0] > 0
    assert (detail.weight[1], detail.update[1]) == (None, None)


@pytest.mark.parametrize(
    ("words", "content", "told"),
    [
        (["-o", "a.jsonl"], "", "a.jsonl is there already"),
        (["--append", "-o", "a.jsonl"], "hello\n", "a.jsonl is no run file"),
        (["-o", "a.jsonl/b.jsonl"], "", "cannot be written"),
        (["--all-ranks"], "", "--all-ranks needs -o FILE"),
    ],
)
def test_what_can_be_known_before_is_said_before_the_script_runs(words, content, told, tmp_path):
    write(tmp_path, "train.py", "print('ran')\n" + TRAIN)
    (tmp_path / "a.jsonl").write_text(content)
    shown = watched(*words, "train.py", cwd=tmp_path)
    assert shown.status in (1, 2)
    assert shown.out == ""
    assert told in shown.err
    assert len(shown.err.splitlines()) == 1
    assert (tmp_path / "a.jsonl").read_text() == content


def test_steps_that_could_not_be_recorded_are_owned_up_to(tmp_path):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
    quiet = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    write(tmp_path, "train.py", limit + quiet + TRAIN.replace("range(6)", "range(60)"))
    shown = forked("--flush-every", "5", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0
    steps = len(read_run(tmp_path / "a.jsonl").steps)
    assert 0 < steps < 60
    assert f"recorded {steps} steps" in shown.err
    assert f"; {60 - steps} more could not be recorded" in shown.err


def test_a_folder_is_not_left_behind_for_nothing(tmp_path):
    write(tmp_path, "train.py", "print('no torch here')")
    shown = watched("-o", "new/folder/a.jsonl", "train.py", cwd=tmp_path)
    assert shown.status == 0
    assert sorted(os.listdir(tmp_path)) == ["train.py"]
