"""The docs as a site: it is built strictly, from any clone, and opens without a server or a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import Opened, chromium

from .conftest import REPOSITORY

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.needs("mkdocs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with --strict: a link, an anchor or a page of the navigation that leads nowhere is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def test_nothing_is_left_as_markdown(site: Path) -> None:
    """What a forge shows as a table, a list or a fence is one here too."""
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 30
    raw = re.compile(r"<p>(\||```|- |\d\. )|\n(- |\| ---)")
    texts = {page.name: re.sub(r"<pre>.*?</pre>", "", page.read_text(), flags=re.DOTALL) for page in pages}
    assert {name: found[0] for name, text in texts.items() if (found := raw.search(text))} == {}


@pytest.mark.parametrize(
    "names", [["index", "tutorial", "reference/cli"], pytest.param([], id="all", marks=pytest.mark.long)]
)
def test_pages_open_without_a_network(site: Path, browser: Browser, names: list[str]) -> None:
    """Each asks for nothing elsewhere, complains of nothing in the console, and shows its heading."""
    every = set(site.rglob("*.html")) - {site / "404.html"}  # that one is for servers
    pages = {site / f"{name}.html" for name in names} or every
    assert pages <= every
    opened = Opened(browser, site / "index.html")
    for path in sorted(pages):
        opened.page.goto(path.as_uri())
        assert opened.page.locator("h1").first.inner_text()
        assert opened.complaints == [], path


def test_it_can_be_searched_from_a_disk(site: Path, browser: Browser) -> None:
    """The field finds an injector in the reference, with no server behind it."""
    opened = Opened(browser, site / "index.html")
    opened.page.locator("[data-md-component=search-query]").fill("network.partition")
    opened.page.locator(".md-search-result__link").first.wait_for(state="attached")
    hits = opened.page.locator(".md-search-result__link").evaluate_all("all => all.map(one => one.href)")
    assert any("injectors.html" in hit for hit in hits), hits
    assert opened.complaints == []
