"""A scenario file as tests: one test for its faults, one for each assertion, and one for the rollback, under the
scenario's name.

The first test that is set up runs the scenario; the others only read its result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.pytest_plugin.outcome import (
    Broken,
    Failed,
    Inconclusive,
    Run,
    Variation,
    failure_text,
    of_options,
    shown,
)
from torchaos.harness.pytest_plugin.session_runs import runs_of
from torchaos.harness.scenario.yaml_source import Source, read

_FIRST = pytest.StashKey[dict[str, str]]()  # run directory: the test whose failure shows the story


class ScenarioFile(pytest.File):
    def collect(self) -> Iterator[pytest.Collector]:
        try:
            source = read(self.path)
        except UsageError as error:
            raise self.CollectError(str(error)) from None
        name = str(source.data.get("scenario", self.path.stem))
        for variation in of_options(self.config):
            full = f"{name}[{variation.name}]" if variation.name else name
            yield ScenarioNode.from_parent(self, name=full, source=source, variation=variation)


class ScenarioNode(pytest.Collector):
    """One variation of a scenario file, as a node in pytest's tree."""

    def __init__(self, *, source: Source, variation: Variation, **more: Any) -> None:
        super().__init__(**more)
        self.source, self.variation = source, variation

    def collect(self) -> Iterable[pytest.Item]:
        data = self.source.data
        if "repeat" in data or any(text.startswith("repeat") for text in self.variation.overrides):
            line = self._line("repeat")  # only all repetitions together decide
            yield CaseItem.from_parent(self, name="repetitions", kind="repetitions", place=0, line=line)
            yield CaseItem.from_parent(self, name="rollback", kind="rollback", place=0, line=line)
            return
        faults, asserts = data.get("faults"), data.get("assert")
        cases: list[tuple[str, str, int, int]] = []  # name, kind, number within its kind, line
        if faults:
            cases.append(("faults", "faults", 0, self._line("faults")))
        for number, one in enumerate(asserts if isinstance(asserts, list) else []):
            name = next(iter(one), "?") if isinstance(one, dict) else str(one)
            cases.append((str(name), "assertion", number, self._line("assert", number)))
        cases.append(("rollback", "rollback", 0, self._line("scenario")))
        names = [name for name, *_ in cases]
        for number, (name, kind, place, line) in enumerate(cases):
            again = names[:number].count(name)
            full = f"{name} ({again + 1})" if again else name
            yield CaseItem.from_parent(self, name=full, kind=kind, place=place, line=line)

    def run(self) -> Run:
        return runs_of(self.config).get(Path(self.path), self.variation)

    def _line(self, *keys: str | int) -> int:
        return self.source.place(keys).line


class CaseItem(pytest.Item):
    parent: ScenarioNode

    def __init__(self, *, kind: str, place: int, line: int, **more: Any) -> None:
        super().__init__(**more)
        self._kind, self._place, self._line = kind, place, line
        if self.config.pluginmanager.hasplugin("timeout"):
            self.add_marker(pytest.mark.timeout(0))  # pytest's time-out is off, because the scenario has its own

    def setup(self) -> None:
        """Runs the scenario if necessary. A run without evidence is an error of the test, not a failure."""
        run = self.parent.run()
        case = self._case(run)
        self.user_properties += [("torchaos.verdict", case["verdict"] if case else "error"), *_properties(run, case)]
        nothing = run.proves_nothing()
        if case is None:
            raise Broken(self._text(run, nothing or f"the run has no verdict on {self.name}: {run.reason}"))
        if case["verdict"] == "inconclusive":
            raise Inconclusive(self._text(run, case["reason"], case))
        if case["verdict"] == "error":
            raise Broken(self._text(run, case["reason"], case))
        if nothing and case["verdict"] == "passed" and self._kind != "rollback":
            kind = Inconclusive if run.verdict == "inconclusive" else Broken
            raise kind(f"the assertion holds, but the run proves nothing: {nothing}")

    def runtest(self) -> None:
        run = self.parent.run()
        case = self._case(run)
        if case is None or case["verdict"] != "passed":
            follows = f"(follows from {case['follows']}) " if case and case.get("follows") else ""
            raise Failed(self._text(run, follows + (case["reason"] if case else run.reason), case))

    def _text(self, run: Run, reason: str, case: Mapping[str, Any] | None = None) -> str:
        """The text of a failure. If several tests of a run fail, only the first shows the story."""
        key = str(run.result.get("run_dir") or f"{run.scenario} {self.parent.variation.name}")
        first = self.config.stash.setdefault(_FIRST, {}).setdefault(key, self.nodeid)
        if not run.result and first != self.nodeid:
            return f"nothing was run; {first} says why"
        return failure_text(run, reason, case, self._line, story=first == self.nodeid)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *more: Any, **options: Any) -> Any:
        if isinstance(excinfo.value, Failed):
            return shown(excinfo.typename, str(excinfo.value), self.path, self._line)
        return super().repr_failure(excinfo, *more, **options)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self._line - 1, f"{self.parent.name}: {self.name}"

    def _case(self, run: Run) -> Mapping[str, Any] | None:
        if self._kind == "repetitions" and run.result and run.cases[0]["kind"] != "repetitions":  # it was not repeated
            return {"kind": self._kind, "verdict": run.verdict, "reason": run.reason, "measured": {}, "bound": {}}
        own = [case for case in run.cases if case["kind"] == self._kind]
        return own[self._place] if self._place < len(own) else None


def _properties(run: Run, case: Mapping[str, Any] | None) -> Iterator[tuple[str, object]]:
    """The measured values with their bounds, by name, for --junitxml."""
    if case is None:
        return
    for name, value in case["measured"].items():
        if value is not None:
            yield f"measured.{name}", value
    yield from ((f"bound.{name}", value) for name, value in case["bound"].items())
    if case["kind"] == "faults":
        for recovery in run.recoveries:
            yield from (
                (f"recovery.{recovery.fault}.{part}", at) for part, at in recovery.parts.items() if at is not None
            )
    yield "torchaos.run_dir", str(run.result["run_dir"])
    yield "torchaos.seed", run.result["seed"]
