"""Each gradient is measured once and written at most once, and no buffer of the gradients' size is allocated."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from control.given_gradients import INF, MAKERS, PATHS, loss_giving, use_path
from gradilocks import AdaGC, ClipByValue, GradientControl, HeadroomScale, clip_grad_norm_, kernels

FUNCTIONS = ("measure", "norm", "multiply_", "clamp_", "unscale_")


@pytest.fixture
def calls(monkeypatch):
    """The kernel functions that were called, in order; calls within another one are not listed."""
    found, depth = [], [0]

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*args, **options):
            if not depth[0]:
                found.append(name.removesuffix("_at"))
            depth[0] += 1
            try:
                return original(*args, **options)
            finally:
                depth[0] -= 1

        monkeypatch.setattr(owner, name, counted)

    for name in FUNCTIONS:
        count(kernels, name)
    if kernels.has_kernels("cpu"):
        extension = kernels.backend_for("cpu")
        count(extension, "measure_at")
        count(extension, "step")
    return found


def iteration(control, params, gradient=1.0, *, unscale=False):
    control.zero_grad()
    control.backward(loss_giving(*((p, gradient) for p in params)))
    if unscale:
        control.unscale_()
    control.step()


@pytest.mark.parametrize("path", ["torch", "C"])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("options", [{}, {"clip": 1.0}, {"scale": HeadroomScale()}, {"scale": None, "clip": 1.0}])
def test_a_step_measures_once_and_multiplies_at_most_once(path, name, options, calls, monkeypatch):
    use_path(path, monkeypatch)
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]
    control = GradientControl(MAKERS[name](params), **options)
    # In plain torch the global norm is enough for a finite step under the plain rules.
    is_norm_enough = path == "torch" and not isinstance(options.get("scale"), HeadroomScale)
    reads = ["norm"] if is_norm_enough else ["measure"]
    writes = {("SGD momentum", path): ["multiply_"], ("own AdamW", "C"): ["step"]}.get((name, path), [])
    for _ in range(3):
        calls.clear()
        iteration(control, params)
        assert calls == reads + writes
    calls.clear()
    iteration(control, params, INF)
    assert calls == (["norm", "measure"] if is_norm_enough else ["measure"])
    calls.clear()
    iteration(control, params, unscale=True)
    has_scale = options.get("scale", 1) is not None
    assert calls == (["unscale_"] if has_scale else []) + reads + writes


def test_clip_grad_norm_reads_and_writes_gradients_once(calls):
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]
    loss_giving(*((p, 1.0) for p in params)).backward()
    clip_grad_norm_(params, 1e-3)
    assert calls == ["norm", "multiply_"]


def test_policies_per_tensor_and_value_add_one_write_each(calls):
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5))]
    for clip, expected in ((AdaGC(), ["measure", "multiply_"]), (ClipByValue(0.5), ["measure", "clamp_"])):
        control = GradientControl(MAKERS["AdamW fused"](params), clip=clip)
        iteration(control, params)
        calls.clear()
        iteration(control, params)
        assert calls == expected


class LargestAllocation(TorchDispatchMode):
    """The largest tensor that operations return in memory that none of their arguments has."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, tensor.numel())
        return result


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


@pytest.mark.parametrize("path", [path for path in PATHS if path in ("torch", "C")])
@pytest.mark.parametrize("name", MAKERS)
def test_no_buffer_of_the_gradients_size_is_allocated(path, name, monkeypatch):
    use_path(path, monkeypatch)
    params = [nn.Parameter(torch.ones(100_000)), nn.Parameter(torch.ones(50_000))]
    control = GradientControl(MAKERS[name](params), clip=1.0)
    if name == "SGD momentum":
        # torch's own step allocates; only what happens before it counts.
        control.optimizers[0].step = lambda: None
    for _ in range(3):
        control.zero_grad()
        control.backward(loss_giving(*((p, 1.0) for p in params)))
        with LargestAllocation() as largest:
            control.step()
    # Plain torch keeps one norm per 128 elements, 1,172 of them.
    assert largest.elements <= 1200
