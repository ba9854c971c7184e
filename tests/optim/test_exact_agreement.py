"""Every setting gives torch's results: as close to float64's as torch's fused kernels come."""

from __future__ import annotations

import pytest
import torch

from tests.optim.twins import (
    close,
    each_optimizer,
    error,
    exactly,
    give,
    ours,
    parameters,
    run,
    sizes,
    skip_what_the_interpreter_rounds,
    torchs,
    values,
)

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STEPS = 3
ADAM = [
    {},
    {"weight_decay": 0.0},
    {"amsgrad": True},
    {"maximize": True},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.3},
    {"eps": 0.1},
    {"eps": 0.0},
    {"betas": (0.0, 0.0), "eps": 1e-3},
    {"betas": (0.0, 0.99)},
    {"betas": (0.5, 0.0), "eps": 1e-3},
    {"betas": (0.99, 0.9999)},
    {"lr": 0.0},
]
SGD = [
    {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0},
    {"momentum": 0.0, "dampening": 0.0},
    {},
    {"dampening": 0.0},
    {"dampening": 0.9},
    {"dampening": 0.0, "nesterov": True},
    {"dampening": 0.0, "nesterov": True, "maximize": True, "weight_decay": 0.0},
    {"maximize": True},
    {"momentum": 0.0, "dampening": 0.5, "maximize": True},
    {"momentum": 0.99},
]
CASES = [
    *(("AdamW", settings) for settings in ADAM),
    *(("Adam", settings) for settings in [*ADAM, {"decoupled_weight_decay": True}]),
    *(("SGD", settings) for settings in SGD),
]
ROUNDING = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def words(case):
    if isinstance(case, str):
        return case
    return " ".join(f"{key}={value}" for key, value in case.items()) or "plain"


def check(kind, device, dtype=torch.float32, **settings):
    shapes = sizes()
    mine, theirs = (parameters(shapes, dtype=dtype, device=device) for _ in range(2))
    run(ours(kind, mine, **settings), STEPS)
    run(torchs(kind, theirs, **settings), STEPS)
    exact = exactly(kind, shapes, dtype, STEPS, **settings)
    # Chance, in 300 elements on the CPU and 15,000 on a GPU.
    tiny = torch.finfo(dtype).eps / (16 if device == "cpu" else 64)
    if dtype is not torch.float64:  # Of which there is no more exact arithmetic here.
        assert error(mine, exact) <= 1.05 * error(theirs, exact) + tiny
    assert error(exact, values(shapes, dtype=dtype)) > 1e-3 or settings.get("lr") == 0.0
    close(mine, exact, tolerance=ROUNDING[dtype])


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=words)
def test_every_setting_gives_torchs_results(kind, settings, device):
    check(kind, device, **settings)


@each_optimizer
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_every_dtype_gives_torchs_results(kind, dtype, device):
    skip_what_the_interpreter_rounds(dtype, device)
    check(kind, device, dtype)


@each_optimizer
def test_dtypes_mix_in_one_optimizer(kind, device):
    dtypes = [torch.float32, torch.float16, torch.float64, torch.float32]
    if device == "cuda":
        dtypes.append(torch.bfloat16)
    mine, theirs = (
        [
            parameters([(7,)], dtype=dtype, device=device, seed=i)[0]
            for i, dtype in enumerate(dtypes)
        ]
        for _ in range(2)
    )
    run(ours(kind, mine), STEPS)
    alone = [torchs(kind, [param], fused=False) for param in theirs]
    for step in range(STEPS):
        give(theirs, step)
        for optimizer in alone:
            optimizer.step()
    for param, other in zip(mine, theirs, strict=True):
        close([param], [other], tolerance=ROUNDING[param.dtype])


GROUPS = {
    "AdamW": [{}, {"lr": 0.1}, {"betas": (0.5, 0.6)}, {"weight_decay": 0.0}, {"maximize": True}],
    "Adam": [{}, {"lr": 0.1}, {"betas": (0.0, 0.6)}, {"amsgrad": False}, {"eps": 1e-2}],
    "SGD": [{}, {"lr": 0.5}, {"momentum": 0.0}, {"weight_decay": 0.0}, {"maximize": True}],
}


@each_optimizer
def test_each_group_has_its_own_settings(kind, device):
    shapes = [(5,), (70,), (3, 4)]

    def groups():
        return [
            {"params": parameters(shapes, seed=place, device=device), **settings}
            for place, settings in enumerate(GROUPS[kind])
        ]

    mine, theirs = ours(kind, groups()), torchs(kind, groups())
    run(mine, STEPS)
    run(theirs, STEPS)
    for one, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        close(one["params"], other["params"])
    ends = [group["params"][0] for group in mine.param_groups]
    assert len({tuple(end.tolist()) for end in ends}) == len(ends)


@each_optimizer
def test_the_same_gradients_give_the_same_bits(kind, device):
    first, second = (parameters(sizes(), device=device) for _ in range(2))
    run(ours(kind, first), STEPS)
    run(ours(kind, second), STEPS)
    assert all(map(torch.equal, first, second))


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"weight_decay": 0.0}], ids=words)
def test_a_thousand_steps_stay_as_close_to_float64_as_torchs(settings, cuda):
    shapes = [(257, 129), (8191,), (1,)]
    mine, theirs = (parameters(shapes, device=cuda) for _ in range(2))
    exact = [torch.nn.Parameter(p.detach().double()) for p in mine]
    optimizers = [
        ours("AdamW", mine, **settings),
        torchs("AdamW", theirs, **settings),
        torchs("AdamW", exact, **settings, fused=False, foreach=False),
    ]
    generator = torch.Generator(cuda).manual_seed(1)
    for _ in range(1000):
        grads = [torch.randn(shape, generator=generator, device=cuda) for shape in shapes]
        for optimizer in optimizers:
            for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
                param.grad = grad.to(param.dtype, copy=True)
            optimizer.step()
    ends = [param.detach().cpu() for param in exact]
    assert error(mine, ends) <= 1.05 * error(theirs, ends)
    assert error(mine, ends) < 1e-4
