"""How far the way through the code is: the calls that one step makes, and the files they are in.

Counted, not timed. `python -m tests.engine.test_path_length` prints the calls one by one.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import gradilocks
from gradilocks import GradientControl, GradScaler, clip_grad_norm_, kernels
from gradilocks.kernels import native

HOUSE = str(Path(gradilocks.__file__).parent)


def calls_of(action):
    """The calls of functions of Gradilocks while `action()` runs: (file, function) -> how many.

    A comprehension and a lambda belong to the function around them (newer Pythons have no call for
    the former), and a generator that goes on is not called again.
    """
    found: Counter[tuple[str, str]] = Counter()
    begun = set()

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(HOUSE):
            return
        if code.co_name.startswith("<") or id(frame) in begun:
            return
        if code.co_flags & 0x20:  # A generator's frame is entered at every item.
            begun.add(id(frame))
            frames.append(frame)
        found[str(Path(code.co_filename).relative_to(HOUSE)), code.co_name] += 1

    frames = []  # So that no id is given twice.
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return found


def report(title, found):
    files = {file for file, _ in found}
    print(f"{title}: {found.total()} calls of {len(found)} functions in {len(files)} files")
    for (file, function), count in found.items():
        print(f"    {count:3d}  {file:32s} {function}")


def small_model(fused=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), torch.ones(2, 8)


def control_step(fused=False):
    """One `control.step()` in mid-run."""
    model, optimizer, inputs = small_model(fused)
    control = GradientControl(optimizer, model=model, clip=1.0)
    for _ in range(3):
        control.backward(model(inputs).square().mean())
        found = calls_of(control.step)
        control.zero_grad()
    return found


def dropin_loop(fused=False):
    """One iteration with the drop-ins in mid-run: scale, unscale_, clip, step, update."""
    model, optimizer, inputs = small_model(fused)
    scaler = GradScaler("cpu", model=model)

    def iteration():
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        loss = model(inputs).square().mean()
        found = calls_of(iteration)
        optimizer.zero_grad()
    return found


def check(title, found, *, calls, files):
    report(title, found)
    assert found.total() <= calls
    assert len({file for file, _ in found}) <= files


@pytest.fixture(params=["plain torch", "C++"])
def way(request, monkeypatch):
    """By plain torch, where nothing is built, or by the native library."""
    gc.collect()  # A control of another test that is still there would be asked for its order.
    if request.param == "plain torch":
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setitem(kernels.BACKENDS, "cpu", kernels.reference)
    elif native.library() is None:
        pytest.skip("the native library is not built here")
    return request.param


# Where C++ settles the step, the way is that of a GPU: a table of addresses, a settler. It is as
# many calls and less time: what plain torch does in sixty operations is one of them. Marks on the
# gradients that a step has used up are methods of Python there, four calls; of C++ they are none.
# Whether gradients have lost their memory is one call more, and a part of the walk in C++.
STEP = {"plain torch": 62, "C++": 58}
# The guard against unscaling twice has methods, of which C++ has its own: up to ten calls more.
ITERATION = {"plain torch": 91, "C++": 100}
MORE_FILES = {"plain torch": 0, "C++": 5}


def test_a_step_of_a_control_is_a_short_way(way):
    calls, more = STEP[way], MORE_FILES[way]
    check("control.step()", control_step(), calls=calls, files=10 + more)
    # A fused optimizer is handed the decision: whose step it is, is asked in one file more.
    check("control.step(), fused", control_step(fused=True), calls=calls, files=11 + more)


def test_a_step_that_is_as_the_last_one_was_is_a_very_short_way(way):
    """The steps of `gradilocks.optim`, which are bound: some sixty calls the whole way."""
    if way == "plain torch":
        pytest.skip("a step is bound where C++ makes its launches")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = gradilocks.optim.AdamW(model.parameters(), lr=1e-3)
    control = GradientControl(optimizer, model=model, clip=1.0)
    for _ in range(4):
        control.backward(model(torch.ones(2, 8)).square().mean())
        found = calls_of(control.step)
        control.zero_grad()
    check("control.step(), again", found, calls=16, files=7)


def test_an_iteration_with_the_drop_ins_is_a_short_way(way):
    calls, more = ITERATION[way], MORE_FILES[way]
    check("the drop-ins' loop", dropin_loop(), calls=calls, files=10 + more)
    check("the drop-ins' loop, fused", dropin_loop(fused=True), calls=calls, files=12 + more)


if __name__ == "__main__":
    report("control.step()", control_step())
    report("the drop-ins' loop", dropin_loop())
