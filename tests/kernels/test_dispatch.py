"""The choice of a backend by device type."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from gradilocks import kernels
from gradilocks.kernels import reference


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch):
    """No backend has been chosen yet."""
    monkeypatch.setattr(kernels, "BACKENDS", {})
    monkeypatch.setattr(kernels, "_failures", {})


def test_the_c_extension_serves_cpu_tensors(cpu):
    assert kernels.backend_for("cpu") is cpu
    assert kernels.describe()["cpu"] == cpu.DESCRIPTION


def test_an_entry_of_none_selects_plain_torch(monkeypatch):
    monkeypatch.setitem(kernels.BACKENDS, "cpu", None)
    assert kernels.backend_for("cpu") is reference
    assert kernels.describe()["cpu"] == "plain torch: selected in kernels.BACKENDS"
    assert kernels.measure([torch.tensor([3.0, 4.0])])[0].item() == 5.0


def test_without_the_extension_plain_torch_serves_cpu_tensors_and_the_reason_is_known(monkeypatch):
    monkeypatch.setattr("pathlib.Path.exists", lambda self: False)
    monkeypatch.delitem(sys.modules, "gradilocks.kernels.cpu", raising=False)
    assert kernels.backend_for("cpu") is reference
    assert kernels.describe()["cpu"] == (
        "plain torch: ImportError: the C extension was not compiled; install with a C++ compiler to get it"
    )


def test_a_backend_whose_kernels_do_not_compile_is_replaced_by_plain_torch(monkeypatch):
    def measure(tensors):
        raise RuntimeError("no C compiler")

    monkeypatch.setitem(sys.modules, "broken", types.SimpleNamespace(measure=measure))
    monkeypatch.setitem(kernels._MODULES, "cpu", "broken")
    assert kernels.measure([torch.tensor([3.0, 4.0])])[0].item() == 5.0
    assert kernels.describe()["cpu"] == "plain torch: RuntimeError: no C compiler"


def test_other_devices_are_served_by_plain_torch():
    assert kernels.backend_for("mps") is reference
    assert kernels.backend_for("xpu") is reference


def test_the_four_operations_go_to_the_chosen_backend(monkeypatch):
    calls = []
    names = ("measure", "multiply_", "clamp_", "unscale_")
    backend = types.SimpleNamespace(**{name: lambda *a, name=name, **k: calls.append(name) for name in names})
    monkeypatch.setitem(kernels.BACKENDS, "cpu", backend)
    number = torch.tensor(1.0, dtype=torch.float64)
    kernels.measure([torch.ones(1)])
    for name in names[1:]:
        getattr(kernels, name)([torch.ones(1)], number)
    assert calls == list(names)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_the_reason_is_known():
    assert kernels.describe()["cuda"] == "plain torch: no CUDA device"


@pytest.mark.gpu
def test_triton_serves_cuda_tensors():
    assert kernels.describe()["cuda"] == "Triton"
