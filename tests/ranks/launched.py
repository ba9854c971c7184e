"""Scripts and commands on several ranks as torchrun starts them, from a server that has torch.

The server forks a child for each rank, with torchrun's variables, and waits for all of them. If one
of them fails it may end the others as torchrun does, by SIGTERM. Streams go to files.
"""

from __future__ import annotations

import functools
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests import PATIENCE
from tests.cli.cli_process import environment
from tests.forks import COMMAND_LINE, SHORT_END, fork_server, until_the_end, without_leaks

SERVER = """
import gc, json, runpy, signal, socket, time
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.nn.parallel
parameter = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.AdamW([parameter])
parameter.sum().backward()
optimizer.step()
del parameter, optimizer
import gradilocks.control
import gradilocks.lab.audit.script_gradients
import gradilocks.observe.step_recorder, gradilocks.observe.torch_hooks
gc.collect()
gc.freeze()  # Else each child looks through a million objects of torch, more than once: seconds.

def child(rank, ranks, port, words):
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({name: str(value) for name, value in told.items()})
    for number, name in ((1, f".out{rank}"), (2, f".err{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    torch.set_num_threads(1)
    if words[0] == "gradilocks":
        sys.argv[1:] = words[1:]
        run_to_the_end(lambda: main(words[1:]))
    sys.argv[:], sys.path[0] = words, os.getcwd()
    run_to_the_end(lambda: runpy.run_path(words[0], run_name="__main__") and None)

for line in sys.stdin:
    words, folder, ranks, ends_others, patience = json.loads(line)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children, found = {}, [None] * ranks
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            os.chdir(folder)
            child(rank, ranks, port, words)
        children[pid] = rank
    until = time.monotonic() + patience
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            found[children.pop(pid)] = code = os.waitstatus_to_exitcode(status)
            if code and ends_others:
                for other in children:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > until:
            for other in children:
                os.kill(other, signal.SIGKILL)
        else:
            time.sleep(0.02)
    print(json.dumps(found), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How the ranks ended, and what each of them printed."""

    statuses: list[int]
    out: list[str]
    err: list[str]


class Launcher:
    """Runs scripts and commands on several ranks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, *words: object, cwd: Path, ranks: int = 2, ends_others: bool = False) -> Ended:
        """One script with its arguments, or "gradilocks" and a command.

        Args:
            words: what to run.
            cwd: where.
            ranks: how many.
            ends_others: whether a rank that fails ends the others, as under torchrun.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        told = list(map(str, words)), str(cwd), ranks, ends_others, PATIENCE
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        streams = (
            [without_leaks((cwd / f"{name}{rank}").read_text()) for rank in range(ranks)]
            for name in (".out", ".err")
        )
        return Ended(statuses, *streams)


@functools.cache
def rank_launcher() -> Launcher:
    """The launcher of this process, made at first use."""
    context = fork_server(
        SERVER, first=SHORT_END + COMMAND_LINE, env=environment(OMP_NUM_THREADS="1", COLUMNS="80")
    )
    return Launcher(until_the_end(context))
