"""``gradilocks demo``: options enter, the run of ``gradilocks.demo`` is shown, a status leaves."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from gradilocks.cli import Interrupted
from gradilocks.cli.demo_text import describe_so_far
from gradilocks.cli.interrupts import HeldInterrupts
from gradilocks.cli.options import number, whole_number
from gradilocks.demo.values import LARGEST, SMALLEST, Settings, Step, Summary
from gradilocks.errors import GradilocksError

_DEFAULT = Settings()


def demo(
    steps: Annotated[
        int,
        typer.Option(
            parser=whole_number(smallest=1), metavar="N", help="How many optimizer steps."
        ),
    ] = _DEFAULT.steps,
    seed: Annotated[
        int,
        typer.Option(
            parser=whole_number(smallest=0, largest=2**63 - 1),
            metavar="N",
            help="Seed of the parameters and of the batches.",
        ),
    ] = _DEFAULT.seed,
    batch_accumulation: Annotated[
        int,
        typer.Option(
            parser=whole_number(smallest=1, largest=2**20),
            metavar="N",
            help="How many equal micro-batches make a global batch. One, of "
            f"{_DEFAULT.rows} x {_DEFAULT.length} characters, is computed: its loss is divided by "
            "N before the backward pass, and its gradients are multiplied by N, in fp32, after it.",
        ),
    ] = _DEFAULT.accumulation,
    scale: Annotated[
        str,
        typer.Option(
            metavar="dynamic|none|NUMBER",
            help=f"What multiplies the loss. dynamic: {_DEFAULT.initial_scale:.0f} at the start, "
            f"doubled after {_DEFAULT.growth_interval} clean steps in a row, halved after a "
            "gradient overflowed. none: nothing. NUMBER: this, at every step.",
        ),
    ] = "dynamic",
    clip: Annotated[
        str,
        typer.Option(
            metavar="NUMBER|none", help="The largest norm that all gradients together may have."
        ),
    ] = str(_DEFAULT.clip),
    json_path: Annotated[
        str | None,
        typer.Option("--json", metavar="PATH", help="Write the summary, as JSON, to a new file."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Train a small GPT in emulated fp16 under GradientControl.

    It learns Python's own documentation, on the CPU, in well under a minute. Its Linear layers
    compute in fp32 and store in fp16, as a tensor core does. The run ends with what was skipped,
    clipped, scaled and learned.

    \b
    Examples:
      gradilocks demo
      gradilocks demo --scale none --steps 100
      gradilocks demo --quiet --json demo.json
    """
    settings = Settings(
        steps=steps,
        seed=seed,
        accumulation=batch_accumulation,
        scale=_read_scale(scale),
        clip=_read_clip(clip),
    )
    target = None if json_path is None else Path(json_path)
    if target is not None:
        _check_new(target)
    _train_and_show(settings, target, quiet=quiet)


def _train_and_show(settings: Settings, target: Path | None, *, quiet: bool) -> None:
    done: list[Step] = []
    try:
        # Until the first step is done: torch imports more of itself on the way there.
        with HeldInterrupts() as interrupts:
            # Here and not above: rich, and torch even more, take longer to import than --help
            # takes to print.
            from gradilocks.cli.demo_view import conclude, introduce, open_console, show_steps

            console = open_console(quiet=quiet)
            introduce(console, settings)
            train = _import_train()
            with show_steps(console, settings) as show:

                def on_step(step: Step) -> None:
                    done.append(step)
                    show(step)
                    interrupts.release()

                summary = train(settings, on_step)
    except KeyboardInterrupt as interrupt:
        unwritten = "" if target is None else f" {target} was not written."
        raise Interrupted(f"{describe_so_far(settings, done)}{unwritten}") from interrupt
    if target is not None:
        _write(target, summary)
    conclude(console, summary)


def _import_train() -> Callable[[Settings, Callable[[Step], None]], Summary]:
    with warnings.catch_warnings():
        # torch says this, once, where there is no NumPy; the demo needs none.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        from gradilocks.demo.train import train
    return train


def _read_scale(text: str) -> float | Literal["dynamic"] | None:
    if text == "dynamic":
        return "dynamic"
    if text == "none":
        return None
    return number(
        "--scale",
        text,
        smallest=SMALLEST,
        largest=LARGEST,
        words=("dynamic", "none"),
    )


def _read_clip(text: str) -> float | None:
    if text == "none":
        return None
    return number("--clip", text, smallest=SMALLEST, largest=LARGEST, words=("none",))


def _check_new(path: Path) -> None:
    """Creates the file and removes it again: better to fail now than after the training."""
    try:
        path.open("x").close()
        path.unlink()
    except FileExistsError as error:
        what = "is a folder" if path.is_dir() else "is already there"
        raise GradilocksError(f"--json {path} {what}; give the path of a new file.") from error
    except OSError as error:
        raise GradilocksError(f"--json {path} cannot be written: {error.strerror}.") from error


def _write(path: Path, summary: Summary) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(summary.to_plain(), file, indent=2, allow_nan=False)
            file.write("\n")
    except OSError as error:
        raise GradilocksError(f"--json {path} cannot be written: {error.strerror}.") from error
