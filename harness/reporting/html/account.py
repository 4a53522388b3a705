"""Tables of the samples that were consumed, and of the checkpoints. Pure."""

from __future__ import annotations

import itertools
import math
import os.path
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from torchaos.harness.analysis.comparison.agreement import common, history_of
from torchaos.harness.analysis.comparison.sample_counts import are_summed
from torchaos.harness.analysis.comparison.sample_reasons import Computed
from torchaos.harness.checkpoints.formats.format_table import may_hold_tensors
from torchaos.harness.interfaces import Need
from torchaos.harness.record.history import Execution, Save
from torchaos.harness.record.history.saves_and_loads import final_path
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.record.steps import Executions, StepTable

_MOST_ROWS = 12
_GONE = "it no longer exists"
_SHOWN = 3  # successive checkpoints that no longer exist


def samples_of(run: Record, twins: Sequence[Record]) -> dict[str, Any]:
    """The numbers of samples that the run and its twin consumed, for each attempt, and the steps in which they differ.
    Empty if no sample was seen."""
    history = history_of(run, twins)
    mine, other = history.by_step(), twins[0].history.by_step() if twins else StepTable.of({})
    if not _many(mine.executions):
        return {}
    attempts = [
        {
            "number": attempt.number, "base": attempt.base, "first": attempt.first_step, "last": attempt.last_step,
            "loaded": os.path.basename(attempt.loaded) if attempt.loaded else None,
            "samples": int(history.executions.of_attempt(attempt.number).column("in_samples").sum()),
        }
        for attempt in history.attempts
    ]  # fmt: skip
    found: dict[str, Any] = {
        "attempts": attempts, "counted": _many(mine.executions), "steps": len(mine),
        "executed": sum(attempt["samples"] for attempt in attempts), "twin": None, "differ": 0, "computed": 0,
        "rows": [],
    }  # fmt: skip
    if other:
        differ, computed = _differ(mine, other), Computed(history, mine, other)
        own = {step for step in differ if computed.follows(step)}  # not known: see sample_accounting
        differ = [step for step in differ if step not in own]
        ours, theirs = ({step: _samples(steps.get(step, {})) for step in differ} for steps in (mine, other))
        found |= {"twin": _many(other.executions), "differ": len(differ), "computed": len(own)}
        if not are_summed(mine, other):  # else it is not known which samples they are
            found |= {"skipped": _over(theirs, ours, differ), "repeated": _over(ours, theirs, differ)}
            found |= {"rows": [_row(step, ours, theirs) for step in differ[:_MOST_ROWS]]}
    return found


def _many(steps: Executions) -> int:
    return int(_counts(steps).sum())


def _counts(steps: Executions) -> Any:
    """For each step: its samples whose digests, or the sum of whose digests, are known."""
    return np.where(steps.column("summed"), steps.column("in_samples"), steps.column("in_seen"))


def _differ(ours: StepTable, theirs: StepTable) -> list[int]:
    """The steps in which all ranks together did not consume the twin's samples."""
    mine, twins = common(ours, theirs)
    same = np.ones(len(mine), bool)
    for read in (_counts, lambda steps: steps.column("samples_sum")):
        same &= mine.sums(read(mine.executions)) == twins.sums(read(twins.executions))
    found: list[int] = np.setdiff1d(np.union1d(ours.numbers, theirs.numbers), mine.numbers[same]).tolist()
    return found


def _samples(by_rank: Mapping[int, Execution]) -> list[str]:
    return sorted(sample for one in by_rank.values() for sample in one.samples if sample is not None)


def _over(these: Mapping[int, list[str]], those: Mapping[int, list[str]], steps: Iterable[int]) -> int:
    """How many samples of the first side the second side lacks. Samples are counted, so one that occurs twice must be
    there twice."""
    one, other = Counter[str](), Counter[str]()
    for step in steps:
        one.update(these.get(step, ()))
        other.update(those.get(step, ()))
    return (one - other).total()


def _row(step: int, ours: Mapping[int, list[str]], theirs: Mapping[int, list[str]]) -> dict[str, Any]:
    a, b = Counter(ours.get(step, ())), Counter(theirs.get(step, ()))
    return {"step": step, "run": a.total(), "twin": b.total(), "common": (a & b).total()}


def checkpoints_of(run: Record) -> list[dict[str, Any]]:
    """The history of each checkpoint. Each save is a row, in order of time, even if all saves write the same file. Then
    comes a row for each checkpoint on disk whose save was not seen. A load belongs to the newest save before it."""
    inventory = run.artifacts.get("inventory")
    looked = isinstance(inventory, dict) and bool(inventory.get("checkpoints"))
    listed = inventory.get("checkpoints", []) if isinstance(inventory, dict) else []
    home = inventory.get("root") if isinstance(inventory, dict) else run.plan.job.checkpoints
    folders = {os.path.dirname(save.path) for save in run.history.saves}
    roots = [str(home or ""), os.path.commonpath(folders) if folders else ""]
    entries = {str(one.get("path")): one for one in listed if isinstance(one, dict)}
    saves: dict[str, dict[tuple[int, int], Save]] = {}  # saves of one step to the same place count once
    for save in run.history.saves:
        name = _below(final_path(save.path), roots, entries)
        saves.setdefault(name, {})[save.attempt, save.local_step] = save
    rows: list[dict[str, Any]] = []
    for name, own in saves.items():
        rows += _saved(run, name, list(own.values()), entries.get(name), looked)
    rows.sort(key=lambda row: row["at"])
    return rows + [_there(name, entry, _loads(run, name)) for name, entry in entries.items() if name not in saves]


def folded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a table, with one row in place of several successive checkpoints that no longer exist, which a job
    that keeps its newest ones leaves behind."""
    short: list[dict[str, Any]] = []
    for is_gone, group in itertools.groupby(rows, lambda row: row["state"] == _GONE and not row["loaded"]):
        some = list(group)
        if is_gone and len(some) > _SHOWN:
            first, last = some[0], some[-1]
            names = f"{first['name']} to {last['name']}: {counted(len(some), 'checkpoint')}"
            short.append(
                {**last, "name": names, "step": None, "at": None, "blocked": None, "state": "they no longer exist"}
            )
        else:
            short += some
    return short


def _below(path: str, roots: Sequence[str], entries: Mapping[str, Any]) -> str:
    """The name of the checkpoint in the inventory. Names are compared by the end of the path, because a run directory
    may have been moved. If the inventory lacks the checkpoint: its path below the first of these folders that contains
    it."""
    fitting = [name for name in entries if path == name or path.endswith("/" + name) or f"/{name}/" in path]
    own = next((os.path.relpath(path, root) for root in roots if root and path.startswith(root + "/")), path)
    return max(fitting, key=len, default=own)


def _saved(
    run: Record, name: str, saves: Sequence[Save], entry: Mapping[str, Any] | None, looked: bool
) -> Iterator[dict[str, Any]]:
    """The rows of one path, in order of time. The file that exists at the end is the result of the last save."""
    start = run.events[0].mono_s
    ends = [*(one.begun_s for one in saves[1:]), math.inf]
    for save, end_s, later in zip(saves, ends, [*saves[1:], None], strict=True):
        since_s = -math.inf if save is saves[0] else save.begun_s
        loaded = _loads(run, name, since_s, end_s)
        row = _there(name, entry, loaded) if entry and later is None else {
            "name": name, "format": save.format, "bytes": None, "verified": None, "good": None, "problem": None,
            "state": _gone(run, name, later, looked), "loaded": loaded,
        }  # fmt: skip
        if not save.ok:
            row = {**row, "state": f"{row['state']}; its save was never finished", "good": row["good"] and None}
        step = row.get("step") if save.global_step is None else save.global_step
        at, blocked = round(save.begun_s - start, 2), round(save.blocked_s, 3)
        yield {**row, "step": step, "attempt": save.attempt, "at": at, "blocked": blocked}


def _gone(run: Record, name: str, later: Save | None, looked: bool) -> str:
    """Why the state of a checkpoint is not known. The inventory leaves out files whose names show no known format."""
    if later is not None:
        return "overwritten" if later.global_step is None else f"overwritten in step {later.global_step}"
    if looked and os.path.splitext(name)[1] and not may_hold_tensors(name):
        return "not read: its name shows no known format"
    if looked:
        return _GONE
    if Need.INVENTORY in run.plan.collect:
        return "not read: the run ended too early"
    return "not read: no assertion, such as checkpoint_integrity, needed it"


def _there(name: str, entry: Mapping[str, Any], loaded: Sequence[int]) -> dict[str, Any]:
    problem = entry.get("problem")
    whole = bool(entry.get("complete")) and bool(entry.get("loadable")) and not problem
    state = "whole" if whole else "incomplete" if not entry.get("complete") else "damaged"
    is_unread = whole and not (entry.get("tensors") or entry.get("values")) and bool(entry.get("problems"))
    return {
        "name": name, "step": entry.get("step"), "format": entry.get("format"), "bytes": entry.get("bytes"),
        "verified": None if is_unread else entry.get("verified"), "problem": problem,
        "state": "not read: its kind is not known" if is_unread else state, "good": None if is_unread else whole,
        "attempt": None, "at": None, "blocked": None, "loaded": loaded,
    }  # fmt: skip


def _loads(run: Record, name: str, since_s: float = -math.inf, until_s: float = math.inf) -> list[int]:
    """The attempts that loaded the checkpoint between these times (CLOCK_MONOTONIC)."""

    def fits(path: str) -> bool:
        plain = os.path.splitext(path)[0]  # ckpt.tmp may have become ckpt.pt
        return path == name or path.endswith("/" + name) or f"/{name}/" in path or plain.endswith("/" + name)

    loads = (load for load in run.history.loads if since_s <= load.mono_s < until_s)
    return sorted({load.attempt for load in loads if load.ok and fits(load.path)})
