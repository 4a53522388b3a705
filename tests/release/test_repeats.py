"""Repetitions judged together: rates with bounds, distributions, and what an interrupted series shows."""

from __future__ import annotations

import io
import json
import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.result import Case, ExitCode, Recovery, Result, Verdict, worst
from torchaos.harness.release import repeats
from torchaos.harness.release.repeats import Ask, Distribution, Repeats, Repetitions, State, ask_of, judge_repeats
from torchaos.harness.reporting import result_files
from torchaos.harness.reporting.terminal.many_runs import show_repeats
from torchaos.harness.scenario.grammar import Repeat
from torchaos.harness.scenario.loader import load

CODES = {Verdict.PASSED: 0, Verdict.FAILED: 1, Verdict.INCONCLUSIVE: 2, Verdict.ERROR: 5}
LETTERS = {"p": Verdict.PASSED, "f": Verdict.FAILED, "i": Verdict.INCONCLUSIVE, "e": Verdict.ERROR}


def result(verdict: Verdict, seed: int, caught_up: float | None = 1.5, lost: int | None = 3) -> Result:
    parts = {"felt": 0.01, "detected": 0.1 + seed / 100, "restored": None, "caught_up": caught_up}
    cases = (
        Case(
            "recovery_time",
            "assertion",
            Verdict.PASSED,
            "",
            {"catch_up": caught_up, "lost_steps": lost},
            {},
            ("catch_up",),
        ),
        Case("loss_continuity", "assertion", verdict, "the loss differs", {"largest_difference": seed / 8, "twins": 1}),
    )
    return Result(
        "kill", "", seed, verdict, CODES[verdict], f"{verdict.value}, truly", f"/runs/{seed}", "", 30.0 + seed,
        recoveries=(Recovery("kill", parts, lost),), cases=cases, attempts=2,
    )  # fmt: skip


def results(letters: str) -> list[Result]:
    return [result(LETTERS[letter], seed) for seed, letter in enumerate(letters)]


def judged(letters: str, ask: Ask, state: State = "done", alike: bool = False) -> Repeats:
    return judge_repeats("kill", "", results(letters), ask, state, alike)


@pytest.mark.parametrize(
    ("letters", "at_least", "verdict"),
    [
        ("pppp", 4, Verdict.PASSED), ("pppf", 3, Verdict.PASSED), ("pppf", 4, Verdict.FAILED),
        ("pppi", 4, Verdict.INCONCLUSIVE), ("ppii", 2, Verdict.PASSED), ("pfff", 2, Verdict.FAILED),
        ("pffi", 2, Verdict.INCONCLUSIVE), ("ppie", 2, Verdict.ERROR),
    ],
)  # fmt: skip
def test_at_least_so_many(letters: str, at_least: int, verdict: Verdict) -> None:
    """Enough that passed is passed, too many that failed is failed, and what inconclusive ones decide is neither."""
    assert judged(letters, Ask(len(letters), at_least)).verdict is verdict


@pytest.mark.parametrize(
    ("letters", "verdict"),
    [("pp", Verdict.PASSED), ("pf", Verdict.FAILED), ("pi", Verdict.INCONCLUSIVE), ("fi", Verdict.FAILED)],
)
def test_without_a_rate_all_must_pass(letters: str, verdict: Verdict) -> None:
    """Where nothing is asked of the rate, one repetition that fails is a failure, as it always was."""
    assert judged(letters, Ask(len(letters))).verdict is verdict


def test_a_rate_is_shown_or_refuted_by_its_bounds() -> None:
    """With 95 % confidence: 59 of 59 show 95 %, 50 of 50 could not, and 5 of 60 refute it."""
    assert judged("p" * 59, Ask(59, rate=0.95)).verdict is Verdict.PASSED
    assert judged("p" * 58 + "f", Ask(59, rate=0.95)).verdict is Verdict.INCONCLUSIVE
    assert judged("p" * 5 + "f" * 55, Ask(60, rate=0.95)).verdict is Verdict.FAILED
    assert judged("p" * 58 + "i", Ask(59, rate=0.95)).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("passed", "trials", "low", "high"),
    [
        (200, 200, 0.05 ** (1 / 200), 1.0),
        (0, 200, 0.0, 1 - 0.05 ** (1 / 200)),
        (29, 30, 0.8514, 0.9983),
        (0, 0, 0.0, 1.0),
    ],
)
def test_the_bounds_are_those_of_clopper_and_pearson(passed: int, trials: int, low: float, high: float) -> None:
    """0 of 200 bounds no more than 1.5 %; 29 of 30 leaves 85 % possible (closed forms, and beta quantiles)."""
    assert repeats.lower(passed, trials, 0.95) == pytest.approx(low, abs=1e-4)
    assert repeats.upper(passed, trials, 0.95) == pytest.approx(high, abs=1e-4)


def test_how_many_are_needed() -> None:
    """For 90, 95 and 99 % with 95 % confidence: 29, 59 and 299, and one fewer does not do."""
    for rate, least in ((0.9, 29), (0.95, 59), (0.99, 299)):
        assert repeats.needed(rate, 0.95) == least
        assert (repeats.lower(least - 1, least - 1, 0.95) or 0.0) < rate


def test_an_error_outweighs_the_rate() -> None:
    """A repetition whose rollback is incomplete decides the exit code, however many passed."""
    broken = replace(result(Verdict.FAILED, 9), exit_code=4, reason="rollback: a process is still stopped")
    together = judge_repeats("kill", "", [*results("pppp"), broken], Ask(5, at_least=4), "done")
    assert (together.verdict, together.exit_code) == (Verdict.ERROR, ExitCode.ROLLBACK)
    assert "with seed 9: rollback: a process is still stopped" in together.reason


def test_a_halted_series_keeps_what_there_is_and_is_inconclusive() -> None:
    """12 of 30 done and all passed: neither passed nor failed, and the figures of the 12 are there."""
    together = judged("p" * 12, Ask(30, at_least=10), "halted")
    assert (together.verdict, together.exit_code) == (Verdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE)
    assert together.reason.startswith("halted after 12 of 30; 12 of 12 passed")
    assert next(one for one in together.figures if one.name == "detected").count == 12


def test_a_series_that_goes_on_is_an_error() -> None:
    """Until the last repetition is done, a gate that reads the report finds no success."""
    assert judged("ppp", Ask(4, at_least=2), "running").exit_code is ExitCode.INTERNAL
    assert judged("", Ask(4), "running").verdict is Verdict.ERROR


def test_chance_is_called_chance() -> None:
    """Where the plans are alike and some passed and some failed, it is said that this is chance."""
    assert "chance" in " ".join(judged("ppf", Ask(3, at_least=1), alike=True).notes)
    assert not judged("ppf", Ask(3, at_least=1), alike=False).notes
    assert not judged("ppp", Ask(3, at_least=1), alike=True).notes


def test_a_distribution() -> None:
    """Least, median, nine in ten, most; what was not seen is counted and is no number."""
    found = Distribution.of("caught_up", [float(n) for n in range(1, 11)] + [None, math.nan], seconds=True)
    assert (found.min, found.median, found.p90, found.max) == (1.0, 5.5, 9.0, 10.0)
    assert (found.count, found.unseen) == (10, 2)
    assert Distribution.of("restored", [None, None], seconds=True).median is None


def test_every_measured_part_has_a_distribution() -> None:
    """Parts and lost steps of the recovery, time and attempts of the run, and the assertions' own numbers once."""
    names = [one.name for one in judged("pppp", Ask(4)).figures]
    assert names == [
        "felt", "detected", "restored", "caught_up", "lost_steps", "run", "attempts",
        "loss_continuity: largest_difference", "loss_continuity: twins",
    ]  # fmt: skip


def test_recoveries_of_several_faults_are_told_apart() -> None:
    """Two faults, the second of which landed twice, have figures of their own."""
    parts = {"caught_up": 1.0}
    several = tuple(Recovery(name, parts, 0) for name in ("first", "second", "second"))
    together = judge_repeats("kill", "", [replace(one, recoveries=several) for one in results("pp")], Ask(2), "done")
    names = [one.name for one in together.figures]
    assert names[:5:2] == ["first, caught_up", "second, caught_up", "second (2), caught_up"]


def test_inconclusive_repetitions_give_no_figures() -> None:
    """What a run measured that is no evidence is left out of the distributions."""
    assert next(one for one in judged("ppi", Ask(3)).figures if one.name == "run").count == 2


def test_an_assertion_says_nothing_of_a_run_that_is_no_evidence() -> None:
    """The cases of an inconclusive repetition count as inconclusive, whatever they say."""
    recovery = next(one for one in judged("ppi", Ask(3)).cases if one.name == "recovery_time")
    assert (recovery.passed, recovery.failed, recovery.inconclusive) == (2, 0, 1)


def plan(seed: int, name: str = "kill") -> Plan:
    return Plan(name, "", seed, PlannedJob(("torchrun", "t.py"), "/", {}, 2, 1, 60.0), (), ())


def series(*asks: Ask) -> Repetitions:
    runs = [(Path(f"{n}.yaml"), plan(seed), ask) for n, ask in enumerate(asks) for seed in range(ask.times)]
    return Repetitions([(*run, Path(f"/runs/{number}")) for number, run in enumerate(runs)])


def test_a_failed_repetition_is_no_failure_where_the_rate_is_judged() -> None:
    """The exit code of a series that asks for a rate is that of the rate; without one it is the worst of all."""
    by_rate, plain = series(Ask(4, at_least=3)), series(Ask(4))
    got = results("pfpp")
    assert worst(by_rate.codes(got, by_rate.judged(got, ended=True))) is ExitCode.PASSED
    assert worst(plain.codes(got, plain.judged(got, ended=True))) is ExitCode.FAILED


def test_series_of_several_files_are_kept_apart() -> None:
    """Two files, one repeated and one not: the one's failure counts, and does not spoil the other's rate."""
    both = series(Ask(3, at_least=2), Ask(1))
    got = results("ppff")
    repeats = both.judged(got, ended=True)
    assert [one.verdict for one in repeats] == [Verdict.PASSED]
    assert both.codes(got, repeats) == [ExitCode.PASSED, ExitCode.FAILED]


def test_a_series_that_was_cut_short_is_inconclusive_at_best() -> None:
    """Runs that never started make the exit code 2, with a rate and without."""
    for ask in (Ask(4, at_least=2), Ask(4)):
        cut = series(ask)
        assert worst(cut.codes(results("pp"), cut.judged(results("pp"), ended=True))) is ExitCode.INCONCLUSIVE


def test_the_command_line_goes_before_the_scenario() -> None:
    """--repeat replaces all that the scenario says; a criterion alone replaces the scenario's."""
    written = Repeat(times=30, at_least=29)
    assert ask_of(written) == Ask(30, 29)
    assert ask_of(written, times=3) == Ask(3)
    assert ask_of(written, at_least=20) == Ask(30, 20)
    assert ask_of(written, rate=0.9) == Ask(30, rate=0.9)
    assert ask_of(None) == Ask()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"at_least": 3}, "give their number, such as --repeat 30"),
        ({"times": 3, "at_least": 4}, "at least 4 of 3 can never pass"),
        ({"times": 30, "at_least": 4, "rate": 0.5}, "write either at_least or rate"),
        ({"times": 30, "rate": 0.95}, "59 are needed"),
    ],
)
def test_what_can_t_be_met_is_refused(options: dict[str, float], words: str) -> None:
    """A criterion without repetitions, more than there are, two at once, or a rate that so few can't show."""
    with pytest.raises(UsageError, match=words):
        ask_of(None, **options)  # type: ignore[arg-type]


def test_without_scipy_a_rate_is_refused_and_a_count_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing extra is named; a count is judged without it, and says that it has no bound."""
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(UsageError, match=r"torchaos\[statistics\]"):
        ask_of(None, times=100, rate=0.9)
    together = judged("pppf", ask_of(None, times=4, at_least=3))
    assert together.verdict is Verdict.PASSED
    assert "torchaos[statistics]" in together.reason


YAML = """
scenario: kill
job: {command: torchrun --nproc-per-node 2 train.py}
assert: [completed]
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("repeat: {times: 30, at_least: 31}", "at least 31 of 30 can never pass"),
        ("repeat: {times: 30, at_least: 1, rate: 0.5}", "write one of them"),
        ("repeat: {at_least: 2}", "'times' is missing"),
        ("repeat: 0", "at least 1"),
        ("repeat: often", "mapping"),
    ],
)
def test_a_scenario_s_mistakes_have_a_place(tmp_path: Path, text: str, words: str) -> None:
    """What is wrong under `repeat` is told with file and line."""
    path = tmp_path / "kill.yaml"
    path.write_text(YAML + text + "\n")
    with pytest.raises(UsageError) as caught:
        load(path)
    assert "kill.yaml:5:" in str(caught.value)
    assert words in str(caught.value)


def test_a_scenario_may_say_a_number_alone(tmp_path: Path) -> None:
    """`repeat: 30` is thirty times, all of which must pass."""
    path = tmp_path / "kill.yaml"
    path.write_text(YAML + "repeat: 30\n")
    assert load(path).repeat == Repeat(times=30)


def test_the_options_are_checked_before_anything_runs(tmp_path: Path) -> None:
    """--at-least without --repeat ends at once, and nothing was made."""
    path = tmp_path / "kill.yaml"
    path.write_text(YAML)
    done = CliRunner().invoke(cli, ["run", str(path), "--at-least", "3", "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, UsageError)
    assert not (tmp_path / "out").exists()


def test_a_plan_says_how_often(tmp_path: Path) -> None:
    """`torchaos plan` tells of the repetitions that the scenario asks for, and plans the first."""
    path = tmp_path / "kill.yaml"
    path.write_text(YAML + "repeat: {times: 30, at_least: 29}\n")
    (tmp_path / "train.py").touch()
    done = CliRunner().invoke(cli, ["plan", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.count("seed 0") == 1
    assert "Repeated 30 times, with increasing seeds: at least 29 of 30 must pass." in done.output


def test_junit_has_one_case_for_a_rate(tmp_path: Path) -> None:
    """With a rate, failed repetitions are no failures in the file; without one they are. The text has the figures."""
    for ask, failures, suites in ((Ask(4, at_least=3), 0, 1), (Ask(4), 2, 5)):
        path = tmp_path / "junit.xml"
        result_files.write_junit(results("pfpp"), path, series(ask).judged(results("pfpp"), ended=True))
        root = ET.parse(path).getroot()
        assert len(root.findall("testsuite")) == suites
        assert len(root.findall(".//failure")) == failures
        text = "".join(root.findall(".//testcase[@classname='kill']")[-1].itertext())
        assert "detected, seconds: {min 0.1, median 0.115, p90 0.13, max 0.13, seen 4, not seen 0}" in text


def test_junit_keeps_the_runs_of_others(tmp_path: Path) -> None:
    """Another file with a scenario of the same name, which is not repeated, fails in the file as ever."""
    path, got = tmp_path / "junit.xml", results("ppff")
    result_files.write_junit(got, path, series(Ask(3, at_least=2), Ask(1)).judged(got, ended=True))
    assert len(ET.parse(path).getroot().findall(".//failure")) == 1


def test_json_has_all(tmp_path: Path) -> None:
    """Every repetition is there, and what they are together."""
    path = tmp_path / "all.json"
    result_files.write_json(results("pfpp"), path, series(Ask(4, at_least=3)).judged(results("pfpp"), ended=True))
    found = json.loads(path.read_text())
    assert len(found["results"]) == 4
    (together,) = found["repeats"]
    assert (together["verdict"], together["rate"]["passed"], together["seeds"]) == ("passed", 3, [0, 1, 2, 3])
    assert {"detected", "lost_steps"} <= {figure["name"] for figure in together["figures"]}


def sheet(repeats: Repeats, width: int = 100) -> Sequence[str]:
    file = io.StringIO()
    show_repeats(repeats, Console(file=file, width=width, force_terminal=False))
    return file.getvalue().splitlines()


def test_the_console_says_it_in_a_table() -> None:
    """Verdict and reason first, then rates with bounds, then figures; parts that nobody saw are left out."""
    lines = sheet(judged("pppf", Ask(4, at_least=3)))
    assert lines[1].split()[:2] == ["PASSED", "kill,"]
    assert "3 of 4 passed (1 failed); at least 3 were required" in lines[2]
    rows = {
        line.split("  ")[1].strip(): line.split()[-5:] for line in lines if line.startswith("   ") and line[3] != " "
    }
    assert rows["loss continuity"] == ["3", "1", "0", "24.9%", "98.7%"]
    assert any(line.strip().startswith("detected") and line.split()[1] == "0.10" for line in lines)
    assert not any("restored" in line for line in lines)
    assert max(map(len, lines)) <= 100
