"""Where the optimizers run: by torch on a CPU, by the kernels interpreted there, and on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks import kernels
from gradilocks.kernels import fused, launches, located, table
from gradilocks.optim import plan

sys.path.insert(0, str(Path(__file__).parent))

COMPILED = torch.cuda.is_available()
INTERPRETED = pytest.param(
    "interpreted",
    marks=pytest.mark.skipif(COMPILED, reason="with a GPU the kernels are compiled, not read"),
)
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def _prepare(way, monkeypatch):
    if way == "interpreted":
        monkeypatch.setitem(kernels._chosen, "cpu", (fused, "for this test"))
        # So that the interpreter, which is slow, sees tensors of several chunks.
        monkeypatch.setattr(plan, "CHUNK", 64)
        monkeypatch.setattr(launches, "TILE", 32)
        monkeypatch.setattr(located, "CHUNK", 256)
        monkeypatch.setattr(fused, "TILE", 128)
    return "cuda" if way == "cuda" else "cpu"


@pytest.fixture(params=["by torch", INTERPRETED, CUDA])
def device(request, monkeypatch):
    """Wherever the optimizers run."""
    yield _prepare(request.param, monkeypatch)
    table._layouts.clear()


@pytest.fixture(params=[INTERPRETED, CUDA])
def kernel_device(request, monkeypatch):
    """Where our own kernels serve."""
    yield _prepare(request.param, monkeypatch)
    table._layouts.clear()


@pytest.fixture
def cuda():
    """A GPU; for tests marked `gpu`."""
    return "cuda"
