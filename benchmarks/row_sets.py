"""The rows, set by set: what competes on which workload, and what its floor is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from compete import Settings, compete, free
from contenders import drop_in_contenders, step_contenders, with_control, with_telemetry
from floor import BF16_BYTES, CLIP_BYTES, MASTERS_BYTES, NORM_BYTES, STEP_BYTES, Floor
from half_contenders import expert_contenders, masters_contenders
from harness import Contender, Ready
from torch import Tensor
from workloads import EXPERTS, NORM, SIZES, Workload

import gradilocks
from report import Row

TOLERANCE = 5e-3
"""torch's norm over 124 M elements is off by 1e-3 on the CPU, ours by 1e-7."""
HALF_TOLERANCE = 5e-2
"""torch's clip rounds norm, coefficient and gradients to the half precision they come in."""


@dataclass(frozen=True)
class Job:
    """One set of rows on one workload."""

    size: str
    limit: float
    rounds: int
    settings: Settings
    floor: Floor | None = None
    compiled: bool = False

    @property
    def device(self) -> torch.device:
        return self.settings.device


def step_rows(job: Job) -> list[Row]:
    """Scale + check + clip + AdamW in float32; where there is something to clip, also on gradients
    that are new every round, as `zero_grad(set_to_none=True)` makes them."""
    rows: list[Row] = []
    for fresh in [False, True] if job.limit < NORM else [False]:
        load = Workload(SIZES[job.size](), device=job.device, fresh=fresh)
        contenders = step_contenders(
            load,
            job.limit,
            compiled=job.compiled and not fresh,
            graph=job.device.type == "cuda" and not fresh,
        )
        # 17.6 GB each at 1.1 B, beside the gradients that all start from.
        at_most = 5 if job.size == "1.1B" else 100
        rows += _measured(job, load, load.describe(job.limit), contenders, STEP_BYTES, at_most)
        del load, contenders
        free()
    return rows


def drop_in_rows(job: Job) -> list[Row]:
    """The drop-in around an unfused optimizer, where the host's time is all there is."""
    load = Workload(SIZES[job.size](), device=job.device, fresh=True)
    name = f"drop-in, default AdamW, {load.describe(job.limit)}"
    return _measured(job, load, name, drop_in_contenders(load, job.limit), STEP_BYTES)


def clip_rows(job: Job) -> list[Row]:
    """clip_grad_norm_ alone, in float32."""
    load = Workload(SIZES[job.size](), device=job.device, scale=1.0)

    def clipping(clip: Callable[..., object]) -> Ready:
        params = load.parameters()
        return Ready(
            lambda: clip(params, job.limit),
            partial(load.put_gradients, params),
            lambda: [param.grad for param in params if param.grad is not None],
        )

    contenders = [
        Contender("torch", partial(clipping, torch.nn.utils.clip_grad_norm_), baseline=True),
        Contender("gradilocks", partial(clipping, gradilocks.clip_grad_norm_)),
    ]
    name = f"clip_grad_norm_ alone, {load.describe(job.limit)}"
    bytes_each = CLIP_BYTES if job.limit < load.norm else NORM_BYTES

    def nothing() -> Iterator[Tensor]:
        return (torch.zeros_like(grad) for grad in load.scaled)

    return _measured(job, load, name, contenders, bytes_each, start=nothing)


def telemetry_rows(job: Job) -> list[Row]:
    """What it costs to keep every step's statistics, tensor by tensor; the plain step is 1.00×."""
    load = Workload(SIZES[job.size](), device=job.device)
    plain = partial(with_control, load, job.limit, own=True)
    contenders = [
        Contender("GradientControl, gradilocks.optim", plain, baseline=True),
        Contender("with telemetry", partial(with_telemetry, load, job.limit)),
    ]
    return _measured(job, load, f"telemetry, {load.describe(job.limit)}", contenders, STEP_BYTES)


def masters_rows(job: Job) -> list[Row]:
    """fp16 parameters and gradients with fp32 masters."""
    load = Workload(SIZES[job.size](), device=job.device, dtype=torch.float16)
    contenders = masters_contenders(load, job.limit)
    name = f"fp32 masters, {load.describe(job.limit)}"
    return _measured(job, load, name, contenders, MASTERS_BYTES)


def moe_rows(job: Job) -> list[Row]:
    """A mixture of experts in bf16 throughout, with no scale; also on new gradients."""
    rows: list[Row] = []
    for fresh in (False, True):
        half = {"dtype": torch.bfloat16, "scale": 1.0}
        load = Workload(EXPERTS[job.size](), device=job.device, fresh=fresh, **half)
        contenders = expert_contenders(load, job.limit)
        name = f"experts, {load.describe(job.limit)}"
        rows += _measured(job, load, name, contenders, BF16_BYTES)
        del load, contenders
        free()
    return rows


ROW_SETS: dict[str, Callable[[Job], list[Row]]] = {
    "step": step_rows,
    "clip": clip_rows,
    "dropin": drop_in_rows,
    "telemetry": telemetry_rows,
    "masters": masters_rows,
    "moe": moe_rows,
}


def _measured(
    job: Job,
    load: Workload,
    name: str,
    contenders: list[Contender],
    bytes_each: int,
    at_most: int = 100,
    start: Callable[[], Iterator[Tensor]] | None = None,
) -> list[Row]:
    floor_ms = None if job.floor is None else job.floor.ms(load.count, bytes_each)
    rows = compete(
        name,
        contenders,
        job.settings,
        rounds=job.rounds,
        start=start or load.start,
        tolerance=TOLERANCE if load.dtype is torch.float32 else HALF_TOLERANCE,
        floor_ms=floor_ms,
        at_most=at_most,
    )
    if job.floor is not None:
        rows.append(job.floor.row(name, load.count, bytes_each))
    return rows
