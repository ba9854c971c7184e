"""Entry point of `python -m gradilocks` and of the `gradilocks` command."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line and returns its exit status."""
    try:
        from gradilocks.cli import main as run_command
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print("gradilocks: typer is not installed: pip install 'gradilocks[cli]'", file=sys.stderr)
        return 1
    status = run_command()
    if status == 130:  # End by SIGINT, as Python does: an exit status of 130 alone would not stop a shell's loop.
        sys.excepthook = lambda *error: None
        raise KeyboardInterrupt
    return status


if __name__ == "__main__":
    sys.exit(main())
