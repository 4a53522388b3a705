"""The result of one call of `torchaos run`, for tests, and the text of a failure: the reason, values with their bounds,
the events around the fault, and lines of the scenario. Secrets are masked, because the text goes to terminals and JUnit
files. The run directory is read only when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from torchaos.harness.record.secrecy import mask

if TYPE_CHECKING:
    from torchaos.harness.protocol.wire import Event
    from torchaos.harness.record.record import Record


_ROLLBACK = 4  # the exit code for an incomplete rollback


_Outcome: Any = pytest.fail.Exception


class Failed(_Outcome):  # type: ignore[misc]
    """An assertion of the scenario does not hold. The text is the whole report, without a traceback of torchaos."""

    __module__ = "builtins"  # pytest's summary then shows the name without a module
    is_failure = True

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)


class Broken(Failed):
    """Nothing was judged, because of bad usage, an internal error, or an incomplete rollback."""

    __module__ = "builtins"
    is_failure = False


class Inconclusive(Failed):
    """The run proves nothing, so the test is inconclusive."""

    __module__ = "builtins"
    is_failure, is_inconclusive = False, True


@dataclass(frozen=True)
class Recovered:
    """One recovery. `parts`: seconds from the fault to the end of each part, by name; None if the part was not seen.
    The names are felt, detected, torn_down, rendezvous, workers_up, imported, prepared, joined, set_up, restored,
    first_step, caught_up."""

    fault: str
    parts: Mapping[str, float | None]
    lost_steps: int | None

    @property
    def caught_up_s(self) -> float | None:
        return self.parts.get("caught_up")


@dataclass(frozen=True)
class Run:
    """One run. `result`: the contents of result.json. Empty if nothing could be run; `output` then has the reason."""

    scenario: Path
    exit_code: int
    output: str
    result: Mapping[str, Any]

    @property
    def verdict(self) -> str:
        """The verdict: passed, failed, inconclusive or error."""
        return str(self.result.get("verdict", "error"))

    @property
    def reason(self) -> str:
        return str(self.result.get("reason", "")) or _last_lines(self.output)

    @property
    def folder(self) -> Path:
        return Path(self.result["run_dir"])

    @property
    def report(self) -> Path:
        return self.folder / "report.html"

    @property
    def cases(self) -> Sequence[Mapping[str, Any]]:
        return tuple(self.result.get("cases", ()))

    def case(self, name: str) -> Mapping[str, Any]:
        """The case of an assertion, of `faults`, or of `rollback`. Raises LookupError if there is none with that
        name."""
        found = next((case for case in self.cases if case["name"] == name), None)
        if found is None:
            raise LookupError(f"{name}: this run has {', '.join(one['name'] for one in self.cases)}")
        return found

    @property
    def recoveries(self) -> Sequence[Recovered]:
        """The recoveries, one for each fault that landed, in order of time."""
        found = self.result.get("recoveries", ())
        return tuple(Recovered(recovery["fault"], recovery["parts"], recovery["lost_steps"]) for recovery in found)

    @property
    def recovery(self) -> Recovered:
        """The only recovery. Raises LookupError if there is none, or several."""
        if len(self.recoveries) != 1:
            raise LookupError(f"there are {len(self.recoveries)} recoveries; choose one of `recoveries`")
        return self.recoveries[0]

    @cached_property
    def record(self) -> Record:
        from torchaos.harness.record.record import Record
        from torchaos.harness.record.rundir import RunDir

        return Record.load(RunDir(self.folder))

    @property
    def journal(self) -> Sequence[Event]:
        """All events, in order of time."""
        return self.record.events

    @cached_property
    def twins(self) -> Sequence[Record]:
        """The records of the fault-free runs."""
        from torchaos.harness.record.record import Record
        from torchaos.harness.record.rundir import RunDir

        home = RunDir(self.folder).twins
        return [Record.load(RunDir(path)) for path in sorted(home.iterdir())] if home.is_dir() else []

    @property
    def twin(self) -> Record | None:
        return self.twins[0] if self.twins else None

    def proves_nothing(self) -> str:
        """Why no assertion of this run may count as passed, even if its own verdict is passed; empty if they may. An
        inconclusive assertion has no effect on the others."""
        if not self.result:
            return f"nothing was run: {self.reason}"
        if self.exit_code == _ROLLBACK or self.result["exit_code"] == _ROLLBACK:
            undone = [
                case["reason"] for case in self.cases if case["kind"] == "rollback" and case["verdict"] != "passed"
            ]
            return f"the rollback is incomplete: {undone[0] if undone else self.reason}"
        own = [case["name"] for case in self.cases if case["kind"] == "assertion" and case["verdict"] != "passed"]
        if self.verdict == "passed" or self.result.get("decided_by") in own:
            return ""
        return "" if self.verdict == "failed" else self.reason


def _last_lines(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:") or ".yaml:" in line]
    return "\n".join(errors or lines[-5:]) or "the command printed nothing"


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
    from torchaos.harness.interfaces import ChaosError
    from torchaos.harness.protocol.wire import Kind
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
