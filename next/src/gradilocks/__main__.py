"""`python -m gradilocks`, and the entry point of the `gradilocks` command."""

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
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
