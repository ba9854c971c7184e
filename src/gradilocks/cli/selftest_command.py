"""``gradilocks selftest``: ranks enter; what works here is shown, judged and written down.

Every rank runs this; rank 0 speaks, and all end with its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from gradilocks.cli.options import check_environment, checked, flag, one_of
from gradilocks.cli.terminal import say
from gradilocks.errors import GradilocksError

CANNOT_RUN = 2
DEVICES = ("auto", "cpu", "cuda")


def selftest(
    device: Annotated[
        str,
        one_of(DEVICES, help="cuda takes one GPU a rank over NCCL, cpu runs over gloo."),
    ] = "auto",
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Everything as JSON, for a bug report."
        ),
    ] = Path("gradilocks-selftest.json"),
    limit: Annotated[
        float,
        typer.Option(
            parser=checked(float, lambda value: 1 <= value <= 3600, "1 to 3600 seconds"),
            metavar="SECONDS",
            help="How long one check may take before it counts as hung.",
        ),
    ] = 30.0,
    quiet: Annotated[bool, flag("--quiet", "Print the verdict and nothing else.")] = False,
) -> None:
    """Test Gradilocks on this machine and over these ranks.

    In about a minute: the kernels and optimizers beside plain arithmetic and torch, and every way
    of laying a model out that fits so many ranks beside one process: norms, decisions, parameters,
    collectives, waits. The file has versions, hardware and results, and no paths or host names.

    Exits with 0 if all is well, 1 if something is wrong, 2 if it could not run. torchrun makes 1
    of both.

    \b
    Examples:
      torchrun --nproc-per-node 4 -m gradilocks selftest
      gradilocks selftest --device cpu -o report.json
      torchrun --nproc-per-node 2 -m gradilocks selftest --device cpu
    """
    # Here and not above: --help must not wait for torch.
    from gradilocks.selftest import CannotRun, find_seat

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # Ends the worker too.
    rank = 0
    try:
        if os.environ.get("RANK", "0") == "0":
            _check_place(output)  # Before torch is imported.
        seat = find_seat()
        rank = seat.rank
        check_environment()
        from gradilocks.selftest import Ensemble

        with Ensemble(seat, device=device, limit=limit) as ensemble:
            status = _checked(ensemble, output, quiet=quiet)
    except (CannotRun, _BadPlace, GradilocksError) as error:
        if rank == 0:
            say(f"the selftest cannot run: {error}")
        raise typer.Exit(CANNOT_RUN) from error
    raise typer.Exit(status)


class _BadPlace(Exception):
    """The file cannot be written where it was asked for."""


def _checked(ensemble: Any, output: Path, *, quiet: bool) -> int:
    """Runs all checks; the exit status, alike on all ranks."""
    from gradilocks.cli.selftest_view import SelftestView
    from gradilocks.selftest import as_json, verdict_of

    speaks = ensemble.seat.rank == 0
    view = SelftestView(quiet=quiet or not speaks)
    began = time.monotonic()
    results = []
    with view.shown():
        view.wait_for("the ranks", 0, 1)
        ensemble.start(view.refresh)
        view.introduce(ensemble.about)
        for done, check in enumerate(ensemble.checks):
            view.wait_for(check.name, done, len(ensemble.checks))
            result = ensemble.run(check, view.refresh)
            if speaks:
                results.append(result)
                view.show(result)
    status = 0
    if speaks:
        well, sentence = verdict_of(results)
        status = 0 if well else 1
        seconds = round(time.monotonic() - began, 1)
        about = {**ensemble.about, "seconds": seconds}
        written = ""
        try:
            _write(output, as_json(results, about))
            written = str(output)
        except GradilocksError as error:
            say(str(error))
            status = status or 1
        view.conclude(results, sentence, seconds=seconds, written=written, well=well)
        with suppress(Exception):  # Before another rank's end makes torchrun end this one.
            sys.stdout.flush()
    found: int = ensemble.agree(status)
    return found


def _check_place(output: Path) -> None:
    """Says at once that a file cannot be written, rather than after all checks."""
    from gradilocks.report import settled

    try:
        place = settled(output)
        if place.is_dir():
            raise GradilocksError(f"{output} is a folder; give the path of a file with -o.")
        if place.exists() and not _is_ours(place):
            raise GradilocksError(
                f"{output} is already there and is no file of a selftest, so it is never "
                "overwritten; name another with -o, or remove it first."
            )
        if not place.parent.is_dir():
            raise GradilocksError(f"{output.parent} is no folder; -o names a file in one.")
        if not os.access(place.parent, os.W_OK):
            raise GradilocksError(f"{output.parent} cannot be written; name another with -o.")
    except GradilocksError as error:
        raise _BadPlace(str(error)) from error


def _is_ours(place: Path) -> bool:
    try:
        text = place.read_text(encoding="utf-8")
        return not text or json.loads(text).get("format") == "gradilocks selftest"
    except (OSError, ValueError, AttributeError):
        return False


def _write(output: Path, text: str) -> None:
    from gradilocks.report import settled, written_whole

    with written_whole(settled(output), given=output) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
