"""Scripts under `run_script` behave as under Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from gradilocks.errors import GradilocksError
from gradilocks.run import Options, run_script
from run.scripts import run_plain, run_recorded

TRAIN = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item(), model.weight.sum().item())
"""

COMMAND = "import sys; from gradilocks.run import *; sys.exit(run_script(sys.argv[1:], Options('run.jsonl')).exit_code)"


def process(*arguments: str, cwd, command: str = COMMAND) -> subprocess.CompletedProcess[str]:
    """`gradilocks run` in a fresh interpreter, in which the script imports torch itself."""
    return subprocess.run(
        [sys.executable, "-c", command, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )


def test_a_script_prints_and_computes_the_same(tmp_path):
    (tmp_path / "plain").mkdir()
    plain = run_plain(TRAIN, cwd=tmp_path / "plain")
    recorded = run_recorded(TRAIN, cwd=tmp_path)
    assert (recorded.exit_code, recorded.out, recorded.err) == (0, plain.out, "")
    assert len(recorded.steps) == 6


@pytest.mark.parametrize(
    ("ending", "exit_code", "status"),
    [
        ("", 0, "finished"),
        ("sys.exit(0)", 0, "finished"),
        ("sys.exit(7)", 7, "SystemExit: 7"),
        ("sys.exit('no data')", 1, "SystemExit: no data"),
        ("raise KeyError('x')", 1, "KeyError: 'x'"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
    ],
)
def test_the_exit_code_is_the_scripts_own(ending, exit_code, status, tmp_path):
    finished = run_recorded(TRAIN + ending, cwd=tmp_path)
    assert finished.exit_code == exit_code
    (end,) = finished.of_kind("end")
    assert (end["status"], end["exit_code"], end["steps"]) == (status, exit_code, 6)


def test_a_traceback_shows_the_script_only(tmp_path):
    finished = run_recorded(TRAIN + "raise KeyError('x')", cwd=tmp_path)
    assert finished.err.startswith("Traceback (most recent call last):\n")
    assert 'train.py", line 14, in <module>' in finished.err
    assert finished.err.endswith("KeyError: 'x'\n")
    assert "gradilocks" not in finished.err


def test_a_script_sees_its_own_arguments_folder_and_main(tmp_path):
    (tmp_path / "helper.py").write_text("value = 3")
    text = """
import sys, __main__
import helper
print(sys.argv[1:], __name__, __file__.endswith("train.py"), helper.value, __main__.value)
value = 5
""".replace("value = 5", "").replace("import helper\n", "import helper\nvalue = 4\n")
    finished = run_recorded(text, "--lr", "3e-4", cwd=tmp_path)
    assert finished.out == "['--lr', '3e-4'] __main__ True 3 4\n"


def test_the_scripts_file_is_absolute_as_in_python(tmp_path):
    (tmp_path / "train.py").write_text("import os; os.chdir('/'); print(__file__); raise KeyError")
    done = process("train.py", cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "train.py")
    assert f'File "{tmp_path / "train.py"}", line 1' in done.stderr


def test_torch_is_imported_by_the_script_after_its_own_settings(tmp_path):
    text = "import os, sys\nassert 'torch' not in sys.modules\nos.environ['OMP_NUM_THREADS'] = '1'\n" + TRAIN
    (tmp_path / "train.py").write_text(text + "assert torch.get_num_threads() == 1")
    done = process("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run.jsonl").read_text().count('"kind":"step"') == 6


def test_a_missing_script_and_a_wrong_guard_are_errors(tmp_path):
    with pytest.raises(GradilocksError, match=r"script 'absent\.py' does not exist"):
        run_script(["absent.py"])
    with pytest.raises(ValueError, match="guard must be 'skip', 'stop' or None, got 'halt'"):
        Options(guard="halt")


def test_sigterm_closes_the_file_and_ends_the_process_by_the_signal(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN + "print('ready', flush=True)\nimport time\ntime.sleep(60)")
    command = [sys.executable, "-c", COMMAND, "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        while "ready" not in started.stdout.readline():
            time.sleep(0.01)
        started.send_signal(signal.SIGTERM)
        assert started.wait(60) == -signal.SIGTERM
    text = (tmp_path / "run.jsonl").read_text()
    assert '"status":"SIGTERM"' in text
    assert text.count('"kind":"step"') == 6


def test_workers_of_a_data_loader_write_nothing(tmp_path):
    text = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, num_workers=1):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""
    finished = run_recorded(text, cwd=tmp_path)
    assert finished.exit_code == 0, finished.err
    assert [line["step"] for line in finished.steps] == [1, 2, 3, 4]
    assert len(finished.of_kind("end")) == 1


def test_an_error_of_ours_ends_the_recording_and_not_the_script(tmp_path):
    text = TRAIN + "import gradilocks.record\ngradilocks.record.Recorder.step = None\n" + TRAIN
    finished = run_recorded(text, cwd=tmp_path)
    assert finished.exit_code == 0
    assert finished.err.startswith("gradilocks: recording stopped (TypeError")
    assert finished.err.count("\n") == 1
    assert len(finished.out.splitlines()) == 12
    (end,) = finished.of_kind("end")
    assert end["status"].startswith("recording stopped: TypeError")


def patched() -> tuple[object, ...]:
    """The functions of torch that are replaced while a script runs."""
    functions = torch.autograd.backward, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_
    return torch.nn.Module.__call__, torch.amp.GradScaler.step, torch.optim.Optimizer.zero_grad, *functions


def test_hooks_are_gone_when_the_script_has_ended(tmp_path):
    before = patched()
    script = tmp_path / "train.py"
    script.write_text(TRAIN.replace("print", "max"))
    directory, arguments, path, main = os.getcwd(), list(sys.argv), list(sys.path), sys.modules["__main__"]
    try:
        assert run_script([str(script)], Options(tmp_path / "run.jsonl")).steps == 6
    finally:
        os.chdir(directory)
        sys.argv[:], sys.path[:], sys.modules["__main__"] = arguments, path, main
    assert patched() == before
