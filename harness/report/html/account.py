"""The account of samples and of checkpoints, as tables. Pure."""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchaos.harness.history import Execution, Save
from torchaos.harness.history.checkpoints import final_path
from torchaos.harness.judging.agreement import history_of
from torchaos.harness.record import Record

_MOST_ROWS = 12


def samples_of(run: Record, twins: Sequence[Record]) -> dict[str, Any]:
    """How many samples were consumed, here and in the twin, by attempt and in the steps that differ; empty where no
    sample was seen."""
    history = history_of(run, twins)
    ours = {step: _samples(by_rank) for step, by_rank in history.by_step().items()}
    theirs = {step: _samples(by_rank) for step, by_rank in twins[0].history.by_step().items()} if twins else {}
    if not any(ours.values()):
        return {}
    attempts = [
        {
            "number": one.number, "base": one.base, "first": one.first_step, "last": one.last_step,
            "loaded": os.path.basename(one.loaded) if one.loaded else None,
            "samples": sum(len(e.samples) for e in history.executions if e.attempt == one.number),
        }
        for one in history.attempts
    ]  # fmt: skip
    found: dict[str, Any] = {
        "attempts": attempts, "counted": sum(map(len, ours.values())), "steps": len(ours),
        "executed": sum(one["samples"] for one in attempts), "twin": None, "differ": 0, "rows": [],
    }  # fmt: skip
    if theirs:
        differ = [step for step in sorted(ours.keys() | theirs.keys()) if ours.get(step) != theirs.get(step)]
        skipped, repeated = _over(theirs, ours, differ), _over(ours, theirs, differ)
        rows = [_row(step, ours, theirs) for step in differ[:_MOST_ROWS]]
        found |= {"twin": sum(map(len, theirs.values())), "skipped": skipped, "repeated": repeated}
        found |= {"differ": len(differ), "rows": rows}
    return found


def _samples(by_rank: Mapping[int, Execution]) -> list[str]:
    return sorted(sample for one in by_rank.values() for sample in one.samples if sample is not None)


def _over(these: Mapping[int, list[str]], those: Mapping[int, list[str]], steps: Iterable[int]) -> int:
    """How many samples these have in those steps that those have not, or less often."""
    one, other = Counter[str](), Counter[str]()
    for step in steps:
        one.update(these.get(step, ()))
        other.update(those.get(step, ()))
    return (one - other).total()


def _row(step: int, ours: Mapping[int, list[str]], theirs: Mapping[int, list[str]]) -> dict[str, Any]:
    a, b = Counter(ours.get(step, ())), Counter(theirs.get(step, ()))
    return {"step": step, "run": a.total(), "twin": b.total(), "common": (a & b).total()}


def checkpoints_of(run: Record) -> list[dict[str, Any]]:
    """Every checkpoint that was saved or lies there, in order of saving, with what became of it."""
    inventory = run.artifacts.get("inventory")
    listed = inventory.get("checkpoints", []) if isinstance(inventory, dict) else []
    root = str(inventory.get("root", "")) if isinstance(inventory, dict) else ""
    entries = {str(one.get("path")): one for one in listed if isinstance(one, dict)}
    last: dict[str, Save] = {}  # of those that went to the same place
    for save in run.history.saves:
        last[_below(final_path(save.path), root, entries)] = save
    rows = [_saved(run, save, name, entries.get(name), bool(listed)) for name, save in last.items()]
    rows += [_there(run, name, entry) for name, entry in entries.items() if name not in last]
    return rows


def _below(path: str, root: str, entries: Mapping[str, Any]) -> str:
    """By which name the inventory knows it: as its own path ends, since a run directory may have been moved."""
    fitting = [name for name in entries if path == name or path.endswith("/" + name) or f"/{name}/" in path]
    return max(fitting, key=len, default=os.path.relpath(path, root) if root and path.startswith(root) else path)


def _saved(run: Record, save: Save, name: str, entry: Mapping[str, Any] | None, looked: bool) -> dict[str, Any]:
    start = run.events[0].mono_s
    row = _there(run, name, entry) if entry else {
        "name": name, "step": save.global_step, "format": save.format, "bytes": None, "verified": None,
        "state": "not there any more" if looked else "not looked at", "good": None, "problem": None,
        "loaded": _loads(run, name),
    }  # fmt: skip
    if not save.ok:
        row = {**row, "state": f"{row['state']}; its save was never finished", "good": row["good"] and None}
    return {**row, "attempt": save.attempt, "at": round(save.begun_s - start, 2), "blocked": round(save.blocked_s, 3)}


def _there(run: Record, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    problem = entry.get("problem")
    whole = bool(entry.get("complete")) and bool(entry.get("loadable")) and not problem
    state = "whole" if whole else "incomplete" if not entry.get("complete") else "damaged"
    return {
        "name": name, "step": entry.get("step"), "format": entry.get("format"), "bytes": entry.get("bytes"),
        "verified": entry.get("verified"), "state": state, "good": whole, "problem": problem,
        "attempt": None, "at": None, "blocked": None, "loaded": _loads(run, name),
    }  # fmt: skip


def _loads(run: Record, name: str) -> list[int]:
    def fits(path: str) -> bool:
        return path == name or path.endswith("/" + name) or f"/{name}/" in path

    return sorted({load.attempt for load in run.history.loads if load.ok and fits(load.path)})
