"""Scripts in processes of their own that begin with torch imported: seconds less for each.

A server imports torch once; every script runs in a child that it forks, from the first line to
Python's own end, with files in the place of its standard streams. What the script imports beside
torch, Gradilocks too, it imports itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from tests import PATIENCE

__all__ = ["ScriptServer", "serving"]

SERVER = """
import json, os, runpy, sys, warnings
import torch, torch._dynamo  # The second is what an optimizer imports when the first is made.

for line in sys.stdin:
    script, words, folder = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        warnings.simplefilter("error")
        sys.argv = [script, *words]
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ScriptServer:
    """Runs scripts, one after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._asked, self._said = (cast(IO[str], it) for it in (process.stdin, process.stdout))
        self._end = process.kill

    def run(self, script: Path, *words: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Runs `python -W error SCRIPT WORDS` in the folder `cwd`, with what it printed."""
        command = [str(script), *map(str, words)]
        print(json.dumps([command[0], command[1:], str(cwd)]), file=self._asked, flush=True)
        hung = threading.Timer(PATIENCE, self._end)
        hung.start()
        said = self._said.readline()
        hung.cancel()
        assert said, f"the server has ended, or {command} took more than {PATIENCE} s"
        status = int(said)
        printed = []
        for name in (".out", ".err"):
            printed.append((cwd / name).read_text(encoding="utf-8"))
            (cwd / name).unlink()
        return subprocess.CompletedProcess(command, status, *printed)


@contextmanager
def serving() -> Iterator[ScriptServer]:
    """A server, for as long as it is needed."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield ScriptServer(process)
        cast(IO[str], process.stdin).close()
