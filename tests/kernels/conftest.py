"""The backends that tests of kernels run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gradilocks.kernels import reference
from kernels.cases import DTYPES, strided_copy


@dataclass(frozen=True)
class BackendCase:
    """A backend with tensors it can process."""

    name: str
    module: Any
    device: str
    sizes: list[int]
    """Odd sizes, around those at which the backend changes its way of working."""
    accuracy: float
    """Relative error of norms of tensors of these sizes, if their dtype has a kernel."""

    def accuracy_of(self, dtype: torch.dtype) -> float:
        """Relative error of norms of one dtype. Half precision without a kernel is measured by plain torch."""
        is_half = dtype in (torch.float16, torch.bfloat16)
        return max(self.accuracy, 1e-6) if is_half and dtype not in getattr(self.module, "TYPES", ()) else self.accuracy

    def copies(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies on the backend's device, with the same strides and offsets."""
        return [strided_copy(tensor, self.device) for tensor in tensors]

    def number(self, value: Any) -> Tensor:
        """A float64 tensor on the backend's device."""
        return torch.tensor(value, dtype=torch.float64, device=self.device)


SMALL = [0, 1, 2, 3, 15, 16, 17, 127, 129, 1023, 1025, 4097]
TRITON_CHUNK = 512


def _interpreted(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("with a GPU, Triton compiles its kernels and cannot process CPU tensors")
    pytest.importorskip("triton", reason="Triton is not installed")
    from gradilocks.kernels import cuda, triton_kernels

    # Small chunks, so that the interpreter, which is slow, divides small tensors.
    for module, name, value in [
        (cuda, "MEASURE_CHUNK", TRITON_CHUNK),
        (cuda, "MULTIPLY_CHUNK", TRITON_CHUNK),
        (triton_kernels, "MEASURE_TILE", 128),
        (triton_kernels, "ELEMENTWISE_TILE", 128),
    ]:
        monkeypatch.setattr(module, name, value)
    return BackendCase("Triton", cuda, "cpu", [0, 1, 512, 1029], 1e-14)


@pytest.fixture(
    params=["torch", "C", "Triton", *(pytest.param(n, marks=pytest.mark.gpu) for n in ("CUDA", "torch-CUDA"))]
)
def backend(request, monkeypatch) -> BackendCase:
    """Every backend in turn."""
    name = request.param
    if name == "Triton":
        return _interpreted(monkeypatch)
    if name == "C":
        return BackendCase(name, request.getfixturevalue("cpu"), "cpu", [*SMALL, 32_769, 70_001], 1e-14)
    if name == "CUDA":
        from gradilocks.kernels import cuda

        return BackendCase(name, cuda, "cuda", [*SMALL, 32_769, 70_001], 1e-14)
    return BackendCase(name, reference, "cuda" if "CUDA" in name else "cpu", [*SMALL, 70_001], 1e-6)


@pytest.fixture
def cpu():
    """The backend of the C extension."""
    return pytest.importorskip("gradilocks.kernels.cpu", reason="the C extension is not compiled", exc_type=ImportError)


@pytest.fixture
def threads():
    """`torch.set_num_threads`, undone after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request) -> torch.dtype:
    """Every element type in turn."""
    return request.param
