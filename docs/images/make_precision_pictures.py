"""Makes the pictures of an audit and of the demo: real runs, their pages, screenshots.

    PYTHONPATH=src python docs/images/make_precision_pictures.py

The audit is of ten steps of the demo's GPT whose loss is divided by 1024 micro-batches; the demo is
the demo. Two minutes on a CPU. Needs `pip install '.[dev]'` and Debian's chromium package.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "report"))

from browser import browser, visit  # noqa: E402

import gradilocks  # noqa: E402
from gradilocks.cli import main as command  # noqa: E402
from gradilocks.demo.small_gpt import GPT, Batches, python_documentation  # noqa: E402

WIDTH = 1280
MOST_BYTES = 300_000


def audit(page: Path) -> None:
    """Ten batches of the demo's GPT, as one of 1024 micro-batches."""
    text = python_documentation()
    torch.manual_seed(0)
    model = GPT(vocabulary=len(text.vocabulary), length=64)
    batches = Batches(text, rows=32, length=64, seed=0)

    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / 1024

    gradilocks.audit(model, loss, [batches.draw() for _ in range(10)]).save_picture(page)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        audit(Path(folder) / "audit.html")
        command(["demo", "--quiet", "-o", str(Path(folder) / "demo")])
        for name, page, height in (
            ("audit.png", Path(folder) / "audit.html", 1700),
            ("demo.png", Path(folder) / "demo" / "report.html", 1700),
        ):
            with visit(chromium, page, width=WIDTH) as seen:
                seen.page.set_viewport_size({"width": WIDTH, "height": height})
                seen.page.wait_for_timeout(500)
                seen.page.screenshot(path=str(HERE / name))
            assert (HERE / name).stat().st_size <= MOST_BYTES, f"{name} is too large: show less"


if __name__ == "__main__":
    main()
