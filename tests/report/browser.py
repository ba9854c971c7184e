"""A real browser for the tests of the page: Debian's Chromium, driven by Playwright, offline."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HOW_TO_INSTALL = "install it with `apt-get install chromium`"
DRAWN = "[...document.querySelectorAll('.canvas')].every(canvas => canvas.dataset.ready)"


@dataclass
class Visit:
    """A page that is open, and what went wrong on it."""

    page: Any
    complaints: list[str] = field(default_factory=list)

    def style(self, selector: str, name: str) -> str:
        value = self.page.evaluate(
            "([s, n]) => getComputedStyle(document.querySelector(s)).getPropertyValue(n)",
            [selector, name],
        )
        return str(value)

    def range_of(self, canvas: str) -> list[float]:
        found = self.page.evaluate(
            "id => document.getElementById(id).layout.xaxis.range.map(Number)", canvas
        )
        return [float(value) for value in found]

    def inside(self, canvas: str) -> dict[str, float]:
        """The place of a plot's drawing area on the screen, scrolled to."""
        area = self.page.locator(f"#{canvas} .nsewdrag").first
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        return {key: float(value) for key, value in box.items()}


@contextmanager
def browser() -> Iterator[Any]:
    """Starts Chromium, or skips the test with the reason."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install '.[dev]'"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip(f"Chromium is not installed; {HOW_TO_INSTALL}")
    with playwright.sync_playwright() as driver:
        # Root may not use Chromium's sandbox, and a container's /dev/shm is small.
        started = driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield started
        finally:
            started.close()


@contextmanager
def visit(
    chromium: Any, page: Path, *, width: int = 1400, dark: bool = False, script: bool = True
) -> Iterator[Visit]:
    """Opens a page from disk; every request but for the file itself is refused and noted."""
    context = chromium.new_context(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
        java_script_enabled=script,
    )
    opened = context.new_page()
    made = Visit(opened)

    def decide(route: Any) -> None:
        if route.request.url.startswith(("file:", "data:", "blob:")):
            route.continue_()
        else:
            made.complaints.append(f"request to {route.request.url}")
            route.abort()

    context.route("**/*", decide)
    opened.on("pageerror", lambda error: made.complaints.append(f"error: {error}"))
    opened.on("dialog", lambda dialog: (made.complaints.append("dialog"), dialog.dismiss()))
    opened.on(
        "console",
        lambda message: (
            made.complaints.append(f"console {message.type}: {message.text}")
            if message.type in ("error", "warning")
            else None
        ),
    )
    try:
        opened.goto(page.as_uri())
        if script:
            opened.wait_for_function(DRAWN, timeout=60_000)
        yield made
    finally:
        context.close()
