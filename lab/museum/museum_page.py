"""The tables of the museum: lab/results/museum.md, and its summary in docs/measured/right-verdicts.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from museum import SIDES, Bug, Side
from sides import Told

Results = dict[tuple[str, Side], Told]


def first(done: Sequence[Told]) -> Results:
    """The results of all sides: for each side, torchaos's first verdict, before torchaos was changed because of it, and
    the last result of plain code."""
    begun = {(told.bug, told.side): told for told in reversed(done)}
    return {key: replace(begun[key], still=told.still) for key, told in last(done).items()}


def last(done: Sequence[Told]) -> Results:
    return {(told.bug, told.side): told for told in done}


def tables(bugs: Sequence[Bug], done: Sequence[Told]) -> dict[str, str]:
    """The tables by the name of their marks: all rows, and the counts alone."""
    counts = summary(bugs, done)
    rows = [*counts, "", *_table(bugs, done), "", *_notes(bugs, done)]
    return {"museum": "\n".join(rows), "museum-summary": "\n".join(counts)}


def summary(bugs: Sequence[Bug], done: Sequence[Told]) -> list[str]:
    lines = ["| | affected: failed by the right assertion | fixed: this finding is gone | fixed: a false failure |",
             "|---|---|---|---|"]  # fmt: skip
    for words, told in (("as first run", first(done)), ("now", last(done))):
        both: dict[Side, list[tuple[Bug, Told]]] = {
            side: [(bug, told[bug.name, side]) for bug in bugs if (bug.name, side) in told] for side in SIDES
        }
        found = sum(result.is_right(bug) for bug, result in both["affected"])
        gone = sum(result.cases.get(bug.failed) != "failed" or bug.failed in bug.still for bug, result in both["fixed"])
        false = sum(result.verdict == "failed" and not result.is_right(bug) for bug, result in both["fixed"])
        sizes = (len(both["affected"]), len(both["fixed"]))
        lines.append(f"| {words} | {found} of {sizes[0]} | {gone} of {sizes[1]} | {false} of {sizes[1]} |")
    return lines


def _table(bugs: Sequence[Bug], done: Sequence[Told]) -> list[str]:
    lines = ["| bug | affected | plain code | torchaos said | fixed | plain code | torchaos said |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    told = last(done)
    for bug in bugs:
        if not all((bug.name, side) in told for side in SIDES):
            continue
        cells = [f"[{bug.name}]({bug.report}): {bug.about}"]
        for side in SIDES:
            result = told[bug.name, side]
            versions = bug.affected if side == "affected" else bug.fixed
            cells += [", ".join(f"{name} {version}" for name, version in versions.items()),
                      "differs" if result.differs else "equal", _said(result)]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def _said(told: Told) -> str:
    failed = [f"`{name}`" for name, verdict in told.cases.items() if verdict == "failed"]
    return (
        told.verdict
        if told.verdict == "passed"
        else f"**{told.verdict}**" + (f": {', '.join(failed)}" if failed else "")
    )


def _notes(bugs: Sequence[Bug], done: Sequence[Told]) -> list[str]:
    lines = []
    if waiting := [bug.name for bug in bugs if not all((bug.name, side) in last(done) for side in SIDES)]:
        lines.append(f"Not run on both sides yet: {', '.join(waiting)}.\n")
    begun, now = first(done), last(done)
    for bug in bugs:
        for side in SIDES:
            if (bug.name, side) not in now:
                continue
            now_told, other = now[bug.name, side], begun[bug.name, side]
            if not now_told.is_right(bug):
                lines.append(f"- {bug.name}, {side}: not as it should be. {now_told.reason}")
            if _said(other) != _said(now_told):
                lines.append(f"- {bug.name}, {side}: as first run {_said(other)}.")
        if (bug.name, "fixed") in now:
            lines += [f"- {bug.name}, fixed: `{name}` fails rightly: {why}" for name, why in bug.still.items()]
    return lines
