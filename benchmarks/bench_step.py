"""Scale + check + clip + AdamW: the time of one step after backward, beside torch's.

    python benchmarks/bench_step.py                     # CPU
    python benchmarks/bench_step.py --no-extension      # CPU, plain torch instead of the C extensions
    python benchmarks/bench_step.py --device cuda       # a GPU with 139 GiB
    python benchmarks/bench_step.py --device cuda --rows 124M 22M -o step.json
    python benchmarks/bench_step.py --rows 1.1B fsdp-2000 --quick

Every step starts from the same scaled gradients of norm 10, which are written before the clock starts: into the memory
of the previous ones ("standing") or into new tensors ("new"). The limit is 1, so every step clips. bf16 rows have no
scale, because torch's scaler rejects bf16 gradients on a GPU: there torch neither checks for NaN nor skips.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from contenders import Problem, control_step, scaler_step
from harness import Contender, Ready, Row, arguments, compete, copy_bandwidth, environment, measure_rows
from versions import V2, V3
from workloads import SCALE, Shapes, Workload, gpt, llama

LIMIT = 1.0
BYTES = {torch.float32: 32, torch.bfloat16: 16}
"""Bytes per parameter that a step must move. float32: the norm reads 4; AdamW reads 16 (gradient, parameter, two
moments) and writes 12. bfloat16 with bfloat16 moments: half of that."""


@dataclass(frozen=True)
class Work:
    """A row of the table."""

    shapes: Shapes
    rounds: int = 151
    dtype: torch.dtype = torch.float32
    at_most: int = 100
    """Number of contenders that fit into 139 GiB together."""
    fsdp: bool = False
    """DTensors on a mesh of one rank, as FSDP2 makes them."""


EXPERT: Shapes = [(501, 1031), (501, 1031), (1031, 501)]
UNALIGNED: Shapes = [(4000 - i % 3,) for i in range(2000)]
WORK = {
    "1.1B": Work(llama(32000, 2048, 5632, 256, 22, head=32000), rounds=21, at_most=6),
    # The embedding has 2^31 + 86,016 elements.
    "7.3B": Work(llama(524_309, 4096, 14_080, 1024, 24, head=1000), rounds=15, dtype=torch.bfloat16, at_most=2),
    "124M": Work(gpt(50257, 768, 12, 1024), rounds=51),
    "22M": Work(gpt(64, 376, 13, 197), rounds=101),
    "0.3M": Work([(96, 96), (96,)] * 32),
    "8M": Work(UNALIGNED, rounds=31),
    "5000": Work(EXPERT * 1667, rounds=15, dtype=torch.bfloat16, at_most=4),
    "12": Work([(41, 41), (41,)] * 6, rounds=301),
    "2": Work([(41, 41), (41,)], rounds=301),
    "fsdp-1.07B": Work([(2048, 2048)] * 256, rounds=15, at_most=6, fsdp=True),
    "fsdp-2000": Work(UNALIGNED, rounds=15, fsdp=True),
    "1.1M": Work(gpt(2048, 80, 12, 256)),
}
DEFAULT = {"cuda": [name for name in WORK if name != "1.1M"], "cpu": ["124M", "1.1M", "12", "2"]}


def ready(
    load: Workload, scale: float | None, make_step: Callable[[Problem, Any], Callable[[], None]], package: Any
) -> Ready:
    """A contender with new parameters."""
    params = load.parameters()
    loss = torch.ones((), device=params[0].device, requires_grad=True)
    step = make_step(Problem(params, lambda: loss, LIMIT, scale, lr=1e-3, eps=load.eps), package)
    prepare = {"standing": partial(load.refill_gradients, params), "new": partial(load.allocate_gradients, params)}
    return Ready(step, params, prepare)


def contenders(load: Workload, work: Work, layout: Callable[[], Any]) -> list[Contender]:
    """All contenders of a row, torch first."""
    make = partial(ready, load, SCALE if work.dtype is torch.float32 else None)
    scaler, control = partial(make, scaler_step), partial(make, control_step)
    found = [
        Contender("torch", scaler),
        Contender("0.2 control, optim", control, V2),
        Contender("0.3 control, optim", control, V3),
        Contender("0.3 control, torch fused", partial(make, partial(control_step, own=False)), V3),
        Contender("0.2 drop-in", scaler, V2),
        Contender("0.3 drop-in", scaler, V3),
    ]
    if work.fsdp:
        collective = partial(make, partial(control_step, layout=layout))
        found.append(Contender("0.3 control, optim, collective", collective, V3))
    elif work.dtype is torch.float32:
        unfused = partial(make, partial(scaler_step, fused=None))
        found.append(Contender("torch unfused", unfused))
        found.append(Contender("0.3 drop-in, unfused", unfused, V3, baseline="torch unfused"))
    return found


def measure(name: str, options: argparse.Namespace, device: torch.device, bandwidth: float) -> list[Row]:
    """Times all contenders of one row."""
    work = WORK[name]
    shapes, rounds = work.shapes, options.rounds or work.rounds
    if options.quick:
        shapes, rounds = [tuple(min(size, 33) for size in shape) for shape in shapes[:24]], 3

    def layout() -> Any:
        from gradilocks.ranks.layout import Layout

        world = (dist.group.WORLD,)
        return Layout((0,), world, world, (), 0, (1.0,) * len(shapes), device)

    with process_group(device) if work.fsdp else nullcontext() as mesh:
        scale = SCALE if work.dtype is torch.float32 else 1.0
        load = Workload(shapes, device=device, dtype=work.dtype, scale=scale, mesh=mesh)
        # torch's clip rounds norm, coefficient and gradients to bf16. On a CPU its norm of 124 M elements is off by
        # 1e-3.
        has_exact_norm = device.type == "cuda" or load.count < 1e7
        tolerance = 5e-2 if work.dtype is torch.bfloat16 else 1e-4 if has_exact_norm else 1e-3
        return compete(
            f"{name}: {load.count / 1e6:,.2f} M in {len(shapes)}, {str(work.dtype)[6:]}",
            contenders(load, work, layout),
            device=device,
            rounds=rounds,
            modes=["standing", "new"],
            start=load.start,
            tolerance=tolerance,
            floor_ms=load.count * BYTES[work.dtype] / bandwidth * 1e3,
            at_most=work.at_most,
        )


@contextmanager
def process_group(device: torch.device) -> Iterator[Any]:
    """A device mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.disable(logging.WARNING)  # torch logs a warning for every norm of a DTensor.
    options: Any = {"backend": "nccl", "device_id": device} if device.type == "cuda" else {"backend": "gloo"}
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)  # type: ignore[attr-defined]
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = arguments("Scale + check + clip + AdamW beside torch's.", list(WORK))
    parser.add_argument("--no-extension", action="store_true", help="CPU: plain torch instead of the C extensions")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if options.no_extension:
        os.environ["GRADILOCKS_NATIVE"] = "off"
        with V3.active() as package:
            package.kernels.BACKENDS["cpu"] = None
    bandwidth = copy_bandwidth(device)
    facts = {**environment(options.commit), "copy bandwidth": f"{bandwidth / 1e9:.0f} GB/s"}
    names = options.rows or DEFAULT[options.device]
    measure_rows(names, lambda name: measure(name, options, device, bandwidth), facts, options.output)


if __name__ == "__main__":
    main()
