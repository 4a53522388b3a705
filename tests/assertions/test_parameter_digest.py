"""parameter_digest: replicas are equal, and what the twin's are; which ones differ first is told."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from torchaos.assertions.parameter_digest import ParameterDigest
from torchaos.harness.contracts import Assertion, Outcome

KILL = [(18, 1)]


@pytest.fixture
def trainer(trainer: Any) -> Any:
    """One whose state is seen."""
    return partial(trainer, state_seen=True)


def test_a_healthy_recovery_passes(trainer: Any) -> None:
    """Replicas equal after every step, and the twin's at each checkpoint and at the end."""
    assert isinstance(ParameterDigest(), Assertion)
    finding = ParameterDigest().judge(trainer(kills=KILL).record(), [trainer().record()])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert (finding.measured["steps"], finding.measured["checkpoints"]) == (30, 6)


def test_replicas_that_diverge_are_told(trainer: Any) -> None:
    """Rank 1 goes its own way after the resume: its number, the step, and that it began with the resume."""
    finding = ParameterDigest().judge(trainer(kills=KILL, apart=1).record(), [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert (
        "after step 16 the parameters of rank 1 are not those of rank 0, after the resume from step 15"
        in finding.reason
    )
    assert (finding.measured["step"], finding.measured["rank"]) == (16, 1)
    assert (
        ParameterDigest(replicas_only=True).judge(trainer(kills=KILL, apart=1).record(), []).outcome is Outcome.FAILED
    )


@pytest.mark.parametrize(("broken", "step"), [("rng", 16), ("momentum", 16), ("weights", 16)])
def test_parameters_that_are_not_the_twins_are_told(trainer: Any, broken: str, step: int) -> None:
    """The first step, how far off the gradient is, the cause, and how many checkpoints it reached."""
    finding = ParameterDigest().judge(trainer(kills=KILL, broken=frozenset({broken})).record(), [trainer().record()])
    assert finding.outcome is Outcome.FAILED
    assert f"first after step {step}, on rank 0, after the resume from step 15" in finding.reason
    assert "the gradient's norm is" in finding.reason
    assert "It reached 3 checkpoints, first that of step 20" in finding.reason


def test_whether_the_weights_were_restored_is_known(trainer: Any) -> None:
    """By what a process began with: weights of a fresh start are told, and where they are right it was the RNG."""
    twin = trainer().record()
    for broken, words in (
        ("weights", "the model's weights were not restored: before step 16 those of rank 0, 1 were those of a fresh"),
        ("rng", "samples, weights, optimizer counter and learning rate agree: the RNG state (dropout) was not"),
    ):
        finding = ParameterDigest().judge(trainer(kills=KILL, broken=frozenset({broken})).record(), [twin])
        assert words in finding.reason


def test_ranks_that_hold_parts_are_no_replicas(trainer: Any) -> None:
    """Ranks that differ in the twin too: they are compared with the twin's, and not with each other."""
    finding = ParameterDigest().judge(trainer(kills=KILL, parts=True).record(), [trainer(parts=True).record()])
    assert finding.outcome is Outcome.PASSED, finding.reason
    assert "no replicas to compare" in finding.reason
    assert ParameterDigest().judge(trainer(kills=KILL, parts=True).record(), []).outcome is Outcome.INCONCLUSIVE


def test_a_job_that_is_never_the_same_is_asked_for_replicas_only(trainer: Any) -> None:
    """Twins that differ among themselves, or from the run before the fault: inconclusive; `replicas_only` passes."""
    noisy = [trainer(noise=n).record() for n in (1, 2)]
    run = trainer(kills=KILL, noise=3).record()
    finding = ParameterDigest().judge(run, noisy)
    assert (finding.outcome, "`replicas_only: true`" in finding.reason) == (Outcome.INCONCLUSIVE, True)
    assert ParameterDigest(replicas_only=True).judge(run, noisy).outcome is Outcome.PASSED


def test_other_sums_on_three_ranks_may_be_rounding(trainer: Any) -> None:
    """A difference that no loss shows by more than 1e-5, with three ranks: inconclusive, by that name."""
    run = trainer(kills=KILL, world=3, broken=frozenset({"momentum"})).record()
    finding = ParameterDigest().judge(run, [trainer(world=3).record()])
    assert finding.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE)
    two = ParameterDigest().judge(trainer(kills=KILL, broken=frozenset({"momentum"})).record(), [trainer().record()])
    assert two.outcome is Outcome.FAILED


def test_fewer_ranks_can_only_be_compared_with_each_other(trainer: Any) -> None:
    """After a change of the number of ranks the sums come in another order: whether it is the twin's can't be told."""
    run = trainer(kills=KILL, worlds={1: 1}, global_batch=True).record()
    finding = ParameterDigest().judge(run, [trainer().record()])
    assert finding.outcome is Outcome.INCONCLUSIVE, finding.reason
