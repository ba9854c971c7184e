"""Fixtures of the drop-in tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

import pytest
import torch

from gradilocks import kernels
from gradilocks.dropin import grad_scaler


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The tensors are small, and on a busy machine threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unscales CPU gradients with our kernels, as on a GPU."""
    monkeypatch.setattr(grad_scaler, "_TORCH_DTYPES", {"cpu": set(), "cuda": set()})


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Selects an entry of `dropin.devices.DEVICES`; returns the device of the tensors."""

    def select(name: str) -> str:
        monkeypatch.setattr(grad_scaler, "_TORCH_DTYPES", {"cpu": set(), "cuda": set()})
        if name == "interpreted":
            pytest.importorskip("triton", reason="Triton is not installed")
            monkeypatch.setitem(kernels.BACKENDS, "cpu", importlib.import_module("gradilocks.kernels.cuda"))
        elif name == "plain torch":
            monkeypatch.setitem(kernels.BACKENDS, "cpu", None)
        return "cuda" if name == "cuda" else "cpu"

    return select
