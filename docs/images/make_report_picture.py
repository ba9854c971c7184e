"""Makes the picture of a report in the README: a real run, its page, a screenshot.

    PYTHONPATH=src python docs/images/make_report_picture.py

It trains the demo's GPT in emulated fp16 for 900 steps (about a minute on a CPU). The scale tries
to grow every 40 steps instead of every 2,000, and the loss of one batch is multiplied by 16, so
that there is something to see: overflows that cost steps, and a spike that the limit catches.
Needs `pip install '.[dev]'` and Debian's chromium package; Pillow, if it is there, makes the
picture smaller.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "report"))

from browser import browser, visit  # noqa: E402
from real_run import train  # noqa: E402

from gradilocks.cli import main as gradilocks  # noqa: E402

PICTURE = HERE / "report.png"
WIDTH, HEIGHT = 1280, 1900
COLOURS = 256  # Of a palette: a third of the bytes, and no eye sees it.


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "gpt.jsonl"
        train(run, steps=900, init_scale=2.0**13, growth_interval=40, bad_batches={150: 16.0})
        gradilocks(["report", str(run)])
        shot = Path(folder) / "shot.png"
        with browser() as chromium, visit(chromium, run.with_suffix(".html"), width=WIDTH) as seen:
            seen.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
            seen.page.wait_for_timeout(500)
            seen.page.screenshot(path=str(shot))
        _with_palette(shot)


def _with_palette(shot: Path) -> None:
    try:
        from PIL import Image
    except ImportError:
        shutil.copy(shot, PICTURE)
        return
    Image.open(shot).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(
        PICTURE, optimize=True
    )


if __name__ == "__main__":
    main()
