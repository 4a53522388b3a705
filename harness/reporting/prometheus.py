"""Metrics of the newest run of each scenario, and of the newest game day of each name, in Prometheus' text format
(https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format). For the textfile collector of
node_exporter, or a push gateway. All are gauges, because a counter would fall when runs are pruned from the history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from torchaos.harness.host.disk import write_atomically
from torchaos.harness.record.result import Verdict, each_restart
from torchaos.harness.reporting.gameday_history import Night
from torchaos.harness.reporting.terminal.text import printable
from torchaos.harness.reporting.trend_store import Kept

Sample = tuple[Mapping[str, str], float]


def write(path: Path, runs: Sequence[Kept], days: Sequence[Night] = ()) -> None:
    """Writes the file in one step, as collectors require. Raises OSError if it can't be written."""
    write_atomically(path, text(runs, days))


def text(runs: Sequence[Kept], days: Sequence[Night] = ()) -> str:
    """The metrics as text. `runs`, `days`: all runs and game days, in order of time."""
    newest = {one.result.scenario: one for one in runs}
    days_by_name = {one.name: one for one in days}
    metrics = {
        "torchaos_runs": ("Runs in the history, by verdict.", _counts(runs)),
        "torchaos_last_run_verdict": ("1 for the verdict of the newest run.", _verdicts(newest)),
        "torchaos_last_run_start_seconds": ("When the newest run began, in seconds since the epoch.", [
            ({"scenario": name}, _epoch(one.result.started)) for name, one in newest.items()
        ]),
        "torchaos_recovery_seconds": ("Seconds from the fault until the job had caught up.", _recoveries(newest)),
        "torchaos_recovery_bound_seconds": ("The bound of that time.", _bounds(newest)),
        "torchaos_lost_steps": ("Steps that were done again after the fault.", _lost(newest)),
        "torchaos_gameday_training_ratio": ("The share of the newest game day in which training went on.", [
            ({"gameday": name}, one.ettr) for name, one in days_by_name.items() if one.ettr is not None
        ]),
        "torchaos_gameday_faults": ("Faults of the newest game day, by outcome.", [
            ({"gameday": name, "outcome": outcome}, float(many))
            for name, one in days_by_name.items() for outcome, many in sorted(one.outcomes.items())
        ]),
    }  # fmt: skip
    lines = [line for name, (about, samples) in metrics.items() for line in _metric(name, about, list(samples))]
    return "\n".join(lines) + "\n" if lines else ""


def _metric(name: str, about: str, samples: Sequence[Sample]) -> Iterator[str]:
    if not samples:
        return
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} gauge"
    for labels, value in samples:
        told = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{{{told}}} {value:.10g}"


def _escaped(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _counts(runs: Sequence[Kept]) -> Iterator[Sample]:
    counts = Counter((one.result.scenario, one.result.verdict.value) for one in runs)
    for (scenario, verdict), many in sorted(counts.items()):
        yield {"scenario": scenario, "verdict": verdict}, float(many)


def _verdicts(newest: Mapping[str, Kept]) -> Iterator[Sample]:
    for scenario, one in newest.items():
        for verdict in Verdict:
            yield {"scenario": scenario, "verdict": verdict.value}, float(one.result.verdict is verdict)


def _recoveries(newest: Mapping[str, Kept]) -> Iterator[Sample]:
    """The slowest recovery from each fault. A recovery that never ended has no sample."""
    for scenario, one in newest.items():
        slowest: dict[str, float] = {}
        for recovery in one.result.recoveries:
            if (took := recovery.parts.get("caught_up")) is not None:
                slowest[recovery.fault] = max(took, slowest.get(recovery.fault, 0.0))
        for fault, took in slowest.items():
            yield {"scenario": scenario, "fault": fault}, took


def _bounds(newest: Mapping[str, Kept]) -> Iterator[Sample]:
    for scenario, one in newest.items():
        bound = next((case.bound.get("catch_up") for case in one.result.cases if case.name == "recovery_time"), None)
        if isinstance(bound, (int, float)):
            yield {"scenario": scenario}, float(bound)


def _lost(newest: Mapping[str, Kept]) -> Iterator[Sample]:
    for scenario, one in newest.items():
        known = [recovery for recovery in one.result.recoveries if recovery.lost_steps is not None]
        for fault in dict.fromkeys(recovery.fault for recovery in known):
            own = each_restart(recovery for recovery in known if recovery.fault == fault)
            yield {"scenario": scenario, "fault": fault}, float(sum(recovery.lost_steps or 0 for recovery in own))


def _epoch(started: str) -> float:
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return 0.0
