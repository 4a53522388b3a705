"""Results as files for other programs: JSON for dashboards and trends, and JUnit XML for gates. Until a run has
finished, each case of its result is an error, so that a gate that reads the file stays closed.

JSON of runs: `{"schema": 1, "results": [...]}`; each result has the same form as result.json in a run directory:

- `schema`: increased when older readers would misunderstand the new form. Added keys do not increase it.
- `scenario`, `description`, `seed`, `reproduce` (command line), `run_dir`, `started` (ISO 8601, UTC), `duration_s`
- `verdict`: passed, failed, inconclusive or error; `reason`: one line; `exit_code`: that of this scenario alone;
  `decided_by`: the case that decided, empty if none did
- `faults`: `id`, `inject`, `target`, `planned`, `applied` (null: never landed), `evidence` (null: not felt),
  `rollback`, `verdict`, `reason`, `imitates` (whose report the fault imitates), `replays` (the record that the fault
  replays); both empty: the fault really happened
- `recoveries`: `fault`; `parts`: seconds since the fault was applied (null: not seen); `lost_steps` (null: not known);
  `advice`: which waits were long, and which setting shortens them; `at_s`: when the fault was applied
  (CLOCK_MONOTONIC); `cut_off`: the run was ended, from outside, before the job had caught up;
  `unplaced`: it is not known which global steps the job made
- `cases`: `name`, `kind` (assertion, faults, rollback), `verdict`, `reason`, `measured` and `bound` by name, `seconds`
  (the names of those figures that are durations)
- `steps`: the highest global step that counts (null: none was seen); `attempts`; `twin`; `versions`; `notes`

If scenarios were repeated, `repeats` has an entry for each of them: `scenario`, `asked`, `times`, `seeds`, `run_dirs`,
`verdict`, `reason`, `exit_code`; `rate` of the scenario and `cases` of each case: `passed`, `failed`, `inconclusive`,
and the bounds `low` and `high` of the true rate (each with `confidence`; null without SciPy); `figures`: `name`,
`seconds` (whether it is a duration), `count`, `unseen`, `min`, `median`, `p90`, `max`; `of_rate`: whether the
repetitions are judged together, so that one failure decides nothing.

Not-a-number and infinities are the strings "nan", "inf" and "-inf". `Result.from_json` reads one result back.

JSON of an exploration:


- `result`: as in the JSON of a run; its cases are the classes of outcomes
- `states`: how many a death can leave; `tried`; `classes`: how many states by class; `unconfirmed`: how many of these
  only forked ranks have shown, and no cold start
- `fatal_share`: the part of the run's time (of which the states were tried) in which a death of all processes is fatal:
  the job does not start again, hangs or goes on wrongly. null: no such time was tried; `fatal_s`, `tried_s`: seconds;
  `unconfirmed_fatal_s`: the seconds of `fatal_s` that only forked ranks have shown
- `outcomes`: one for each state: `state` (its name), `digest` (of its files), `model`, `died_at_step`, `kind` (the
  class), `reason`, `assertion` (which one says so), `lost_steps` (null: none, or not known), `from_step` (null: not
  known), `mended` (whether a second start got past the death; null: there was none), `warm`, `confirmed` (false: only
  forked ranks have shown the failure), `seconds`, `operations`, `last_operation`, `moments` (seconds since the
  recording began, from and until), `files` (what is there of each), `run_dir` (empty: not kept)
- `started`: how resumes were started; `unfinished`; `notes`; `unsure`: what the recorder could not see

JUnit XML is written for the strictest reader: Jenkins's published schema (junit-10.xsd of its xUnit plugin). GitLab
ignores properties and drops cases with equal names, so figures are in the text, and names are unique in the file. No
case is ever skipped, and a suite is never green if its run did not pass, so a gate that reads it stays closed in case
of doubt. Jenkins's attachments plugin reads the path of a run's page from a line of system-out, so no text of the job
may look like such a line."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from junit_xml import TestCase, TestSuite

from torchaos.harness.crash_explorer.exploration_summary import ExplorationSummary
from torchaos.harness.crash_explorer.resume_outcomes import OutcomeClass, is_suspected
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.record.plan import Plan, counted
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.result import SCHEMA, Case, ExitCode, Result, Verdict, root_first
from torchaos.harness.release.repeats import Repeats
from torchaos.harness.reporting.terminal.many_runs import as_json, as_result
from torchaos.harness.reporting.terminal.text import (
    name_in_words,
    on_one_line,
    pairs_in_words,
    printable,
    shortened,
    value_in_words,
)


def write_json(results: Sequence[Result], path: Path, repeats: Sequence[Repeats] = ()) -> None:
    """Writes the results, and replaces the file in one step. Secrets in `reproduce` are masked. Raises OSError if the
    file can't be written."""
    shown = [replace(result, reproduce=mask(result.reproduce)) for result in results]
    found: dict[str, Any] = {"schema": SCHEMA, "results": [result.to_json() for result in shown]}
    if repeats:
        found["repeats"] = [as_json(one) for one in repeats]
    write_atomically(path, json.dumps(found, indent=1, allow_nan=False) + "\n")


def to_json(found: ExplorationSummary, result: Result) -> dict[str, Any]:
    began_s = found.recording.began_s
    counts = Counter(one.kind.value for one in found.outcomes)
    unconfirmed = {kind.value: count for kind in OutcomeClass if (count := found.unconfirmed(kind))}
    outcomes = [
        {
            **one.to_json(), "confirmed": not is_suspected(one),
            "moments": [[round(at_s - began_s, 4) for at_s in moment] for moment in one.moments],
        }
        for one in found.outcomes
    ]  # fmt: skip
    return {
        "schema": 1, "result": result.to_json(), "states": found.choice.in_all, "tried": len(outcomes),
        "classes": dict(counts), "unconfirmed": unconfirmed, "fatal_share": found.fatal_share,
        "fatal_s": round(found.fatal_s, 4), "unconfirmed_fatal_s": round(found.unconfirmed_fatal_s, 4),
        "tried_s": round(found.tried_s, 4), "outcomes": outcomes, "started": found.warm,
        "unfinished": found.unfinished, "notes": list(found.notes), "unsure": list(found.recording.unsure),
    }  # fmt: skip


_NOT_FINISHED = "not finished"


def placeholder_result(plan: Plan, run_dir: Path | str) -> Result:
    """The result of an unfinished run: every case is an error. Names and order of the cases are those of the final
    result."""
    faults = [Case("faults", "faults", Verdict.ERROR, _NOT_FINISHED)] if plan.faults else []
    asserts = [Case(one.name, "assertion", Verdict.ERROR, _NOT_FINISHED, bound=one.params) for one in plan.asserts]
    return Result(
        scenario=plan.scenario,
        description=plan.description,
        seed=plan.seed,
        verdict=Verdict.ERROR,
        exit_code=ExitCode.INTERNAL,
        reason=_NOT_FINISHED,
        run_dir=str(run_dir),
        started="",
        duration_s=0.0,
        cases=(*faults, *asserts, Case("rollback", "rollback", Verdict.ERROR, _NOT_FINISHED)),
    )


_NAME, _MESSAGE, _TEXTS = (
    200,
    500,
    (8000, 2000, 500, 100),
)  # characters of a text: the first limit with which the file is small enough is used
_FILE = 20 << 20  # bytes; GitLab takes 30 MB
_ATTACHMENT = "[[ATTACHMENT|"


def write_junit(results: Sequence[Result], path: Path, repeats: Sequence[Repeats] = (), of: str = "") -> None:
    """Writes one suite for each result, and one for each repeated scenario. `of`: what they belong to, such as a gate.
    Replaces the file in one step. Raises OSError if it can't be written."""
    write_atomically(path, text(results, repeats, of))


def text(results: Sequence[Result], repeats: Sequence[Repeats] = (), of: str = "") -> str:
    """The JUnit XML of the results. `of`: what they belong to, such as a gate. If a scenario is judged by its rate, its
    single repetitions get no cases, because one failed repetition is no failure."""
    found = ""
    for most in _TEXTS:
        found = _text(results, repeats, most, of)
        if len(found.encode()) <= _FILE:
            break
    return found


def _text(results: Sequence[Result], repeats: Sequence[Repeats], most: int, of: str) -> str:
    """The JUnit XML: a suite for each result and for each repeated scenario. A scenario that is judged by its rate has
    only its own suite, and none for its runs. `most`: the largest number of characters of a text. `of`: what the
    results belong to, such as a gate; it comes before the name of each suite. Empty: nothing."""
    by_rate = {run_dir for one in repeats if one.of_rate for run_dir in one.run_dirs}
    results = [result for result in results if result.run_dir not in by_rate]
    runs = Counter(result.scenario for result in results)
    same = Counter((result.scenario, result.seed) for result in results)
    root, seen = ElementTree.Element("testsuites"), Counter[tuple[str, int]]()
    for result in results:
        key = (result.scenario, result.seed)
        seen[key] += 1
        which = f"seed {result.seed}" + (f", run {seen[key]}" if same[key] > 1 else "")
        root.append(_suite(result, which, runs[result.scenario] > 1, most))
    for one in repeats:
        root.append(_suite(as_result(one), counted(one.times, "repetition"), len(repeats) > 1, most))
    if of:
        root.set("name", of)
        for suite in root:
            suite.set("name", f"{of}: {suite.get('name')}")
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, 0)) for suite in root)))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(result: Result, suffix: str, several: bool, most: int) -> ElementTree.Element:
    """The test suite of one result. `suffix`: which run it is, such as `seed 3, run 2`; the suite's name ends with it.
    `several`: whether the scenario has several runs; then the names of the cases end with it, too. `most`: the largest
    number of characters of a text."""
    scenario = shortened(on_one_line(result.scenario), _NAME)
    names = _unique([shortened(on_one_line(case.name), _NAME) for case in _cases(result)])
    cases = [
        _test_case(result, case, f"{name} [{suffix}]" if several else name, scenario, most, first=place == 0)
        for place, (name, case) in enumerate(zip(names, _cases(result), strict=True))
    ]
    page = Path(result.run_dir) / "report.html"
    for place, (found, case) in enumerate(zip(cases, _cases(result), strict=True)):
        if (place == 0 or case.verdict is not Verdict.PASSED) and page.is_absolute() and page.is_file():
            found.stdout = f"{found.stdout}\n{_ATTACHMENT}{page}]]".lstrip("\n")
    cases[0].elapsed_sec = round(result.duration_s, 3)  # the time of the whole run, because single cases have none
    suite: ElementTree.Element = TestSuite(
        f"{scenario}, {suffix}", cases, timestamp=on_one_line(result.started)[:19] or None
    ).build_xml_doc()
    suite.attrib.pop("disabled", None)  # not in Jenkins's schema
    return suite


def _cases(result: Result) -> list[Case]:
    """The cases of the result. If the run did not pass although all its cases did, there is one more case, for the run
    itself."""
    verdicts = {case.verdict for case in result.cases}
    if result.cases and (result.verdict is Verdict.PASSED or verdicts - {Verdict.PASSED}):
        return root_first(result.cases)
    return [Case("run", "faults", result.verdict, result.reason), *root_first(result.cases)]


def _test_case(result: Result, case: Case, name: str, classname: str, most: int, first: bool) -> TestCase:
    """The case as JUnit has it. The message is the reason, and the text has only what the message has not. The first
    case of the suite, and each case that did not pass, also say where the run is and how to run it again."""
    reason = mask(case.full_reason)
    message = shortened(on_one_line(reason) or "no reason was given", min(_MESSAGE, most))
    passed = case.verdict is Verdict.PASSED
    lines = [case.full_reason] if passed or message != reason else []
    lines += _figures(result, case)
    if first or not passed:
        lines += [f"seed: {result.seed}", f"files: {result.run_dir}"]
        lines += [f"again: {result.reproduce}"] if result.reproduce else []
    text = printable(mask("\n".join(filter(None, lines)))).replace(_ATTACHMENT, _ATTACHMENT[1:])
    report = shortened(text, most)
    found = TestCase(name, classname=classname, stdout=report if passed else "")
    if case.verdict is Verdict.FAILED:
        found.add_failure_info(message, report, failure_type="failed")
    elif not passed:
        found.add_error_info(message, report, error_type=case.verdict.value)
    return found


def _figures(result: Result, case: Case) -> list[str]:
    """A line for each figure that can be understood without the reason: figures with a bound, durations, counts such as
    `lost steps`, and distributions over repetitions. For the case of the faults, also a line for each fault and each
    recovery."""
    lines = []
    for name in dict.fromkeys((*case.measured, *case.bound)):
        value = case.measured.get(name)
        counts = name.endswith("s") and isinstance(value, int)
        if not (name in case.bound or name in case.seconds or counts or isinstance(value, Mapping)):
            continue
        parts = [value_in_words(name, case.measured[name], case.seconds)] if name in case.measured else []
        parts += [f"bound {value_in_words(name, case.bound[name], case.seconds)}"] if name in case.bound else []
        lines.append(f"{name_in_words(name)}: {', '.join(parts)}")
    if case.kind == "faults":
        lines += [
            f"{fault.id}: {fault.inject} at {fault.target}; planned {fault.planned}; "
            f"applied {fault.applied or 'never'}; evidence {fault.evidence or 'none'}; "
            f"rollback {fault.rollback}; {fault.verdict.value}: {fault.reason}"
            for fault in result.faults
        ]
        lines += [
            f"recovery from {recovery.fault}, seconds: {pairs_in_words(recovery.parts)}"
            for recovery in result.recoveries
        ]
    return lines


def _unique(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        others = (f"{name} ({number})" for number in count(2))
        found.append(name if name not in found else next(other for other in others if other not in found))
    return found
