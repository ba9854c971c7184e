"""`benchmarks/bench_step.py` and `bench_training.py` run, and their contenders do the same work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def measured(script_server: Any, name: str, *words: str, folder: Path) -> dict[str, Any]:
    """What a benchmark writes; it ends with status 1 if a contender has done other work."""
    done = script_server.run(BENCHMARKS / name, *words, "-o", "found.json", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert found["command"].endswith("-o benchmarks/results/found.json")
    assert found["note"] == ""
    kernels = found["environment"]["kernels"]
    assert "cpu" in kernels
    assert not any(re.search(r"(^|\s)/", said) for said in kernels.values())  # No folder of ours.
    return found


def test_a_step_is_measured_on_gradients_that_stay_and_on_new_ones(script_server, tmp_path):
    words = ["--size", "tiny", "--rows", "step,moe", "--limit", "1", "--rounds", "1"]
    words += ["--compile", "none"]
    found = measured(script_server, "bench_step.py", *words, folder=tmp_path)
    contenders: dict[str, list[str]] = {}
    for row in found["rows"]:
        contenders.setdefault(row["workload"], []).append(row["contender"])
    staying, new, experts, new_experts = contenders
    assert new == staying.replace(" tensors,", " tensors, new gradients every step,")
    assert "new gradients" not in experts
    assert "new gradients" in new_experts
    assert contenders[staying] == contenders[new]
    assert contenders[experts] == contenders[new_experts]
    assert all("GradientControl, gradilocks.optim" in names for names in contenders.values())


def test_whole_training_steps_are_measured_beside_torchs(script_server, tmp_path):
    words = ["--models", "tiny", "--rounds", "5"]
    found = measured(script_server, "bench_training.py", *words, folder=tmp_path)
    torchs, drop_in, control, recording = found["rows"]
    assert torchs["faster"]["wall"] == torchs["faster"]["loop"] == 1.0
    for row in (drop_in, control, recording):
        assert row["baseline"]["loop"] == "torch"
        for measure in ("wall", "loop"):
            ratio = torchs["times"][measure]["median_ms"] / row["times"][measure]["median_ms"]
            assert row["faster"][measure] == pytest.approx(ratio)
    ends = found["ends"]["tiny"]
    assert list(ends) == [row["contender"] for row in found["rows"]]
    assert ends[control["contender"]] == ends[recording["contender"]]  # To the bit.
    assert all(end["loss"] < end["loss_of_the_first_pass"] for end in ends.values())
    assert found["recording"]["tiny"].keys() == {"ms", "percent"}


def test_unlike_work_is_told_and_ends_with_status_1(script_server, tmp_path):
    """A clip that halves every gradient besides: the script itself has to notice."""
    script = tmp_path / "halving.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        "import torch, gradilocks\n"
        "def halving(params, limit):\n"
        "    return torch.nn.utils.clip_grad_norm_(params, limit / 2)\n"
        "gradilocks.clip_grad_norm_ = halving\n"
        f"runpy.run_path({str(BENCHMARKS / 'bench_training.py')!r}, run_name='__main__')\n"
    )
    done = script_server.run(script, "--models", "tiny", "--rounds", "5", cwd=tmp_path)
    assert done.returncode == 1
    assert "note: tiny: drop-in: its loss is" in done.stderr
    assert "recording: its loss" not in done.stderr


def test_an_unknown_model_is_refused(script_server, tmp_path):
    script = BENCHMARKS / "bench_training.py"
    done = script_server.run(script, "--models", "tiny,huge", cwd=tmp_path)
    assert done.returncode == 2
    assert "--models takes 124M-8x512, " in done.stderr
    assert done.stderr.rstrip().endswith("got huge")
