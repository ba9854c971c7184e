"""Where the steps run, and who settles them."""

from __future__ import annotations

import pytest

from tests.engine.backends import DEVICES, Settling, serve


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """A device that the Triton kernels serve: interpreted on the CPU, compiled on CUDA."""
    return serve(request.param, monkeypatch)


@pytest.fixture
def settling(device, monkeypatch):
    """Whether the device may settle the steps there, and how many it has settled."""
    return Settling(monkeypatch)
