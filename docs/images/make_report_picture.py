"""Makes the picture of a report in the README: a real run, its page, a screenshot.

    PYTHONPATH=src python docs/images/make_report_picture.py

It trains the demo's GPT in emulated fp16 for 900 steps (about a minute on a CPU). The scale tries
to grow every 40 steps instead of every 2,000, and the loss of one batch is multiplied by 16, so
that there is something to see: overflows that cost steps, and a spike that the limit catches.
Needs `pip install '.[dev]'` and Debian's chromium package.
"""

from __future__ import annotations

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
MOST_BYTES = 300_000


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "gpt.jsonl"
        train(run, steps=900, init_scale=2.0**13, growth_interval=40, bad_batches={151: 16.0})
        gradilocks(["report", str(run)])
        with browser() as chromium, visit(chromium, run.with_suffix(".html"), width=WIDTH) as seen:
            seen.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
            seen.page.wait_for_timeout(500)
            seen.page.screenshot(path=str(PICTURE))
    assert PICTURE.stat().st_size <= MOST_BYTES, "too large for a README: show less of the page"


if __name__ == "__main__":
    main()
