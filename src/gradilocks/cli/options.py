"""What the commands take: their options and arguments, read with a word on what was expected.

Text from the command line enters and a value leaves, or what was expected and what came. Here is
also how a command that runs a script tells its own options from the script's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from gradilocks.cli.terminal import printable, say
from gradilocks.errors import GradilocksError
from gradilocks.native_mode import mode_asked_for
from gradilocks.observe import Program

_Value = TypeVar("_Value")

# The base of every mistake in a command line. typer gives it no public name: older versions take it
# from click, newer ones carry their own copy.
USAGE_ERROR: Any = typer.BadParameter.mro()[1]


def checked(
    read: Callable[[str], _Value], holds: Callable[[_Value], bool], expected: str
) -> Callable[[str], _Value]:
    """Returns the parser of an option, for ``typer.Option(parser=...)``."""

    def parse(text: str) -> _Value:
        with suppress(ValueError):
            value = read(text)
            if holds(value):
                return value
        raise typer.BadParameter(f"expected {expected}, got {str(text)!r}.")

    return parse


def flag(name: str, help: str) -> Any:
    """Declares an option that is given or not."""
    return typer.Option(name, help=help)


def whole_number(*names: str, help: str, smallest: int = 1, largest: int | None = None) -> Any:
    """Declares an option that is a whole number within bounds."""
    bounds = f"of at least {smallest}" if largest is None else f"from {smallest} to {largest}"
    parser = checked(
        int,
        lambda value: smallest <= value and (largest is None or value <= largest),
        f"a whole number {bounds}",
    )
    return typer.Option(*names, parser=parser, metavar="N", help=help)


def one_of(words: Sequence[str], *, help: str) -> Any:
    """Declares an option that is one of a few words, which shells complete."""
    parser = checked(str, words.__contains__, f"{', '.join(words[:-1])} or {words[-1]}")
    return typer.Option(
        parser=parser, metavar="NAME", help=help, autocompletion=lambda: list(words)
    )


def latest_runs(count: int = 1) -> list[Path]:
    """The runs under runs/ that were begun last, the latest of them last; says which they are.

    Raises:
        USAGE_ERROR: there are not so many.
    """
    from gradilocks.report import find_runs

    folder = Path("runs")
    found = find_runs(folder)[:count] if folder.is_dir() else []
    if len(found) < count:
        named = "no run file was named" if count == 1 else "no run files were named"
        few = f"{'only one' if found else 'none'} under runs/"
        raise USAGE_ERROR(f"{named}, and there is {few}. Name what you mean, as runs/a.jsonl.")
    which = "the latest run" if count == 1 else f"the {count} latest runs"
    say(f"{which}: {printable(' '.join(map(str, found[::-1])))}")
    return found[::-1]


def amount(*names: str, help: str) -> Any:
    """Declares an option that is a name with a number, as in tokens=65536; `named_amount` reads it.

    May be given several times.
    """
    parser = checked(
        lambda text: text if named_amount(text)[0] else "",
        bool,
        "a name and a number of more than 0, as in tokens=65536",
    )
    return typer.Option(*names, parser=parser, metavar="NAME=N", help=help)


def named_amount(text: str) -> tuple[str, float]:
    """A name and its number.

    Raises:
        ValueError: there is no number, or it is not finite and more than 0.
    """
    name, _, written = text.rpartition("=")
    number = float(written)
    if not 0 < number < math.inf:
        raise ValueError(f"{written} is not a number of more than 0.")
    return name.strip(), number


def run_file(metavar: str, *, help: str) -> Any:
    """Declares an argument that is a run file: one that shells complete as a path."""
    return typer.Argument(
        metavar=metavar, help=help, show_default=False, autocompletion=complete_run_file
    )


def complete_run_file(incomplete: str) -> list[str]:
    """The run files, and the folders on the way to them, that begin so.

    A folder that is the only one is entered at once: shells put a space after a sole answer.
    """
    folder, start = os.path.split(incomplete)
    found = []
    with suppress(OSError), os.scandir(os.path.expanduser(folder) or ".") as entries:
        for entry in entries:
            if entry.name.startswith(start) and (start or not entry.name.startswith(".")):
                if entry.is_dir():
                    found.append(os.path.join(folder, entry.name, ""))
                elif entry.name.endswith(".jsonl"):
                    found.append(os.path.join(folder, entry.name))
    if len(found) == 1 and found[0].endswith(os.sep):
        return complete_run_file(found[0]) or found
    return sorted(found)


# --- commands that run a script ------------------------------------------------------------------

# What follows the script's name belongs to the script, whatever it looks like.
SCRIPT: dict[str, Any] = {"allow_interspersed_args": False}

Script = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script and its own arguments."),
]
Module = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--module",
        metavar="MODULE",
        help="Run a module instead of a script, as python -m does.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="The run file. Default: a fresh name under runs/."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing; errors are still said.")]


def check_environment() -> None:
    """Refuses a GRADILOCKS_NATIVE that means nothing, before anything is run.

    Raised in the middle of a script that is watched, it would end the watching, and leave a run
    without a run file.
    """
    try:
        mode_asked_for()
    except ValueError as error:
        raise GradilocksError(str(error)) from error


def program_of(script: list[str] | None, module: str | None, *, command: str) -> Program:
    """The program that was named: a module, or a script, with its own arguments."""
    check_environment()
    given = tuple(script or ())
    if module is not None:
        return Program(module, given, module=True)
    if not given:
        raise typer.BadParameter(f"expected a script, as in 'gradilocks {command} train.py'.")
    return Program(given[0], given[1:])


class Command(TyperCommand):
    """A command that shows its arguments as they are typed.

    typer puts the type behind each, as Python writes it: RUN.jsonl <list[Path]>.
    """

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """What follows the command's name in the line of usage."""
        return ["[OPTIONS]", *(each.metavar for each in self._arguments(ctx))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the arguments and the options."""
        records = [(each.metavar, each.help or "") for each in self._arguments(ctx)]
        if records:
            with formatter.section("Arguments"):
                formatter.write_dl(records)
        others = (p for p in self.get_params(ctx) if p.param_type_name == "option")
        with formatter.section("Options"):
            formatter.write_dl([found for p in others if (found := p.get_help_record(ctx))])

    def _arguments(self, ctx: Any) -> list[Any]:
        return [p for p in self.get_params(ctx) if p.param_type_name == "argument"]


class ScriptCommand(Command):
    """A command that runs a script: also what follows the name of a module belongs to it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Ends the options of gradilocks after ``-m MODULE``."""
        try:
            return super().parse_args(ctx, self._options_ended(args))
        except USAGE_ERROR as error:
            name = getattr(error, "option_name", None)
            if name is None or not getattr(error, "format_message", str)().startswith("No such"):
                raise
            script = next((word for word in args if word.endswith(".py")), None)
            own = [max(p.opts, key=len) for p in self.params if p.param_type_name == "option"]
            near = get_close_matches(name, own, cutoff=0.75)
            meant = f" Did you mean {' or '.join(near)}?" if near else ""
            command = f"gradilocks {ctx.info_name}"
            raise USAGE_ERROR(
                f"{name} is no option of {command}.{meant} Options of the script come after its "
                f"name: {command} {script or 'train.py'} {name} ...",
                ctx=ctx,
            ) from error

    def _options_ended(self, words: list[str]) -> list[str]:
        options = [p for p in self.params if p.param_type_name == "option"]
        with_value = {n for p in options if not getattr(p, "is_flag", False) for n in p.opts}
        place = 0
        while place < len(words) and words[place].startswith("-") and words[place] != "--":
            word = words[place]
            place += 2 if word in with_value else 1
            if word in ("-m", "--module") or word.startswith(("--module=", "-m")):
                return [*words[:place], "--", *words[place:]] if len(words) > place else words
        return words
