"""The score of the verdicts: from the results of the bench (oracle.py) to the tables of docs/measured/score.md."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from oracle import Told, Trainer, is_explained, is_right

from torchaos.harness.release.repeats.bounds import upper

BEGIN, END = "<!-- score: begin -->", "<!-- score: end -->"
CONFIDENCE = 0.95
_PATH = re.compile(r"(?<![\w.}])/(?!dev/)(?:[\w.+-]+/)+([\w.+-]+)")


def page(text: str, trainers: Sequence[Trainer], done: Sequence[Told]) -> str:
    """The page with its tables made anew; what stands outside the two marks is left as it is."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables(trainers, done)}\n{END}{after}"


def summary(trainers: Sequence[Trainer], done: Sequence[Told]) -> str:
    return "\n".join(_rates(trainers, done))


def tables(trainers: Sequence[Trainer], done: Sequence[Told]) -> str:
    parts = [
        _rates(trainers, done), _broken(trainers, done), _healthy(trainers, done), _noisy(trainers, done),
        _unclear(trainers, done),
    ]  # fmt: skip
    return "\n\n".join("\n".join(part) for part in parts if part)


def _rates(trainers: Sequence[Trainer], done: Sequence[Told]) -> list[str]:
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
        told = [one for one in done if one.kind == kind and one.verdict != "error" and not _by_luck(trainers, one)]
        if told:
            by = Counter(one.verdict for one in told)
            bad = sum(by[one] for one in wrong)
            bound = upper(bad, len(told), CONFIDENCE)
            limit = "not known (SciPy is missing)" if bound is None else f"{bound:.1%}"
            lines.append(f"| {words} | {len(told)} | {by[good]} | {bad} | {by['inconclusive']} | {limit} |")
    return lines


def _broken(trainers: Sequence[Trainer], done: Sequence[Told]) -> list[str]:
    rows = [one for one in trainers if one.kind == "broken"]
    lines = []
    for trainer in rows:
        told = [one for one in done if one.shot.trainer == trainer.name and one.verdict != "error"]
        if told:
            lines.append(_broken_row(trainer, told))
    if not lines:
        return []
    right = sum("| yes |" in line for line in lines)
    return [
        f"## Broken trainers: {right} of {len(lines)} failed by the right assertion, for the right reason", "",
        "| trainer | its defect | verdict | by the right assertion | it said | failed too |",
        "|---|---|---|---|---|---|", *lines,
    ]  # fmt: skip


def _broken_row(trainer: Trainer, told: Sequence[Told]) -> str:
    best = next((one for one in told if is_explained(trainer, one)), told[0])
    verdict = best.verdict
    if trainer.repeat > 1:
        verdict = ", ".join(f"{count} {what}" for what, count in sorted(Counter(one.verdict for one in told).items()))
    right = "yes" if is_right(trainer, best) else "**no**"
    said = best.reasons.get(trainer.failed) or best.reason
    also = ", ".join(name for name, what in best.cases.items() if what == "failed" and name != trainer.failed)
    cells = (f"`{trainer.name}`", _about(trainer), verdict, right, f"{trainer.failed}: {said}", also)
    return _row(cells)


def _healthy(trainers: Sequence[Trainer], done: Sequence[Told]) -> list[str]:
    told = [one for one in done if one.kind == "healthy" and one.verdict != "error"]
    if not told:
        return []
    places = {(one.shot.trainer, one.shot.seed, one.shot.rank, one.shot.step, one.shot.phase) for one in told}
    passed = sum(one.verdict == "passed" for one in told)
    lines = [
        f"## Healthy trainers: {passed} of {len(told)} runs passed, "
        f"{len(places)} of them distinct in trainer, seed, rank, step and phase", "",
        "| trainer | runs | passed | failed | inconclusive | why not passed |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    return lines + [_row(cells) for cells in _by_trainer(trainers, told)]


def _noisy(trainers: Sequence[Trainer], done: Sequence[Told]) -> list[str]:
    told = [one for one in done if one.kind == "noisy" and one.verdict != "error"]
    small = [one for one in done if one.kind == "small" and one.verdict != "error"]
    lines = []
    if told:
        lines += [
            "## Noisy trainers", "", "| trainer | runs | passed | failed | inconclusive | why not passed |",
            "|---|---|---|---|---|---|", *(_row(cells) for cells in _by_trainer(trainers, told)),
        ]  # fmt: skip
    if small:
        lines += ["", "## The smallest defect that is found under noise", ""]
        lines += ["| weights off by | runs | failed | passed | inconclusive |", "|---|---|---|---|---|"]
        for trainer in (one for one in trainers if one.kind == "small"):
            by = Counter(one.verdict for one in small if one.shot.trainer == trainer.name)
            counts = (str(by.total()), str(by["failed"]), str(by["passed"]), str(by["inconclusive"]))
            lines.append(_row((trainer.args[trainer.args.index("--off") + 1], *counts)))
    return lines


def _unclear(trainers: Sequence[Trainer], done: Sequence[Told]) -> list[str]:
    told = [one for one in done if one.kind == "unclear" and one.verdict != "error"]
    if not told:
        return []
    return [
        "## Runs that can't be judged, and are said to be inconclusive", "",
        "| trainer | runs | passed | failed | inconclusive | why not passed |", "|---|---|---|---|---|---|",
        *(_row(cells) for cells in _by_trainer(trainers, told)),
    ]  # fmt: skip


def _by_trainer(trainers: Sequence[Trainer], told: Sequence[Told]) -> Iterator[tuple[str, ...]]:
    for trainer in trainers:
        own = [one for one in told if one.shot.trainer == trainer.name]
        if own:
            by = Counter(one.verdict for one in own)
            why = next((one.reason for one in own if one.verdict != "passed"), "")
            counts = (str(len(own)), str(by["passed"]), str(by["failed"]), str(by["inconclusive"]))
            yield (f"`{trainer.name}`", *counts, why)


def _by_luck(trainers: Sequence[Trainer], told: Told) -> bool:
    """One that recovers by luck is right to pass when it did: it tells nothing of the rate."""
    return told.kind == "broken" and any(one.name == told.shot.trainer and one.repeat > 1 for one in trainers)


def _about(trainer: Trainer) -> str:
    if trainer.about:
        return trainer.about
    with open(trainer.path, encoding="utf-8") as file:
        return " ".join((ast.get_docstring(ast.parse(file.read())) or "").split())


def _row(cells: Sequence[str]) -> str:
    """Of a path of the machine that it was run on only the name is kept."""
    cells = [_PATH.sub(r"\1", cell) for cell in cells]
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |"
