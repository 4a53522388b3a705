"""The pages in a real browser: they draw, zoom, show what is under the pointer, filter, fit a phone, and cause no
error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from chromium import Opened as OpenedPage
from chromium import chromium
from recorded import change_events, judged, lose, recorded

from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting import html
from torchaos.harness.reporting.html import index
from torchaos.harness.reporting.trend_store import kept_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LOG = ["starting", *(f"step {n} loss 1.0" for n in range(1, 12)), "E failed (exitcode: -9) (pid: 29501)", "restarted"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """It failed: a loss differs."""
    folder = recorded(tmp_path_factory.mktemp("browser") / "run")
    change_events(folder, "rank0-a1", lose(9))
    (folder.root / "logs").mkdir()
    (folder.root / "logs" / "job-0.log").write_text("\n".join(LOG))
    html.write(folder, judged(folder))
    return folder


class Opened(OpenedPage):
    """A page with charts."""

    def scale(self, chart: str) -> tuple[float, float]:
        """What stretch a chart shows."""
        low, high = self.page.evaluate(
            "id => { const x = document.getElementById(id).plot.scales.x; return [x.min, x.max] }", chart
        )
        return low, high

    def colours(self, chart: str) -> int:
        """How many different ones are drawn."""
        return int(self.page.evaluate(
            "id => { const c = document.querySelector('#' + id + ' canvas');"
            " const d = new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer);"
            " return new Set(d).size }", chart))  # fmt: skip

    def at(self, chart: str, seconds: float, lane: float) -> tuple[float, float]:
        """The middle of a lane (from 0) at a time, on the screen."""
        x, y = self.page.evaluate(
            "([id, s, lane]) => { const p = document.getElementById(id).plot; p.over.scrollIntoView({block: 'center'});"
            " const r = p.over.getBoundingClientRect();"
            " return [r.left + p.valToPos(s, 'x'), r.top + (lane + 0.5) * 26] }",
            [chart, seconds, lane],
        )  # fmt: skip
        return x, y


@pytest.fixture
def opened(browser: Browser, run: RunDir) -> Iterator[Opened]:
    found = Opened(browser, run.report)
    yield found
    assert found.complaints == []
    found.page.close()


def test_all_charts_are_drawn(opened: Opened) -> None:
    """Every chart has more than its background, and the page is no wider than the window."""
    for chart in ("timeline-chart", "loss-chart", "apart-chart", "lr-chart"):
        assert opened.colours(chart) > 5, chart
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_timeline_zooms_and_tells(opened: Opened) -> None:
    """It opens around the faults. Dragging over a stretch shows that stretch; the button of a fault shows the fault;
    the pointer over a fault or a step gets its words; a double click shows all again."""
    near = opened.scale("timeline-chart")
    opened.page.get_by_role("button", name="All").click()
    whole = opened.scale("timeline-chart")
    assert whole[1] - whole[0] > 90
    assert whole[0] < near[0] < 27.06 < 47.56 < near[1] < whole[1]
    x, y = opened.at("timeline-chart", 27.06, 0)
    opened.page.mouse.move(x, y)
    assert "process.kill on rank 1" in opened.page.locator(".tip").inner_text()
    begin, end = opened.at("timeline-chart", 20, 0), opened.at("timeline-chart", 40, 0)
    opened.page.mouse.move(*begin)
    opened.page.mouse.down()
    opened.page.mouse.move(*end, steps=4)
    opened.page.mouse.up()
    low, high = opened.scale("timeline-chart")
    assert low == pytest.approx(20, abs=1)
    assert high == pytest.approx(40, abs=1)
    opened.page.get_by_role("button", name="Fault: process.freeze").click()
    low, high = opened.scale("timeline-chart")
    assert low < 47.56 < high < 60
    lanes = opened.page.evaluate(
        "JSON.parse(document.getElementById('data').textContent).timeline.lanes.map(l => l.name)"
    )
    steps = opened.page.evaluate("JSON.parse(document.getElementById('data').textContent).timeline.steps")
    lane, _attempt, first, _last, start, over = next(one for one in steps if one[4] > low and one[5] < high)[:6]
    opened.page.mouse.move(*opened.at("timeline-chart", (start + over) / 2, lane))
    assert f"{lanes[lane]}: step {first}, attempt 1" in opened.page.locator(".tip").inner_text()
    assert "forward" in opened.page.locator(".tip").inner_text()
    opened.page.mouse.dblclick(x, y)
    assert opened.scale("timeline-chart") == whole


def test_the_timeline_is_filtered(opened: Opened) -> None:
    """A field chooses ranks and boxes kinds: what is not wanted leaves the drawing."""
    tall = opened.page.locator("#timeline-chart canvas").bounding_box()
    opened.page.get_by_placeholder("0-3, 7").fill("0")
    short = opened.page.locator("#timeline-chart canvas").bounding_box()
    assert tall is not None
    assert short is not None
    assert tall["height"] - short["height"] == pytest.approx(26, abs=1)
    before = opened.page.evaluate("document.querySelector('#timeline-chart canvas').toDataURL()")
    opened.page.get_by_role("checkbox", name="checkpoints").uncheck()
    assert opened.page.evaluate("document.querySelector('#timeline-chart canvas').toDataURL()") != before


def test_the_curves_zoom_together(opened: Opened) -> None:
    """A stretch of steps chosen in one chart is shown in the others too."""
    box = opened.page.locator("#loss-chart .u-over").bounding_box()
    assert box is not None
    opened.page.locator("#loss-chart").scroll_into_view_if_needed()
    box = opened.page.locator("#loss-chart .u-over").bounding_box()
    assert box is not None
    opened.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 50)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 50, steps=4)
    opened.page.mouse.up()
    assert opened.scale("loss-chart") == pytest.approx((7.5, 10.75), abs=0.2)
    assert opened.scale("lr-chart") == pytest.approx(opened.scale("loss-chart"))


def test_the_log_is_filtered(opened: Opened) -> None:
    """Only the lines that hold the text are left."""
    opened.page.get_by_placeholder("text in a line").fill("EXITCODE")
    lines = opened.page.locator("pre.log > span:visible")
    assert "exitcode: -9" in lines.first.inner_text()
    assert lines.count() <= 2


def test_dark_and_print(browser: Browser, run: RunDir) -> None:
    """A dark system gets a dark page, and paper is white all the same."""
    opened = Opened(browser, run.report, color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert opened.page.evaluate(background) == "rgb(20, 23, 27)"
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.page.evaluate(background) == "rgb(255, 255, 255)"
    assert len(opened.page.pdf(format="A4")) > 20_000
    assert opened.complaints == []
    opened.page.close()


def test_a_phone_is_wide_enough(browser: Browser, run: RunDir) -> None:
    """At 360 pixels nothing sticks out at the side, no table is cut off, and the charts are there. A row of a wide
    table is a card, with the names of its columns."""
    opened = Opened(browser, run.report, width=360, is_mobile=True, has_touch=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    cut = "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert opened.page.evaluate(cut) == 0
    named = "getComputedStyle(document.querySelector('table.cards tbody td'), '::before').content"
    assert opened.page.evaluate(named) not in ("none", "normal")
    assert opened.colours("timeline-chart") > 5
    assert opened.complaints == []
    opened.page.close()


def test_the_index_page(browser: Browser, run: RunDir) -> None:
    """It draws the trend, filters its rows, and leads to a run's own page."""
    path = run.root.parent / "index.html"
    index.write(path, [kept_of(run)] * 3)
    opened = Opened(browser, path)
    assert opened.colours("trend-0") > 3
    opened.page.locator("#run-filter").fill("nothing like it")
    assert opened.page.locator("#runs tbody tr:visible").count() == 0
    opened.page.locator("#run-filter").fill("FAILED")
    assert opened.page.locator("#runs tbody tr:visible").count() == 3
    opened.page.locator("#runs tbody a").first.click()
    assert opened.page.title() == "failed: kill-then-freeze"
    assert opened.complaints == []
    opened.page.close()
