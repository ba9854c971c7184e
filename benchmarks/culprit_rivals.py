"""What tells of NaN in a script that nobody touched: `gradilocks run`, and two others beside it.

Each of them runs the script of the zoo in a process of its own (on a CPU a fork of one that has
imported torch), and what it printed is read for what it says and judged by the planted truth:

    anomaly mode              `torch.autograd.set_detect_anomaly(True)`: an error in backward, with
                              the function and the lines of the forward call that it belongs to
    DebugUnderflowOverflow    of Transformers, if that is installed: an error in forward, with the
                              module and its input, output or weight that was not finite

Both are judged kindly. A line is the right place if it is in the code of the planted module, though
it does not say which of several such modules it was; nobody but `gradilocks run` has to know the
step.
"""

from __future__ import annotations

import ast
import gc
import importlib
import os
import re
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # The zoo lies among the tests.
from tests.culprits.zoo import SCRIPT, Case, said_of, verdict
from torch import nn

from gradilocks.cli import main
from gradilocks.runfile import read_run

RIGHT, ELSEWHERE, NOTHING = "right", "elsewhere", "nothing"


class Judged(NamedTuple):
    """What one of them said of a training."""

    verdict: str
    """'right', 'elsewhere' if it points to another place, 'nothing'; 'wrong' if it claims to know
    and does not."""
    said: str
    certainty: str = ""


def by_gradilocks(case: Case, folder: Path, *, options: tuple[str, ...]) -> Judged:
    """`gradilocks run`."""
    words = ["run", "-o", "a.jsonl", *options, str(SCRIPT), *case.words]
    _, err = _run("gradilocks", words, folder)
    if not (folder / "a.jsonl").exists():
        raise RuntimeError(f"{case.name} was not recorded: {err[-500:]}")
    said = said_of(read_run(folder / "a.jsonl"))
    found = verdict(case, said)
    place = said.module if said.where in ("module", "parameters") else ""
    return Judged(found, f"step {said.step}, {said.where} {place}".strip(), said.certainty)


# --- anomaly mode --------------------------------------------------------------------------------


def by_anomaly_mode(case: Case, folder: Path) -> Judged:
    """torch's own."""
    _, err = _run("anomaly", case.words, folder)
    error = re.search(r"Function '(\w+)' returned nan values", err)
    if error is None:
        return Judged(NOTHING, "no error" if "Error" not in err else err.strip().splitlines()[-1])
    # The lines of the forward call stand in a warning, before the error's own traceback.
    told = err[: err.index("Traceback (most recent call last)")]
    frames = re.findall(rf'File "{re.escape(str(SCRIPT))}", line (\d+), in (\w+)', told)
    if not frames:
        return Judged(ELSEWHERE, f"{error[1]}, no line")
    line, function = int(frames[-1][0]), frames[-1][1]
    place = _class_at(line) or function
    said = f"{error[1]}, in {place}"
    return Judged(RIGHT if _is_planted_line(case, line, place) else ELSEWHERE, said)


def _anomaly() -> None:
    warnings.simplefilter("default")
    torch.autograd.set_detect_anomaly(True)


def _is_planted_line(case: Case, line: int, place: str) -> bool:
    if case.where == "after":
        return place in ("loss_of", "train_policy", "FocalLoss")
    if case.where != "module":
        return False  # Data, weights, a learning rate: no line of the model made it.
    own = {"gate": "Gate", "length": "Length"}
    called = case.module.rpartition(".")[2]
    kinds = {"forward": "Gate", "power": "Gate", "backward": "Length"}
    if place == own.get(called, kinds.get(case.fault)):
        return True
    return f"self.{called}(" in SCRIPT.read_text().splitlines()[line - 1]


def _class_at(line: int) -> str:
    """The class of the script that a line is in, or ''."""
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            return node.name
    return ""


# --- DebugUnderflowOverflow ----------------------------------------------------------------------


def has_underflow_overflow() -> bool:
    """Whether Transformers is here."""
    try:
        from transformers.debug_utils import DebugUnderflowOverflow  # noqa: F401
    except ImportError:
        return False
    return True


def by_underflow_overflow(case: Case, folder: Path) -> Judged:
    """Transformers'."""
    out, err = _run("underflow_overflow", case.words, folder)
    if "Detected inf/nan" not in out:
        return Judged(NOTHING, "no error" if "Error" not in err else err.strip().splitlines()[-1])
    what = re.findall(r"^(\S+) has (?:nans|infs)$", out, re.MULTILINE)
    frames = out[out.index("Detected inf/nan") :]
    modules = re.findall(r"^ {17} ?(\S*) (\w+)$", frames, re.MULTILINE)
    name, kind = modules[-1] if modules else ("", "")
    said = f"{what[0]} of {name or 'the model'} ({kind})"
    return Judged(RIGHT if _is_planted_value(case, name, what[0]) else ELSEWHERE, said)


def _is_planted_value(case: Case, name: str, what: str) -> bool:
    is_input, is_output = what.startswith("input"), what.startswith("output")
    if case.where == "module":
        return is_output and (case.module == name or case.module.endswith(f".{name}"))
    if case.where == "parameters":
        return not (is_input or is_output) and case.module == f"{name}.{what}"
    return case.where == "input" and is_input


def _underflow_overflow() -> None:
    from transformers.debug_utils import DebugUnderflowOverflow

    from gradilocks.observe.script_models import owners_of

    made = torch.optim.Optimizer.__init__
    watched: list[nn.Module] = []

    def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        made(optimizer, *args, **kwargs)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for model in owners_of(params):
            if not any(each is model for each in watched):
                watched.append(model)
                DebugUnderflowOverflow(model)

    torch.optim.Optimizer.__init__ = init  # type: ignore[method-assign]


# --- processes -----------------------------------------------------------------------------------


def warm_up() -> None:
    """Imports what all trainings need, so that their processes begin with it; uses no GPU."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter])
    parameter.sum().backward()
    optimizer.step()
    for name in ("step_recorder", "torch_hooks", "patches", "script_calls", "script_tracer"):
        importlib.import_module(f"gradilocks.observe.{name}")
    for name in ("cli.app", "report"):
        importlib.import_module(f"gradilocks.{name}")
    del parameter, optimizer
    gc.collect()
    gc.freeze()  # Else each child looks through a million objects of torch, more than once.


def _act(who: str, words: Sequence[str]) -> None:
    """Does what one of them does with the script, in this process."""
    if who == "gradilocks":
        main(list(words))
        return
    {"anomaly": _anomaly, "underflow_overflow": _underflow_overflow}[who]()
    sys.argv = [str(SCRIPT), *words]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _run(who: str, words: Sequence[str], folder: Path) -> tuple[str, str]:
    """What it prints, on both streams."""
    if os.environ.get("DEVICE", "cpu") == "cpu":
        return _forked(lambda: _act(who, words), folder)
    done = subprocess.run(  # What is forked cannot use a GPU.
        [sys.executable, __file__, who, *words], cwd=folder, capture_output=True, text=True
    )
    return done.stdout, done.stderr


def _forked(run: Callable[[], object], folder: Path) -> tuple[str, str]:
    """What a child that does `run` in `folder` prints, on both streams."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.chdir(folder)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            run()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.waitpid(child, 0)
    return (folder / "out").read_text(), (folder / "err").read_text()


if __name__ == "__main__":
    _act(sys.argv[1], sys.argv[2:])
