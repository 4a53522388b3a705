"""The bench: verdicts on trainers that are known to be broken, healthy or noisy. `python lab/campaigns/oracle.py` runs
all of it, many times."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import marks
import oracle
import pytest
import scoring
from oracle import BenchRun, Trainer

from torchaos.harness import registry

TABLE = oracle.table()
ROWS = {one.name: one for one in TABLE}


def told(trainer: Trainer, verdict: str, reason: str = "", number: int = 0) -> BenchRun:
    """What came of a run that was never made."""
    failed = verdict == "failed"
    cases = {trainer.failed: verdict} if failed else {}
    return BenchRun(oracle.shot(trainer, number), trainer.kind, verdict, reason, cases, {trainer.failed: reason})


def test_the_table_is_whole() -> None:
    """At least 80 broken trainers of ours, each a file that says what is wrong with it, and an assertion that there
    is; those of others say it in the table."""
    broken = [one for one in TABLE if one.kind == "broken" and not one.about]
    assert len(broken) >= 80
    names = {path.stem for path in (oracle.TRAINERS / "broken").glob("*.py")}
    assert names <= {Path(one.path).stem for one in broken}
    for one in broken:
        assert Path(one.path).is_relative_to(oracle.TRAINERS / "broken"), one.name
        assert len(ast.get_docstring(ast.parse(Path(one.path).read_text())) or "") > 40, one.name
        assert one.failed in oracle.ASSERTIONS, one.name
        assert one.says, one.name
    others = [one for one in TABLE if one.kind == "broken" and one.about]
    assert all(one.failed in oracle.ASSERTIONS and one.says and (one.home or Path(one.path).exists()) for one in others)
    assert all(set(one.asserts) <= set(oracle.ASSERTIONS) for one in TABLE)
    for name in oracle.ASSERTIONS:
        assert registry.find("assertions", name)


def test_many_healthy_runs_are_on_more_than_two_ranks() -> None:
    """Of 300 healthy runs at least 60 are on three or four ranks, where sums come in another order after a restart."""
    rows = [one for one in TABLE if not one.needs]
    runs = [trainer for trainer, _shot in oracle.due(rows, [], 300) if trainer.kind == "healthy"]
    assert sum(trainer.ranks in (3, 4) for trainer in runs) >= 60


def test_right_is_the_right_assertion_with_the_right_words() -> None:
    """A broken trainer that fails for another reason is not found; inconclusive is right for a noisy one alone."""
    broken, healthy, noisy = ROWS["restarts_sampler"], ROWS["base"], ROWS["atomics"]
    assert oracle.is_right(broken, told(broken, "failed", "in steps 1 and 11: the sampler restarted."))
    assert not oracle.is_right(broken, told(broken, "failed", "the data was rewound"))
    assert not oracle.is_right(broken, replace(told(broken, "failed", "the sampler restarted"), cases={}))
    assert not oracle.is_right(broken, told(broken, "passed"))
    assert not oracle.is_right(healthy, told(healthy, "inconclusive"))
    assert oracle.is_right(noisy, told(noisy, "inconclusive"))
    assert not oracle.is_right(noisy, told(noisy, "failed"))


def test_each_run_of_a_noisy_trainer_counts() -> None:
    """One right run does not excuse another that was failed; only of broken trainers is one enough."""
    noisy = ROWS["atomics"]
    passed, failed = told(noisy, "passed"), told(noisy, "failed")
    assert oracle.wrong(noisy, [passed, failed, passed]) == [failed]


def test_unclear_is_right_only_when_inconclusive_for_the_reason_that_the_table_names() -> None:
    """A run that nobody can judge must be said to be inconclusive, and why."""
    row = replace(ROWS["base"], kind="unclear", says="too noisy")
    assert oracle.is_right(row, told(row, "inconclusive", "loss_continuity: too noisy to judge"))
    assert not oracle.is_right(row, told(row, "inconclusive", "the run was ended early"))
    assert not oracle.is_right(row, told(row, "passed", "too noisy"))


def test_luck_is_no_wrong_verdict_as_long_as_it_is_found() -> None:
    """One that recovers by luck may pass, if one of its runs is failed; any other broken one may not."""
    lucky, broken = ROWS["recovers_by_luck"], ROWS["restarts_sampler"]
    passed, found = (
        told(lucky, "passed"),
        told(lucky, "failed", "most likely it chose the wrong checkpoint as the newest"),
    )
    assert oracle.wrong(lucky, [passed, found]) == []
    assert oracle.wrong(lucky, [passed, passed]) == [passed, passed]
    assert oracle.wrong(lucky, [found, told(lucky, "inconclusive")]) == [told(lucky, "inconclusive")]
    assert oracle.wrong(broken, [told(broken, "passed")]) == [told(broken, "passed")]


def test_only_broken_ones_are_left_out_of_the_rate_for_luck() -> None:
    """A noisy trainer is run several times, and each run counts."""
    pytest.importorskip("scipy", reason="the bound is SciPy's")
    noisy, lucky = ROWS["atomics"], ROWS["recovers_by_luck"]
    runs = [*(told(noisy, "inconclusive", number=number) for number in range(6)), told(lucky, "passed")]
    summary = scoring.summary([noisy, lucky], runs)
    assert "| 6 | 0 | 0 | 6 |" in summary
    assert "broken" not in summary


def test_a_run_that_can_not_be_judged_again_keeps_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its directory is gone, or not whole: what was said of it stands, and why is told."""
    old = told(ROWS["base"], "passed")
    assert oracle.judged_again(old) == old
    lost = replace(old, folder=str(tmp_path))
    assert oracle.judged_again(lost) == lost
    assert "not judged again" in capsys.readouterr().out


def test_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    """Results are read back; a line that was cut off and a run that broke down are due again, the others are not."""
    base = ROWS["base"]
    done = [told(base, "passed", number=0), told(base, "error", number=1)]
    path = tmp_path / "results.jsonl"
    path.write_text(done[0].to_json() + "\n" + done[1].to_json() + "\n" + done[0].to_json()[:40])
    assert oracle.read(path) == done
    shots = [shot for _trainer, shot in oracle.due([base], oracle.read(path), 40)]
    assert [shot.number for shot in shots] == list(range(1, 40))
    assert {shot.seed for shot in shots} == {0, 1}
    assert len({(shot.seed, shot.rank, shot.step, shot.phase) for shot in shots}) > 30
    fresh = [shot for _trainer, shot in oracle.due([base], oracle.read(path), 40, first=40)]
    assert {shot.seed for shot in fresh} == {2, 3}


def test_the_score_counts_what_was_wrong() -> None:
    """Of 200 healthy runs without one wrong verdict the bound is 1.5 %; one that failed is counted, with its reason."""
    pytest.importorskip("scipy", reason="the bound is SciPy's")
    base, broken = ROWS["base"], ROWS["restarts_sampler"]
    runs = [told(base, "passed", number=number) for number in range(200)]
    assert "| 200 | 200 | 0 | 0 | 1.5% |" in scoring.summary([base], runs)
    tables = scoring.tables(
        [base, broken],
        [
            *runs[:9],
            told(base, "failed", "it fell over: /somewhere/bin/python3 is left, and 2 entries in /dev/shm", 9),
            told(broken, "failed", "the sampler restarted"),
        ],
    )
    page = marks.filled("before\n<!-- score: begin -->\nold\n<!-- score: end -->\nafter", tables)
    assert page.startswith("before")
    assert page.endswith("after")
    assert "old" not in page
    assert "| 10 | 9 | 1 | 0 |" in page
    assert "it fell over" in page
    assert "/somewhere" not in page
    assert "python3 is left, and 2 entries in /dev/shm" in page
    assert "1 of 1 failed by the right assertion" in page


def test_a_page_without_the_marks_is_not_written(tmp_path: Path) -> None:
    """A page has the tables that it has marks for; one with none of the marks is a mistake of the caller."""
    page = tmp_path / "page.md"
    page.write_text("<!-- b: begin -->\nold\n<!-- b: end -->\n")
    marks.write([page], {"a": "not here", "b": "new"})
    assert page.read_text() == "<!-- b: begin -->\nnew\n<!-- b: end -->\n"
    with pytest.raises(ValueError, match="has no marks of a"):
        marks.write([page], {"a": "not here"})


@pytest.mark.job
def test_a_sample_of_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that begins its data again is failed for just that, of ten assertions. That healthy ones pass is shown
    by other jobs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    broken = ROWS["restarts_sampler"]
    found = oracle.run(broken, oracle.shot(broken, 0), tmp_path, twin={"runs": 1})
    assert oracle.is_right(broken, found), found
    assert found.cases["loss_continuity"] == "failed", found


@pytest.mark.job
@pytest.mark.long
@pytest.mark.parametrize("name", [one.name for one in TABLE if one.kind != "small"])
def test_the_whole_bench_once(name: str, tmp_path: Path) -> None:
    """Each trainer of the table gets the verdict that it deserves."""
    trainer = ROWS[name]
    if trainer.lacks:
        pytest.skip(trainer.lacks)
    runs: list[BenchRun] = []
    for number in range(trainer.repeat):
        runs.append(oracle.run(trainer, oracle.shot(trainer, number), tmp_path))
        if trainer.kind == "broken" and oracle.is_right(trainer, runs[-1]):
            break  # it is found
    wrong = oracle.wrong(trainer, runs)
    assert not wrong, [(one.verdict, one.reasons or one.reason) for one in wrong]
