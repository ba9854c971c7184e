"""Scripts in processes of their own that begin with torch imported: seconds less for each.

A server imports torch once; every script runs in a child that it forks, from the first line to
Python's own end, with files in the place of its standard streams. What the script imports beside
torch, Gradilocks too, it imports itself, unless the server is told to. With `ranks=` it runs in
several children at once, which find in their environment what torchrun would put there.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from tests import PATIENCE
from tests.forks import fork_server, without_leaks

__all__ = ["ScriptServer", "serving"]

SERVER = """
import gc, importlib, json, os, runpy, signal, socket, sys, warnings
import torch, torch._dynamo  # The second is what an optimizer imports when the first is made.

for module in sys.argv[1:]:
    importlib.import_module(module)

def run(script, words, folder, rank):
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, f".out{rank}"), (2, f".err{rank}")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    warnings.simplefilter("error")
    # torch says so wherever a checkpoint is read by one process.
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
    sys.argv = [script, *words]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")

def place(rank, ranks, port):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)

gc.collect()
gc.freeze()  # Else each child looks through a million objects of torch, more than once: seconds.

for line in sys.stdin:
    script, words, folder, ranks = json.loads(line)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks or 1):
        child = os.fork()
        if not child:
            if ranks:
                place(rank, ranks, port)
            run(script, words, folder, rank)
            break
        children.append(child)
    else:
        worst = 0
        while children:
            child, status = os.wait()
            children.remove(child)
            worst = worst or os.waitstatus_to_exitcode(status)
            if worst:  # The others would wait for it.
                for other in children:
                    os.kill(other, signal.SIGKILL)
        print(worst, flush=True)
        continue
    break
"""


class ScriptServer:
    """Runs scripts, one after another."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._asked, self._said = (cast(IO[str], it) for it in (process.stdin, process.stdout))
        self._end = process.kill

    def run(
        self, script: Path, *words: Any, cwd: Path, ranks: int = 0
    ) -> subprocess.CompletedProcess[str]:
        """Runs `python -W error SCRIPT WORDS` in the folder `cwd`, with what it printed.

        Args:
            script: the file.
            words: its arguments.
            cwd: the folder.
            ranks: how many processes run it, as if torchrun had started them; what rank 0 printed
                comes first. 0 is one process that knows of no ranks.
        """
        command = [str(script), *map(str, words)]
        asked = json.dumps([command[0], command[1:], str(cwd), ranks])
        print(asked, file=self._asked, flush=True)
        hung = threading.Timer(PATIENCE, self._end)
        hung.start()
        said = self._said.readline()
        hung.cancel()
        assert said, f"the server has ended, or {command} took more than {PATIENCE} s"
        status = int(said)
        printed = []
        for name in (".out", ".err"):
            files = sorted(cwd.glob(f"{name}[0-9]*"))
            texts = [without_leaks(file.read_text(encoding="utf-8")) for file in files]
            printed.append("".join(texts))
            for file in files:
                file.unlink()
        return subprocess.CompletedProcess(command, status, *printed)


@contextmanager
def serving(*modules: str) -> Iterator[ScriptServer]:
    """A server, for as long as it is needed.

    Args:
        modules: that it imports beside torch, once for all scripts.
    """
    with fork_server(SERVER, *modules) as process:
        yield ScriptServer(process)
