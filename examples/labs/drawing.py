"""What the labs share: their two options, and how a picture is made and saved.

A lab's docstring goes in and is its help text. Out come ``--quick`` and ``--output``, and a
matplotlib that needs no screen; where it is missing, one line says how to get it, before the lab
has computed for a minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#e08a1e", "#3a9464", "#c8372d", "#8a8f98"


def options(about: str | None) -> argparse.Namespace:
    """The command line of a lab: ``quick`` and ``output``."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, to see that it runs; proves nothing"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/labs"),
        metavar="FOLDER",
        help="where the picture goes (default: runs/labs)",
    )
    given = parser.parse_args()
    pyplot()
    # The tensors of the labs are small: two threads would wait for each other most of the time.
    torch.set_num_threads(1)
    try:
        given.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output {given.output}: cannot make this folder: {error.strerror}.")
    if given.quick:
        print("Quick: few steps, only to see that it runs. Leave out --quick for the real lab.\n")
    return given


def pyplot() -> Any:
    """matplotlib's pyplot, without a screen and in the look that the labs share."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("The labs draw with matplotlib, which is missing: pip install matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "figure.dpi": 100,
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#e6e8eb",
            "legend.frameon": False,
        }
    )
    return plt


def save(figure: Any, path: Path) -> None:
    """Writes the picture, in 128 colours, which is a third of the size, and says where it is."""
    from PIL import Image  # matplotlib brings it.

    figure.savefig(path)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    print(f"\nThe picture: {path}")
