"""Runs every kernel once on awkward tensors, for compute-sanitizer. Not a test by itself:

PYTHONPATH=src compute-sanitizer --tool memcheck python tests/kernels/exercise.py
PYTHONPATH=src compute-sanitizer --tool racecheck python tests/kernels/exercise.py
"""

import torch

from gradilocks import GradientControl, kernels, optim
from gradilocks.kernels import fused

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
            fused.measure(some, order=order)
        fused.multiply_and_check_(some, torch.full((), 0.5, device=device))
        fused.multiply_(some, torch.full((), 0.5, device=device))
        fused.clamp_(some, torch.full((), 0.25, device=device))
    mixed = [tensor for dtype in DTYPES for tensor in tensors(dtype, device)]
    for optimizer_class, settings in OPTIMIZERS:
        params = [torch.nn.Parameter(tensor.clone()) for tensor in mixed]
        optimizer = optimizer_class(params, lr=1e-3, **settings)
        control = GradientControl(optimizer, clip=1.0, scale=2.0**-3)
        for bad in (False, True, False):
            loss = sum(param.float().sum() for param in params)
            control.backward(loss * float("inf") if bad else loss)
            assert control.step().skipped == bad
            control.zero_grad()


if __name__ == "__main__":
    exercise(torch.device("cuda"))
    torch.cuda.synchronize()
    print(kernels.describe()["cuda"])
