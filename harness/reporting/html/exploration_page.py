"""The page of an exploration: when a death is fatal, the operations in order with the states between them, and the
story of the smallest state that fails."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchaos.harness.crash_explorer.exploration_summary import NAME as SCRIPT
from torchaos.harness.crash_explorer.exploration_summary import ExplorationSummary, told
from torchaos.harness.crash_explorer.operations import Operation
from torchaos.harness.crash_explorer.resume_outcomes import Outcome, OutcomeClass, is_suspected
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.record.plan import seconds_in_words
from torchaos.harness.record.result import Result
from torchaos.harness.reporting.html.page import render

_HEIGHTS = {"create": 6, "open": 6, "mkdir": 6, "write": 8, "close": 4}  # usual; others are drawn high
_STEP, _LANE = 12, 22  # distance of operations and of lanes, in units of the picture
_MOST = 1500  # the most operations that are shown
_WIDTH = 1000  # width of the picture of the run's time


def write(found: ExplorationSummary, result: Result, path: Path) -> None:
    """Writes the page, readable only by its owner. Raises OSError if it can't be written."""
    write_atomically(path, text(found, result, path.parent), private=True)


def text(found: ExplorationSummary, result: Result, home: Path) -> str:
    """The HTML of the page of an exploration. `home`: the directory of the exploration; links are relative to it."""
    share = found.fatal_share
    return render("explored.html", {}, {
        "result": result.to_json(), "found": found.warm, "there_are": found.choice.in_all,
        "classes": [_class(found, kind) for kind in OutcomeClass], "tried": len(found.outcomes),
        "fatal": "" if share is None else f"{share:.1%}", "fatal_s": seconds_in_words(found.fatal_s),
        "unconfirmed_s": seconds_in_words(found.unconfirmed_fatal_s) if found.unconfirmed_fatal_s else "",
        "unconfirmed": any(map(is_suspected, found.outcomes)), "tried_s": seconds_in_words(found.tried_s),
        "time": _time(found), "line": _line(found),
        "smallest": _story(found.smallest, home) if found.smallest else None,
        "outcomes": [_row(one, home) for one in found.outcomes],
        "notes": [*found.notes, *found.recording.unsure], "unfinished": found.unfinished,
    })  # fmt: skip


def _class(found: ExplorationSummary, kind: OutcomeClass) -> dict[str, Any]:
    own = found.of(kind)
    says = told(own) if own and kind is not OutcomeClass.RIGHT else ""
    return {"name": kind.value, "mark": _mark(kind), "states": len(own), "says": says}


def _mark(kind: OutcomeClass) -> str:
    return f"x-{kind.name.lower()}"


def _mark_of(one: Outcome) -> str:
    return _mark(one.kind) + (" unconfirmed" if is_suspected(one) else "")


def _doubt(one: Outcome) -> str:
    return " (not confirmed)" if is_suspected(one) else ""


def _time(found: ExplorationSummary) -> dict[str, Any]:
    """The time of the recorded run, coloured by the outcome of a death of all processes at that time."""
    began_s, whole_s = found.recording.began_s, found.seconds or 1.0
    parts = [
        {
            "x": round(_WIDTH * (since - began_s) / whole_s, 2),
            "width": round(max(0.8, _WIDTH * (until - since) / whole_s), 2),
            "mark": _mark_of(one), "words": f"{one.kind.value}{_doubt(one)}: {one.state}, step {one.died_at_step}",
        }
        for one in found.outcomes if one.model == "process death"
        for since, until in one.moments
    ]  # fmt: skip
    return {"width": _WIDTH, "parts": parts, "end": seconds_in_words(whole_s)}


def _line(found: ExplorationSummary) -> dict[str, Any]:
    """The operations from left to right, with a lane for each rank. Below them is a lane for each model of a death,
    with the states that are possible from that operation on."""
    shown = _shown(found)
    place = {operation.number: number for number, operation in enumerate(shown)}
    ranks = sorted({operation.rank for operation in shown}, key=lambda rank: (rank is None, rank))
    models = sorted({one.model for one in found.outcomes})
    lanes = [*("others" if rank is None else f"rank {rank}" for rank in ranks), *models]
    operations = [
        {
            "x": number * _STEP, "y": ranks.index(operation.rank) * _LANE + 4, "kind": operation.kind.value,
            "words": str(operation), "height": _HEIGHTS.get(operation.kind.value, 14),
        }
        for number, operation in enumerate(shown)
    ]  # fmt: skip
    states, ends = [], {state.name: state.last_operation for state in found.choice.states}
    height: dict[tuple[str, int], int] = {}
    for one in sorted(
        found.outcomes, key=lambda one: list(OutcomeClass).index(one.kind)
    ):  # the worst is drawn last, on top
        last = ends.get(one.state)
        at = -1 if last is None else place.get(last.number)
        if at is not None and (beside := height.setdefault((one.model, at), 0)) < 3:
            height[one.model, at] += 1
            y = (len(ranks) + models.index(one.model)) * _LANE + 4 + 5 * beside
            words = f"{one.state}, step {one.died_at_step}: {one.kind.value}{_doubt(one)}. {one.reason}"
            states.append({"x": (at + 1) * _STEP - 3, "y": y, "mark": _mark_of(one), "words": words})
    return {
        "lanes": lanes, "lane": _LANE, "width": (len(shown) + 1) * _STEP, "height": len(lanes) * _LANE,
        "operations": operations, "states": states,
        "left_out": len(found.recording.operations) - len(shown),
    }  # fmt: skip


def _shown(found: ExplorationSummary) -> Sequence[Operation]:
    """The operations to show: those around the smallest failing state or, if no state fails, the first ones."""
    operations, smallest = found.recording.operations, found.smallest
    if len(operations) <= _MOST:
        return operations
    ends: Mapping[str, Operation | None] = {state.name: state.last_operation for state in found.choice.states}
    last = ends.get(smallest.state) if smallest else None
    at = next((place for place, one in enumerate(operations) if last and one.number == last.number), 0)
    first = max(0, min(at - _MOST // 2, len(operations) - _MOST))
    return operations[first : first + _MOST]


def _story(one: Outcome, home: Path) -> dict[str, Any]:
    script = Path(one.run_dir) / SCRIPT
    shell = script.read_text(encoding="utf-8", errors="replace") if one.run_dir and script.is_file() else ""
    again = {None: "", True: "A second start gets past the death.", False: "A second start fails as well."}[one.mended]
    again += " No cold start has confirmed it yet." if is_suspected(one) else ""
    return {
        **_row(one, home), "files": one.files, "last": one.last_operation or "none", "operations": one.operations,
        "again": again, "script": os.path.relpath(script, home) if shell else "", "shell": shell,
    }  # fmt: skip


def _row(one: Outcome, home: Path) -> dict[str, Any]:
    report = Path(one.run_dir, "report.html") if one.run_dir else None
    return {
        "state": one.state, "model": one.model, "step": one.died_at_step, "kind": one.kind.value,
        "mark": _mark_of(one), "assertion": one.assertion, "reason": one.reason, "from_step": one.from_step,
        "lost": one.lost_steps, "seconds": one.seconds,
        "how": (f"as {one.like}" if one.like else "forked" if one.warm else "launcher") + _doubt(one),
        "link": os.path.relpath(report, home) if report and report.is_file() else "",
        "folder": os.path.relpath(one.run_dir, home) if one.run_dir else "",
    }  # fmt: skip
