"""`gradilocks selftest` as it is typed: over one and two processes, and over a broken library."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import gradilocks
from tests import PATIENCE
from tests.selftest.broken_library import SECRET

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this torch has no torch.distributed"
)

ROOT = Path(__file__).resolve().parents[2]
BROKEN = Path(__file__).with_name("broken_library.py")
broken_library = pytest.mark.long
"""It hangs and dies on purpose, for half a minute; tests/selftest has each part by itself."""


class Run(NamedTuple):
    status: int
    out: str
    err: str
    checks: dict[str, dict[str, Any]]
    file: str


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    # What conftest sets for other tests: here the kernels are not to be interpreted.
    kept.pop("TRITON_INTERPRET", None)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def _run(*words: str, cwd: Path, file: str = "report.json", **more: str) -> Run:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env=_environment(**more),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return _read(done.returncode, done.stdout, done.stderr, cwd / file)


def _read(status: int, out: str, err: str, path: Path) -> Run:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    checks = {each["name"]: each for each in json.loads(text)["checks"]} if text else {}
    return Run(status, out, err, checks, text)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _on_two_ranks(*words: str, cwd: Path) -> Run:
    """As another launcher than torchrun starts them; what rank 0 said, the worst status of both."""
    port = str(_free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=cwd,
            env=_environment(
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (out, err), (other, _) = [rank.communicate(timeout=PATIENCE) for rank in ranks]
    assert other == "", "rank 1 has spoken"
    assert ranks[0].returncode == ranks[1].returncode
    return _read(ranks[0].returncode, out, err, cwd / "report.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The library as it is, over two ranks of torchrun."""
    folder = tmp_path_factory.mktemp("whole")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["-m", "gradilocks", "selftest", "--device", "cpu", "-o", "report.json"]
    return _run(*torchrun, *words, "--limit", "120", cwd=folder)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A library that is broken in six ways, over two ranks."""
    folder = tmp_path_factory.mktemp("broken")
    words = ["--device", "cpu", "-o", "report.json", "--limit", "15"]
    return _on_two_ranks(str(BROKEN), str(folder), *words, cwd=folder)


def test_all_is_well_over_two_ranks_of_torchrun(whole: Run) -> None:
    assert whole.status == 0, whole.out + whole.err
    tried = [check for check in whole.checks.values() if check["state"] != "not tried"]
    assert {check["state"] for check in tried} == {"ok"}
    assert len(tried) >= 20
    assert f"All {len(tried)} checks passed." in whole.out
    assert whole.out.count("Gradilocks ") == 1, "more than one rank has spoken"


def test_what_does_not_fit_is_listed_with_the_reason(whole: Run) -> None:
    assert whole.checks["HSDP"]["why"] == "needs 4 ranks or more"
    assert whole.checks["Triton"]["why"]
    assert "not tried HSDP" in whole.out


def test_collectives_and_their_bytes_are_counted(whole: Run) -> None:
    counted = {name: check["numbers"].get("collectives") for name, check in whole.checks.items()}
    assert counted["DDP"] == 0
    assert counted["FSDP2"] == counted["PP, process_group="] == 1
    assert counted["FSDP2, drop-ins"] == counted["FSDP2, per tensor"] == 2
    assert counted["TP, sequence parallel"] == 4
    assert 100 < whole.checks["FSDP2"]["numbers"]["bytes"] < 1000


def test_the_file_says_what_ran_and_nothing_of_the_user(whole: Run) -> None:
    content = json.loads(whole.file)
    assert content["passed"] is True
    assert (content["ranks"], content["device"], content["backend"]) == (2, "cpu", "gloo")
    assert content["versions"]["gradilocks"] == gradilocks.__version__
    assert content["hardware"]["cores"] >= 1
    for private in (socket.gethostname(), str(ROOT), str(Path.home()), sys.prefix):
        assert private not in whole.file or len(private) < 3


@broken_library
def test_a_broken_library_is_found_out(broken: Run) -> None:
    assert broken.status == 1, broken.out + broken.err
    assert json.loads(broken.file)["passed"] is False
    assert "checks FAILED: plain torch" in broken.out


@broken_library
@pytest.mark.parametrize(
    ("check", "state", "text"),
    [
        ("plain torch", "wrong", "clamp_, float32: a tensor of (1,) is off"),
        ("FSDP1", "wrong", "p = 2, step 1: the norm is"),
        ("PP, process_group=", "wrong", "in one process"),
        ("FSDP2, per tensor", "wrong", "3 collectives (2 allgather, 1 allreduce)"),
        ("FSDP2, headroom", "raised", "RuntimeError: sabotage in plans.py"),
        ("experts, copies=", "hung", "rank 1: no end after"),
        ("TP, sequence parallel", "died", "rank 0: its process was ended by SIGKILL"),
    ],
)
def test_each_fault_is_told_in_its_own_way(broken: Run, check: str, state: str, text: str) -> None:
    found = broken.checks[check]
    assert found["state"] == state, found
    told = "\n".join(found["problems"])
    assert text in told
    assert f"{state.upper():<10}{check}" in broken.out


@broken_library
def test_a_hang_says_where(broken: Run) -> None:
    (told,) = [t for t in broken.checks["experts, copies="]["problems"] if t.startswith("rank 1:")]
    assert "broken_library.py" in told
    assert "gradilocks/ranks/model_ranks.py" in told


@broken_library
def test_the_checks_after_a_fault_still_run(broken: Run) -> None:
    for name in ("DDP", "FSDP2", "FSDP2, gradilocks.optim", "TP", "a rank without experts"):
        assert broken.checks[name]["state"] == "ok", broken.checks[name]


@broken_library
def test_what_the_user_would_not_publish_is_left_out(broken: Run) -> None:
    assert "sabotage in" in broken.file
    for private in (SECRET, "somebody", str(ROOT), sys.prefix):
        assert private not in broken.file


def test_one_process_needs_no_torchrun_and_writes_its_file_here(tmp_path: Path) -> None:
    words = ["-m", "gradilocks", "selftest", "--device", "cpu", "--quiet"]
    done = _run(*words, cwd=tmp_path, file="gradilocks-selftest.json")
    assert done.status == 0, done.out + done.err
    assert done.checks["FSDP2"]["state"] == "ok"
    assert done.checks["TP"]["why"] == "needs 2 ranks or more"
    (line,) = done.out.splitlines()
    assert line.startswith("All ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "mine.json"], "mine.json is already there and is no file of a selftest"),
        (["-o", "."], ". is a folder"),
        (["-o", "no/where.json"], "no is no folder"),
        (["--limit", "0"], "expected 1 to 3600 seconds, got '0'"),
        (["--device", "tpu"], "expected auto, cpu or cuda, got 'tpu'"),
    ],
)
def test_what_cannot_run_is_one_line_and_status_2(
    tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "mine.json").write_text('{"a": 1}')
    done = _run("-m", "gradilocks", "selftest", *words, cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert said in done.err
    assert len(done.err.splitlines()) == 1
    assert (tmp_path / "mine.json").read_text() == '{"a": 1}'


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_the_way_out_is_named(tmp_path: Path) -> None:
    done = _run("-m", "gradilocks", "selftest", "--device", "cuda", cwd=tmp_path)
    assert done.status == 2
    assert "torch sees no GPU here. Take --device cpu" in done.err


@pytest.mark.gpu
def test_one_gpu_is_tested_over_nccl_with_the_kernels(tmp_path: Path) -> None:
    words = ["-m", "gradilocks", "selftest", "--device", "cuda", "-o", "report.json"]
    done = _run(*words, "--limit", "120", cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    content = json.loads(done.file)
    assert (content["backend"], content["host_waits"]) == ("nccl", "watched for")
    for name in ("Triton", "FSDP2", "FSDP2, offloaded", "a control, gradilocks.optim"):
        assert done.checks[name]["state"] == "ok"
