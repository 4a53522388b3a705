"""`torchaos bisect`: what it runs, what it says, and its exit code. Runs and pip are stood in for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.minimize.package_bisect import Packages
from torchaos.harness.minimize.scenario_shrink import Child, Ran
from torchaos.harness.record import result
from torchaos.harness.record.result import Verdict
from torchaos.harness.reporting import result_files

SCENARIO = """\
scenario: mine
job:
  command: torchrun --nproc-per-node 2 --max-restarts 3 train.py --out {run}/ck
  env: {PYTHONPATH: own}
faults: [{inject: process.kill, target: {rank: 1}, when: {step: 5}}]
assert: [completed, restarts]
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each run. A run fails by `restarts` if its release of `lib` is 3 or newer."""
    (tmp_path / "train.py").touch()
    (tmp_path / "mine.yaml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    made: list[list[str]] = []

    def path_with(self: Packages, pins: Mapping[str, str]) -> str:
        assert self.path == "own"
        return f"/releases/{pins['lib']}:own"

    def call(self: Child, words: Sequence[str], home: Path, fds: Sequence[int] = ()) -> Ran:
        made.append(list(words))
        release = int(words[-1].partition("/releases/")[2][0])
        verdict = Verdict.FAILED if release >= 3 else Verdict.PASSED
        cases = (result.Case("completed", "assertion", Verdict.PASSED, ""),
                 result.Case("restarts", "assertion", verdict, ""))  # fmt: skip
        found = result.Result("mine", "", 0, verdict, verdict.exit_code, "too many", "", "", 0.0, cases=cases)
        home.mkdir(parents=True)
        result_files.write_json([found], home / "results.json")
        return Ran(verdict.exit_code, found)

    monkeypatch.setattr(Packages, "releases", lambda self, name: [str(number) for number in range(1, 9)])
    monkeypatch.setattr(Packages, "path_with", path_with)
    monkeypatch.setattr(Child, "call", call)
    return made


def bisect(*words: str) -> Result:
    return CliRunner().invoke(cli, ["bisect", "mine.yaml", *words])


def test_the_release_is_named(runs: list[list[str]]) -> None:
    """With the exit code of the newest; a second call runs nothing."""
    done = bisect("lib=1..8")
    assert "the failure begins with lib 3: lib 2 passed, 3 failed\n" in done.output
    assert "failed        lib 8: too many\n" in done.output
    assert done.exit_code == 1
    assert 4 <= len(runs) <= 5
    again = bisect("lib=1..8")
    assert "the failure begins with lib 3" in again.output
    assert "and 0 of them run by this call" in again.output
    assert len(runs) <= 5


def test_what_a_run_is_given(runs: list[list[str]]) -> None:
    """The user's own file, seed and options, and the folder of the release before the job's own PYTHONPATH. Another
    seed makes another run."""
    assert bisect("lib=1..2", "--seed", "7", "--set", "job.timeout=2m").exit_code == 0
    assert runs[0] == ["mine.yaml", "--seed", "7", "--set", "job.timeout=2m",
                       "--set", 'job.env.PYTHONPATH="/releases/1:own"']  # fmt: skip
    bisect("lib=1..2")
    assert len(runs) == 4


def test_one_assertion_may_count_alone(runs: list[list[str]]) -> None:
    """And must be one of the scenario's."""
    assert bisect("lib=1..8", "--assertion", "completed").exit_code == 0
    wrong = bisect("lib=1..8", "--assertion", "loss_continuity")
    assert isinstance(wrong.exception, UsageError)
    assert "it has completed, restarts" in str(wrong.exception)


def test_without_a_verdict_no_more_tries_are_advised(runs: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the runs lack, other releases lack too."""
    call = Child.call

    def undecided(self: Child, words: Sequence[str], home: Path, fds: Sequence[int] = ()) -> Ran:
        found = replace(
            call(self, words, home, fds).result, verdict=Verdict.INCONCLUSIVE, exit_code=result.ExitCode.INCONCLUSIVE
        )
        result_files.write_json([found], home / "results.json")
        return Ran(2, found)

    monkeypatch.setattr(Child, "call", undecided)
    done = bisect("lib=1..2")
    assert done.exit_code == 2
    assert "none of these releases has a verdict; do first what the reasons above ask for" in done.output
    assert "--samples" not in done.output


@pytest.mark.parametrize(
    ("texts", "hint"),
    [
        (["lib=1..2"], "--samples tries more of them"),
        (["lib=1..2", "other=1..2"], "name a single package to change it"),
    ],
)
def test_without_a_change_the_next_call_is_told(runs: list[list[str]], texts: list[str], hint: str) -> None:
    """It is one that the command takes: --samples is refused for several packages."""
    done = bisect(*texts)
    assert done.exit_code == 0
    assert f"no change was found among these releases; {hint}" in done.stdout
    assert "passed        lib 1" in done.stderr
    assert "passed  " not in done.stdout, "progress goes to standard error"


def test_the_job_must_run_here(runs: list[list[str]]) -> None:
    """A release on this machine says nothing about a job in a container."""
    refused = bisect("lib=1..8", "--set", "launcher=docker", "--set", "job.container.image=x")
    assert isinstance(refused.exception, UsageError)
    assert not runs
