"""A small training for all frameworks; one batch makes the gradient of `middle.weight`, and of nothing else, Inf."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gradilocks import GradientControl, optim

CULPRIT = "middle.weight"
WIDTH, ROWS, STEPS = 6, 4, 6
CLIP = 0.02
"""A norm that clips most steps."""
BAD_STEP = 2
"""The step, from 0, whose last batch is bad."""

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "ours": lambda params: optim.AdamW(params, lr=0.01),
}

each_precision = pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
each_setting = pytest.mark.parametrize(
    ("make", "precision", "accumulate"),
    [
        pytest.param(OPTIMIZERS[name], precision, accumulate, id=f"{name}-{precision}-{accumulate}")
        for name, precision, accumulate in (
            ("sgd", "no", 2),
            ("sgd", "fp16", 1),
            ("fused", "no", 1),
            ("fused", "bf16", 1),
            ("fused", "fp16", 2),
            ("ours", "bf16", 2),
            ("ours", "fp16", 1),
        )
    ],
)


class Network(nn.Module):
    """Three layers. The last column of a batch is 1 for a bad batch; the output is the loss of each row."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first, self.middle, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.is_bad = False
        self.middle.weight.register_hook(lambda grad: torch.full_like(grad, torch.inf) if self.is_bad else grad)

    def forward(self, rows: Tensor) -> Tensor:
        rows, marker = rows[:, :WIDTH], rows[:, WIDTH]
        self.is_bad = bool(marker.amax() > 0)
        hidden = torch.tanh(self.middle(torch.tanh(self.first(rows))))
        # Small enough that float16 gradients hold it times the first scale, 65,536.
        return 0.01 * (self.head(hidden).float().squeeze(-1) - rows.float().sum(-1)).square()


def batches(steps: int = STEPS, *, accumulate: int = 1, bad: int | None = BAD_STEP) -> list[Tensor]:
    """`steps * accumulate` batches; the last batch of step `bad` is the bad one."""
    rows = torch.randn(steps * accumulate, ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    marker = torch.zeros(steps * accumulate, ROWS, 1)
    if bad is not None:
        marker[(bad + 1) * accumulate - 1] = 1.0
    return list(torch.cat([rows, marker], dim=-1))


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [param.detach().clone() for param in model.parameters()]


def assert_same(ours: list[Tensor], expected: list[Tensor], *, tolerance: float = 0.0) -> None:
    """Fails unless the tensors are equal, bit for bit by default."""
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def reset_accelerate() -> None:
    """Clears the state that Accelerators share within a process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def use_float16(accelerator) -> None:
    """Makes an Accelerator autocast to float16 and scale, which it does on a GPU only."""
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    handler = accelerator.scaler_handler
    accelerator.scaler = torch.amp.GradScaler("cpu", **({} if handler is None else handler.to_kwargs()))


def control_loop(make, rows, schedule, *, precision="no", accumulate=1, **options) -> tuple[list[Tensor], list[float]]:
    """The same training with a GradientControl alone: its parameters and norms."""
    model, norms = Network(), []
    optimizer = make(model.parameters())
    control = GradientControl(optimizer, model=model, scale="dynamic" if precision == "fp16" else None, **options)
    scheduler = control.scheduler(LambdaLR(optimizer, schedule))
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for i, batch in enumerate(rows, start=1):
        with torch.autocast("cpu", dtype, enabled=precision != "no"):
            loss = model(batch)
        control.backward(loss.mean() / accumulate)
        if i % accumulate == 0:
            norms.append(control.step().norm)
            scheduler.step()
            control.zero_grad()
    return weights(model), norms


def join_process_group(rank: int) -> None:
    """Lets Accelerate find the process group of `ranks.rank_world`."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", ACCELERATE_USE_CPU="true"
    )
