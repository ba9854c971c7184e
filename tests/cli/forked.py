"""Commands in processes of their own that begin with torch imported: seconds less for each.

A server imports torch once; every command runs in a child that it forks, from the command line's
entry to Python's own end, with files in the place of its standard streams.
"""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path

from tests.cli.cli_process import environment
from tests.forks import COMMAND_LINE, SHORT_END, fork_server, until_the_end, without_leaks

SERVER = """
import gc, json, runpy
import torch
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([parameter])
parameter.sum().backward()
optimizer.step()  # Which imports what an optimizer needs.
del parameter, optimizer
import gradilocks.lab.audit.script_gradients
import gradilocks.observe.patches, gradilocks.observe.step_recorder
import gradilocks.observe.torch_hooks
gc.collect()
gc.freeze()  # Else each child looks through a million objects of torch, more than once: seconds.

for line in sys.stdin:
    words, folder = json.loads(line)
    child = os.fork()
    if not child:
        os.chdir(folder)
        for number, name in ((1, ".out"), (2, ".err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if words[0] == "python":
            sys.argv[:] = words[1:]
            sys.path[0] = os.path.dirname(os.path.abspath(words[1]))
            run_to_the_end(lambda: runpy.run_path(words[1], run_name="__main__") and None)
        sys.argv[1:] = words
        run_to_the_end(lambda: main(words))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Server:
    """Runs commands."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
        """One command of gradilocks, or "python" and a script, with what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(map(str, words)), str(cwd)]) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        out, err = ((cwd / name).read_text() for name in (".out", ".err"))
        for name in (".out", ".err"):
            (cwd / name).unlink()
        return subprocess.CompletedProcess(list(map(str, words)), status, out, without_leaks(err))


@functools.cache
def command_server() -> Server:
    """The server of this process, made at first use."""
    context = fork_server(
        SERVER, first=SHORT_END + COMMAND_LINE, env=environment(OMP_NUM_THREADS="1", COLUMNS="80")
    )
    return Server(until_the_end(context))
