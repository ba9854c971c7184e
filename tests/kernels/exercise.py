"""Runs every kernel once on awkward tensors, for compute-sanitizer. Not a test by itself:

PYTHONPATH=src compute-sanitizer --tool memcheck python tests/kernels/exercise.py
PYTHONPATH=src compute-sanitizer --tool racecheck python tests/kernels/exercise.py
"""

import torch

from gradilocks import DynamicScale, GradientControl, GradScaler, clip_grad_norm_, kernels, optim
from gradilocks.kernels import native, triton_backend

SIZES = (1, 3, 2047, 4096, 4097, 32768, 70_001)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OPTIMIZERS = (
    (optim.AdamW, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.AdamW, {"master_weights": True}),
)


def tensors(dtype, device):
    """Odd sizes, an empty one, and one at an odd address."""
    made = [torch.randn(size, device=device).to(dtype) for size in (*SIZES, 0)]
    return [*made, torch.randn(5001, device=device).to(dtype)[1:]]


def exercise(device):
    """Every kernel, every dtype, values that make the kernels read twice."""
    for dtype in DTYPES:
        some = tensors(dtype, device)
        some[3][7] = float("inf")
        some[4][8] = float("nan")
        some[5].mul_(torch.finfo(dtype).tiny)
        for order in (2.0, 1.0, float("inf")):
            triton_backend.measure(some, order=order)
        triton_backend.multiply_and_check_(some, torch.full((), 0.5, device=device))
        triton_backend.multiply_(some, torch.full((), 0.5, device=device))
        triton_backend.clamp_(some, torch.full((), 0.25, device=device))
    mixed = [tensor for dtype in DTYPES for tensor in tensors(dtype, device)]
    for optimizer_class, settings in OPTIMIZERS:
        params = [torch.nn.Parameter(tensor.clone()) for tensor in mixed]
        params.append(torch.nn.Parameter(torch.randn(33, 17, device=device).t()))
        params.append(torch.nn.Parameter(torch.randn(33, 34, device=device)[:, ::2]))
        optimizer = optimizer_class(params, lr=1e-3, **settings)
        policy = DynamicScale(init_scale=2.0**-3, growth_interval=1)
        control = GradientControl(optimizer, clip=1.0, scale=policy)
        for bad in (False, True, False):
            loss = sum(param.float().sum() for param in params)
            control.backward(loss * float("inf") if bad else loss)
            assert control.step().skipped == bad
            control.zero_grad()

    repeat(device)
    some = [torch.nn.Parameter(tensor) for tensor in mixed if tensor.dtype is not torch.float16]
    optimizer = torch.optim.SGD(some, lr=1e-3)
    scaler = GradScaler("cuda")
    for bad in (False, True):
        scaler.scale(sum(param.float().sum() for param in some)).backward()
        if bad:
            some[4].grad[5] = float("nan")
        scaler.unscale_(optimizer)
        for order in (2.0, 1.0, float("inf")):
            clip_grad_norm_(some, 0.5, order)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def repeat(device):
    """Steps that are taken again by the same launches, on gradients that lie elsewhere."""
    for optimizer_class, settings in OPTIMIZERS:
        dtype = torch.bfloat16 if "master_weights" in settings else torch.float32
        params = [torch.nn.Parameter(torch.randn(s, device=device).to(dtype)) for s in SIZES]
        optimizer = optimizer_class(params, lr=1e-3, **settings)
        control = GradientControl(optimizer, clip=1.0)
        held = []
        for number in range(7):
            control.backward(sum(param.float().sum() for param in params))
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number // 2)
            control.step()
            held.append([param.grad for param in params])
            control.zero_grad()
        assert control._bound is not None or native.library() is None


if __name__ == "__main__":
    exercise(torch.device("cuda"))
    torch.cuda.synchronize()
    print(kernels.describe()["cuda"])
