"""The same parameters and gradients for several optimizers, and how far apart they end."""

from __future__ import annotations

import pytest
import torch

import gradilocks
from gradilocks import kernels
from gradilocks.optim import fused_optimizer

OPTIMIZERS = ("AdamW", "Adam", "SGD")
SETTINGS = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
}
MASTERED = [(70,), (3, 4), ()]
each_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)
# Adam has all that AdamW has, and with amsgrad one more tensor of state.
both_kinds = pytest.mark.parametrize("kind", ["Adam", "SGD"])


def ours(kind, params, **settings):
    return getattr(gradilocks.optim, kind)(params, **{**SETTINGS[kind], **settings})


def torchs(kind, params, **settings):
    return getattr(torch.optim, kind)(params, **{**SETTINGS[kind], "fused": True, **settings})


def sizes():
    """Odd sizes around a chunk of the kernels, an empty one and a scalar included."""
    chunk = fused_optimizer.CHUNK
    return [(), (0,), (1,), (chunk - 1,), (chunk,), (3, chunk // 2 + 5)]


def values(shapes, *, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [value.to(dtype).to(device) for value in made]


def parameters(shapes, *, seed=0, dtype=torch.float32, device="cpu"):
    return [
        torch.nn.Parameter(value) for value in values(shapes, seed=seed, dtype=dtype, device=device)
    ]


def give(params, step, *, factor=1.0):
    """New gradients, the same for every list of parameters of the same shapes."""
    for param, grad in zip(params, values([p.shape for p in params], seed=100 + step), strict=True):
        half = torch.float32 if param.dtype is torch.float64 else param.dtype
        param.grad = (grad.to(half) * factor).to(param.device, param.dtype)


def run(optimizer, steps, *, first=0):
    """So many steps on scripted gradients."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in range(first, first + steps):
        give(params, step)
        optimizer.step()


def exactly(kind, shapes, dtype, steps, **settings):
    """Where float64 arithmetic ends with gradients that are rounded as the others' are."""
    params = [torch.nn.Parameter(value.double()) for value in values(shapes, dtype=dtype)]
    optimizer = torchs(kind, params, **{**settings, "fused": False, "foreach": False})
    for step in range(steps):
        grads = values(shapes, seed=100 + step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(dtype).double()
        optimizer.step()
    return params


def error(params, exact):
    """The root of the mean square of all differences."""
    differences = [
        (param.detach().cpu().double() - wanted.detach()).flatten()
        for param, wanted in zip(params, exact, strict=True)
    ]
    return torch.cat(differences).square().mean().sqrt().item()


def same(one, other):
    """Whether two lists of tensors, or two states, are equal bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(_bits(one), _bits(other))
        )
    return one == other


def _bits(tensor):
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    made = tensor.detach().cpu().contiguous()
    return made.view(kinds[made.element_size()]) if made.is_floating_point() else made


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def close(params, others, *, tolerance=1e-5):
    """Asserts that two lists of tensors are equal within rounding."""
    for param, other in zip(params, others, strict=True):
        one, another = param.detach().cpu().double(), other.detach().cpu().double()
        torch.testing.assert_close(one, another, rtol=tolerance, atol=tolerance)


def skip_what_the_interpreter_rounds(dtype, device):
    """bfloat16 in the interpreter, which cuts it off instead of rounding."""
    if dtype is torch.bfloat16 and device == "cpu" and kernels.BACKENDS["cpu"].BY_ADDRESS:
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding; `-m gpu` tests it")


def mastered(kind, device, dtype=torch.float16, *, shapes=MASTERED, **settings):
    """Half-precision parameters and an optimizer that keeps masters of them."""
    skip_what_the_interpreter_rounds(dtype, device)
    params = parameters(shapes, dtype=dtype, device=device)
    return params, ours(kind, params, master_weights=True, **settings)


def masters_of(optimizer, params):
    return [optimizer.state[param]["master"] for param in params]


def check_rounded(optimizer, params):
    """Asserts that every parameter is its master rounded."""
    for param, master in zip(params, masters_of(optimizer, params), strict=True):
        assert master.dtype is torch.float32
        assert torch.equal(param, master.to(param.dtype))


def loaded(params, values):
    """Writes the values into the parameters, as loading a model does."""
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def contents_of(optimizer):
    """Every number of the state, for comparing."""
    return [
        {name: value.tolist() for name, value in optimizer.state[param].items()}
        for group in optimizer.param_groups
        for param in group["params"]
    ]
