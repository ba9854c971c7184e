"""`benchmarks/bench_ranks.py` runs, and its contenders end with the same parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)


def test_collectives_and_times_are_measured_beside_torchs_way(tmp_path: Path) -> None:
    file = tmp_path / "ranks.json"
    words = ["--ranks", "2", "--layouts", "FSDP2", "--size", "tiny", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "bench_ranks.py", *words, "-o", str(file)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert content["command"].endswith("-o benchmarks/results/ranks.json")
    assert content["note"] == ""
    counted = {each["contender"]: each for each in content["collectives"]}
    by_torch, by_drop_in, by_control, per_tensor = counted.values()
    assert by_torch["collectives"] == by_drop_in["collectives"] == 2
    assert by_control["collectives"] == 1
    assert by_control["bytes_got"] == 2 * by_control["bytes_given"]
    assert per_tensor["collectives"] == 2
    assert len(content["rows"]) == 5
    assert all(row["times"]["wall"]["median_ms"] > 0 for row in content["rows"])
    assert len(content["what_grows"]) == 4


def test_a_mesh_of_one_has_the_contenders_of_a_gpu(script_server, tmp_path: Path) -> None:
    words = ["--ranks", "1", "--size", "tiny", "--rounds", "1", "-o", "one.json"]
    done = script_server.run(ROOT / "benchmarks" / "bench_ranks.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "one.json").read_text())
    assert content["note"] == ""
    assert [row["contender"] for row in content["rows"]] == [
        "torch: clip, fused AdamW",
        "drop-in, torch fused AdamW",
        "drop-in, gradilocks.optim",
        "GradientControl, torch fused AdamW",
        "GradientControl, gradilocks.optim",
        "the same, by the way of several ranks",
        "torch: GradScaler, clip, fused AdamW",
        "drop-in, torch fused AdamW",
        "drop-in, gradilocks.optim",
        "GradientControl, torch fused AdamW",
        "GradientControl, gradilocks.optim",
    ]
    scaled = [row["workload"].endswith(", scaled") for row in content["rows"]]
    assert scaled == [False] * 6 + [True] * 5


def test_a_wrong_option_is_refused(script_server, tmp_path: Path) -> None:
    for words, said in (
        (["--layouts", "FSDP3"], "--layouts takes DDP, FSDP2, FSDP2 x TP, PP x FSDP2, got FSDP3"),
        (["--ranks", "1,2"], "--ranks takes numbers from 2 on, or 1 alone"),
        (["--size", "huge"], "got huge"),
    ):
        script = ROOT / "benchmarks" / "bench_ranks.py"
        done = script_server.run(script, *words, cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
