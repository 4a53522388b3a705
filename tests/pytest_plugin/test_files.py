"""Scenario files as tests: which are collected, the test result for each verdict, and the effect of pytest's own
options."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from torchaos.harness.pytest_plugin.outcome import Run, failure_text

from .conftest import Project

CASES = ["faults", "recovery_time", "checkpoint_integrity", "loss_continuity", "sample_accounting", "restarts",
         "completed", "rollback"]  # fmt: skip


@pytest.mark.slow
def test_only_what_was_asked_for_is_collected(project: Project) -> None:
    """A project's YAML is not looked at unless it is named or matches a pattern that the project set; of that, only
    scenarios are taken. No run is started by collecting."""
    project.scenario("chaos/kill")
    project.file("chaos/values.yaml", "replicas: 3\nnested:\n  scenario: none\n")
    assert project.pytest("--collect-only", "-q").code == 5, "nothing is collected"
    assert project.pytest("--collect-only", "-q", "chaos").code == 5, "a folder that is named is no wish for scenarios"
    named = project.pytest("--collect-only", "-q", "chaos/kill.yaml")
    wanted = [f"chaos/kill.yaml::kill::{case}" for case in CASES]
    assert named.text.splitlines()[: len(wanted)] == wanted, named
    assert project.pytest("--collect-only", "-q", "chaos/values.yaml").code in (4, 5)
    matched = project.pytest("--collect-only", "-q", "--torchaos-scenarios", "chaos/*.yaml")
    assert matched.text.splitlines()[: len(wanted)] == wanted, matched
    project.file("torchaos-runs/kill-1/scenario.yaml", "scenario: kill\njob: {command: x}\n")
    project.file("torchaos-runs/kill-1/plan.json", "{}")
    for glob in ("chaos/*.yaml", "**/*.yaml"):
        matched = project.pytest("--collect-only", "-q", "--torchaos-scenarios", glob)
        assert matched.text.splitlines()[: len(wanted) + 1] == [*wanted, ""], "not the copy in a run directory"
    assert "a pattern of scenarios is relative" in project.pytest("--torchaos-scenarios", "/chaos/*.yaml").text
    typo = project.pytest("--torchaos-scenarios", "kaos/*.yaml")
    assert typo.code == 4, "else nothing would be run, and nobody told"
    assert typo.text.strip() == f"ERROR: kaos/*.yaml: no scenario matches this pattern in {project.folder}"
    assert not matched.calls()


def test_a_scenario_in_braces_is_collected(project: Project) -> None:
    """JSON, and YAML in its style: `torchaos run` takes them, so that a pattern must not leave them out in silence. One
    that is broken is an error, and other files in braces are left alone."""
    text = '{"scenario": "kill", "job": {"command": "x"}, "faults": [],\n "assert": ["completed"]}\n'
    project.file("chaos/a.json", text)
    project.file("chaos/b.yaml", f"# a comment\n--- {text}")
    project.file("chaos/c.yaml", "{job: {command: x}, scenario: kill, assert: [completed]}")
    project.file("chaos/d.yaml", '{"values": {"scenario": "kill"}}')
    found = project.pytest("--collect-only", "-q", "--torchaos-scenarios", "chaos/*")
    wanted = [
        f"chaos/{name}::kill::{case}" for name in ("a.json", "b.yaml", "c.yaml") for case in ("completed", "rollback")
    ]
    assert found.text.splitlines()[: len(wanted) + 1] == [*wanted, ""], found
    project.file("chaos/a.json", text[:-5])
    assert "a.json:" in project.pytest("chaos/a.json").text


@pytest.mark.slow
@pytest.mark.parametrize("change", [("\n", "\r\n"), ("\n", "\r"), ("scenario:", "\ufeffscenario:")])
def test_other_line_ends_and_a_byte_order_mark_are_read(project: Project, change: tuple[str, str]) -> None:
    """As `torchaos run` reads them; a file that can't be read is an error of its own."""
    text = "scenario: kill\njob: {command: x}\nassert: [completed]\n".replace(*change)
    (project.folder / "a.yaml").write_bytes(text.encode())
    (project.folder / "b.yaml").mkdir()
    (project.folder / "c.yaml").write_bytes(b"scenario: kill\n\xff")
    found = project.pytest("--collect-only", "-q", "--torchaos-scenarios", "*.yaml")
    assert found.text.splitlines()[:2] == [f"a.yaml::kill::{case}" for case in ("completed", "rollback")], found
    assert "c.yaml:2:1: this is not UTF-8 text" in found.text
    assert found.counts() == {"error": 1}


def test_each_verdict_has_its_outcome(project: Project) -> None:
    """Passed, failed and inconclusive scenarios side by side: a failure is a failure, what is inconclusive is neither
    that nor passed, with a section of its own; each scenario runs once, however many assertions it has."""
    for name in ("good", "bad", "unfelt"):
        project.scenario(name)
    done = project.pytest("good.yaml", "bad.yaml", "unfelt.yaml", "--junitxml", "junit.xml")
    assert done.code == 1, done
    assert done.counts() == {"passed": 8 + 7 + 1, "failed": 1, "inconclusive": 7}, done
    assert [call["scenario"] for call in done.calls()] == ["good", "bad", "unfelt"]
    assert "FAILED bad.yaml::bad::recovery_time - caught up 71.50 s" in done.text
    assert "unfelt.yaml::unfelt::faults proves nothing" in done.text
    assert "the assertion holds, but the run proves nothing: faults: process.kill: nothing shows" in done.text
    suite = ET.parse(project.folder / "junit.xml").getroot()
    assert len(suite.findall(".//failure")) == 1
    assert len(suite.findall(".//error")) == 7
    case = next(one for one in suite.iter("testcase") if one.find("failure") is not None)
    assert (case.get("classname"), case.get("name")) == ("bad.yaml.bad", "recovery_time")
    properties = {one.get("name"): one.get("value") for one in case.iter("property")}
    assert properties["measured.catch_up"] == "20.677901"
    assert properties["bound.catch_up"] == "60.0"
    assert properties["torchaos.verdict"] == "failed"


def test_a_failure_shows_what_its_reader_needs(project: Project) -> None:
    """The reason, the figure and its bound, what happened around the fault, the scenario's own lines, the files; and
    not a line of our code."""
    project.scenario("bad")
    text = project.pytest("bad.yaml").text
    story = text[text.index("= FAILURES =") : text.index("short test summary")]
    for part in (
        "caught up 71.50 s after the fault, and 60 s are allowed", "catch up         20.68 s  (bound: 60 s)",
        "+0.00 s  process.kill hits rank 1 in step 12, backward", "rank 1 is gone (pid 29501): killed by SIGKILL",
        ">   20 |   - recovery_time: {catch_up: 60s}", "files:  ", "again:  torchaos run s.yaml --seed 7",
    ):  # fmt: skip
        assert part in story, part
    assert "rolling back" not in story  # comes after the job's end, and explains nothing
    assert "pytest_plugin" not in story
    assert "Traceback" not in story
    assert "def " not in story


@pytest.mark.slow
@pytest.mark.parametrize("on_ci", ["", "true"])
def test_several_failures_of_a_run_do_not_repeat_its_story(project: Project, on_ci: str) -> None:
    """What happened around the fault is shown once, with the first failure, also on a CI machine, where pytest does not
    cut its summary. The cause comes first where it is known, so
    that it is seen in a summary that is cut; a bound beside which nothing was measured is not shown."""
    project.scenario("bad-data")
    project.env |= {"COLUMNS": "80", "CI": on_ci, "BUILD_NUMBER": ""}
    done = project.pytest("bad-data.yaml")
    assert done.counts()["failed"] == 2, done
    assert done.text.count("around the fault:") == 1
    assert done.text.count("\nfiles:  ") == 2
    assert "\nthe sampler restarted\nthe loss of rank 0 in step 16 is 2.5" in done.text
    (line,) = [line for line in done.text.splitlines() if line.startswith("FAILED") and "loss_continuity" in line]
    assert line.endswith("- the sampler restarted")
    assert "not measured" not in done.text


@pytest.mark.slow
def test_an_assertion_alone_does_not_pass_in_a_run_that_proves_nothing(project: Project) -> None:
    """Chosen by -k, an assertion that holds in a run whose fault was not felt is inconclusive; one beside an assertion
    that could not be judged passes; and on a machine that was not put in order, nothing does."""
    for name in ("unfelt", "unseen", "dirty"):
        project.scenario(name)
    assert project.pytest("unfelt.yaml", "-k", "recovery_time").counts() == {"inconclusive": 1, "deselected": 7}
    assert project.pytest("unseen.yaml").counts() == {"passed": 7, "inconclusive": 1}
    dirty = project.pytest("dirty.yaml", "-k", "recovery_time")
    assert dirty.code == 1
    assert dirty.counts() == {"error": 1, "deselected": 7}
    assert "the rollback is incomplete: process.freeze could not be taken back" in dirty.text


@pytest.mark.slow
def test_repetitions_are_judged_together(project: Project) -> None:
    """A scenario that is repeated has one test for all its repetitions: one that failed among others that passed is a
    failure where all had to pass, and none where a share was enough; the failed one's story is shown."""
    for name in ("often", "often-enough"):
        path = project.scenario(name)
        path.write_text(path.read_text() + "repeat: {times: 3}\n")
    done = project.pytest("often.yaml", "often-enough.yaml")
    assert done.counts() == {"failed": 1, "passed": 3}, done
    assert "FAILED often.yaml::often::repetitions - 2 of 3 passed" in done.text
    assert "process.kill hits rank 1" in done.text
    single = project.scenario("bad")
    single.write_text(single.read_text() + "repeat: {times: 1}\n")
    assert project.pytest("bad.yaml").counts() == {"failed": 1, "passed": 1}
    project.scenario("often")
    assert project.pytest("often.yaml", "--torchaos-set=repeat.times=3").counts() == {"failed": 1, "passed": 1}


@pytest.mark.slow
def test_what_can_t_be_run_is_an_error_with_its_place(project: Project) -> None:
    """A scenario that the command refuses, one that is no YAML, and a command that is not there: the message alone."""
    project.scenario("unusable")
    project.file("broken.yaml", "scenario: x\njob: [\n")
    done = project.pytest("unusable.yaml")
    assert done.counts() == {"error": 8}, done
    assert "unusable.yaml:3:5: no such key; did you mean job?" in done.text
    assert done.text.count("nothing was run; unusable.yaml::unusable::faults says why\n") == 2 * 7, done
    broken = project.pytest("broken.yaml")
    assert broken.code in (1, 2)
    assert "broken.yaml:3:1:" in broken.text
    assert "Traceback" not in broken.text
    project.file("pytest.ini", "[pytest]\ntorchaos_command = /no/such/torchaos\n")
    assert "/no/such/torchaos: No such file or directory; see torchaos_command" in project.pytest("unusable.yaml").text


@pytest.mark.slow
def test_pytests_own_options_behave(project: Project) -> None:
    """-x ends after the first failure, --lf runs what failed or was inconclusive again, and only that, -k chooses."""
    for name in ("bad", "unfelt", "good"):
        project.scenario(name)
    first = project.pytest("-x", "bad.yaml", "good.yaml")
    assert first.counts() == {"passed": 1, "failed": 1}, first
    assert [call["scenario"] for call in first.calls()] == ["bad"]
    project.pytest("bad.yaml", "unfelt.yaml", "good.yaml")
    again = project.pytest("--lf", "bad.yaml", "unfelt.yaml", "good.yaml")
    assert again.counts() == {"failed": 1, "inconclusive": 7, "deselected": 16}, again
    assert [call["scenario"] for call in again.calls()] == ["bad", "unfelt"]
    chosen = project.pytest("good.yaml", "-k", "rollback")
    assert chosen.counts() == {"passed": 1, "deselected": 7}


@pytest.mark.slow
def test_scenarios_are_multiplied(project: Project) -> None:
    """By seed, rank, phase or any key: one set of tests each, named by the values, run with them."""
    project.scenario("good")
    done = project.pytest(
        "good.yaml", "--torchaos-seeds=1,2", "--torchaos-each=rank=0,1", "--torchaos-each=job.timeout=1m", "-q",
        "--torchaos-set=twin.runs=1",
    )  # fmt: skip
    assert done.counts() == {"passed": 32}, done
    words = [" ".join(call["words"]) for call in done.calls()]
    assert len(set(words)) == 4
    assert words[0] == "--seed 1 --set twin.runs=1 --set faults.0.target.rank=0 --set job.timeout=1m"
    listed = project.pytest("good.yaml", "--torchaos-each=phase=forward,backward", "--collect-only", "-q")
    assert "good.yaml::good[phase=backward]::rollback" in listed.text
    for option, says in (
        ("--torchaos-each=rank", "--torchaos-each rank: write KEY=VALUE,VALUE, such as rank=0,1"),
        ("--torchaos-seeds=one", "'one' is not a seed: a seed is a whole number"),
        ("--torchaos-live=-1", "--torchaos-live -1: at least one scenario must be allowed to run"),
    ):
        refused = project.pytest("good.yaml", option)
        assert (refused.code, refused.text.strip()) == (4, f"ERROR: {says}")


def test_it_stays_out_of_projects_that_do_without_it(project: Project) -> None:
    """Loading the plugin imports nothing but pytest and the standard library, and changes no test of a project that has
    fixtures and YAML of its own."""
    project.file("data.yaml", "scenario: of another tool\n")
    project.file("test_own.py", (
        "import sys, pytest\n"
        "HEAVY = {'yaml', 'pydantic', 'rich', 'click', 'jinja2', 'numpy', 'psutil', 'torch', 'platformdirs'}\n"
        "@pytest.fixture\ndef run():\n    return 'ours'\n"
        "def test_own(run):\n"
        "    assert run == 'ours'\n"
        "    ours = {name for name in sys.modules if name.startswith('torchaos.')}\n"
        "    assert ours <= {'torchaos.harness', 'torchaos.harness.pytest_plugin'}, ours\n"
        "    assert 'torchaos.harness.pytest_plugin' in ours\n"
        "    assert not HEAVY & sys.modules.keys()\n"
    ))  # fmt: skip
    done = project.pytest("-q", "--strict-markers")
    assert done.counts() == {"passed": 1}, done


def test_a_failure_shows_no_secret(tmp_path: Path) -> None:
    """The lines of the scenario that go to the terminal and into JUnit files come without the secrets in them."""
    path = tmp_path / "scenario.yaml"
    path.write_text("env:\n  WANDB_API_KEY: s3cr3tvalue\n  LR: 1\nassert: [completed]\n")
    text = failure_text(Run(path, 1, "", {}), "login with --token s3cr3tvalue", line=4)
    assert "WANDB_API_KEY: ***" in text
    assert ">    4 | assert: [completed]" in text
    assert "s3cr3t" not in text
