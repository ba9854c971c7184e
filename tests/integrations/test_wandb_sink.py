"""The Weights & Biases sink, offline: the run's own file is read back, and nobody is called."""

from __future__ import annotations

import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradilocks
from tests import PATIENCE
from tests.integrations.wandb_file import history

SOURCE = Path(gradilocks.__file__).parent.parent
HERE = Path(__file__).parent
PROGRAM = """
import sys
import wandb
from gradilocks.integrations.wandb import WandbSink
from gradilocks.record import Sink
from tests.runfile.run_files import *

joins = sys.argv[1] == "join"
own = wandb.init(mode="offline", project="mine") if joins else None
sink = WandbSink(project="tests", mode="offline")
assert isinstance(sink, Sink)
sink.open(HEADER)
sink.optimizer(FIRST)
sink.optimizer(SECOND)
sink.step(plain_step(1, loss=2.5))
if joins:
    own.log({"mine": 1})
sink.step(skipped_step(2, "embed.weight"))
sink.step(STEP)
sink.close(END)
assert (wandb.run is own) if joins else wandb.run is None
if joins:
    own.finish()
"""


class Refuser(socketserver.BaseRequestHandler):
    """Stands where a proxy would, and remembers who came."""

    def handle(self) -> None:
        self.server.callers.append(self.request.recv(256))  # type: ignore[attr-defined]


@pytest.fixture
def proxy() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refuser) as server:
        server.callers = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def run(folder: Path, way: str, port: int) -> None:
    address = f"http://127.0.0.1:{port}"
    kept = {name: value for name, value in os.environ.items() if "WANDB" not in name}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way],
        cwd=folder,
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join([str(SOURCE), str(HERE.parents[1])]),
            "HTTP_PROXY": address, "HTTPS_PROXY": address, "http_proxy": address,
            "https_proxy": address, "NO_PROXY": "", "no_proxy": "",
            "HOME": str(folder), "WANDB_ERROR_REPORTING": "false",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", ["alone", "join"])
def test_steps_are_logged_offline_and_nobody_is_called(tmp_path, proxy, way):
    run(tmp_path, way, proxy.server_address[1])
    logged = history(tmp_path)
    steps = [row for row in logged if "gradilocks/step" in row]
    assert [row["gradilocks/step"] for row in steps] == [1, 2, 7]
    assert steps[0]["gradilocks/loss"] == 2.5
    assert steps[1]["gradilocks/why_skipped"] == "Inf in embed.weight; scale 2^10"
    assert "gradilocks/norm" not in steps[1]
    assert steps[2]["gradilocks/optimizer1/detail/weight/scale"] == 1.25
    assert [row["mine"] for row in logged if "mine" in row] == ([1] if way == "join" else [])
    assert proxy.callers == []
