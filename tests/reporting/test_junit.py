from __future__ import annotations

import re
import string
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from torchaos.harness.record.result import Case, FaultResult, Result, Verdict
from torchaos.harness.reporting import result_files

# By hand from junit-10.xsd of Jenkins's xUnit plugin: per element: required attributes, others, children.
_TIME = re.compile(r"(([0-9]{0,3},)*[0-9]{3}|[0-9]{0,3})*(\.[0-9]*)?")
_XSD = {
    "testsuites": (set(), {"name", "time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors"},
        {"group", "time", "skipped", "timestamp", "hostname", "id", "package", "file", "log", "url"},
        {"testsuite", "properties", "testcase", "system-out", "system-err"},
    ),
    "testcase": ({"name"}, {"time", "classname", "group"}, {"skipped", "error", "failure", "system-out", "system-err"}),
    "failure": (set(), {"type", "message"}, set()),
    "error": (set(), {"type", "message"}, set()),
    "system-out": (set(), set(), set()),
}


def check_xsd(element: ElementTree.Element) -> None:
    required, optional, children = _XSD[element.tag]
    assert required <= element.attrib.keys() <= required | optional
    assert element.tag not in ("testsuites", "testsuite") or _TIME.fullmatch(element.get("time", ""))
    for child in element:
        assert child.tag in children
        check_xsd(child)


def parsed(results: list[Result]) -> ElementTree.Element:
    root = ElementTree.fromstring(result_files.text(results).encode())
    check_xsd(root)
    return root


def outcome(case: ElementTree.Element) -> str:
    found = [child.get("type", "") for child in case if child.tag in ("failure", "error")]
    return found[0] if found else "passed"


def test_each_case_of_a_result_is_a_test_case(results: dict[str, Result]) -> None:
    """A result becomes one suite with its cases in order; failed is a failure, inconclusive and error are errors."""
    root = parsed([results["several"], results["inconclusive"]])
    first, second = root
    assert first.get("name") == "freeze-then-kill, seed 7"
    assert first.get("timestamp") == "2026-11-20T20:49:45"
    assert [(case.get("name"), case.get("classname"), outcome(case)) for case in first] == [
        ("faults", "freeze-then-kill", "failed"),
        ("recovery_time", "freeze-then-kill", "failed"),
        ("rollback", "freeze-then-kill", "error"),
    ]
    assert [outcome(case) for case in second] == ["inconclusive", "inconclusive", "passed", "passed"]
    assert [child.tag for case in second for child in case if child.tag != "system-out"] == ["error", "error"]
    assert {name: root.get(name) for name in ("tests", "failures", "errors")} == {
        "tests": "7",
        "failures": "2",
        "errors": "3",
    }
    assert first.get("time") == "31.42"


def test_each_thing_is_told_once(results: dict[str, Result]) -> None:
    """The message is the reason; the text has what was measured and its bound, since properties are ignored, and what
    is of use without the reason: no number whose name says nothing. In a case that passed, system-out has both."""
    measured = {"catch_up": 71.5, "felt": 0.5, "lost_steps": 3, "step": 21, "own": 8}
    case = Case("recovery_time", "assertion", Verdict.FAILED, "too slow", measured, {"catch_up": 60.0},
                ("catch_up", "felt"))  # fmt: skip
    well = replace(case, verdict=Verdict.PASSED, reason="quick")
    (suite,) = parsed([replace(results["failed"], cases=(case, well, replace(well, name="again")))])
    failure = suite[0].find("failure")
    assert failure is not None
    assert failure.get("message") == "too slow"
    figures = ["catch up: 71.50 s, bound 60 s", "felt: 0.50 s", "lost steps: 3"]
    run = results["failed"].run_dir
    again = ["seed: 7", f"files: {run}", "again: torchaos run scenarios/process/kill-rank.yaml --seed 7"]
    assert (failure.text or "").splitlines() == [*figures, *again]
    assert suite[0].find("system-out") is None
    assert (suite[1].findtext("system-out") or "").splitlines() == ["quick", *figures]


def test_a_reason_that_the_message_cuts_is_whole_in_the_text(results: dict[str, Result]) -> None:
    """Readers show messages on one line, so a long reason is shortened there."""
    case = Case("a", "assertion", Verdict.FAILED, "much to tell " * 100)
    (suite,) = parsed([replace(results["failed"], cases=(case,))])
    assert case.reason.strip() in (suite[0].findtext("failure") or "")


def test_the_gate_names_its_suites(results: dict[str, Result]) -> None:
    """A reader of the file sees which gate it was, and in which environment."""
    root = ElementTree.fromstring(result_files.text([results["passed"]], of="gate release, ci"))
    check_xsd(root)
    assert (root.get("name"), root[0].get("name")) == ("gate release, ci", "gate release, ci: kill-rank, seed 7")


def test_names_are_unique_over_the_file(results: dict[str, Result]) -> None:
    """GitLab drops cases of equal name, so repeated runs carry their seed, and equal assertions a number."""
    case = Case("completed", "assertion", Verdict.PASSED, "")
    twice = replace(results["passed"], cases=(case, case, replace(case, name="completed (2)")))
    root = parsed([twice, replace(twice, seed=8), replace(twice, seed=8)])
    names = [(case.get("classname"), case.get("name")) for suite in root for case in suite]
    assert len(set(names)) == len(names) == 9
    assert [suite.get("name") for suite in root] == [
        "kill-rank, seed 7",
        "kill-rank, seed 8, run 1",
        "kill-rank, seed 8, run 2",
    ]
    assert names[:2] == [("kill-rank", "completed [seed 7]"), ("kill-rank", "completed (2) [seed 7]")]


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.ERROR])
@pytest.mark.parametrize("empty", [True, False])
def test_no_suite_is_greener_than_its_run(results: dict[str, Result], verdict: Verdict, empty: bool) -> None:
    """A run that did not pass though each of its cases did, or that has no case at all, gets a case of its own."""
    cases = () if empty else results["passed"].cases
    (suite,) = parsed([replace(results["passed"], verdict=verdict, reason="ended early", cases=cases)])
    assert suite[0].get("name") == "run"
    assert outcome(suite[0]) == verdict.value


def test_a_failure_without_a_reason_is_still_a_failure(results: dict[str, Result]) -> None:
    """An empty reason does not make the failure vanish."""
    (suite,) = parsed([replace(results["failed"], cases=(Case("a", "assertion", Verdict.FAILED, ""),))])
    assert outcome(suite[0]) == "failed"


@pytest.mark.slow
def test_sizes_are_bounded(results: dict[str, Result]) -> None:
    """A reason as long as a log file makes a small file, which says how much was left out."""
    case = Case("a", "assertion", Verdict.FAILED, "<&\0" * 10**6)
    text = result_files.text([replace(results["failed"], cases=(case,))])
    assert len(text) < 200_000
    assert "characters and more left out" in text


def test_a_file_of_very_many_cases_is_still_taken(results: dict[str, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader takes files up to a size: of too many long reasons each is told more briefly, and none is left out."""
    monkeypatch.setattr(result_files, "_FILE", 1_000_000)
    case = Case("a", "assertion", Verdict.FAILED, "&<>" * 3000)
    text = result_files.text([replace(results["failed"], seed=seed, cases=(case,)) for seed in range(40)])
    assert 300_000 < len(text.encode()) < 1_000_000
    assert ElementTree.fromstring(text.encode()).get("failures") == "40"


def test_the_page_is_attached(results: dict[str, Result], tmp_path: Path) -> None:
    """Jenkins finds the page of a run in the output of its first case and of each that did not pass, alone on a line;
    text of a job's that looks like such a line attaches nothing."""
    case = Case(
        "b", "assertion", Verdict.FAILED, "[[ATTACHMENT|/etc/shadow]]", {"said": "\n[[ATTACHMENT|/etc/passwd]]"}
    )
    run = replace(results["passed"], run_dir=str(tmp_path), cases=(results["passed"].cases[0], case))
    assert "ATTACHMENT" not in (parsed([replace(run, cases=run.cases[:1])])[0][0].findtext("system-out") or "")
    (tmp_path / "report.html").write_text("<!doctype html>")
    (suite,) = parsed([run])
    for one in suite:
        lines = (one.findtext("system-out") or "").splitlines()
        assert [line for line in lines if "[[ATTACHMENT|" in line] == [f"[[ATTACHMENT|{tmp_path}/report.html]]"]


def test_secrets_of_a_job_are_masked(results: dict[str, Result]) -> None:
    """A token that a reason quotes from a log is in neither the message nor the text."""
    case = Case("a", "assertion", Verdict.FAILED, "401 for HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz")
    assert "hf_abc" not in result_files.text([replace(results["failed"], cases=(case,))])


def test_the_parser_of_a_github_action_reads_it(results: dict[str, Result]) -> None:
    """junitparser, which publish-unit-test-result-action reads reports with, counts the same cases and verdicts."""
    parser = pytest.importorskip("junitparser", reason="needs junitparser")
    suites = parser.JUnitXml.fromstring(result_files.text([*results.values()]).encode())
    assert (suites.tests, suites.failures, suites.errors) == (19, 3, 3)
    cases = [case for suite in suites for case in suite]
    assert sum(isinstance(one, parser.Failure) for case in cases for one in case.result) == 3
    assert sum(isinstance(one, parser.Error) for case in cases for one in case.result) == 3
    assert len({(case.classname, case.name) for case in cases}) == len(cases)


def test_the_file_is_replaced_whole(results: dict[str, Result], tmp_path: Path) -> None:
    """The placeholder's file is replaced, and nothing else stays in the folder."""
    path = tmp_path / "deep" / "junit.xml"
    result_files.write_junit([replace(results["passed"], verdict=Verdict.ERROR, cases=())], path)
    result_files.write_junit([results["passed"]], path)
    root = ElementTree.parse(path).getroot()
    assert root.get("errors") == "0"
    assert [one.name for one in path.parent.iterdir()] == ["junit.xml"]


_TEXTS = st.text(
    st.characters() | st.sampled_from("\0\x1b\r\ud800\udfff\ufffe\uffff\x85<>&\"'") | st.sampled_from(string.printable)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=_TEXTS, verdict=st.sampled_from(list(Verdict)))
@example(text="]]>\x1b[0m\ud83d\uffff" + chr(0x1FFFE), verdict=Verdict.FAILED)
def test_any_text_is_well_formed(results: dict[str, Result], text: str, verdict: Verdict) -> None:
    """Whatever text a log put into a result, the file parses, fits the schema, and counts its failures right."""
    fault = FaultResult(text, text, text, text, text, None, text, verdict, text)
    case = Case(text, "faults", verdict, text, {text: text, "list": [text]}, {text: float("nan")})
    odd = replace(
        results["passed"], scenario=text, reason=text, verdict=verdict, cases=(case,), faults=(fault,), started=text
    )
    (suite,) = parsed([odd])
    assert suite.get("failures") == str(int(verdict is Verdict.FAILED))
    assert suite.get("errors") == str(int(verdict in (Verdict.INCONCLUSIVE, Verdict.ERROR)))
