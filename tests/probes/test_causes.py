"""Known failures of torch, gloo and NCCL, recognised by lines of real logs."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from reference import PAGES

from torchaos.harness.monitoring.probes.job_log import BY_NAME, CAUSES, CauseReader, cause_of

LOGS = Path(__file__).parent.parent / "data" / "logs"
GUIDE = Path(__file__).parents[2] / "docs" / "known-failures.md"
with open(LOGS / "causes.tsv", newline="") as _file:
    SAMPLES = list(csv.DictReader(_file, delimiter="\t", quoting=csv.QUOTE_NONE))
ABORT = next(one["line"] for one in SAMPLES if one["cause"] == "teardown-abort")


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda one: f"{one['cause']}, {one['source']}: {one['shows']}")
def test_a_line_is_what_it_is(sample: dict[str, str]) -> None:
    """Each line of the samples is recognised as the failure that it shows, with advice. `none`: it shows no failure of
    the job, or not which."""
    cause = cause_of(sample["line"], restarts=0)
    assert (cause.name if cause else "none") == sample["cause"]
    assert cause is None or cause.advice


def test_every_cause_has_a_sample() -> None:
    """No pattern of the table is without a line of a log that it was taken from."""
    assert {one["cause"] for one in SAMPLES} - {"none"} | {"gloo-stale-store"} == BY_NAME.keys()


def test_the_page_shows_the_table() -> None:
    """The reference has a row for each cause, with its versions and public issues, and no other row. The guide names
    no other cause."""
    rows = [line for line in PAGES["reference/known-failures.md"]().splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", GUIDE.read_text()))
    assert len(named) > 5
    assert named <= BY_NAME.keys()
    assert rows == [
        f"| `{one.name}` | {one.whose} | {one.seen or 'not known'} | {', '.join(one.issues) or 'none known'} "
        f"| {one.advice} |"
        for one in CAUSES
    ]


def test_the_stale_store_is_one_only_after_a_restart() -> None:
    """Gloo's refused connection means torchrun's stale store after a restart, and the network before one."""
    line = next(line for line in (LOGS / "torchrun-gloo.log").read_text().splitlines() if "connectFullMesh" in line)
    stale, first = cause_of(line, restarts=1), cause_of(line, restarts=0)
    assert stale is not None
    assert first is not None
    assert stale.name == "gloo-stale-store"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in stale.advice
    assert first.name == "gloo-connect"


def test_a_real_log_of_a_failed_restart() -> None:
    """The whole log of a failed gloo restart names the dead peer and the stale store, and nothing else."""
    reader, names = CauseReader(), []
    restarts = 0
    for line in (LOGS / "torchrun-gloo.log").read_text().splitlines():
        restarts = 1 if "restart_count=1" in line else restarts
        for said in reader.read(line, restarts):
            names.append(said.data["cause"])
    assert set(names) == {"peer-gone", "gloo-stale-store"}


def test_a_cause_is_not_told_endlessly() -> None:
    """A line that is printed in a loop is told a few times per attempt."""
    reader = CauseReader()
    told = [said for restarts in (0, 1) for _ in range(50) for said in reader.read(ABORT, restarts)]
    assert len(told) == 2 * CauseReader.MOST


def test_ordinary_output_has_no_cause() -> None:
    """A healthy run's log has none."""
    assert not [one for one in (LOGS / "torchrun-restart.log").read_text().splitlines() if cause_of(one, restarts=0)]


def test_a_line_of_the_jobs_own_watchdog() -> None:
    """A regular expression of the scenario is told of by its text, beside what is known of the same line."""
    reader = CauseReader(["no progress for [0-9]+ s"])
    (said,) = reader.read("rank 1: no progress for 30 s", restarts=0)
    assert (said.data["cause"], said.data["pattern"]) == ("own-watchdog", "no progress for [0-9]+ s")
    both = list(reader.read(f"no progress for 5 s: {ABORT}", restarts=0))
    assert [one.data["cause"] for one in both] == ["teardown-abort", "own-watchdog"]
    assert list(reader.read("step 3 loss 1.0", restarts=0)) == []


def test_the_page_says_which_tell_of_a_hang() -> None:
    """What `hang_detected` takes for the job's own notice is said in the guide."""
    page = GUIDE.read_text()
    _, _, after = page.partition("signs that the job noticed a hang: ")
    sentence = after.partition(".")[0]
    assert {one.name for one in CAUSES if one.hang} == set(sentence.replace("`", " ").replace(",", " ").split()) & set(
        BY_NAME
    )
