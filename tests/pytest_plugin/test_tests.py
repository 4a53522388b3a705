"""Tests written in Python: the marker, the `run` fixture, several workers, and what an interruption leaves."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from dataclasses import replace
from importlib.util import find_spec
from xml.etree import ElementTree

import pytest
from waiting import wait_until

from .conftest import Project

pytestmark = pytest.mark.slow

TESTS = """
import pytest

@pytest.mark.torchaos("good.yaml", seeds=[1, 2], phases=["forward"])
def test_recovers(run):
    assert run.verdict == "passed"
    assert [one.fault for one in run.recoveries] == ["process.kill", "process.freeze"]
    assert run.recoveries[0].caught_up_s < 30 and run.recoveries[0].lost_steps == 11
    assert run.case("recovery_time")["measured"]["lost_steps"] == 11
    assert any(event.kind.value == "fault.applying" for event in run.journal)
    assert run.twin.history.last_step == run.record.history.last_step == 14
    assert (run.folder / "plan.json").is_file()

@pytest.mark.torchaos("good.yaml", seeds=[1], phases=["forward"])
def test_shares_its_run(run):
    with pytest.raises(LookupError, match="there are 2 recoveries"):
        run.recovery
    with pytest.raises(LookupError, match="this run has faults, recovery_time"):
        run.case("nothing")

@pytest.mark.torchaos("bad.yaml")
def test_fails_with_its_run(run):
    raise AssertionError("never reached")

@pytest.mark.torchaos("unfelt.yaml")
def test_is_inconclusive_with_its_run(run):
    raise AssertionError("never reached")

@pytest.mark.torchaos("bad.yaml", judge=False)
def test_judges_by_itself(run):
    assert run.verdict == "failed"
    assert run.case("recovery_time")["verdict"] == "failed"
"""


def test_the_fixture_gives_the_run(project: Project) -> None:
    """A test sees recoveries, journal and twin; tests with the same scenario share its run; one whose run did not pass
    fails, or is inconclusive, with it, unless it wants to judge by itself."""
    for name in ("good", "bad", "unfelt"):
        project.scenario(name)
    project.file("test_job.py", TESTS)
    done = project.pytest("-q", "--strict-markers", "--junitxml=junit.xml")
    assert done.counts() == {"passed": 4, "failed": 1, "inconclusive": 1}, done
    assert "FAILED test_job.py::test_fails_with_its_run" in done.text
    suite = ElementTree.parse(project.folder / "junit.xml").getroot()[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["6", "1", "1"], "inconclusive: an error"
    assert len(done.calls()) == 4, "good with two seeds, bad, unfelt"
    assert done.calls()[0]["words"] == ["--seed", "1", "--set", "faults.0.when.phase=forward"]
    assert "test_recovers[seed=2-phase=forward]" in project.pytest("-q", "--collect-only").text


@pytest.mark.parametrize("on_ci", ["", "true"])
def test_the_short_summary_shows_the_cause(project: Project, on_ci: str) -> None:
    """In one line for each test, also on a CI machine, where pytest does not cut it; the report shows all the rest."""
    project.scenario("bad-data")
    project.env |= {"CI": on_ci, "BUILD_NUMBER": ""}
    project.file("test_job.py", "import pytest\n@pytest.mark.torchaos('bad-data.yaml')\ndef test_a(run): pass\n")
    done = project.pytest("test_job.py")
    summary = done.text[done.text.index("short test summary") :].splitlines()
    assert summary[1:-1] == ["FAILED test_job.py::test_a - the sampler restarted"], done
    assert "the loss of rank 0 in step 16 is 2.5" in done.text


def test_a_fixture_of_the_project_may_be_called_run(project: Project) -> None:
    """`torchaos_run` is the same fixture by a name of ours, with the same variations."""
    project.scenario("good")
    project.file("conftest.py", "import pytest\n@pytest.fixture\ndef run(): return 'their own'\n")
    project.file("test_job.py", "\n".join([
        "import pytest", "@pytest.mark.torchaos('good.yaml', seeds=[1, 2])",
        "def test_both(torchaos_run, run): assert (torchaos_run.verdict, run) == ('passed', 'their own')",
    ]))  # fmt: skip
    assert project.pytest("-q").counts() == {"passed": 2}


def test_a_scenario_is_explored(project: Project) -> None:
    """With `explore`, the test gets the result of `torchaos explore` with these models, and its verdict; a run of the
    same scenario is another one."""
    for name in ("good", "bad"):
        project.scenario(name)
    explored = "@pytest.mark.torchaos('{}.yaml', seeds=[3], explore=['process-death', 'node-death'])\n"
    project.file("test_job.py", "import pytest\n" + "".join([
        explored.format("good") + "def test_a(run): assert run.verdict == 'passed'\n",
        explored.format("bad") + "def test_b(run): pass\n",
        "@pytest.mark.torchaos('good.yaml', seeds=[3])\ndef test_c(run): pass\n",
    ]))  # fmt: skip
    done = project.pytest("-q", "--torchaos-consent", "host.kernel")
    assert done.counts() == {"passed": 2, "failed": 1}, done
    models = ["--model", "process-death", "--model", "node-death"]
    words = [(call["command"], call["words"]) for call in done.calls()]
    assert words == [
        *[("explore", ["--seed", "3", *models])] * 2, ("run", ["--consent", "host.kernel", "--seed", "3"]),
    ]  # fmt: skip


def test_a_marker_that_can_t_be_read_is_told(project: Project) -> None:
    """A file that is not there, an argument that there is none of, no value, no marker, two markers: one sentence each,
    without a line of the plugin's code."""
    project.scenario("good")
    project.file("test_job.py", (
        "import pytest\n"
        "@pytest.mark.torchaos('none.yaml')\ndef test_a(run): pass\n"
        "def test_b(run): pass\n"
        "@pytest.mark.torchaos('good.yaml')\n@pytest.mark.torchaos('good.yaml')\ndef test_c(run): pass\n"
        "@pytest.mark.torchaos('good.yaml', seeds=[1, 2])\ndef test_d(request): request.getfixturevalue('run')\n"
    ))  # fmt: skip
    done = project.pytest("-q")
    assert done.counts() == {"error": 3, "failed": 1}, done
    assert f"there is no {project.folder / 'none.yaml'}; correct the path" in done.text
    assert "test_job.py::test_c - its run needs one @pytest.mark.torchaos" in done.text
    assert "its marker asks for 2 runs" in done.text
    for given, says in (("sed=1", "has no sed"), ("seeds=['one']", "is not a seed"), ("each={'rank': []}", "no value")):
        code = f"import pytest\n@pytest.mark.torchaos('good.yaml', {given})\ndef test_a(run): pass\n"
        project.file("test_job.py", code)
        refused = project.pytest("-q")
        assert refused.counts() == {"error": 1}
        assert says in refused.text
        done = replace(done, text=done.text + refused.text)
    for inside in ("pytest_plugin", "pluggy", "def ", "Traceback"):
        assert inside not in done.text


MARKED = """
import pytest, unittest
mark = pytest.mark.torchaos("good.yaml")

@mark
def test_alone(): pass

@mark
class TestClass:
    def test_in_a_class(self): pass

@mark
@pytest.mark.parametrize("n", [1, 2])
def test_parametrized(n): pass

@pytest.mark.parametrize("n", [pytest.param(1, marks=mark)])
def test_marked_parameter(n): pass

@mark
class TestUnit(unittest.TestCase):
    def test_of_unittest(self): pass

@mark
def test_request(request): pass

@pytest.fixture
def run(): return "the project's own"

@mark
def test_own_run(run): pass
"""

ASKED = """
import pytest, unittest
mark = pytest.mark.torchaos("good.yaml")

@mark
@pytest.mark.usefixtures("run")
def test_used(): pass

@pytest.fixture
def mine(torchaos_run): return torchaos_run

@mark
def test_through_a_fixture(mine): assert mine.verdict == "passed"

@mark
@pytest.mark.usefixtures("mine")
class TestUsed(unittest.TestCase):
    def test_of_unittest(self): pass

@mark
def test_later(request): assert request.getfixturevalue("run").verdict == "passed"

@mark
@pytest.mark.skip(reason="not today")
def test_skipped(): pass

def test_without_a_marker(): pass
"""


def test_a_marked_test_that_runs_nothing_never_passes(project: Project) -> None:
    """A marker on a test that never asks for its run is an error: on a function, a class, a parameter, a TestCase, or
    where the project's own fixture hides ours. Where a test may still ask while it runs, it fails at its end."""
    project.scenario("good")
    project.file("test_job.py", MARKED)
    done = project.pytest("-q")
    assert done.counts() == {"error": 5, "failed": 3}, done
    assert "its marker torchaos runs nothing, because the test does not use the fixture" in done.text
    assert "pytest_plugin" not in done.text
    assert not done.calls()
    project.file("test_job.py", "import pytest\npytestmark = pytest.mark.torchaos('good.yaml')\ndef test_a(): pass\n")
    assert project.pytest("-q").counts() == {"error": 1}, "also marked by its module"


def test_a_test_may_ask_for_its_run_by_another_way(project: Project) -> None:
    """By usefixtures, through a fixture of its own, or by getfixturevalue; a test that is skipped asks for nothing."""
    project.scenario("good")
    project.file("test_job.py", ASKED)
    done = project.pytest("-q")
    assert done.counts() == {"passed": 5, "skipped": 1}, done
    assert len(done.calls()) == 1


@pytest.mark.skipif(find_spec("xdist") is None, reason="needs pytest-xdist")
def test_workers_share_runs(project: Project) -> None:
    """Under pytest-xdist each scenario runs once, although its assertions are spread over the workers."""
    for number in range(2):
        project.scenario(f"good-{number}")
    project.plugins.append("xdist")
    done = project.pytest("-v", "-n", "2", "--dist=load", "--strict-markers", "--torchaos-scenarios=*.yaml")
    assert done.counts() == {"passed": 16}, done
    assert sorted(call["scenario"] for call in done.calls()) == ["good-0", "good-1"]
    workers = {line[:5] for line in done.text.splitlines() if "good-0.yaml::good-0" in line and line[:3] == "[gw"}
    assert workers == {"[gw0]", "[gw1]"}


FAILING = """
import pytest

@pytest.mark.torchaos("bad.yaml")
def test_bad(run): pass

@pytest.mark.torchaos("unfelt.yaml")
def test_unfelt(run): pass

@pytest.mark.torchaos("unusable.yaml")
def test_unusable(run): pass

@pytest.mark.torchaos("good.yaml", seed=[1])
def test_typo(run): pass
"""


@pytest.mark.skipif(find_spec("xdist") is None, reason="needs pytest-xdist")
def test_workers_tell_the_same(project: Project) -> None:
    """Failures, inconclusive runs, errors and files that can't be collected: under pytest-xdist the same counts, the
    same short reasons, and the same cases in JUnit as without."""
    for name in ("bad", "unfelt", "unusable"):
        project.scenario(name)
    project.file("broken.yaml", "scenario: broken\njob: [\n")
    project.file("test_job.py", FAILING)
    files = ["bad.yaml", "unfelt.yaml", "unusable.yaml", "test_job.py", "broken.yaml"]
    project.plugins.append("xdist")
    told = []
    for words in (["-n0", "--continue-on-collection-errors"], ["-n2"]):
        done = project.pytest("-q", *words, *files, "--junitxml=junit.xml")
        short = re.findall(r"^(?:FAILED|ERROR|INCONCLUSIVE) .*", done.text, re.MULTILINE)
        suite = ElementTree.parse(project.folder / "junit.xml").getroot()[0]
        cases = [(one.get("classname"), one.get("name"), [each.tag for each in one]) for one in suite]
        messages = [each.get("message") for one in suite for each in one if each.tag in ("error", "failure")]
        counted = [suite.get(name) for name in ("tests", "failures", "errors")]
        # With several workers, it is chance which test of a run is the first, and says why nothing was run.
        lines = {re.sub("^(ERROR (?:unusable|broken).yaml.*?) - .*", r"\1", line) for line in short}
        told.append((done.counts(), sorted(lines), counted, sorted(cases)))
        assert not [line for line in [*short, *messages] if "[gw" in str(line)]
        assert any("FAILED bad.yaml::bad::recovery_time - caught up 71.50 s" in line for line in short), done
        assert any(re.match("INCONCLUSIVE test_job.py::test_unfelt - .*nothing shows", line) for line in short)
    assert [(one, two) for one, two in zip(*told, strict=True) if one != two] == []


def test_a_ready_scenario_by_its_name(project: Project) -> None:
    """As for `torchaos run`; the scenario may be given by its keyword."""
    project.file("test_job.py", (
        "import pytest\n@pytest.mark.torchaos('process/kill-rank')\ndef test_a(run): pass\n"
        "@pytest.mark.torchaos(scenario='process/kill-rank')\ndef test_b(run): pass\n"
        "@pytest.mark.torchaos('process/kil-rank')\ndef test_c(run): pass\n"
    ))  # fmt: skip
    done = project.pytest("-q")
    assert done.counts() == {"passed": 2, "error": 1}, done
    assert [call["scenario"] for call in done.calls()] == ["kill-rank"]
    assert "did you mean process/kill-rank" in done.text


WRONG = {
    "'good.yaml', seed=[1]": "has no seed; did you mean 'seeds'?",
    "'good.yaml', sets=['a=1']": "has no sets; did you mean 'set'?",
    "'good.yaml', seeds=5": "seeds is a list, such as seeds=[5], not 5",
    "'good.yaml', set='a=1'": "set is a list",
    "'good.yaml', explore='process-death'": "explore is a list",
    "'good.yaml', each=['rank']": "each is a mapping",
    "'good.yaml', each={'rank': 1}": "rank is a list",
    "'good.yaml', seeds=[-1]": "-1 is not a seed: a seed is a whole number, at least 0",
    "'good.yaml', seeds=[1.5]": "1.5 is not a seed",
    "'god.yaml'": "did you mean good.yaml?",
    "": "needs one @pytest.mark.torchaos",
    "5": "needs one @pytest.mark.torchaos",
}


def test_a_wrong_marker_is_an_error_of_its_test(project: Project) -> None:
    """One sentence that says what was meant, which the short summary shows beside the test's name; the other tests of
    the file run."""
    project.scenario("good")
    project.env["COLUMNS"] = "240"
    tests = [f"@pytest.mark.torchaos({given})\ndef test_{n}(run): pass\n" for n, given in enumerate(WRONG)]
    fine = "@pytest.mark.torchaos('good.yaml', seeds=(1, 2))\ndef test_fine(run): pass\n"
    project.file("test_job.py", "import pytest\n" + "".join([*tests, fine]))
    done = project.pytest("-q")
    assert done.counts() == {"error": len(WRONG), "passed": 2}, done
    for number, says in enumerate(WRONG.values()):
        assert re.search(rf"test_job.py::test_{number} - .*{re.escape(says)}", done.text), (says, done.text)
    refused = project.pytest("-q", "--torchaos-seeds=1,-2", "good.yaml")
    assert (refused.code, "-2' is not a seed" in refused.text) == (4, True)


def test_live_scenarios_take_turns(project: Project) -> None:
    """Two sessions at the same time on a machine with one slot: their scenarios are live one after the other."""
    project.env["XDG_STATE_HOME"] = str(project.folder / "state")
    started = [
        subprocess.Popen(
            project.command(project.scenario(f"good-{number}").name, "--torchaos-live=1", "-p", "no:cacheprovider"),
            cwd=project.folder, env=project.env, stdout=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    assert ["8 passed" in process.communicate(timeout=300)[0] for process in started] == [True, True]
    first, second = sorted(json.loads(line) for line in (project.folder / "times").read_text().splitlines())
    assert first[1] <= second[0], "both were live at the same time"


def test_an_interruption_ends_the_run_in_order(project: Project) -> None:
    """Ctrl-C while a scenario runs is passed on to it, and it is waited for: nothing is left behind."""
    project.scenario("slow")
    process = subprocess.Popen(
        project.command("slow.yaml"), cwd=project.folder, env=project.env, stdout=subprocess.PIPE, text=True
    )
    call = wait_until(project.call)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 2, text
    assert time.monotonic() - call["at"] < 50, "it was not waited for to its end"


def test_a_killed_pytest_ends_the_run(project: Project) -> None:
    """The scenario gets the signal of Ctrl-C, with which it ends in order."""
    project.scenario("slow")
    process = subprocess.Popen(project.command("slow.yaml"), cwd=project.folder, env=project.env)
    wait_until(project.call)
    process.kill()
    process.wait()
    wait_until((project.folder / "interrupted").exists)
