"""The command line in a process of its own, as a user has it: fed, watched, interrupted."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

import gradilocks
from tests.forks import COMMAND_LINE, fork_server, until_the_end

COMMAND = [sys.executable, "-m", "gradilocks"]
TIMEOUT = 120.0
SOURCE = Path(gradilocks.__file__).parent.parent


def environment(**more: str) -> dict[str, str]:
    """This process's, with this checkout's package and nothing that changes how output looks."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in {"FORCE_COLOR", "COLUMNS", "LINES", "NO_COLOR"}
    }
    return {**kept, "PYTHONPATH": str(SOURCE), "PYTHONUTF8": "1", **more}


# Commands that only read files. Python takes longer to import what they need than they take, so a
# process that has imported it forks for each of them, with its own environment, folder and streams.
READERS = ("compare", "explain", "export", "ls", "page", "report", "watch")
SERVER = """
import gc, json, os, sys
import rich.live, rich.progress, rich.table
gc.freeze()
for line in sys.stdin:
    words, folder, variables, streams = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(variables)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in enumerate(streams, 1):
            os.dup2(os.open(name, os.O_WRONLY), number)
        sys.argv[1:] = words
        sys.exit(main(words))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run(
    *arguments: object, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """One command, with what it printed."""
    words = list(map(str, arguments))
    if words[:1] and words[0] in READERS and not any(name.startswith("PYTHON") for name in more):
        return _forked(words, cwd or Path.cwd(), environment(**more))
    return subprocess.run(
        [*COMMAND, *words],
        cwd=cwd,
        env=environment(**more),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        check=False,
    )


def _forked(
    words: list[str], cwd: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        for stream in streams:
            stream.touch()
        request = [words, str(cwd.absolute()), variables, list(map(str, streams))]
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        assert select.select([server.stdout], [], [], TIMEOUT)[0], f"{words} goes on"
        status = int(server.stdout.readline())
        out, err = (stream.read_text(encoding="utf-8") for stream in streams)
    return subprocess.CompletedProcess([*COMMAND, *words], status, out, err)


@functools.cache
def _server() -> subprocess.Popen[str]:
    return until_the_end(fork_server(SERVER, first=COMMAND_LINE, env=environment()))


def start(*arguments: object) -> subprocess.Popen[str]:
    """A command that goes on; it can be interrupted even where this test is run with `&`."""
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


class OnATerminal:
    """A command on a terminal of its own; `seen` is everything it has written there."""

    def __init__(
        self, *arguments: object, cwd: Path, columns: int = 80, lines: int = 24, **more: str
    ) -> None:
        self._here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=there,
            stdout=there,
            stderr=there,
            cwd=cwd,
            env=environment(TERM="xterm-256color", **more),
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(there, termios.TIOCSCTTY, 0),
        )
        os.close(there)
        os.set_blocking(self._here, False)
        self.seen = ""

    def read(self) -> str:
        """What there is to read now."""
        try:
            while chunk := os.read(self._here, 1 << 16):
                self.seen += chunk.decode("utf-8", "replace")
        except (BlockingIOError, OSError):  # nothing there, or the other end is closed
            pass
        return self.seen

    def wait_for(self, text: str) -> None:
        """Reads until a text has been written."""
        wait_until(lambda: text in self.read(), f"{text!r} in what was written: {self.seen!r}")

    def press_ctrl_c(self) -> None:
        """As a terminal does it: to the whole foreground group."""
        os.write(self._here, b"\x03")

    def close(self) -> int:
        """Waits for the end; returns the exit status."""
        deadline = time.monotonic() + TIMEOUT
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read()
            time.sleep(0.01)
        self.read()
        os.close(self._here)
        return self.process.wait(timeout=1)


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Waits for something another process does; only the failure is timed."""
    deadline = time.monotonic() + TIMEOUT
    while not true():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
