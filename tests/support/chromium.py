"""Pages in a real browser, with all errors and requests that they cause."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_AXE = Path(__file__).parents[2] / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser. Skips the test if playwright or chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM:
        pytest.skip("needs chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def axe_core() -> str:
    """The source of axe, which checks accessibility. Skips the test if ci/install-axe has not fetched it."""
    if not _AXE.is_file():
        pytest.skip("needs axe-core: run ci/install-axe")
    return _AXE.read_text(encoding="utf-8")


class Opened:
    """A page. `complaints`: what it wrote to the console, its errors, and the addresses that it requested."""

    def __init__(self, browser: Browser, path: Path, width: int = 1200, **more: Any) -> None:
        self.page: Page = browser.new_page(viewport={"width": width, "height": 900}, **more)
        self.complaints: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "request", lambda request: self.complaints.append(request.url) if request.url[:4] == "http" else None
        )
        self.page.goto(path.as_uri())
