"""The score of the verdicts: turns the results of the bench (oracle.py) into tables."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from oracle import BenchRun, Trainer, is_explained, is_right

from torchaos.harness.release.repeats import upper

CONFIDENCE = 0.95
_PATH = re.compile(r"(?<![\w.}])/(?!dev/)(?:[\w.+-]+/)+([\w.+-]+)")


def summary(trainers: Sequence[Trainer], done: Sequence[BenchRun]) -> str:
    return "\n".join(_rates(trainers, done))


def tables(trainers: Sequence[Trainer], done: Sequence[BenchRun]) -> dict[str, str]:
    """The tables by the name of their marks: the rates alone, and all rows."""
    parts = [
        _rates(trainers, done), _broken(trainers, done), _healthy(trainers, done), _noisy(trainers, done),
        _unclear(trainers, done),
    ]  # fmt: skip
    rows = "\n\n".join("\n".join(part) for part in parts if part)
    return {"score": rows, "score-summary": summary(trainers, done)}


def _rates(trainers: Sequence[Trainer], done: Sequence[BenchRun]) -> list[str]:
    lines = [
        f"| | runs | right | wrong | inconclusive | the rate of wrong ones is below ({CONFIDENCE:.0%} confidence) |",
        "|---|---|---|---|---|---|",
    ]
    for kind, good, wrong, words in (
        ("broken", "failed", ("passed",), "broken: failed is right, passed is wrong"),
        ("healthy", "passed", ("failed",), "healthy: passed is right, failed is wrong"),
        ("noisy", "passed", ("failed",), "noisy: passed is right, failed is wrong"),
        ("unclear", "inconclusive", ("passed", "failed"), "unclear: inconclusive is right, all else is wrong"),
    ):
        runs = [run for run in done if run.kind == kind and run.verdict != "error" and not _by_luck(trainers, run)]
        if runs:
            by = Counter(run.verdict for run in runs)
            bad = sum(by[verdict] for verdict in wrong)
            bound = upper(bad, len(runs), CONFIDENCE)
            limit = "not known (SciPy is missing)" if bound is None else f"{bound:.1%}"
            lines.append(f"| {words} | {len(runs)} | {by[good]} | {bad} | {by['inconclusive']} | {limit} |")
    return lines


def _broken(trainers: Sequence[Trainer], done: Sequence[BenchRun]) -> list[str]:
    rows = [trainer for trainer in trainers if trainer.kind == "broken"]
    lines = []
    for trainer in rows:
        runs = [run for run in done if run.shot.trainer == trainer.name and run.verdict != "error"]
        if runs:
            lines.append(_broken_row(trainer, runs))
    if not lines:
        return []
    right = sum("| yes |" in line for line in lines)
    return [
        f"## Broken trainers: {right} of {len(lines)} failed by the right assertion, for the right reason", "",
        "| trainer | its defect | verdict | by the right assertion | it said | failed too |",
        "|---|---|---|---|---|---|", *lines,
    ]  # fmt: skip


def _broken_row(trainer: Trainer, runs: Sequence[BenchRun]) -> str:
    best = next((run for run in runs if is_explained(trainer, run)), runs[0])
    verdict = best.verdict
    if trainer.repeat > 1:
        verdict = ", ".join(f"{count} {what}" for what, count in sorted(Counter(run.verdict for run in runs).items()))
    right = "yes" if is_right(trainer, best) else "**no**"
    reason = best.reasons.get(trainer.failed) or best.reason
    also = ", ".join(name for name, what in best.cases.items() if what == "failed" and name != trainer.failed)
    cells = (f"`{trainer.name}`", _about(trainer), verdict, right, f"{trainer.failed}: {reason}", also)
    return _row(cells)


def _healthy(trainers: Sequence[Trainer], done: Sequence[BenchRun]) -> list[str]:
    runs = [run for run in done if run.kind == "healthy" and run.verdict != "error"]
    if not runs:
        return []
    places = {(run.shot.trainer, run.shot.seed, run.shot.rank, run.shot.step, run.shot.phase) for run in runs}
    passed = sum(run.verdict == "passed" for run in runs)
    lines = [
        f"## Healthy trainers: {passed} of {len(runs)} runs passed, "
        f"{len(places)} of them distinct in trainer, seed, rank, step and phase", "",
        "| trainer | runs | passed | failed | inconclusive | why not passed |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    return lines + [_row(cells) for cells in _by_trainer(trainers, runs)]


def _noisy(trainers: Sequence[Trainer], done: Sequence[BenchRun]) -> list[str]:
    runs = [run for run in done if run.kind == "noisy" and run.verdict != "error"]
    small = [run for run in done if run.kind == "small" and run.verdict != "error"]
    lines = []
    if runs:
        lines += [
            "## Noisy trainers", "", "| trainer | runs | passed | failed | inconclusive | why not passed |",
            "|---|---|---|---|---|---|", *(_row(cells) for cells in _by_trainer(trainers, runs)),
        ]  # fmt: skip
    if small:
        lines += ["", "## The smallest defect that is found under noise", ""]
        lines += ["| weights off by | runs | failed | passed | inconclusive |", "|---|---|---|---|---|"]
        for trainer in (row for row in trainers if row.kind == "small"):
            by = Counter(run.verdict for run in small if run.shot.trainer == trainer.name)
            counts = (str(by.total()), str(by["failed"]), str(by["passed"]), str(by["inconclusive"]))
            lines.append(_row((trainer.args[trainer.args.index("--off") + 1], *counts)))
    return lines


def _unclear(trainers: Sequence[Trainer], done: Sequence[BenchRun]) -> list[str]:
    runs = [run for run in done if run.kind == "unclear" and run.verdict != "error"]
    if not runs:
        return []
    return [
        "## Runs that can't be judged, and are said to be inconclusive", "",
        "| trainer | runs | passed | failed | inconclusive | why not passed |", "|---|---|---|---|---|---|",
        *(_row(cells) for cells in _by_trainer(trainers, runs)),
    ]  # fmt: skip


def _by_trainer(trainers: Sequence[Trainer], runs: Sequence[BenchRun]) -> Iterator[tuple[str, ...]]:
    for trainer in trainers:
        own = [run for run in runs if run.shot.trainer == trainer.name]
        if own:
            by = Counter(run.verdict for run in own)
            why = next((run.reason for run in own if run.verdict != "passed"), "")
            counts = (str(len(own)), str(by["passed"]), str(by["failed"]), str(by["inconclusive"]))
            yield (f"`{trainer.name}`", *counts, why)


def _by_luck(trainers: Sequence[Trainer], run: BenchRun) -> bool:
    """Whether the run is of a broken trainer that may recover by luck. Such a run says nothing about the rate."""
    return run.kind == "broken" and any(row.name == run.shot.trainer and row.repeat > 1 for row in trainers)


def _about(trainer: Trainer) -> str:
    if trainer.about:
        return trainer.about
    with open(trainer.path, encoding="utf-8") as file:
        return " ".join((ast.get_docstring(ast.parse(file.read())) or "").split())


def _row(cells: Sequence[str]) -> str:
    """A row of a table. Paths of the machine that ran the bench are shortened to the file's name."""
    cells = [_PATH.sub(r"\1", cell) for cell in cells]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |"
