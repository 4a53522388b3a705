"""The page of a run: its contents, that it needs no other file, and that nothing in a log can do harm in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from recorded import RECORDED, change_events, judged, lose, recorded

from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, Verdict
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.reporting import html
from torchaos.harness.reporting.html import page
from torchaos.harness.reporting.html.charts import curves_of, gpus_of
from torchaos.harness.reporting.html.log_evidence import hangs_of, logs_of, words
from torchaos.harness.reporting.html.page import checkpoints_of, folded, samples_of
from torchaos.harness.reporting.html.page_timeline import timeline_of

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(1)> {{ 7*7 }} \x1b[2J\u2028 & ]]>"


class Page(HTMLParser):
    """What a browser would find in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def data(self) -> Any:
        return json.loads(self.scripts[0])


def page_of(folder: RunDir) -> Page:
    return Page(html.text(folder, judged(folder)))


RUNS = Path(__file__).parents[1] / "data" / "runs"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return recorded(tmp_path / "run")


def test_the_page_needs_nothing_else(run: RunDir) -> None:
    """Nothing is loaded from anywhere: no address in any attribute or style, and a policy that allows only its own
    scripts, by their digests; it is far below the size that a gate's artifact may have."""
    text = html.text(run, judged(run))
    page = Page(text)
    assert len(text) < 200_000
    outside = [value for _tag, attrs in page.tags for name, value in attrs.items() if name in ("src", "href") and value]
    assert all(value.startswith(("#", "data:")) for value in outside), outside
    assert not re.search(r"@import|url\(", text)
    policy = next(attrs["content"] or "" for tag, attrs in page.tags if attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    for script in page.scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy, "the browser would not run it"
    assert len(page.scripts) == 3
    assert "The MIT License" in text, "the charting library's"


def test_the_verdict_comes_first_and_says_why(run: RunDir) -> None:
    """The page of a run that failed begins with the verdict and its reason, and the assertion that failed is open."""
    change_events(run, "rank0-a1", lose(9))
    page = page_of(run)
    hit = r"1\. process.kill hit rank 1 of 2 in step 12 \(backward\)\. The job was restarted and went on .*? "
    why = r"Why: The loss differs first in step 9 .*?1 of 6 assertions failed: loss continuity\. Something"
    assert re.match(rf"failed: \S+ torchaos · a run with faults failed kill-then-freeze {hit}{why}", page.text)
    opened = [attrs["class"] for tag, attrs in page.tags if tag == "details" and "open" in attrs and "class" in attrs]
    assert opened == ["case failed"]


def test_the_reason_of_an_inconclusive_run_stands_once(run: RunDir) -> None:
    """The head of the page has it whole, and the list of the assertions refers to it."""
    result, why = judged(run), "the contents could not be compared"
    case = next(one for one in result.cases if one.name == "loss_continuity")
    case = replace(case, verdict=Verdict.INCONCLUSIVE, reason=why)
    result = replace(result, verdict=Verdict.INCONCLUSIVE, reason=f"loss_continuity: {why}",
                     decided_by="loss_continuity", cases=(case,))  # fmt: skip
    page = Page(html.text(run, result))
    assert page.text.lower().count("the contents could not be compared") == 1
    assert "inconclusive loss continuity as above" in page.text


def test_failures_come_first_and_what_follows_from_them_is_folded(run: RunDir) -> None:
    """Below the verdict stands the root of the failures; the failures that follow from it are inside a fold."""
    result = judged(run)
    loss, samples = (one for one in result.cases if one.name in ("loss_continuity", "sample_accounting"))
    failed = replace(samples, verdict=Verdict.FAILED)
    follows = replace(loss, verdict=Verdict.FAILED, follows="sample_accounting")
    page = Page(html.text(run, replace(result, verdict=Verdict.FAILED, cases=(result.cases[0], follows, failed))))
    folds = [attrs["class"] for tag, attrs in page.tags if tag == "details" and "class" in attrs]
    assert folds == ["case failed", "follows", "case failed", "case passed"]
    assert "1 more follows from it: loss continuity" in page.text


def test_every_part_of_the_run_is_in_it(run: RunDir) -> None:
    """Faults with their evidence, the parts of the recoveries, samples, checkpoints, environment, and the command."""
    words = page_of(run).text
    for part in (
        "process.kill → rank 1", "pid 29501 ended with exit code -9, the kernel says", "caught up after 20.68 s",
        "ranks up", "336 samples in the 14 steps that count", "None skipped, none repeated", "step-14", "2.13.0+cpu",
        "torchaos run s.yaml --seed 7", "No difference from the twin in any of 14 steps",
    ):  # fmt: skip
        assert part in words, part


def test_nothing_in_a_run_can_do_harm(run: RunDir) -> None:
    """Markup, template syntax and control characters in a log, a scenario, a name or a reason stay text; secrets are
    masked wherever they stand."""
    (run.root / "logs").mkdir()
    (run.root / "logs" / "job-0.log").write_text(f"{NASTY}\nHF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz\n")
    run.scenario.write_text(NASTY)
    plan = json.loads(run.plan.read_text())
    plan["description"], plan["job"]["command"] = NASTY, ["torchrun", NASTY, "--api-key", "sesame-street"]
    plan["faults"][0]["id"] = NASTY
    run.plan.write_text(json.dumps(plan))

    def rename(event: dict[str, Any]) -> None:
        if event["data"].get("fault") == "process.kill":
            event["data"]["fault"] = NASTY

    change_events(run, "", rename)
    text = html.text(run, judged(run))
    page = Page(text)
    assert len(page.scripts) == 3
    assert not [tag for tag, attrs in page.tags if tag == "img" or any(name.startswith("on") for name in attrs)]
    assert page.text.count("<script>alert(1)</script>") > 3
    assert "{{ 7*7 }}" in page.text
    assert "\x1b" not in text
    assert "hf_abcdef" not in text
    assert "sesame" not in text


def test_the_timeline_tells_what_happened(run: RunDir) -> None:
    """A lane per rank with every step of every attempt; a fault that is taken back is on until then, and one that can't
    be has a mark; the shade of each ends when the job had caught up; the recovery's parts follow each other."""
    record, result = Record.load(run), judged(run)
    timeline = timeline_of(record, result.recoveries)
    names = [lane["name"] for lane in timeline.lanes]
    assert names[-2:] == ["rank 0", "rank 1"]
    assert len(timeline.steps) == len(record.history.executions) == 50
    (freeze,) = (span for span in timeline.spans if span[3] == "fault")
    (kill,) = (mark for mark in timeline.marks if mark[0] == names.index("process.kill"))
    assert timeline.shades[0][0] == kill[1]
    assert timeline.shades[0][1] - kill[1] == pytest.approx(result.recoveries[0].parts["caught_up"], abs=0.001)
    assert freeze[2] - freeze[1] == pytest.approx(0.377, abs=0.01)
    parts = [span for span in timeline.spans if span[3].startswith("part") and span[0] == names.index("recovery")]
    assert [a[2] for a in parts[:-1]] == pytest.approx([b[1] for b in parts[1:]])
    exits = [mark for mark in timeline.marks if mark[2].startswith("exit")]
    assert sorted(mark[2] for mark in exits) == ["exit", "exit", "exit bad", "exit bad"]
    assert not timeline.left_out


def test_what_was_not_recorded_is_not_called_equal(run: RunDir) -> None:
    """Without losses and learning rates, the page says that nothing is compared."""

    def forget(event: dict[str, Any]) -> None:
        if event["kind"] in ("step", "loss"):
            event["data"] |= {"losses": None} | ({"lr": None} if event["kind"] == "step" else {})

    change_events(run, "rank", forget)
    words = page_of(run).text
    assert "Nothing is compared: no loss and no learning rate was recorded" in words
    assert "No difference from the twin" not in words


def test_the_curves_show_where_the_twin_was_left(run: RunDir) -> None:
    """The first step whose loss is another than the twin's, its two values, and no difference before it."""
    change_events(run, "rank1-a1", lose(9))
    record = Record.load(run)
    curves = curves_of(record, [Record.load(RunDir(run.twins / "0"))])
    assert curves["first_difference"]["step"] == 9
    assert curves["first_difference"]["rank"] == 1
    ours, theirs = (float(curves["first_difference"][whose]) for whose in ("run", "twin"))
    assert ours == pytest.approx(theirs + 0.5)
    assert curves["steps"] == list(range(1, 15))
    assert [step for step, apart in zip(curves["steps"], curves["apart"], strict=True) if apart] == [9]
    assert [value is None for value in curves["first_loss"]] == [False] * 11 + [True] * 3, "done a second time"
    assert not curves_of(record, [])["first_difference"]


def test_numbers_that_are_none_are_told_and_not_drawn(run: RunDir) -> None:
    """A rate, loss or time that is no number does not keep the browser from reading the rest, and is named as it is."""

    def spoil(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 9:
            event["data"].update(losses=[float("nan")], lr=[float("inf")])
            event["data"]["phases"]["data"] = float("nan")

    change_events(run, "rank0-a1", spoil)
    page = page_of(run)
    assert "differs first in step 9 on rank 0: inf here" in page.text

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads(page.scripts[0], parse_constant=refuse)


def test_samples_are_counted(run: RunDir) -> None:
    """One sample that was swapped for another in one step is one skipped and one repeated, in a row of its own."""

    def swap(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["step"] == 7:
            event["data"]["samples"][0] = event["data"]["samples"][1]

    change_events(run, "rank0-a1", swap)
    found = samples_of(Record.load(run), [Record.load(RunDir(run.twins / "0"))])
    assert (found["counted"], found["twin"], found["skipped"], found["repeated"]) == (336, 336, 1, 1)
    assert found["rows"] == [{"step": 7, "run": 24, "twin": 24, "common": 23}]
    assert [one["base"] for one in found["attempts"]] == [0, 0]


def test_card_and_section_say_the_same_about_samples(run: RunDir) -> None:
    """None was skipped or repeated only if that was judged, and passed."""
    result = judged(run)
    others = [case for case in result.cases if case.name != "sample_accounting"]
    doubtful = Case("sample_accounting", "assertion", Verdict.INCONCLUSIVE, "some were not seen")
    sure = Case("sample_accounting", "assertion", Verdict.PASSED, "all", {"skipped": 0, "repeated": 0})
    for case, is_sure in ((None, False), (doubtful, False), (sure, True)):
        text = Page(html.text(run, replace(result, cases=(*others, *([case] if case else []))))).text
        assert ("None skipped, none repeated" in text) is is_sure
        assert ("samples skipped / repeated not known" in text) is not is_sure
        assert ("some were not seen" in text) is (case is doubtful)


def test_checkpoints_have_their_state(run: RunDir) -> None:
    """Whole, damaged and vanished ones are told apart, with what is wrong."""
    inventory = json.loads((run.artifacts / "inventory.json").read_text())
    inventory["checkpoints"] = [one for one in inventory["checkpoints"] if one["path"] == "step-14"]
    inventory["checkpoints"][0].update(problem="bit 3 of byte 17 is flipped", complete=True, loadable=True)
    (run.artifacts / "inventory.json").write_text(json.dumps(inventory))
    states = {one["name"]: (one["state"], one["good"]) for one in checkpoints_of(Record.load(run))}
    assert states["step-14"] == ("damaged", False)
    assert next(state for name, (state, _) in states.items() if "step-10" in name).startswith("it no longer exists")


def test_a_file_that_the_inventory_leaves_out_is_not_gone(run: RunDir) -> None:
    """A save under a name of no known format: whether the file is there was not looked at."""
    record = Record.load(run)
    begun = next(event for event in record.events if event.kind is Kind.SAVE_BEGIN)
    end = next(event for event in record.events if event.kind is Kind.SAVE_END)
    path = f"{begun.data['path'].rpartition('/')[0]}/random.rng0"
    more = [replace(event, data={**event.data, "path": path}) for event in (begun, end)]
    events = tuple(sorted((*record.events, *more), key=lambda event: event.mono_s))
    states = {row["name"]: row["state"] for row in checkpoints_of(replace(record, events=events))}
    assert next(state for name, state in states.items() if name.endswith(".rng0")).startswith("not read: its name")


def test_many_checkpoints_that_the_job_removed_are_one_row(run: RunDir) -> None:
    """A job that keeps its newest two leaves one row for all the others; one that was loaded keeps its own."""
    rows = checkpoints_of(Record.load(run))
    gone = {**rows[0], "state": "it no longer exists", "loaded": []}
    many = [{**gone, "name": f"step-{step}"} for step in range(40)]
    many[20]["loaded"] = [1]
    short = [row["name"] for row in folded([*many, *rows[-2:]])]
    assert short == ["step-0 to step-19: 20 checkpoints", "step-20", "step-21 to step-39: 19 checkpoints",
                     *(row["name"] for row in rows[-2:])]  # fmt: skip


def test_one_file_that_is_overwritten_has_a_row_for_each_save() -> None:
    """A real run whose saves all go to one file, loaded by two attempts between the first and the second."""
    rows = checkpoints_of(Record.load(RunDir(RUNS / "kill-twice")))
    assert [(row["name"], row["step"], row["loaded"]) for row in rows] == [
        ("checkpoint", 4, [1, 2]), ("checkpoint", 8, []), ("checkpoint", 12, []),
    ]  # fmt: skip
    assert [row["state"] for row in rows] == [
        "overwritten in step 8", "overwritten in step 12",
        "not read: no assertion, such as checkpoint_integrity, needed it",
    ]  # fmt: skip


def test_a_run_folder_with_the_name_of_something_unfinished_keeps_it(tmp_path: Path) -> None:
    """`runs-part` is the user's own name, and no checkpoint that is not complete yet."""
    shutil.copytree(RUNS / "kill-twice", tmp_path / "run")
    for path in (path for path in (tmp_path / "run").rglob("*") if path.suffix in (".json", ".jsonl")):
        path.write_text(path.read_text().replace("/runs/kill-twice/", "/runs-part/kill-twice/"))
    rows = checkpoints_of(Record.load(RunDir(tmp_path / "run")))
    assert rows == checkpoints_of(Record.load(RunDir(RUNS / "kill-twice")))


def test_the_log_around_the_fault(run: RunDir) -> None:
    """Of a long log the lines around the death are shown, with the line of the death marked; after a resume the same
    step comes again, and is not mistaken for the first time."""
    steps = [f"step {n} loss 1.0" for n in range(1, 12)]
    death = "E torch failed (exitcode: -9) local_rank: 1 (pid: 29501) of binary: python"
    later = [f"step {n} loss 1.0" for n in range(1, 15)]
    (run.root / "logs").mkdir()
    lines = [*["chatter"] * 500, *steps, "dying", death, *["chatter"] * 500, *later, *["chatter"] * 100]
    (run.root / "logs" / "job-0.log").write_text("\n".join(lines))
    (log,) = logs_of(run, Record.load(run))
    kill, freeze, end = log["pieces"]
    assert kill["text"].split("\n")[kill["mark"]] == death
    assert kill["first"] + kill["mark"] == lines.index(death) + 1
    assert "step 12 loss" in freeze["text"].split("\n")[freeze["mark"]]
    assert end["text"].count("\n") < 60


def test_a_hang_is_told_with_its_culprits(run: RunDir) -> None:
    """Who noticed it, who is to blame and why stand on the page."""
    with open(run.events / "harness.jsonl", "a") as file:
        file.write(json.dumps({
            "kind": "hang.declared", "source": "harness", "seq": 999, "wall_s": 1795218610.0, "mono_s": 12980.0,
            "rank": None, "attempt": 1, "step": None, "data": {
                "observers": ["log", "stacks"], "ranks": [1], "since_s": 12975.0, "culprits": [1], "suspects": [1],
                "confidence": "high", "summary": "rank 1 holds the others up", "evidence": {"1": ["it is in <recv>"]}},
        }) + "\n")  # fmt: skip
    assert hangs_of(Record.load(run))[0]["culprits"] == [1]
    words = page_of(run).text
    assert "rank 1 holds the others up" in words
    assert "it is in <recv>" in words


def test_the_gpus_have_curves_and_figures(run: RunDir) -> None:
    """Rates come from counters, without the time in which a counter began again. Errors are those that came during the
    run. What was not sampled is an empty cell, and a chart without values is left out. A run without GPUs has none."""
    assert gpus_of(Record.load(run)) == {"charts": [], "rows": []}
    assert 'id="gpus"' not in html.text(run, judged(run))
    first = {"busy_percent": 10.0, "nvlink_bytes": 0, "ecc_corrected": 70, "clock_reasons": 1}
    more = {**first, "busy_percent": 99.0, "nvlink_bytes": 3e9, "ecc_corrected": 72, "clock_reasons": 0x41}
    again = {**first, "nvlink_bytes": 5, "ecc_corrected": 0}
    begin = Record.load(run).events[0].mono_s
    samples = [(1.0, 0, first), (1.5, 1, {"memory_bytes": 2e9}), (2.0, 0, more), (3.0, 0, again)]
    lines = [("gpu.sample", at, {"gpu": gpu, "ranks": [gpu], "values": one, "pids": []}) for at, gpu, one in samples]
    lines.append(("gpu.event", 3.5, {"gpu": 1, "ranks": [1], "event": "Xid 79", "xid": 79}))
    with open(run.events / "harness.jsonl", "a") as file:
        for number, (kind, at, data) in enumerate(lines, 900):
            place = {"source": "harness", "seq": number, "wall_s": 1795218610.0, "mono_s": begin + at}
            file.write(json.dumps({"kind": kind, **place, "data": {"node": 0, **data}}) + "\n")
    found = gpus_of(Record.load(run))
    assert [(chart["title"], chart["times"], chart["lines"]) for chart in found["charts"]] == [
        ("busy, % of the time", [1.0, 2.0, 3.0], [["GPU 0", [10, 99, 10]]]),
        ("over NVLink and PCIe, GB/s", [2.0], [["GPU 0", [3.0]]]),
        ("memory in use, GB", [1.5], [["GPU 1", [2.0]]]),
    ]
    assert found["rows"][0] == {
        "name": "GPU 0", "ranks": [0], "busy": "99 %", "memory": "", "temperature": "", "power": "",
        "slowed": "heat (hardware)", "errors": "2 corrected", "events": "",
    }  # fmt: skip
    words = page_of(run).text
    assert "GPU 1, node 0: Xid 79" in words
    assert "heat (hardware)" in words


def test_a_run_of_which_hardly_anything_is_left_has_a_page(run: RunDir) -> None:
    """No step, no twin, no log, no artifact: the page says so, rather than nothing."""
    for path in (*run.events.glob("rank*"), *run.artifacts.iterdir()):
        path.unlink()
    shutil.rmtree(run.twins)
    lines = (run.events / "harness.jsonl").read_text().splitlines()
    (run.events / "harness.jsonl").write_text("\n".join(lines[:2]) + "\n")
    words = page_of(run).text
    for part in ("No step was seen", "No sample was seen", "None was seen", "There is no log", "No fault landed"):
        assert part in words, part


def test_the_command_writes_it(run: RunDir, tmp_path: Path) -> None:
    """`torchaos report` works on a run directory that was moved, into it or to a named file; of what is no run
    directory it says so."""
    judged(run)
    moved = RunDir(run.root.rename(tmp_path / "moved"))
    done = CliRunner().invoke(cli, ["report", str(moved.root)])
    assert done.exit_code == 0, done.output
    assert moved.report.read_text().startswith("<!doctype html>")
    assert moved.report.stat().st_mode & 0o077 == 0
    assert CliRunner().invoke(cli, ["report", str(moved.root), "-o", str(tmp_path / "x.html")]).exit_code == 0
    assert (tmp_path / "x.html").stat().st_mode & 0o777 == 0o600, "as private as the one in the run directory"
    assert (tmp_path / "x.html").read_text() == moved.report.read_text()
    with pytest.raises(UsageError, match=r"no plan\.json in it"):
        CliRunner().invoke(cli, ["report", str(tmp_path)], catch_exceptions=False)


def test_the_longest_part_is_not_shown_as_a_failure() -> None:
    """Red means that something is wrong; that a part of a recovery took longest is nothing wrong."""
    css = (Path(html.__file__).parent / "static" / "page.css").read_text()
    rules = re.findall(r"\.longest rect \{([^}]*)\}", css)
    assert rules
    assert all("--bad" not in rule and "--failed" not in rule for rule in rules)


@pytest.mark.parametrize("folder", [RECORDED, *sorted(RUNS.iterdir())], ids=lambda folder: folder.name)
def test_the_list_of_events_is_in_words(folder: Path) -> None:
    """No event is shown as the names and values of its data."""
    run = Record.load(RunDir(folder))
    raw = re.compile(r"\b(?:start_ticks|local_rank|duration_s|exit_code) |\bTrue\b|\bFalse\b|\bNone\b|[\[{]'")
    told = [event for event in run.beside_steps if event.kind in page.STORY]
    lines = [(event.kind.value, text) for event, text in words(run.plan, told)]
    assert lines
    assert [line for line in lines if raw.search(line[1])] == []
