"""Each kind of page in a real browser, on a desk and on a phone, in light and dark: no errors, nothing wider than the
page, and none of axe's rules is broken. `PAGES=FOLDER` saves pictures of the pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chromium import Opened, axe_core, chromium
from day_page import day_page
from recorded import change_events, judged, lose, recorded

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.gameday.fault_outcomes import Outcome
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting import html
from torchaos.harness.reporting.html import index
from torchaos.harness.reporting.trend_store import kept_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

GOLDEN = Path(__file__).parents[1] / "data" / "runs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind, by its name."""
    home = tmp_path_factory.mktemp("pages")
    passed, failed = recorded(home / "passed"), recorded(home / "failed")
    change_events(failed, "rank0-a1", lose(9))
    for folder in (passed, failed):
        (folder.root / "logs").mkdir()
        (folder.root / "logs" / "job-0.log").write_text("step 11 loss 1.0\nE failed (exitcode: -9) (pid: 29501)\n")
        html.write(folder, judged(folder))
    found = {"passed": passed.report, "failed": failed.report}
    for name, run in {"inconclusive": "missed", "hang": "freeze", "several": "kill-twice"}.items():
        folder = RunDir(Path(shutil.copytree(GOLDEN / run, home / name)))
        html.write(folder, judge(folder))
        found[name] = folder.report
    found["history"] = home / "index.html"
    index.write(found["history"], [kept_of(passed), kept_of(failed)] * 2)
    found["day"] = home / "day.html"
    came = [(outcome, "what was seen of it, in a sentence that is as long as most") for outcome in Outcome]
    found["day"].write_text(day_page(home, *came, planned=2, ettr=0.9, mttr="30s", lost_steps=3))
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["passed", "failed", "inconclusive", "hang", "several", "history", "day"])
def test_a_page_is_for_everybody(browser: Browser, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    """The page draws without complaint, fits its window, and breaks no rule of axe."""
    opened = Opened(browser, pages[name], width=width, color_scheme=scheme, bypass_csp=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    if folder := os.environ.get("PAGES"):
        opened.page.screenshot(path=f"{folder}/{name}-{width}-{scheme}.png")
    opened.page.evaluate(axe_core())
    broken = opened.page.evaluate("axe.run().then(found => found.violations.map(one => [one.id, one.nodes[0].html]))")
    assert broken == []
    assert opened.complaints == []
    opened.page.close()
