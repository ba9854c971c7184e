"""Scripts run twice, by Python and by `gradilocks run`, and what each of them shows."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import gradilocks
from tests.cli.forked import command_server

SOURCE = Path(gradilocks.__file__).parent.parent
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class Shown:
    """What a process left behind."""

    status: int
    out: str
    err: str

    @property
    def told(self) -> list[str]:
        """The lines of `gradilocks run` itself."""
        return [line for line in self.err.splitlines() if line.startswith("gradilocks: ")]

    @property
    def others(self) -> str:
        """Standard error without them, and without the log's lines on skips."""
        lines = self.err.splitlines()
        return "\n".join(
            x for x in lines if not x.startswith("gradilocks: ") and " skipped: " not in x
        )


def environment(**more: str) -> dict[str, str]:
    """The same for both: one thread, this source, nothing of torchrun's."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "COLUMNS": "80", **more}


def process(*words: str, cwd: Path, stdin: str = "", **more: str) -> Shown:
    """Runs the interpreter on `words`."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(**more),
    )
    return Shown(done.returncode, done.stdout, done.stderr)


def watched(*words: str, cwd: Path, stdin: str = "", **more: str) -> Shown:
    """`gradilocks run WORDS`."""
    return process("-m", "gradilocks", "run", *words, cwd=cwd, stdin=stdin, **more)


def forked(*words: str, cwd: Path, command: str = "run") -> Shown:
    """The same where how torch is imported does not count: in a process that begins with it.

    With `command="python"` the script runs without gradilocks.
    """
    done = command_server().run(command, *words, cwd=cwd)
    return Shown(done.returncode, done.stdout, done.stderr)


def both(*words: str, cwd: Path, stdin: str = "") -> tuple[Shown, Shown]:
    """By Python, and by `gradilocks run`."""
    return process(*words, cwd=cwd, stdin=stdin), watched(*words, cwd=cwd, stdin=stdin)


def write(folder: Path, name: str, text: str) -> str:
    """A script in `folder`; its name."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return name


TRAIN = """
import sys
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(6):
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
"""
"""A few steps, to which a test adds how it ends."""
