"""The command line: ``gradilocks COMMAND``, one file a command.

Arguments enter, an exit status leaves: 0, or 1 for a ``GradilocksError``, 2 for a wrong option,
130 for an interrupt. This package is the only place in Gradilocks that prints and exits. typer and
rich are imported when a command runs, and torch only by the commands that train.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from gradilocks.cli.terminal import Interrupted, held_interrupts
from gradilocks.errors import GradilocksError
from gradilocks.report import clean

__all__ = ["main"]

INTERRUPTED = 130
_UNWRITABLE = {getattr(errno, name, None) for name in ("ENOSPC", "EDQUOT", "EFBIG", "EIO", "EBADF")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: what follows the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit status.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    # Under `run`, standard output is the script's, closed or full.
    ours = given[:1] != ["run"] or given[1:2] in (["--help"], ["-h"])
    if ours and sys.stdout is None:
        return _fail("standard output is closed; there is nowhere to print to.", status=1)
    try:
        status = _run(given)
        if ours:
            sys.stdout.flush()  # Not later: Python would show a traceback on its way out.
        return status
    except GradilocksError as error:
        return _fail(str(error), status=1)
    except Interrupted as interrupt:
        return _fail(f"interrupted {interrupt}", status=INTERRUPTED)
    except KeyboardInterrupt:
        return _fail("interrupted.", status=INTERRUPTED)
    except BrokenPipeError:
        # The reader of the output went away (`gradilocks demo | head -1`).
        _drop_output()
        return 1
    except OSError as error:
        if not ours or error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _drop_output()
        return _fail(f"standard output cannot be written: {error.strerror}.", status=1)


def _run(arguments: list[str]) -> int:
    with held_interrupts():
        import typer

        from gradilocks.cli.app import app, completion
        from gradilocks.cli.options import USAGE_ERROR

    try:
        answer = completion(arguments)
        if answer is not None:
            print(answer)
            return 0
        status = app(arguments, prog_name="gradilocks", standalone_mode=False)
    except USAGE_ERROR as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "gradilocks"
        message = " ".join(getattr(error, "format_message", error.__str__)().split())
        stop = "" if message.endswith((".", "?")) else "."
        return _fail(f"{message}{stop} Try '{command} --help'.", status=2)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    if status == INTERRUPTED:  # how newer versions of typer report a KeyboardInterrupt
        raise KeyboardInterrupt
    return status if isinstance(status, int) else 0


def _drop_output() -> None:
    # Python would flush stdout once more on its way out, and print a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, *, status: int) -> int:
    if sys.stderr is not None:  # None if it is closed, and then print would take stdout
        print(f"gradilocks: {clean(message)}", file=sys.stderr)
    return status
