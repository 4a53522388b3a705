"""The result of one call of `torchaos run`, for tests; the text of a failure (the reason, values with their bounds, the
events around the fault, and lines of the scenario); and variations of a scenario: seeds, ranks, phases, steps, or any
other value. Secrets are masked, because the text goes to terminals and JUnit files. The run directory is read only when
it is needed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import ExceptionChainRepr, ReprEntryNative, ReprFileLocation, ReprTraceback

from torchaos.harness.record.plan import counted
from torchaos.harness.record.redaction import mask
from torchaos.harness.registry import suggest

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
    def decisive(self) -> Mapping[str, Any] | None:
        """The case that decided the verdict, if it was a single one."""
        return next((case for case in self.cases if case["name"] == self.result.get("decided_by")), None)

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


def shown(text: str, path: Path, line: int) -> ExceptionChainRepr:
    """The text of a failure, in the form that pytest wants and that pytest-xdist sends to its controller. pytest's
    summary and JUnit's `message` show only the first line, which is the cause if it is known. On a CI machine pytest
    does not shorten its summary, and would show the whole text a second time."""
    at = ReprFileLocation(str(path), line, text.partition("\n")[0])
    return ExceptionChainRepr([(ReprTraceback([ReprEntryNative([f"{text}\n"])], None, "native"), at, None)])


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
        if event is record.exited:  # what torchaos does afterwards explains no failure
            break
    yield "around the fault:"
    yield from lines[:_MOST_LINES]
    if len(lines) > _MOST_LINES:
        yield f"  ... and {counted(len(lines) - _MOST_LINES, 'more line')}, in the report"


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


_KEYS = {"rank": "faults.0.target.rank", "phase": "faults.0.when.phase", "step": "faults.0.when.step"}
_OPTIONS = {"seeds": "seed", "ranks": "rank", "phases": "phase", "steps": "step"}  # the marker's arguments
_LISTS = (*_OPTIONS, "set", "explore")


@dataclass(frozen=True)
class Variation:
    name: str  # in brackets after the test's name; empty if there is only one variation
    seed: int | None
    overrides: tuple[str, ...]  # in the form of `--set`


def of_options(config: pytest.Config) -> list[Variation]:
    """The variations from the command line. Raises pytest.UsageError if an option can't be read."""
    axes: list[tuple[str, Sequence[Any]]] = []
    if seeds := config.getoption("--torchaos-seeds"):
        axes.append(("seed", _split("--torchaos-seeds", seeds)))
    for text in config.getoption("--torchaos-each"):
        key, equals, values = text.partition("=")
        if not equals or not key:
            raise pytest.UsageError(f"--torchaos-each {text}: write KEY=VALUE,VALUE, such as rank=0,1")
        axes.append((key, _split(f"--torchaos-each {key}", values)))
    return _crossed(axes, config.getoption("--torchaos-set"))


def of_marker(given: Mapping[str, Any]) -> list[Variation]:
    """The variations from a marker, at least one. Raises Broken if the marker can't be read."""
    for name in given:
        if name not in (*_LISTS, "scenario", "each", "judge"):
            near = suggest(name, [*_LISTS, "each", "judge"])
            hint = f"did you mean {near!r}?" if near else f"it has {', '.join(_LISTS)}, each and judge"
            raise Broken(f"the marker torchaos has no {name}; {hint}")
    each = given.get("each", {})
    if not isinstance(each, Mapping):
        raise Broken(f"the marker torchaos: each is a mapping, such as {{'rank': [0, 1]}}, not {each!r}")
    for name, values in [*((name, given[name]) for name in _LISTS if name in given), *each.items()]:
        if not isinstance(values, (list, tuple, range, set, frozenset)):
            raise Broken(f"the marker torchaos: {name} is a list, such as {name}=[{values!r}], not {values!r}")
    axes = [(key, list(given[option])) for option, key in _OPTIONS.items() if given.get(option)]
    axes += [(key, list(values)) for key, values in each.items()]
    if empty := [key for key, values in axes if not values]:
        raise Broken(f"the marker torchaos has no value for {empty[0]}, so nothing would be run; give at least one")
    try:
        return _crossed(axes, given.get("set", ()))
    except pytest.UsageError as error:
        raise Broken(f"the marker torchaos: {error}") from None


def _crossed(axes: Sequence[tuple[str, Sequence[Any]]], always: Iterable[str]) -> list[Variation]:
    found = []
    for values in product(*(values for _key, values in axes)):
        pairs = [(key, value) for (key, _), value in zip(axes, values, strict=True)]
        seeds = [value for key, value in pairs if key == "seed"]
        overrides = tuple(f"{_KEYS.get(key, key)}={value}" for key, value in pairs if key != "seed")
        name = "-".join(f"{key}={value}" for key, value in pairs)
        found.append(Variation(name, _seed(seeds[0]) if seeds else None, (*always, *overrides)))
    return found


def _seed(value: Any) -> int:
    if not re.fullmatch(r"\d{1,18}", str(value)):
        bound = ", at least 0" if str(value).startswith("-") else ""
        raise pytest.UsageError(f"{value!r} is not a seed: a seed is a whole number{bound}")
    return int(value)


def _split(option: str, text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise pytest.UsageError(f"{option}: no value; write them with commas between, such as 0,1")
    return found
