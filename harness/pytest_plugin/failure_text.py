"""The text of a failure: the reason, values with their bounds, the events around the fault, and lines of the scenario.
Secrets are masked, because the text goes to terminals and JUnit files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from torchaos.harness.pytest_plugin.outcome import Run
from torchaos.harness.record.secrecy import mask

_BEFORE_S, _AFTER_S, _MOST_LINES = 5.0, 120.0, 30
_AROUND = 3  # lines of the scenario
_BETWEEN = "\n\n"  # between two paragraphs


def shown(outcome: str, text: str, path: Path, line: int) -> ExceptionChainRepr:
    """The text of a failure, in the form that pytest wants and that pytest-xdist sends to its controller. pytest's
    summary and JUnit's `message` show only the first paragraph. On a CI machine pytest does not shorten its summary,
    and would show the whole text a second time."""
    at = ReprFileLocation(str(path), line, f"{outcome}: {text.partition(_BETWEEN)[0]}")
    return ExceptionChainRepr([(ReprTraceback([ReprEntryNative([text])], None, "native"), at, None)])


def failure_text(
    run: Run, reason: str, case: Mapping[str, Any] | None = None, line: int | None = None, story: bool = True
) -> str:
    """The text of a failure. `line`: the line of the assertion in the scenario, from 1. `story`: whether to include the
    events around the fault. The most likely cause comes first, because pytest's summary shows only the beginning."""
    cause = [case["cause"]] if case and case.get("cause") else []
    blocks = [[*cause, reason], list(_figures(case)) if case else [], list(_around(run)) if story else []]
    blocks += [list(_excerpt(run.scenario, line)), list(_pointers(run))]
    return mask(_BETWEEN.join("\n".join(lines) for lines in blocks if lines))


def _figures(case: Mapping[str, Any]) -> Iterator[str]:
    from torchaos.harness.reporting.terminal.text import name_in_words, value_in_words

    measured, bound, seconds = case["measured"], case["bound"], case.get("seconds", ())
    for name in sorted(measured, key=lambda name: name not in bound):
        found = value_in_words(name, measured[name], seconds)
        against = f"  (bound: {value_in_words(name, bound[name], seconds)})" if name in bound else ""
        yield f"  {name_in_words(name):<16} {found}{against}"


def _around(run: Run) -> Iterator[str]:
    """The journal's notable events around the first fault that landed."""
    if not run.result or not run.folder.is_dir():
        return
    from torchaos.harness.agent.wire import Kind
    from torchaos.harness.interfaces import ChaosError
    from torchaos.harness.reporting.terminal.narrator import Narrator

    try:
        record = run.record
    except ChaosError as error:
        yield f"the journal can't be read: {error}"
        return
    hits = [event.mono_s for event in record.of_kind(Kind.APPLYING, Kind.APPLIED)]
    if not hits:
        yield "no fault landed"
        return
    narrator, lines = Narrator(record.plan), []
    for event in record.events:
        line = narrator.tell(event)
        since = event.mono_s - hits[0]
        if line and -_BEFORE_S <= since <= _AFTER_S:
            lines.append(f"  {since:+8.2f} s  {line.text}")
    yield "around the fault:"
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield f"  ... and {len(lines) - _MOST_LINES} more lines, in the report"


def _excerpt(path: Path, line: int | None) -> Iterator[str]:
    if line is None:
        return
    try:
        lines = mask(path.read_text(errors="replace")).splitlines()
    except OSError:
        return
    yield f"{path.name}:{line}"
    for number in range(max(1, line - _AROUND), min(len(lines), line + _AROUND) + 1):
        yield f"{'>' if number == line else ' '} {number:>4} | {lines[number - 1]}"


def _pointers(run: Run) -> Iterator[str]:
    if not run.result:
        return
    yield f"files:  {run.folder}"
    if run.report.is_file():
        yield f"report: {run.report}"
    if run.result.get("reproduce"):
        yield f"again:  {run.result['reproduce']}"
