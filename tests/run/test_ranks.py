"""Scripts that torchrun starts on several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradilocks.errors import GradilocksError
from gradilocks.run import run_script

PROGRAM = Path(__file__).parent / "programs" / "data_parallel.py"
LAUNCH = "import sys; from gradilocks.run import *; sys.exit(run_script(sys.argv[1:], Options('run.jsonl')).exit_code)"


def test_each_rank_names_its_own_culprit_and_no_rank_waits(tmp_path):
    (tmp_path / "launch.py").write_text(LAUNCH)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(PROGRAM)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    # gloo sometimes aborts while a process exits, also without gradilocks.
    assert done.returncode == 0 or "terminate called without an active exception" in done.stderr, done.stderr
    texts = [(tmp_path / name).read_text() for name in ("run.jsonl", "run.rank1.jsonl")]
    files = [[json.loads(line) for line in text.splitlines()] for text in texts]
    first, second = (next(line for line in lines if line["kind"] == "culprit") for lines in files)
    assert (first["step"], first["known"]) == (3, False)
    assert "comes from another rank" in first["text"]
    assert (second["step"], second["module"], second["operation"]) == (3, "1", "div")
    steps = [[line["step"] for line in lines if line["kind"] == "step"] for lines in files]
    assert steps == [[1, 2, 3, 4, 5], [3, 4, 5]], "rank 1 writes its bad steps only"


def test_several_ranks_need_a_name_for_the_run_file(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(GradilocksError, match="-o FILE is required with several ranks"):
        run_script([str(PROGRAM)])
