"""The length of the path through the code: calls of our functions in one step, and the files they are in.

Counted, not timed. `PYTHONPATH=tests .venv/bin/python tests/step/test_path_length.py` prints the calls.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import gradilocks
from control.given_gradients import use_path
from gradilocks import GradientControl

PACKAGE = str(Path(gradilocks.__file__).parent)


def calls_of(action) -> Counter[tuple[str, str]]:
    """The calls of functions of this package while `action()` runs, by file and function.

    A comprehension or lambda belongs to the function around it, and a generator counts once.
    """
    found: Counter[tuple[str, str]] = Counter()
    generators = []

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if code.co_flags & 0x20:  # A generator's frame is entered for every item.
            if any(frame is other for other in generators):
                return
            generators.append(frame)
        found[str(Path(code.co_filename).relative_to(PACKAGE)), code.co_name] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def calls_of_a_step(optimizer_name: str) -> Counter[tuple[str, str]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = {
        "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
        "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
        "own AdamW": lambda ps: gradilocks.optim.AdamW(ps, lr=1e-3),
    }[optimizer_name](model.parameters())
    control = GradientControl(optimizer, model=model, clip=1.0)
    for _ in range(3):
        control.backward(model(torch.ones(2, 8)).square().mean())
        found = calls_of(control.step)
        control.zero_grad()
    return found


def report(title: str, found: Counter[tuple[str, str]]) -> str:
    files = {file for file, _ in found}
    lines = [f"{title}: {found.total()} calls of {len(found)} functions in {len(files)} files"]
    return "\n".join(lines + [f"    {count:3d}  {file:30s} {name}" for (file, name), count in found.items()])


@pytest.mark.parametrize(("name", "calls", "files"), [("AdamW", 35, 10), ("AdamW fused", 29, 9), ("own AdamW", 33, 12)])
def test_a_step_is_a_short_path(name, calls, files, monkeypatch):
    use_path("C", monkeypatch)
    found = calls_of_a_step(name)
    text = report(name, found)
    assert found.total() <= calls, text
    assert len({file for file, _ in found}) <= files, text


if __name__ == "__main__":
    for kind in ("AdamW", "AdamW fused", "own AdamW"):
        print(report(kind, calls_of_a_step(kind)))
