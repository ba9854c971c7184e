"""What a step costs over ranks: collectives, bytes and time, against torch's own way.

    python benchmarks/bench_ranks.py                      # 2, 4 and 8 gloo ranks on loopback
    python benchmarks/bench_ranks.py --ranks 2 --layouts FSDP2 --rounds 100
    python benchmarks/bench_ranks.py --device cuda        # FSDP2 on a mesh of one GPU, NCCL
    python benchmarks/bench_ranks.py --ranks 1            # the same contenders on a CPU, gloo
    python benchmarks/bench_ranks.py --device cuda --queued

Parameters are what the wrappers leave: DTensors with the placements of `fully_shard` and of tensor
parallel plans, plain tensors under DDP. Each contender starts a round from the same gradients,
copied in outside the clock, and all end with the same parameters, or the run ends with status 1;
the per-tensor policy, which torch does not have, bounds other norms and is compared for time alone.
Collectives and bytes are counted in a step of their own. Over gloo the ranks share the cores of
one machine: what travels says something there, and ratios of times; where other work shares the
machine too, ratios of the processor's time of rank 0 alone. On a mesh of one a step is measured
without a scale, as clip_grad_norm_ and the optimizer's own step, and with one, as a GradScaler's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import sys
import tempfile
from contextlib import redirect_stderr
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compete import Settings, compete, free
from environment import environment
from floor import STEP_BYTES, Floor
from harness import Contender, Ready
from rank_layouts import LAYOUTS, RankLoad, fsdp2
from row_sets import TOLERANCE
from workloads import SCALE, SIZES

import gradilocks
from gradilocks import control as control_module
from gradilocks.selftest import CollectiveCounter
from report import Row, Spread, save, table

LR = 1e-3
LIMIT = 1.0
RANK_SIZES = {**SIZES, "1.07B": lambda: [(2048, 2048)] * 256}
GPU_ROUNDS = {"1.07B": 15, "8M": 31}
PATIENCE = 600.0
Counted = dict[str, Any]


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    print(environment(device), flush=True)
    if device.type == "cuda":
        on_one_rank(options, torch.device("cuda", 0))
    elif options.ranks == [1]:
        on_one_rank(options, device)
    else:
        over_gloo(options)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", default="2,4,8", help="over gloo, 1 or more than 1")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="over gloo; default: all")
    parser.add_argument("--size", default="", help="default: 1M over gloo; 1.07B,8M on a GPU")
    parser.add_argument("--rounds", type=int, default=0, help="default: 40; on a GPU 15 and 31")
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    parser.add_argument("--queued", action="store_true", help="time the GPU also with a full queue")
    options = parser.parse_args()
    options.ranks = [int(number) for number in options.ranks.split(",")]
    options.layouts = options.layouts.split(",")
    default = "1.07B,8M" if options.device == "cuda" else "1M"
    options.size = (options.size or default).split(",")
    if unknown := set(options.size) - set(RANK_SIZES):
        parser.error(f"--size takes {', '.join(RANK_SIZES)}, got {', '.join(sorted(unknown))}")
    if unknown := set(options.layouts) - set(LAYOUTS):
        parser.error(f"--layouts takes {', '.join(LAYOUTS)}, got {', '.join(sorted(unknown))}")
    if options.ranks != [1] and any(number < 2 for number in options.ranks):
        parser.error("--ranks takes numbers from 2 on, or 1 alone: a mesh of one")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    return options


# --- contenders -----------------------------------------------------------------------------------


def in_torchs_loop(load: RankLoad, *, ours: bool, scaled: bool, own: bool = False) -> Ready:
    """unscale_, clip_grad_norm_, step, update: with torch's names, or with ours in their place.

    Args:
        load: what is stepped.
        ours: whether scaler and clip are ours.
        scaled: whether there is a scaler.
        own: whether the optimizer is ours, too.
    """
    params = load.parameters()
    make: Any = gradilocks.optim.AdamW if own else torch.optim.AdamW
    optimizer = make(params, lr=LR, eps=load.eps, **({} if own else {"fused": True}))
    library: Any = gradilocks if ours else torch.nn.utils
    kind = load.device.type
    made: Any = gradilocks.GradScaler if ours else torch.amp.GradScaler
    scaler = made(kind, init_scale=load.scale) if scaled else None
    pipeline = load.layout.pipeline

    def clip() -> None:
        if pipeline is None:
            library.clip_grad_norm_(params, LIMIT)
            return
        # As pipelines do it: the norm of a stage, and one all_reduce more over the stages.
        norm = library.get_total_norm([param.grad for param in params])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        powers = norm.square()
        dist.all_reduce(powers, group=pipeline)
        library.clip_grads_with_norm_(params, LIMIT, powers.sqrt())

    def run() -> None:
        if scaler is None:
            clip()
            optimizer.step()
            return
        scaler.scale(load.loss)
        scaler.unscale_(optimizer)
        if pipeline is not None:  # Else one stage steps and the other does not.
            for flag in scaler._found_inf_per_device(optimizer).values():
                local = flag.to_local() if hasattr(flag, "to_local") else flag
                dist.all_reduce(local, op=dist.ReduceOp.MAX, group=pipeline)
        clip()
        scaler.step(optimizer)
        scaler.update()

    return Ready(run, lambda: load.put_gradients(params), lambda: load.results(params))


def with_control(
    load: RankLoad,
    *,
    clip: Any = LIMIT,
    own: bool = False,
    scaled: bool,
    together: bool = False,
) -> Ready:
    """GradientControl over torch's fused AdamW, or over our own.

    Args:
        load: what is stepped.
        clip, scaled: what the control does.
        own: whether the optimizer is ours.
        together: alone on its mesh, goes the way of several ranks all the same, with the
            collective: one rank would settle the step on the device by itself.
    """
    params = load.parameters()
    make: Any = gradilocks.optim.AdamW if own else torch.optim.AdamW
    optimizer = make(params, lr=LR, eps=load.eps, **({} if own else {"fused": True}))
    scale = gradilocks.DynamicScale(init_scale=load.scale) if scaled else None
    control = gradilocks.GradientControl(optimizer, scale=scale, clip=clip, **load.layout.told)

    def run() -> None:
        if scaled:
            control.scale_loss(load.loss)
        if not together:
            control.step()
            return
        alone, control_module.has_other_ranks = control_module.has_other_ranks, lambda: True
        try:
            control.step()
        finally:
            control_module.has_other_ranks = alone

    return Ready(run, lambda: load.put_gradients(params), lambda: load.results(params))


def contenders(load: RankLoad, *, scaled: bool, own: bool) -> list[Contender]:
    """Everybody who ends with the same parameters, torch's first."""
    given: dict[str, Any] = {"scaled": scaled}
    torchs = "torch: GradScaler, clip, fused AdamW" if scaled else "torch: clip, fused AdamW"
    made = [
        Contender(torchs, lambda: in_torchs_loop(load, ours=False, **given), baseline=True),
        Contender("drop-in, torch fused AdamW", lambda: in_torchs_loop(load, ours=True, **given)),
        Contender("GradientControl, torch fused AdamW", lambda: with_control(load, **given)),
    ]
    if own:
        build = lambda: in_torchs_loop(load, ours=True, own=True, **given)  # noqa: E731
        made.insert(2, Contender("drop-in, gradilocks.optim", build))
        build = lambda: with_control(load, own=True, **given)  # noqa: E731
        made.append(Contender("GradientControl, gradilocks.optim", build))
    if own and not scaled:
        build = lambda: with_control(load, own=True, together=True, **given)  # noqa: E731
        made.append(Contender("the same, by the way of several ranks", build))
    return made


def per_tensor(load: RankLoad) -> Contender:
    """A policy that bounds the norm of every tensor, over all ranks, apart."""
    policy = gradilocks.ClipPerTensor(LIMIT)
    build = lambda: with_control(load, clip=policy, scaled=True)  # noqa: E731
    return Contender("GradientControl, ClipPerTensor", build)


# --- over gloo ------------------------------------------------------------------------------------


def over_gloo(options: argparse.Namespace) -> None:
    set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "gradilocks.dropin"])
    settings = Settings(torch.device("cpu"))
    rows: list[Row] = []
    counted: list[Counted] = []
    for number in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(
                on_a_rank,
                args=(number, folder, options),
                nprocs=number,
                join=True,
                start_method="forkserver",
            )
            told = json.loads((Path(folder) / "0.json").read_text())
        for each in told["rows"]:
            times = {measure: Spread(**spread) for measure, spread in each.pop("times").items()}
            rows.append(Row(times=times, **each))
        for note in told["notes"]:
            settings.notes.say(note, failure=told["failed"])
        counted += told["counted"]
        print(f"{number} ranks: measured", flush=True)
    grows = what_grows(counted)
    extra = {"collectives": counted, "what_grows": grows}
    if options.output:
        save(options.output, rows, device=settings.device, notes=settings.notes, extra=extra)
    parts = table(rows), processor_table(rows), collectives_table(counted), "\n".join(grows)
    print(*parts, sep="\n\n")
    if settings.notes.failed:
        sys.exit("Not everything is as it should be; the notes above say what.")


def on_a_rank(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    """One of the processes; rank 0 leaves what it measured in the folder."""
    logging.disable(logging.WARNING)  # torch's own, of what is suboptimal in a DTensor's norm.
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=PATIENCE),
    )
    settings = Settings(torch.device("cpu"))
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere if rank else sys.stderr):
        rows, counted = measured(ranks, options, settings)
    if rank == 0:
        notes = settings.notes
        told = {
            "rows": [asdict(row) for row in rows],
            "counted": counted,
            "notes": notes.lines,
            "failed": notes.failed,
        }
        (Path(folder) / "0.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def measured(
    ranks: int, options: argparse.Namespace, settings: Settings
) -> tuple[list[Row], list[Counted]]:
    """All sizes and layouts that fit so many ranks."""
    rows: list[Row] = []
    counted: list[Counted] = []
    rounds = options.rounds or 40
    for size in options.size:
        for name in options.layouts:
            layout = LAYOUTS[name](ranks)
            if layout is None:
                continue
            load = RankLoad(RANK_SIZES[size](), layout, device=settings.device)
            *same, apart = [*contenders(load, scaled=True, own=False), per_tensor(load)]
            counted += [counted_step(each, load, name, ranks) for each in (*same, apart)]
            what = f"{ranks} ranks, {name}, {load.described}"
            for title, who, tolerance in (
                (what, same, TOLERANCE),
                (f"{what}, per tensor", [same[0], apart], math.inf),
            ):
                rows += compete(
                    title, who, settings, rounds=rounds, start=load.start, tolerance=tolerance
                )
            free()
    return rows, counted


def counted_step(contender: Contender, load: RankLoad, layout: str, ranks: int) -> Counted:
    """What one step of a contender sends, after two that do not count; the most of all ranks."""
    ready = contender.build()
    for _ in range(2):
        ready.prepare()
        ready.run()
    ready.prepare()
    with CollectiveCounter() as counter:
        ready.run()
    told: list[Any] = [None] * ranks
    mine = counter.total, counter.bytes_given, counter.bytes_got, dict(counter.calls)
    dist.all_gather_object(told, mine)
    total, given, got, kinds = max(told, key=lambda each: each[:3])
    return {
        "ranks": ranks,
        "layout": layout,
        "contender": contender.name,
        "tensors": load.count_of_tensors,
        "collectives": total,
        "bytes_given": given,
        "bytes_got": got,
        "kinds": kinds,
    }


def processor_table(rows: list[Row]) -> str:
    """The processor's time of rank 0, without what it waits for others."""
    lines = ["| workload | contender | CPU ms of rank 0 | × less than torch |", "|---|---|---|---|"]
    for row in rows:
        cells = row.workload, row.contender, f"{row.times['cpu'].median_ms:.2f}"
        lines.append("| " + " | ".join(cells) + f" | {row.faster['cpu']:.2f} |")
    return "\n".join(lines)


def collectives_table(counted: list[Counted]) -> str:
    lines = [
        "| ranks | layout | contender | collectives a step | bytes a rank gives | gets |",
        "|---|---|---|---|---|---|",
    ]
    for each in counted:
        cells = (each[key] for key in ("ranks", "layout", "contender", "collectives"))
        bytes_ = (f"{each[key]:,}" for key in ("bytes_given", "bytes_got"))
        lines.append("| " + " | ".join([*map(str, cells), *bytes_]) + " |")
    return "\n".join(lines)


def what_grows(counted: list[Counted]) -> list[str]:
    """In words, layout by layout: what grows with the number of ranks, and what does not."""
    told = []
    for layout, who in dict.fromkeys((each["layout"], each["contender"]) for each in counted):
        mine = [e for e in counted if (e["layout"], e["contender"]) == (layout, who)]
        parts = []
        for key, words in (
            ("collectives", "collectives a step"),
            ("bytes_given", "bytes from each rank"),
            ("bytes_got", "bytes to each rank"),
        ):
            numbers = [each[key] for each in mine]
            if len(set(numbers)) == 1:
                parts.append(f"{words}: {numbers[0]:,}")
            else:
                how = "GROW" if numbers == sorted(numbers) else "change"
                parts.append(f"{words} {how}: {', '.join(f'{number:,}' for number in numbers)}")
        ranks = ", ".join(str(each["ranks"]) for each in mine)
        told.append(f"{layout}, {who}, {ranks} ranks: {'; '.join(parts)}")
    return told


# --- on a mesh of one -----------------------------------------------------------------------------


def on_one_rank(options: argparse.Namespace, device: torch.device) -> None:
    """FSDP2 on a mesh of one, over NCCL on a GPU: what the kernels do on shards."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    backend, bound = ("nccl", {"device_id": device}) if on_gpu else ("gloo", {})
    logging.disable(logging.WARNING)  # torch's own, of what is suboptimal in a DTensor's norm.
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **bound)
    settings = Settings(device, queued=options.queued)
    floor = Floor(device) if on_gpu else None
    free()
    rows: list[Row] = []
    memory: list[dict[str, Any]] = []
    extra: dict[str, object] = {"temporaries": memory}
    if floor is not None:
        extra["copy_bytes_per_second"] = floor.bytes_per_second
    for size, scaled in itertools.product(options.size, (False, True)):
        scale = SCALE if scaled else 1.0
        load = RankLoad(RANK_SIZES[size](), fsdp2(1, device.type), device=device, scale=scale)
        everybody = contenders(load, scaled=scaled, own=True)
        what = f"FSDP2 on one {'GPU' if on_gpu else 'rank'}, {load.described}"
        what += ", scaled" if scaled else ""
        rows += compete(
            what,
            everybody,
            settings,
            rounds=options.rounds or (GPU_ROUNDS.get(size, 61) if on_gpu else 40),
            start=load.start,
            tolerance=TOLERANCE,
            floor_ms=floor.ms(load.count, STEP_BYTES) if floor else None,
        )
        free()
        if floor is not None and not scaled:
            rows.append(floor.row(what, load.count, STEP_BYTES))
            memory += [temporaries(each, load) for each in everybody]
        if options.output:
            save(options.output, rows, device=device, notes=settings.notes, extra=extra)
    print(table(rows))
    for each in memory:
        print("{workload}: {contender}: {mebibytes:.1f} MiB of temporaries a step".format(**each))
    dist.destroy_process_group()
    if settings.notes.failed:
        sys.exit("Not everything is as it should be; the notes above say what.")


def temporaries(contender: Contender, load: RankLoad) -> dict[str, Any]:
    """The most that a step needs above what lives through it: parameters, gradients, moments."""
    free()
    ready = contender.build()
    for _ in range(3):
        ready.prepare()
        ready.run()
    ready.prepare()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ready.run()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    return {
        "workload": load.described,
        "contender": contender.name,
        "mebibytes": most / 2**20,
        "gradients_mebibytes": load.count * 4 / 2**20,
    }


if __name__ == "__main__":
    main()
