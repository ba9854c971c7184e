"""A step makes no buffer of the gradients' size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gradilocks import ClipByNorm, ClipByValue, GradientControl
from tests import PATIENCE

ELEMENTS = 1 << 23
"""32 MiB of float32: many pieces of the size in which gradients are read."""


def largest_allocation(work):
    """The most bytes that one operation asked torch's allocator for while `work` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    sizes = [event.cpu_memory_usage for event in seen.events() if event.cpu_memory_usage > 0]
    return max(sizes, default=0)


def step_allocation(dtype, clip, *, fused, gradient, layout=None, unscale=False):
    p = nn.Parameter(torch.zeros(ELEMENTS // 4096, 4096, dtype=dtype))
    optimizer = torch.optim.SGD([p], lr=0.1, fused=fused)
    control = GradientControl(optimizer, clip=clip, scale=None if dtype is torch.float16 else 2.0)
    p.grad = torch.full_like(p, gradient) if layout is None else layout(gradient, dtype)
    control.scale_loss(torch.zeros((), requires_grad=True) * 1.0)

    def work():
        if unscale:
            control.unscale_()
        control.step()

    return largest_allocation(work), p.grad.numel() * p.grad.element_size()


CASES = [
    (torch.float32, None, 0.5),
    (torch.float32, ClipByNorm(1.0), 0.5),
    (torch.float32, ClipByNorm(1.0, order=1.0), 0.5),
    (torch.float32, ClipByNorm(1.0, order=float("inf")), 0.5),
    (torch.float32, ClipByValue(0.1), 0.5),
    (torch.float32, ClipByNorm(1.0), 1e30),  # must be read again: its squares overflow
    (torch.float32, ClipByNorm(1.0), float("nan")),
    (torch.float32, ClipByNorm(1.0), float("inf")),
    (torch.bfloat16, ClipByNorm(1.0), 0.5),
    (torch.float16, ClipByNorm(1.0), 0.5),
]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "clip", "gradient"), CASES)
def test_no_operation_of_a_step_allocates_a_gradient(dtype, clip, gradient, fused):
    # A piece of 2^20 elements in float64 is the most that may be held.
    asked, size = step_allocation(dtype, clip, fused=fused, gradient=gradient)
    assert asked <= 8 << 20 < size


def test_unscaling_in_place_allocates_no_gradient():
    asked, size = step_allocation(
        torch.float32, ClipByNorm(1.0), fused=False, gradient=0.5, unscale=True
    )
    assert asked <= 8 << 20 < size


def test_a_strided_gradient_is_not_copied_whole():
    def columns(value, dtype):
        return torch.full((ELEMENTS // 4096, 8192), value, dtype=dtype)[:, ::2]

    asked, size = step_allocation(
        torch.float32, ClipByNorm(1.0), fused=False, gradient=0.5, layout=columns
    )
    assert asked <= 8 << 20 < size


PROGRAM = """
import json, sys
import torch
from gradilocks import ClipByNorm, ClipByValue, GradientControl

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

p = torch.nn.Parameter(torch.zeros(50_000_000))
p.grad = torch.full_like(p, 0.5)
small = torch.nn.Parameter(torch.zeros(64, 64))
grown = {}
for name, clip in (("norm", ClipByNorm(1.0)), ("value", ClipByValue(0.1))):
    for fused in (False, True):
        warm = GradientControl(torch.optim.SGD([small], lr=0.1, fused=fused), clip=clip)
        warm.backward((small * 2.0).sum())
        warm.step()
        control = GradientControl(torch.optim.SGD([p], lr=0.1, fused=fused), clip=clip)
        control.scale_loss(torch.zeros((), requires_grad=True) * 1.0)
        before = peak()
        control.step()
        grown[f"{name}, fused={fused}"] = peak() - before
print(json.dumps(grown))
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc"
)
def test_the_peak_memory_of_a_process_grows_by_far_less_than_a_gradient_of_200_megabytes():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert len(grown) == 4
    # Pieces of a few megabytes, the threads' stacks, and what BLAS sets up when first used.
    assert max(grown.values()) < 60 << 20, grown
