"""Runs with chosen releases: which of their results count, and which runs are not repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from torchaos.harness.interfaces import ChaosError
from torchaos.harness.minimize.package_bisect import NotInstallable, Packages, Tries, passed
from torchaos.harness.minimize.scenario_shrink import Child, Ran
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict
from torchaos.harness.reporting import result_files

CASES = (Case("completed", "assertion", Verdict.PASSED, ""), Case("loss_continuity", "assertion", Verdict.FAILED, ""))
RESULT = Result("x", "", 0, Verdict.FAILED, 1, "why", "", "", 0.0, cases=CASES)
PASSED = (Case("completed", "assertion", Verdict.PASSED, ""),)


@pytest.mark.parametrize(
    ("verdict", "assertion", "expected"),
    [
        (Verdict.PASSED, None, True),
        (Verdict.FAILED, None, False),
        (Verdict.INCONCLUSIVE, None, None),
        (Verdict.ERROR, None, None),
        (Verdict.FAILED, "completed", True),
        (Verdict.FAILED, "loss_continuity", False),
        (Verdict.FAILED, "restarts", None),
        (Verdict.INCONCLUSIVE, "completed", None),
    ],
)
def test_what_counts_of_a_result(verdict: Verdict, assertion: str | None, expected: bool | None) -> None:
    """The whole verdict, or one assertion of a run that is evidence."""
    assert passed(replace(RESULT, verdict=verdict), assertion) is expected


class Scripted(Child):
    """Stands in for a run: its verdict is that of the last word."""

    def __init__(self, verdicts: Mapping[str, Verdict]) -> None:
        super().__init__()
        self.verdicts, self.words = verdicts, list[str]()

    def call(self, words: Sequence[str], home: Path, fds: Sequence[int] = ()) -> Ran:
        home.mkdir(parents=True)
        self.words.append(words[-1])
        verdict = self.verdicts[words[-1]]
        cases = PASSED if verdict is Verdict.PASSED else CASES
        result = replace(RESULT, verdict=verdict, exit_code=verdict.exit_code, cases=cases)
        result_files.write_json([result], home / "results.json")
        return Ran(verdict.exit_code, result)


class NoPip(Packages):
    def path_with(self, pins: Mapping[str, str]) -> str:
        if pins["a"] == "0":
            raise NotInstallable("ERROR: no")
        return pins["a"]


def tries(home: Path, child: Child, told: list[str]) -> Tries:
    return Tries(NoPip(), lambda path: (["run", path], f"x-{path}"), home, None, told.append, child)


def test_a_verdict_is_not_sought_again(tmp_path: Path) -> None:
    """A later call takes up what an earlier one decided; a run without a verdict is made again."""
    child = Scripted({"1": Verdict.PASSED, "2": Verdict.FAILED, "3": Verdict.INCONCLUSIVE})
    told: list[str] = []
    first = tries(tmp_path, child, [])
    assert [first({"a": name}) for name in "123"] == [True, False, None]
    again = tries(tmp_path, child, told)
    assert [again({"a": name}) for name in "123"] == [True, False, None]
    assert (child.words, first.runs, again.runs) == (["1", "2", "3", "3"], 3, 1)
    assert told[:2] == ["passed        a 1 (in an earlier call)", "failed        a 2 (in an earlier call): why"]


def test_failures_of_other_assertions_are_told(tmp_path: Path) -> None:
    """If one assertion counts, a release may pass by it although its run failed: the line says by what."""
    told: list[str] = []
    one = replace(tries(tmp_path, Scripted({"1": Verdict.FAILED}), told), assertion="completed")
    assert one({"a": "1"}) is True
    assert told == ["passed        a 1, but the run failed by loss_continuity"]


def test_a_run_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    """Its folder has no result, or one that says that it did not finish."""
    (tmp_path / "x-1-0").mkdir()
    (tmp_path / "x-1-1").mkdir()
    result_files.write_json([replace(RESULT, verdict=Verdict.ERROR)], tmp_path / "x-1-1" / "results.json")
    child = Scripted({"1": Verdict.PASSED})
    assert tries(tmp_path, child, [])({"a": "1"}) is True
    assert child.words == ["1"]


def test_what_can_not_be_installed_has_no_verdict(tmp_path: Path) -> None:
    """And nothing is run."""
    told: list[str] = []
    child = Scripted({})
    assert tries(tmp_path, child, told)({"a": "0"}) is None
    assert (told, child.words) == (["no verdict    a 0: it can't be installed: ERROR: no"], [])


def test_an_error_or_a_signal_ends_the_search(tmp_path: Path) -> None:
    """No verdict is made of a run that could not be made, nor of one that was ended."""
    child = Scripted({"1": Verdict.ERROR, "2": Verdict.PASSED})
    with pytest.raises(ChaosError, match="the run could not be made: why"):
        tries(tmp_path, child, [])({"a": "1"})
    assert child.verdicts["1"].exit_code is ExitCode.INTERNAL
    child.stop("SIGINT was received")
    for name in "20":
        with pytest.raises(ChaosError, match="it was ended: SIGINT was received; the same command goes on"):
            tries(tmp_path, child, [])({"a": name})
    assert child.words == ["1"]
