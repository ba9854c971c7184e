"""Fixtures of the drop-in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from control.given_gradients import use_path
from dropin.loops import SCALERS, two_weights
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


@pytest.fixture(params=sorted(SCALERS))
def scaler_class(request):
    """torch's class and ours: a test with this fixture states a fact of torch's class."""
    return SCALERS[request.param]


@pytest.fixture
def param():
    return two_weights()


@pytest.fixture(params=["torch", "kernels"])
def unscaled_by(request):
    """Gradients on a CPU are unscaled by torch's pass, then by our kernels."""
    if request.param == "kernels":
        request.getfixturevalue("_kernels_on_cpu")


@pytest.fixture(params=["extension", "plain torch"])
def cpu_backend(request, monkeypatch):
    """The C extension, then torch's own operations."""
    if request.param == "plain torch":
        monkeypatch.setitem(kernels.BACKENDS, "cpu", None)


@pytest.fixture
def use_kernels(monkeypatch: pytest.MonkeyPatch, _kernels_on_cpu: None) -> Callable[[str], str]:
    """Selects an entry of `PATHS`; returns the device of the tensors."""
    return lambda name: use_path(name, monkeypatch)
