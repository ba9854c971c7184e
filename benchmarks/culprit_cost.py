"""What finding culprits costs while nothing is wrong, and how long a replay takes.

Everybody trains a model of their own, alike, and takes turns: a block of steps each, in another
order each round; those who add much take part in every fifth. What counts is the median, over the
rounds, of the difference to the block of another in the same round. On a CPU the clock is the
processor's time of the thread that trains, so that others on the machine matter less; on a GPU it
is the wall's, from an idle device to an idle device.

    nothing                   plain torch
    recording                 as `gradilocks run --no-trace` does it
    light trace               as `gradilocks run` does it
    --trace                   as `gradilocks run --trace` does it: waits for a GPU at each step
    anomaly mode              torch.autograd.set_detect_anomaly(True)
    DebugUnderflowOverflow    of Transformers, where that is installed

Two works: a small model whose step is short, and a GPT whose step takes 10 ms or more.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from culprit_rivals import has_underflow_overflow
from torch import Tensor, nn
from torch.nn import functional as F

from gradilocks.demo.small_gpt import GPT
from gradilocks.observe.script_calls import ScriptCalls
from gradilocks.observe.script_tracer import ScriptTracer
from gradilocks.observe.step_recorder import Guard, ScriptRecorder, StepRecorder
from gradilocks.observe.torch_hooks import TorchHooks
from gradilocks.step.events import EVENTS

VOCABULARY = 96
BLOCK_SECONDS = 0.1
REPLAYS = SELDOM = 5
WAYS = {"recording": None, "light trace": "light", "--trace": "always"}
OVER = {"light trace": "recording", "--trace": "recording"}
"""Over whose steps a contender's are told; else over those of plain torch."""


class Work:
    """A model, its optimizer and its batch."""

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        on_gpu = device == "cuda"
        if name == "short":
            layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, VOCABULARY)
            self.model: nn.Module = nn.Sequential(*layers).to(device)
            self._inputs = torch.randn(16, 32, device=device)
        else:
            width, length, rows = (1024, 512, 16) if on_gpu else (128, 32, 4)
            blocks = {"width": width, "layers": 12 if on_gpu else 4, "heads": 8}
            self.model = GPT(vocabulary=VOCABULARY, length=length, **blocks).to(device)
            self._inputs = torch.randint(VOCABULARY, (rows, length), device=device)
        self._targets = torch.randint(VOCABULARY, (self._inputs.shape[0],), device=device)
        if name != "short":
            self._targets = self._inputs
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=on_gpu)
        self.factor = 1.0

    def step(self) -> None:
        self.optimizer.zero_grad()
        with self._autocast:
            logits: Tensor = self.model(self._inputs)
        loss = F.cross_entropy(logits.float().flatten(0, -2), self._targets.flatten())
        (loss * self.factor if self.factor != 1.0 else loss).backward()
        self.optimizer.step()


class Watcher:
    """What `gradilocks run` puts around a script, there for the length of a block."""

    def __init__(self, path: Path, trace: str | None) -> None:
        self.guard = Guard(_raise)
        self.steps = StepRecorder(lambda: ScriptRecorder(path, all_ranks=False, git=None), print)
        self.tracer = None
        began = self.steps.data_wait.forward_begins
        self.calls = ScriptCalls(keeps=trace is not None, began=began)
        listeners: list[Any] = [self.steps.losses, self.calls, self.steps]
        if trace is not None:
            waits = trace == "always"
            self.tracer = ScriptTracer(self.calls, self.steps.recorder_now, waits=waits)
            listeners.append(self.tracer)
        self._listener = self.guard.around(listeners)
        self._hooks = TorchHooks()

    def __enter__(self) -> None:
        EVENTS.add(self._listener)
        self._hooks = TorchHooks()
        self._hooks.install()
        self.steps.data_wait.install()

    def __exit__(self, *_: object) -> None:
        self.steps.data_wait.close()
        self._hooks.remove()
        EVENTS.discard(self._listener)


def costs(device: str, *, seconds: float) -> dict[str, Any]:
    """Trains under everybody; what each step took, and a replay."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"device": device, "works": {}}
    for name in ("short", "long"):
        with tempfile.TemporaryDirectory() as folder:
            found["works"][name] = _compete(name, device, Path(folder), seconds / 2)
    return found


def _compete(name: str, device: str, folder: Path, seconds: float) -> dict[str, Any]:
    contenders: dict[str, tuple[Work, Callable[[], Any]]] = {}
    watchers: dict[str, Watcher] = {}
    contenders["nothing"] = Work(name, device), ExitStack
    for label, trace in WAYS.items():
        watcher = watchers[label] = Watcher(folder / f"{label}.jsonl", trace)
        contenders[label] = Work(name, device), lambda watcher=watcher: watcher
        _block(*contenders[label], 8, device)  # Until it is known which modules are called.
    contenders["anomaly mode"] = Work(name, device), _anomaly
    if has_underflow_overflow():
        from transformers.debug_utils import DebugUnderflowOverflow

        work = Work(name, device)
        DebugUnderflowOverflow(work.model)
        contenders["DebugUnderflowOverflow"] = work, ExitStack
    for work, around in contenders.values():
        _block(work, around, 4, device)
    many = max(1, int(BLOCK_SECONDS / _block(*contenders["nothing"], 4, device)))
    taken: dict[str, dict[int, float]] = {label: {} for label in contenders}
    until, labels, number = time.monotonic() + seconds, list(contenders), 0
    while time.monotonic() < until or number < 5 * SELDOM:
        labels = labels[1:] + labels[:1]
        for label in labels:
            if label in ("nothing", *WAYS) or number % SELDOM == 0:
                taken[label][number] = _block(*contenders[label], many, device)
        number += 1
    rows = [_row(label, taken) for label in contenders]
    step = statistics.median(taken["nothing"].values())
    replays = _replays(contenders["--trace"][0], watchers["--trace"], device)
    for watcher in watchers.values():
        if watcher.tracer is not None:
            watcher.tracer.close()
    return {
        "rounds": number,
        "steps_a_block": many,
        "parameters": sum(p.numel() for p in contenders["nothing"][0].model.parameters()),
        "replay_ms": 1e3 * statistics.median(replays),
        "replay_in_steps": statistics.median(replays) / step,
        "rows": rows,
    }


def _block(work: Work, around: Callable[[], Any], steps: int, device: str) -> float:
    """Seconds a step."""
    clock = _clock(device)
    with around():
        work.step()  # After the change.
        _synchronize(device)
        begin = clock()
        for _ in range(steps):
            work.step()
        _synchronize(device)
        return (clock() - begin) / steps


def _replays(work: Work, watcher: Watcher, device: str) -> list[float]:
    """Seconds that it takes to run a bad step once more, from a state that is put back."""
    assert watcher.tracer is not None
    tracer = watcher.tracer._tracer
    look, clock = tracer.look, _clock(device)
    taken: list[float] = []
    good = {name: value.clone() for name, value in work.model.state_dict().items()}

    def timed(*args: Any, **kwargs: Any) -> None:
        _synchronize(device)
        begin = clock()
        look(*args, **kwargs)
        _synchronize(device)
        taken.append(clock() - begin)

    tracer.look = timed  # type: ignore[method-assign]
    with watcher:
        for _ in range(REPLAYS):
            work.factor = float("nan")
            work.step()
            work.factor = 1.0
            work.model.load_state_dict(good)
            work.optimizer.state.clear()
            work.step()
    if len(taken) != REPLAYS or not tracer.findings:
        raise RuntimeError(f"{len(taken)} of {REPLAYS} bad steps were run once more")
    return taken


def _row(label: str, taken: dict[str, dict[int, float]]) -> dict[str, Any]:
    """Microseconds a step, and what is added to whose."""
    over = OVER.get(label, "nothing")
    mine, theirs = list(taken[label].values()), [taken[over][each] for each in taken[label]]
    added = [1e6 * (a - b) for a, b in zip(mine, theirs, strict=True)]
    share = [100 * (a / b - 1) for a, b in zip(mine, theirs, strict=True)]
    quarters = statistics.quantiles(added, n=4, method="inclusive")
    return {
        "contender": label,
        "median_us": 1e6 * statistics.median(mine),
        "least_us": 1e6 * min(mine),
        "over": over,
        "added_us": statistics.median(added),
        "added_us_quarters": [quarters[0], quarters[-1]],
        "added_us_of_least": 1e6 * (min(mine) - min(theirs)),
        "added_percent": statistics.median(share),
    }


def _anomaly() -> Any:
    return torch.autograd.detect_anomaly(check_nan=True)


def _clock(device: str) -> Callable[[], float]:
    return time.perf_counter if device == "cuda" else time.thread_time


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _raise(error: Exception) -> None:
    raise error


def table(found: dict[str, Any]) -> str:
    """As Markdown."""
    lines = [
        "| step | contender | us a step | added to | us (half of the rounds) "
        "| us, quickest blocks |",
        "|---|---|---|---|---|---|",
    ]
    for name, work in found["works"].items():
        for row in work["rows"]:
            cells = [name, row["contender"], f"{row['median_us']:,.0f}"]
            if row["contender"] == "nothing":
                cells += ["", "", ""]
            else:
                low, high = row["added_us_quarters"]
                spread = f"{row['added_us']:+,.0f} ({low:+,.0f} to {high:+,.0f})"
                cells += [row["over"], spread, f"{row['added_us_of_least']:+,.0f}"]
            lines.append("| " + " | ".join(cells) + " |")
    told = ", ".join(
        f"{work['replay_in_steps']:.1f} of the {name} ones ({work['replay_ms']:.1f} ms)"
        for name, work in found["works"].items()
    )
    return "\n".join(lines) + f"\n\nA replay takes as long as {told}."
