from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import Named, Plan, PlannedJob
from torchaos.harness.record.result import Case, Result, Verdict
from torchaos.harness.reporting import result_files
from torchaos.harness.reporting.result_files import placeholder_result


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is not JSON")


@pytest.mark.parametrize("name", ["passed", "failed", "inconclusive", "several"])
def test_a_result_comes_back(results: dict[str, Result], name: str, tmp_path: Path) -> None:
    """A result that was written to a file reads back as the same result."""
    result_files.write_json([results[name]], tmp_path / "out.json")
    raw = json.loads((tmp_path / "out.json").read_text())
    assert raw["schema"] == 1
    assert Result.from_json(raw["results"][0]) == results[name]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=()) | st.sampled_from("\ud800\0")),
    value=st.recursive(
        st.none() | st.floats() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.integers(), inner),
    ),
)  # fmt: skip
def test_anything_is_json(results: dict[str, Result], text: str, value: Any) -> None:
    """Whatever is measured, the result is JSON that a strict reader takes, and reads back to the same JSON."""
    case = Case("odd", "assertion", Verdict.FAILED, text, {text: value, "where": Path("/a")})
    raw = replace(results["passed"], reason=text, cases=(case,)).to_json()
    line = json.dumps(raw, ensure_ascii=False).encode()
    assert json.loads(line, parse_constant=refuse) == raw
    assert Result.from_json(raw).to_json() == raw


@pytest.mark.parametrize(
    ("change", "says"),
    [({"schema": 2}, "use a newer torchaos"), ({"verdict": "fine"}, "not a result"), ({"cases": [{}]}, "not a result")],
)
def test_what_is_no_result_is_refused(results: dict[str, Result], change: dict[str, object], says: str) -> None:
    """A later schema, an unknown verdict or a missing field is one clear error."""
    with pytest.raises(UsageError, match=says):
        Result.from_json({**results["passed"].to_json(), **change})


def test_a_run_that_has_not_finished_is_all_errors(tmp_path: Path) -> None:
    """Before a run starts, its files name every case to come as an error, so that a killed run is never green."""
    job = PlannedJob(("torchrun", "a.py"), "/", {}, 2, 1, 60.0)
    asserts = (Named("recovery_time", {"catch_up": 60.0}), Named("completed", {}))
    result = placeholder_result(Plan("kill-rank", "", 7, job, (), asserts), tmp_path)
    assert [(case.name, case.verdict, case.reason) for case in result.cases] == [
        (name, Verdict.ERROR, "not finished") for name in ("recovery_time", "completed", "rollback")
    ]
    result_files.write_json([result], tmp_path / "out.json")
    assert '"verdict": "passed"' not in (tmp_path / "out.json").read_text()
    assert 'tests="3" failures="0" errors="3"' in result_files.text([result])
