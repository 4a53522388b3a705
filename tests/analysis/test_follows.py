"""Which failure is the cause, and which failures follow from it: the first difference decides, not the scenario's
order."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from torchaos.harness.analysis.explanations import linked
from torchaos.harness.analysis.verdict import verdict_of
from torchaos.harness.interfaces import Finding, First, Outcome, What
from torchaos.harness.record.plan import Named
from torchaos.harness.record.result import Case, Result, Verdict, root_first
from torchaos.harness.reporting import result_files
from torchaos.harness.reporting.terminal import console


def links(*said: tuple[str, What, int], fallen: bool = False) -> dict[str, str | None]:
    """What each failed case follows from."""
    cases = [Case(name, "assertion", Verdict.FAILED, "") for name, _what, _step in said]
    findings = [Finding(Outcome.FAILED, "", first=First(what, step)) for _name, what, step in said]
    faults = [Case("faults", "faults", Verdict.FAILED if fallen else Verdict.PASSED, "")]
    return {case.name: case.follows for case in linked(cases, findings, faults)}


def judged(run: Any, twin: Any, asserts: Sequence[str]) -> Result:
    plan = replace(run.plan, asserts=tuple(Named(name, {}) for name in asserts))
    return verdict_of(replace(run, plan=plan), [twin], "/run")


@pytest.mark.parametrize(
    "asserts", [["loss_continuity", "sample_accounting"], ["sample_accounting", "loss_continuity"]]
)
def test_the_loss_follows_from_the_samples(trainer: Any, asserts: list[str]) -> None:
    """A sampler that starts over: the reason of the run names the samples in either order, and the loss follows."""
    run = trainer(kills=[(18, 1)], broken=frozenset({"sampler"})).record()
    result = judged(run, trainer().record(), asserts)
    assert result.verdict is Verdict.FAILED
    assert result.reason.startswith("sample_accounting: ")
    follows = {case.name: case.follows for case in result.cases}
    assert follows == {"sample_accounting": None, "loss_continuity": "sample_accounting", "rollback": None}
    assert [case.name for case in root_first(result.cases)] == ["sample_accounting", "loss_continuity", "rollback"]


def test_the_cause_is_told_apart_from_what_was_seen(trainer: Any) -> None:
    """In a few words, for whoever has no room for the whole reason; a case that passed has none."""
    run = trainer(kills=[(18, 1)], broken=frozenset({"optimizer"})).record()
    result = judged(run, trainer().record(), ["loss_continuity", "sample_accounting"])
    causes = {case.name: case.cause for case in result.cases}
    assert causes["loss_continuity"].startswith("the optimizer's state was not restored")
    assert causes["sample_accounting"] == ""


def test_a_schedule_is_a_cause_of_its_own(trainer: Any) -> None:
    """Sampler and schedule both start over: neither follows from the other."""
    run = trainer(kills=[(18, 1)], broken=frozenset({"sampler", "schedule"})).record()
    result = judged(run, trainer().record(), ["sample_accounting", "lr_continuity"])
    assert [case.follows for case in result.cases] == [None, None, None]


@pytest.mark.parametrize("asserts", [["lr_continuity", "sample_accounting"], ["sample_accounting", "lr_continuity"]])
def test_of_several_causes_the_first_in_the_flow_of_the_data_leads(trainer: Any, asserts: list[str]) -> None:
    """A step takes its samples before its rate, in whichever order the scenario names them."""
    run = trainer(kills=[(18, 1)], broken=frozenset({"sampler", "schedule"})).record()
    result = judged(run, trainer().record(), asserts)
    assert result.decided_by == "sample_accounting"
    assert result.reason.startswith("sample_accounting: ")


def test_a_chain_has_one_root() -> None:
    """Samples, loss, parameters, checkpoint: all follow from the samples, and so says each."""
    assert links(
        ("checkpoint_integrity", What.SAVED, 20),
        ("parameter_digest", What.PARAMETERS, 16),
        ("loss_continuity", What.LOSS, 16),
        ("sample_accounting", What.SAMPLES, 16),
    ) == {
        "checkpoint_integrity": "sample_accounting",
        "parameter_digest": "sample_accounting",
        "loss_continuity": "sample_accounting",
        "sample_accounting": None,
    }


def test_what_came_earlier_is_no_consequence() -> None:
    """Parameters that were wrong a step before the loss are its cause; an earlier checkpoint is no effect."""
    told = links(("loss", What.LOSS, 16), ("digest", What.PARAMETERS, 15), ("saved", What.SAVED, 10))
    assert told == {"loss": "digest", "digest": None, "saved": None}


def test_replicas_that_differ_follow_from_no_samples() -> None:
    """Other samples for all do not make ranks unequal: that is a defect of its own."""
    told = links(("samples", What.SAMPLES, 16), ("digest", What.REPLICAS, 16))
    assert told == {"samples": None, "digest": None}


def test_replicas_that_differ_follow_from_a_state_that_one_rank_lost() -> None:
    """state_restored says so; the loss follows too."""
    told = links(("digest", What.REPLICAS, 16), ("state", What.REPLICAS, 15), ("loss", What.LOSS, 16))
    assert told == {"digest": "state", "state": None, "loss": "state"}
    assert links(("digest", What.REPLICAS, 16), ("state", What.PARAMETERS, 15))["digest"] is None


def test_samples_that_the_job_computes_follow_from_its_parameters() -> None:
    """A policy that was wrong meets other observations from the next step on; samples of a data set follow from no
    loss."""
    for what in (What.LOSS, What.RATE, What.PARAMETERS):
        told = links(("samples", What.COMPUTED, 17), ("earlier", what, 16))
        assert told == {"samples": "earlier", "earlier": None}
        assert links(("samples", What.SAMPLES, 17), ("earlier", what, 16))["samples"] is None
    told = links(("samples", What.COMPUTED, 16), ("loss", What.LOSS, 16))
    assert told == {"samples": None, "loss": "samples"}
    assert links(("samples", What.COMPUTED, 16), ("integrity", What.LOADED, 15))["samples"] == "integrity"


def test_a_damaged_checkpoint_that_was_loaded_is_the_cause() -> None:
    """Of the losses from the next step on."""
    told = links(("loss", What.LOSS, 16), ("integrity", What.LOADED, 15))
    assert told == {"loss": "integrity", "integrity": None}


def test_steps_are_absent_since_the_job_ended() -> None:
    """And it ended since the fault was not outlived, where that is known."""
    said = (("loss", What.ABSENT, 19), ("completed", What.ENDING, 18))
    assert links(*said) == {"loss": "completed", "completed": None}
    assert links(*said, fallen=True) == {"loss": "faults", "completed": "faults"}


def test_of_two_that_say_the_same_the_first_is_the_cause() -> None:
    """Two assertions that saw one learning rate differ have one finding."""
    told = links(("loss", What.RATE, 16), ("rates", What.RATE, 16))
    assert told == {"loss": None, "rates": "loss"}


def test_the_field_survives_the_file(trainer: Any) -> None:
    """What follows from what is in result.json; a file of an earlier version, which lacks it, is read all the same."""
    run = trainer(kills=[(18, 1)], broken=frozenset({"sampler"})).record()
    result = judged(run, trainer().record(), ["loss_continuity", "sample_accounting"])
    raw = result.to_json()
    assert Result.from_json(raw).cases[0].follows == "sample_accounting"
    for case in raw["cases"]:
        del case["follows"]
    assert Result.from_json(raw).cases[0].follows is None


def test_every_report_says_it(trainer: Any) -> None:
    """Console and JUnit show the cause first, and mark what follows from it."""
    run = trainer(kills=[(18, 1)], broken=frozenset({"sampler"})).record()
    result = judged(run, trainer().record(), ["loss_continuity", "sample_accounting"])
    paper = io.StringIO()
    console.show(result, Console(file=paper, width=200))
    for text in (paper.getvalue(), result_files.text([result])):
        told = text[text.index("Verdicts") :] if "Verdicts" in text else text
        assert "(follows from sample_accounting) the loss differs first" in told
        assert told.index("skipped") < told.index("(follows from")
