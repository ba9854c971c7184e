"""What the policies are worth: real training on a CPU, the same seeds for everybody.

    python benchmarks/bench_policies.py                  # both experiments, five seeds, minutes
    python benchmarks/bench_policies.py --only scales --seeds 2
    python benchmarks/bench_policies.py -o benchmarks/results/policies_cpu.json

1. scales: a small GPT in emulated fp16 (storage rounded to fp16, arithmetic in fp32), 500 steps,
   with one batch whose loss is 4096 times the others'. The loss is summed over the batch, as some
   code bases do, or averaged over 4,096 such batches, of which one is computed, as a large global
   batch is. How many steps does each scale lose to overflow, and where does the loss end?
2. clips: a perceptron on a regression, with bad batches planted: labels shuffled, or inputs ×100.
   Where does the loss on clean data end, and what is the worst that it was on the way?
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from environment import environment
from torch import Tensor, nn
from torch.nn import functional as F

from gradilocks import (
    AdaGC,
    ClipByNorm,
    DynamicScale,
    GradientControl,
    HeadroomScale,
    NoClip,
    NoScale,
    SkipSpikes,
    ZScoreClip,
    chain,
    emulate,
)
from gradilocks.demo.small_gpt import GPT, Batches, python_documentation

STEPS, SPIKE = 500, 300
BAD = {120: "labels", 180: "inputs", 240: "labels", 300: "inputs", 360: "inputs", 420: "labels"}
ROWS, LENGTH, MANY = 16, 48, 4096
RULES: dict[str, tuple[torch.dtype, Any]] = {
    "fp32, no scale": (torch.float32, NoScale()),
    "fp16, no scale": (torch.float16, NoScale()),
    "fp16, torch's rule": (torch.float16, DynamicScale.torch()),
    "fp16, Megatron's rule": (torch.float16, DynamicScale.megatron()),
    "fp16, HeadroomScale": (torch.float16, HeadroomScale()),
}
FACTORS = {"summed": float(ROWS * LENGTH), "averaged over 4,096 batches": 1.0 / MANY}
SCALES = {f"{rule}; {loss}": (*RULES[rule], FACTORS[loss]) for loss in FACTORS for rule in RULES}
CLIPS: dict[str, Any] = {
    "no clip": NoClip(),
    "ClipByNorm(1)": ClipByNorm(1.0),
    "ZScoreClip": ZScoreClip(),
    "AdaGC": AdaGC(warmup=50),
    "SkipSpikes": SkipSpikes(),
    "SkipSpikes, then ClipByNorm(1)": chain(SkipSpikes(), ClipByNorm(1.0)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["scales", "clips"], default=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(torch.device("cpu")),
        "seeds": options.seeds,
    }
    experiments = {"scales": (SCALES, scaled_run), "clips": (CLIPS, clipped_run)}
    for name, (arms, run) in experiments.items():
        if options.only in (None, name):
            found[name] = compete(name, list(arms), run, options.seeds)
            print(table(found[name]), flush=True)
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def compete(
    name: str, arms: list[str], run: Callable[[tuple[str, int]], dict[str, float]], seeds: int
) -> dict[str, Any]:
    """Every arm with every seed, two at a time."""
    jobs = [(arm, seed) for seed in range(seeds) for arm in arms]
    results: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for done, ((arm, seed), numbers) in enumerate(
            zip(jobs, pool.imap(run, jobs), strict=True), start=1
        ):
            results[arm].append({"seed": seed, **numbers})
            print(f"{name}: {done} of {len(jobs)}: {arm}, seed {seed}", file=sys.stderr, flush=True)
    return results


def table(results: dict[str, list[dict[str, float]]]) -> str:
    """Median over the seeds, and the range, in Markdown."""
    keys = [key for key in next(iter(results.values()))[0] if key != "seed"]
    lines = [f"| arm | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
    for arm, runs in results.items():
        cells = []
        for key in keys:
            values = sorted(run[key] for run in runs)
            middle = statistics.median(values)
            cells.append(f"{middle:.4g} ({values[0]:.4g} to {values[-1]:.4g})")
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def scaled_run(job: tuple[str, int]) -> dict[str, float]:
    """One training of the GPT under one scale."""
    arm, seed = job
    torch.set_num_threads(1)
    stored, policy, factor = SCALES[arm]
    text = python_documentation()
    torch.manual_seed(seed)
    model = GPT(vocabulary=len(text.vocabulary), length=LENGTH, width=48, layers=2, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-8 * factor)
    # The limit is for the averaged loss, and so is eps, whatever the factor.
    control = GradientControl(
        optimizer, model=model, scale=policy, clip=1.0 * factor, give_up_after=None
    )
    batches = Batches(text, rows=ROWS, length=LENGTH, seed=seed)
    losses, lost_before, lost_after = [], 0, 0
    for number in range(1, STEPS + 1):
        inputs, targets = batches.draw()
        with emulate(stored):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        control.backward(loss * factor * (4096.0 if number == SPIKE else 1.0))
        outcome = control.step()
        control.zero_grad()
        losses.append(loss.item())
        lost_before += outcome.skipped and number < SPIKE
        lost_after += outcome.skipped and number > SPIKE
    return {
        "steps lost before the spike": float(lost_before),
        "after it": float(lost_after),
        "final loss": statistics.fmean(losses[-50:]),
    }


def clipped_run(job: tuple[str, int]) -> dict[str, float]:
    """One training of the perceptron under one clip."""
    arm, seed = job
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1000 + seed)
    torch.manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    model.append(nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    control = GradientControl(
        optimizer, model=model, scale=None, clip=CLIPS[arm], give_up_after=None
    )
    draw = partial(torch.randn, generator=generator)
    clean = draw(1024, 32)

    @torch.no_grad()
    def test_loss() -> float:
        return F.mse_loss(model(clean), teacher(clean) * 3.0).item()

    worst = -math.inf
    for number in range(1, STEPS + 1):
        inputs, targets = bad_batch(number, draw, teacher)
        control.backward(F.mse_loss(model(inputs), targets))
        control.step()
        control.zero_grad()
        if number >= min(BAD):
            worst = max(worst, test_loss())
    return {"final loss": test_loss(), "worst loss after the first bad batch": worst}


@torch.no_grad()
def bad_batch(
    number: int, draw: Callable[..., Tensor], teacher: nn.Module
) -> tuple[Tensor, Tensor]:
    """A batch, spoilt if this is the step for it."""
    inputs = draw(64, 32)
    targets = teacher(inputs) * 3.0
    if BAD.get(number) == "labels":
        targets = targets.roll(1, 0)
    if BAD.get(number) == "inputs":
        inputs = inputs * 100.0
    return inputs, targets


if __name__ == "__main__":
    main()
