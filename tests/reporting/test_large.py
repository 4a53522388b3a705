"""The page of a run of 16 ranks and 10,000 steps still opens at once."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
from recorded import recorded

from torchaos.harness.analysis.verdict import records_of, verdict_of
from torchaos.harness.reporting import html

RANKS, STEPS, KILLED, RESUMED = 16, 10_000, 6_000, 5_900

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def lines(source: str, rank: int, attempt: int, begin_s: float, first: int, last: int, apart: int) -> list[str]:
    """The events of one rank in one attempt, a step each tenth of a second; from step `apart` on losses are others."""

    def event(kind: str, seq: int, at_s: float, step: int, data: dict[str, Any]) -> str:
        return json.dumps({
            "kind": kind, "source": source, "seq": seq, "wall_s": 1.79e9 + at_s, "mono_s": at_s, "rank": rank,
            "attempt": attempt, "step": step, "data": data,
        })  # fmt: skip

    about = {"pid": 100 + 100 * attempt + rank, "start_ticks": 1, "local_rank": rank, "world_size": RANKS,
             "python": "3", "torch": "2", "hooks": []}  # fmt: skip
    found = [event("agent.started", 0, begin_s, 0, about)]
    if attempt:
        path = f"/c/step-{first - 1}"
        loaded = {"path": path, "format": "torch", "ok": True, "numbers": {"step": first - 1}}
        found.append(event("checkpoint.load_end", 1, begin_s + 0.5, 0, loaded))
    for step in range(first, last + 1):
        loss = 2 + math.cos(step / 50 + rank) / (1 + step / 1000) + (step >= apart) * 1e-3
        data = {
            "losses": [loss], "samples": [f"{step:x}-{rank:x}"], "indices": [step * RANKS + rank], "lr": [1e-3 / step],
            "opt_step": step, "sched_step": step, "skipped": False,
            "phases": {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01},
        }  # fmt: skip
        found.append(event("step", step + 1, begin_s + 1 + (step - first) * 0.1, step - first + 1, data))
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank 1 is killed in step 6,000; the job goes on from step 5,900, and from step 7,000 its losses are others."""
    folder = recorded(tmp_path_factory.mktemp("large") / "run")
    plan = json.loads(folder.plan.read_text())
    plan["faults"] = [one for one in plan["faults"] if one["inject"] == "process.kill"]
    plan["faults"][0]["trigger"]["step"] = KILLED + 1
    folder.plan.write_text(json.dumps(plan))
    killed_s = 100 + 1 + KILLED * 0.1
    harness: list[dict[str, Any]] = [
        {"kind": "run.stage", "mono_s": 99.0, "data": {"stage": "run"}},
        {"kind": "job.started", "mono_s": 99.5, "attempt": 0, "data": {"submission": 0, "pid": 9}},
        {"kind": "fault.applying", "mono_s": killed_s, "rank": 1, "attempt": 0,
         "data": {"fault": "process.kill", "phase": "backward", "global_step": KILLED + 1, "pid": 101}},
        *({"kind": "rank.exited", "mono_s": killed_s + 0.1 + rank / 100, "rank": rank, "attempt": 0,
           "data": {"pid": 100 + rank, "start_ticks": 1, "exit_code": -9 if rank == 1 else -15}}
          for rank in range(RANKS)),
        {"kind": "job.exited", "mono_s": killed_s + 500, "data": {"submission": 0, "pid": 9, "exit_code": 0}},
        {"kind": "run.stage", "mono_s": killed_s + 501, "data": {"stage": "end"}},
    ]  # fmt: skip
    for home, twin in ((folder.events, False), (folder.twins / "0" / "events", True)):
        for path in home.iterdir():
            path.unlink()
        own = [one for one in harness if not twin or one["kind"].startswith(("run", "job"))]
        (home / "harness.jsonl").write_text("".join(
            json.dumps({"source": "harness", "seq": n, "wall_s": 1.79e9 + one["mono_s"], "rank": None, "attempt": None,
                        "step": None, **one}) + "\n" for n, one in enumerate(own)))  # fmt: skip
        for rank in range(RANKS):
            first = lines(f"rank{rank}-a0", rank, 0, 100, 1, STEPS if twin else KILLED, STEPS + 1)
            (home / f"rank{rank}-a0-p{100 + rank}.jsonl").write_text("\n".join(first) + "\n")
            if not twin:
                second = lines(f"rank{rank}-a1", rank, 1, killed_s + 20, RESUMED + 1, STEPS, 7_000)
                (home / f"rank{rank}-a1-p{200 + rank}.jsonl").write_text("\n".join(second) + "\n")
    records = records_of(folder)
    result = verdict_of(*records, str(folder.root))
    began = time.monotonic()
    html.write(folder, result, records)
    print(f"written in {time.monotonic() - began:.2f} s, {folder.report.stat().st_size / 1e6:.2f} MB; {result.reason}")
    return folder.report


def test_the_page_stays_small_and_tells_what_was_left_out(page: Path) -> None:
    """Under 2 MB, with every lane, the first difference at its exact step, all steps near the fault, and a word on what
    was drawn in groups."""
    text = page.read_text()
    assert len(text.encode()) < 2_000_000
    assert "differs first in <b>step 7000</b>" in text
    assert "steps far from every fault are drawn in groups" in text
    assert "of 10000 steps are drawn" in text
    data = json.loads(text[text.index('id="data">') + 10 :].partition("</script>")[0])
    assert [lane["name"] for lane in data["timeline"]["lanes"]][-RANKS:] == [f"rank {rank}" for rank in range(RANKS)]
    single = {one[2] for one in data["timeline"]["steps"] if one[2] == one[3]}
    assert set(range(KILLED - 100, KILLED)) <= single
    drawn = {step for one in data["timeline"]["steps"] for step in range(one[2], one[3] + 1)}
    assert drawn == set(range(1, STEPS + 1))


def test_the_page_is_drawn_with_few_elements(page: Path) -> None:
    """A browser has few elements to draw, however many steps and ranks there were."""
    with chromium() as browser:
        opened = browser.new_page(viewport={"width": 1200, "height": 900})
        opened.goto(page.as_uri())
        opened.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        elements = opened.evaluate("document.getElementsByTagName('*').length")
        assert 100 < elements < 2_000
