"""Results as short Markdown, and a run as a small picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner
from recorded import change_events, judged, lose, recorded

from torchaos.harness.analysis.verdict import records_of
from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import Result, Verdict
from torchaos.harness.reporting import html
from torchaos.harness.reporting.notifications import annotation, markdown

NASTY = "<b>bold</b> | cell `code` @everybody [link](http://x) *star*\n# heading"


def test_a_run_is_told_in_short(results: dict[str, Result]) -> None:
    """The verdict, what happened, why, the figures against their bounds, the cases folded, and the command."""
    failed = results["failed"]
    text = markdown([failed], {failed.run_dir: ["process.kill hit rank 1."]})
    lines = text.splitlines()
    assert lines[0] == "### ❌ kill-rank: failed"
    assert lines[2] == "process.kill hit rank 1."
    assert lines[4].startswith("**Why: At step 21 rank 0 had loss 3.41296")
    assert "| recovery | 6.84 s | 60 s allowed | ✅ |" in lines
    assert "<details><summary>6 cases: 5 passed, 1 failed</summary>" in lines
    first = next(line for line in lines[lines.index("| | case | why |") + 2 :])
    assert first.startswith("| ❌ | loss continuity | ")
    assert lines[-1] == "31.42 s, seed 7. Again: `torchaos run scenarios/process/kill-rank.yaml --seed 7`"


def test_several_runs_begin_with_a_table(results: dict[str, Result]) -> None:
    """A row for each run; those that did not pass are told first; of very many runs, some are in the table only."""
    passed, failed = results["passed"], results["failed"]
    text = markdown([passed, failed], {})
    assert text.startswith("## torchaos: 2 runs, 1 passed, 1 failed\n")
    assert "| ✅ passed | kill-rank | 7 | 6.84 s (60 s allowed) | 5 (no bound) |" in text
    assert text.index("### ❌") < text.index("### ✅")
    many = markdown([passed] * 25, {})
    assert many.count("### ✅") == 20
    assert "5 more runs are in the table only." in many


def test_nothing_in_a_result_becomes_markup(results: dict[str, Result]) -> None:
    """Markup, table borders and mentions in a reason stay text, on one line, and secrets are masked."""
    bad = replace(results["failed"], scenario=NASTY, reason=f"{NASTY} HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz")
    text = markdown([bad], {bad.run_dir: [NASTY]})
    assert "<b>" not in text
    assert "@everybody" not in text
    assert "[link](" not in text
    assert "hf_abcdef" not in text
    assert not [line for line in text.splitlines() if line.startswith("# heading")]
    assert "\\| cell \\`code\\`" in text


def test_the_commands_write_both(tmp_path: Path) -> None:
    """`report` writes a summary of all runs, and the picture of one; the run directories may have been moved."""
    folder = recorded(tmp_path / "run")
    summary, card = tmp_path / "s.md", tmp_path / "card.svg"
    done = CliRunner().invoke(cli, ["report", str(folder.root), "--summary", str(summary), "--card", str(card)])
    assert done.exit_code == 0, done.output
    assert "process.kill hit rank 1 of 2 in step 12 (backward)." in summary.read_text()
    assert ET.fromstring(card.read_text()).tag.endswith("svg")
    again = CliRunner().invoke(cli, ["report", str(folder.root), str(folder.root), "--card", str(card)])
    assert isinstance(again.exception, UsageError)
    assert "--card names one file" in str(again.exception)


def test_the_picture_shows_the_run(tmp_path: Path) -> None:
    """The verdict, the sentence, three figures, both losses, the step of the fault, and the first difference. Nothing
    in a name can break it."""
    folder = recorded(tmp_path / "run")
    change_events(folder, "rank0-a1", lose(9))
    result = replace(judged(folder), scenario=NASTY)
    picture = ET.fromstring(html.card(result, *records_of(folder)))
    words = [one.text or "" for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert words[0] == "FAILED"
    assert result.verdict is Verdict.FAILED
    assert any(text.startswith("1. process.kill hit rank 1 of 2 in step 12") for text in words)
    assert any("1 of 6 assertions failed: loss continuity" in text for text in words)
    assert {"longest recovery", "most steps done again", "samples skipped / repeated"} <= set(words)
    assert "process.kill: step 12" in words
    assert "first difference: step 9" in words
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) >= 2
    assert not list(picture.iter("{http://www.w3.org/2000/svg}b"))


def test_github_shows_a_run_that_did_not_pass(results: dict[str, Result]) -> None:
    """An error beside the scenario's file, or a warning if the run is no evidence. A ready scenario is no file of the
    user's repository. Nothing in a reason can begin another command."""
    failed = replace(results["failed"], reason=f"100 %: one, two\n::error::no {NASTY}")
    line = annotation(failed, Path("chaos/kill,rank.yaml"))
    assert line.startswith("::error title=torchaos kill-rank%3A failed,file=chaos/kill%2Crank.yaml::100 %25: one, two ")
    assert "\n" not in line
    warning = annotation(results["inconclusive"], Path("/somewhere/kill-late.yaml"))
    assert warning.startswith("::warning title=torchaos kill-late%3A inconclusive::kill: it never landed")
