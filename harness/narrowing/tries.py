"""Runs a scenario with chosen releases of packages. The verdict of an earlier call is used again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.narrowing.bisect import Passed, Pins, in_words
from torchaos.harness.narrowing.child import JUDGED, Child
from torchaos.harness.narrowing.packages import NotInstallable, Packages
from torchaos.harness.record.finished import results_in
from torchaos.harness.record.result import Result, Verdict

# For a PYTHONPATH: the words of `torchaos run`, and a name for the run with a digest of all that may change a verdict.
Prepare = Callable[[str], tuple[list[str], str]]


@dataclass
class Tries:
    """Runs the scenario for sets of releases. `home`: a folder for the runs. `assertion`: if given, only this assertion
    counts."""

    packages: Packages
    prepare: Prepare
    home: Path
    assertion: str | None
    tell: Callable[[str], None]
    child: Child = field(default_factory=Child)
    runs: int = 0

    def __call__(self, pins: Pins) -> Passed:
        """Whether the recovery passes with these releases; None if the run is no evidence. Raises ChaosError if it was
        stopped, or if a run could not be made."""
        try:
            words, name = self.prepare(self.packages.path_with(pins))
        except NotInstallable as error:
            self._check_stopped()
            self.tell(f"no verdict    {in_words(pins)}: it can't be installed: {error}")
            return None
        result, when = self._result(words, name)
        found = passed(result, self.assertion)
        word = "no verdict" if found is None else "passed" if found else "failed"
        self.tell(f"{word:<12}  {in_words(pins)}{when}{_why(result, found)}")
        return found

    def _result(self, words: list[str], name: str) -> tuple[Result, str]:
        for number in count():
            home = self.home / f"{name}-{number}"
            if not home.exists():
                break
            result = _finished(home)
            if result and passed(result, self.assertion) is not None:
                return result, " (in an earlier call)"
        self._check_stopped()
        ran = self.child.call(words, home)
        self._check_stopped()
        if ran.code not in JUDGED:
            raise ChaosError(f"{home}: the run could not be made: {ran.result.reason}")
        self.runs += 1
        return ran.result, ""

    def _check_stopped(self) -> None:
        if self.child.stopped:
            raise ChaosError(f"it was ended: {self.child.stopped}; the same command goes on")


def _finished(home: Path) -> Result | None:
    try:
        return results_in(home / "results.json")[0]
    except (OSError, IndexError, UsageError):
        return None


def _why(result: Result, found: Passed) -> str:
    if not found:
        return f": {result.reason}"
    failed = [case.name for case in result.cases if case.verdict is Verdict.FAILED]
    return f", but the run failed by {', '.join(failed)}" if failed else ""


def passed(result: Result, assertion: str | None) -> Passed:
    """Whether the run passed; None if it is no evidence. If only one assertion counts, failures of others are
    ignored."""
    verdict = result.verdict
    if assertion and verdict is Verdict.FAILED:
        verdict = next((case.verdict for case in result.cases if case.name == assertion), Verdict.INCONCLUSIVE)
    return {Verdict.PASSED: True, Verdict.FAILED: False}.get(verdict)
