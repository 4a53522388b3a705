from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paper import Paper
from rich.console import Console

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.record.result import Case, Recovery, Result, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting.terminal import console as show
from torchaos.harness.reporting.terminal import headline, text
from torchaos.harness.reporting.terminal.console import why

RUNS = Path(__file__).parents[1] / "data" / "runs"


def sheet(file: Paper, width: int) -> Console:
    return Console(file=file, width=width, force_terminal=False)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["passed", "failed", "inconclusive", "several"])
def test_a_result_looks_like_this(
    results: dict[str, Result], paper: type[Paper], golden: Callable[[str, str], None], name: str, width: int
) -> None:
    """Each kind of result prints exactly as in its golden file, at both widths, and no line is too wide."""
    file = paper()
    show.show(results[name], sheet(file, width))
    golden(f"{name}-{width}", file.getvalue())
    assert max(map(len, file.getvalue().splitlines())) <= width
    assert not [line for line in file.getvalue().splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("name", ["passed", "failed", "inconclusive", "several"])
def test_in_short_a_result_looks_like_this(
    results: dict[str, Result], paper: type[Paper], golden: Callable[[str, str], None], name: str
) -> None:
    """At most 15 lines: the verdict, its cause, how the faults ended, and where to read more; nothing twice."""
    file = paper()
    show.show(results[name], sheet(file, 100), Path("/runs/one/report.html"), whole=False)
    golden(f"{name}-brief-100", file.getvalue())
    assert len(file.getvalue().splitlines()) <= 15


@pytest.mark.parametrize("name", [path.name for path in sorted(RUNS.iterdir())])
def test_recorded_runs_are_short(paper: type[Paper], name: str) -> None:
    """Each real run fits on half a screen, and no sentence of it is printed twice."""
    file = paper()
    show.show(judge(RunDir(RUNS / name)), sheet(file, 100), whole=False)
    lines = [line.strip() for line in file.getvalue().splitlines() if line.strip()]
    assert len(lines) <= 15
    assert len(set(lines)) == len(lines)


def test_one_cause_is_told_once(results: dict[str, Result], paper: type[Paper]) -> None:
    """Nothing could be judged of a run whose job was never started: in full, the cases with one reason are one."""
    blind = [Case(name, "assertion", Verdict.INCONCLUSIVE, "it was never started") for name in ("a", "b", "c")]
    never = replace(
        results["inconclusive"], faults=(), cases=tuple(blind), reason="it was never started", decided_by="",
        steps=None,
    )  # fmt: skip
    for whole, times in ((False, 0), (True, 1)):
        file = paper()
        show.show(never, sheet(file, 100), whole=whole)
        assert file.getvalue().count("it was never started") == times


def test_a_summary_looks_like_this(
    results: dict[str, Result], paper: type[Paper], golden: Callable[[str, str], None]
) -> None:
    """Several results print as one table with a line each."""
    file = paper()
    show.summary([*results.values()], sheet(file, 80))
    golden("summary-80", file.getvalue())


def test_ascii_is_enough(results: dict[str, Result], paper: type[Paper], golden: Callable[[str, str], None]) -> None:
    """A console whose encoding is ASCII gets every mark, bar and odd character in ASCII."""
    file = paper("ascii")
    show.show(replace(results["several"], reason="loss 3 × too high → naïve ☃"), sheet(file, 80))
    assert file.getvalue().isascii()
    golden("several-ascii-80", file.getvalue())


def test_the_verdict_comes_first(results: dict[str, Result], paper: type[Paper]) -> None:
    """The first line that is not empty names the verdict, and the second says why."""
    file = paper()
    show.show(results["failed"], sheet(file, 120))
    first, second = file.getvalue().split("\n")[1:3]
    assert first.split()[:2] == ["FAILED", "kill-rank"]
    assert second.strip() == f"{why(results['failed']).lead}."


def test_a_command_is_left_whole_and_its_secrets_masked(results: dict[str, Result], paper: type[Paper]) -> None:
    """The command that reproduces the run is one line however long, and shows no token."""
    file = paper()
    command = "torchaos run " + "x" * 100 + " --set job.env.HF_TOKEN=hf_abc"
    show.show(replace(results["passed"], reproduce=command), sheet(file, 80))
    assert command.replace("hf_abc", "***") in file.getvalue()


def test_markup_and_control_characters_are_text(results: dict[str, Result], paper: type[Paper]) -> None:
    """What looks like markup stays as it is, and an escape sequence from a log can't reach the terminal."""
    file = paper()
    case = Case("odd", "assertion", Verdict.FAILED, "[red]not red[/red] \x1b[2Jgone :smile:")
    show.show(replace(results["passed"], cases=(case,)), sheet(file, 120))
    assert "[red]not red[/red] \\x1b[2Jgone :smile:" in file.getvalue()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    reason=st.text(),
    figures=st.dictionaries(st.text(), st.floats() | st.text() | st.none()),
    width=st.integers(20, 200),
)
def test_anything_can_be_shown(
    results: dict[str, Result], paper: type[Paper], reason: str, figures: dict[str, object], width: int
) -> None:
    """Whatever text and figures a result holds, it is shown on consoles of any width and both encodings."""
    case = Case(reason, "assertion", Verdict.FAILED, reason, figures, figures)
    odd = replace(results["passed"], reason=reason, scenario=reason, cases=(case,), notes=(reason,))
    for encoding in ("utf-8", "ascii"):
        file = paper(encoding)
        show.show(odd, sheet(file, width))
        show.summary([odd, odd], sheet(file, width))
        assert file.getvalue().encode(encoding)


@given(st.dictionaries(st.sampled_from(["felt", "detected", "restored", "caught_up"]), st.none() | st.floats(0, 1e6)))
def test_bars_stay_in_their_column(parts: dict[str, float | None]) -> None:
    """Every part that was seen gets a bar, none is wider than its column, and none takes less than no time."""
    whole = max((at for at in parts.values() if at is not None), default=0.0)
    for marks in (text._UNICODE, text._ASCII):
        for span in headline.spans(parts):
            bar = headline.bar(span, whole, 30, marks)
            assert len(bar) <= 30
            assert bool(bar) == (span.end_s is not None)
            assert span.took_s >= 0


def test_a_recovery_without_figures_is_shown(results: dict[str, Result], paper: type[Paper]) -> None:
    """A recovery of which nothing was seen says so, rather than nothing."""
    file = paper()
    result: Result = replace(results["passed"], recoveries=(Recovery("kill", {"felt": None, "caught_up": None}, None),))
    show.show(result, sheet(file, 80))
    assert "from kill: never caught up" in file.getvalue()
    assert file.getvalue().count("not seen") == 2


def test_the_longest_parts_and_advice_are_told(results: dict[str, Result], paper: type[Paper]) -> None:
    """Below the parts of a recovery: what took most of the time, and which setting shortens a wait."""
    recovery = Recovery(
        "kill", {"detected": 0.1, "torn_down": 0.2, "rendezvous": 15.2, "caught_up": 18.0}, 1, ("Set it",)
    )
    file = paper()
    show.show(replace(results["passed"], recoveries=(recovery,)), sheet(file, 120))
    lines = [line.strip() for line in file.getvalue().splitlines()]
    assert "Most of it: rendezvous 83 %, catching up 16 %" in lines
    assert "· Set it" in lines


def test_each_failed_assertion_is_named(results: dict[str, Result], paper: type[Paper]) -> None:
    """In short too: those that follow from another are named beside it."""
    root = Case("sample_accounting", "assertion", Verdict.FAILED, "2 samples were skipped")
    after = [
        Case(name, "assertion", Verdict.FAILED, f"{name} differs", follows=root.name)
        for name in ("loss_continuity", "parameter_digest")
    ]
    one = replace(
        results["failed"], reason=root.reason, decided_by=root.name, cases=(root, *after), recoveries=(), faults=()
    )
    file = paper()
    show.show(one, sheet(file, 100), whole=False)
    assert "sample accounting: loss continuity, parameter digest follow from it" in file.getvalue()
