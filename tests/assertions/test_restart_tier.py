"""restart_tier: a restart in place, on another node, or by another submission."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.assertions.restart_tier import RestartTier
from torchaos.harness.analysis.findings.restarts import TIERS, Tier
from torchaos.harness.base_classes import Assertion
from torchaos.harness.interfaces import Outcome, Target
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import After, PlannedFault

KILL = [(18, 1)]


def _on_nodes(run: Any, nodes: dict[tuple[int, int], int]) -> Any:
    """The record with ranks on these nodes, by (attempt, rank)."""
    events = [
        replace(e, data={**e.data, "node": nodes[e.attempt, e.rank]})
        if e.kind is Kind.RANK_UP and e.attempt is not None and e.rank is not None
        else e
        for e in run.events
    ]
    return replace(run, events=tuple(events))


def test_in_place(trainer: Any) -> None:
    """A restart inside torchelastic on the same nodes is the cheapest one."""
    assert isinstance(RestartTier(), Assertion)
    finding = RestartTier(most="in_place").judge(trainer(kills=KILL).record(), [])
    assert (finding.outcome, finding.measured["tier"]) == (Outcome.PASSED, "in_place")
    assert finding.bound == {"most": "in_place", "least": "none"}
    finding = RestartTier(least="node_replaced").judge(trainer(kills=KILL).record(), [])
    assert (finding.outcome, "at least node_replaced was expected" in finding.reason) == (Outcome.FAILED, True)


def test_no_restart_at_all(trainer: Any) -> None:
    """A job that goes on by itself needed no tier."""
    finding = RestartTier(most="none").judge(trainer(freeze=(18, 1, 3.0)).record(), [])
    assert (finding.outcome, finding.measured) == (Outcome.PASSED, {"tier": "none", "freeze": "none"})


def test_another_node(trainer: Any) -> None:
    """A standby in the place of the dead node, or the same node started anew, is the second tier."""
    run = trainer(kills=KILL).record()
    standby = _on_nodes(run, {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 2})
    finding = RestartTier(most="in_place").judge(standby, [])
    assert (finding.outcome, finding.measured["kill"]) == (Outcome.FAILED, "node_replaced")
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    again = {"submission": 0, "node": 1, "pid": 77}
    back = Event(Kind.NODE_STARTED, "harness", 9_999, 0.0, hit.mono_s + 0.01, data=again)
    same = _on_nodes(run, {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 1})
    started = replace(same, events=(*same.events, back))
    assert RestartTier().judge(started, []).measured["kill"] == "node_replaced"


def test_the_whole_job(trainer: Any) -> None:
    """A scheduler that starts the job again is the last tier."""
    run = trainer(kills=KILL, resubmitted=True).record()
    finding = RestartTier(most="node_replaced").judge(run, [])
    assert (finding.outcome, finding.measured["tier"]) == (Outcome.FAILED, "resubmitted")
    assert RestartTier().judge(run, []).outcome is Outcome.PASSED


def test_steps_under_notice_are_no_recovery(trainer: Any) -> None:
    """A job that is told to leave makes a few more steps and saves before it does: what brought it back came later."""
    run = trainer(kills=KILL, resubmitted=True).record()
    told_s = next(e.mono_s for e in run.events if e.kind is Kind.STEP and e.step == 15)
    events = tuple(replace(e, mono_s=told_s + 1e-4) if e.kind is Kind.APPLYING else e for e in run.events)
    fault = PlannedFault("kill", "node.preempt", "node", Target((1,), (0,)), After(), {}, "", "Preempt")
    noticed = replace(run, events=events, plan=replace(run.plan, faults=(fault,)))
    assert RestartTier(least="resubmitted").judge(noticed, []).outcome is Outcome.PASSED


def test_the_worst_of_one_fault_that_landed_twice(trainer: Any) -> None:
    """Its own tier is the highest that one of its landings needed, though the other needed none."""
    run = trainer(kills=KILL).record()
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    later = next(e for e in run.events if e.kind is Kind.STEP and (e.attempt, e.rank, e.step) == (1, 1, 7))
    again = replace(hit, source=later.source, mono_s=later.mono_s + 1e-4, attempt=1, data={**hit.data, "pid": 1})
    events = tuple(sorted((*run.events, again), key=lambda e: e.mono_s))
    finding = RestartTier(most="none").judge(replace(run, events=events), [])
    assert (finding.outcome, finding.measured) == (Outcome.FAILED, {"tier": "in_place", "kill": "in_place"})
    assert finding.reason.startswith("kill in attempt 0: the job was restarted in place")


def test_the_worst_of_several(trainer: Any) -> None:
    """Every fault has its own tier, and the highest is what is bounded."""
    run = trainer(kills=[(8, 1), (18, 1)]).record()
    finding = RestartTier().judge(run, [])
    assert (finding.outcome, finding.measured["tier"]) == (Outcome.PASSED, "in_place")


def test_no_tier_helped(trainer: Any) -> None:
    """A job that never got further than before was brought back by none."""
    run = trainer(kills=KILL).record()
    hit = next(e for e in run.events if e.kind is Kind.APPLYING)
    cut = replace(run, events=tuple(e for e in run.events if e.mono_s <= hit.mono_s + 1 and e.attempt != 1))
    finding = RestartTier().judge(cut, [])
    assert (finding.outcome, "the job did not come back" in finding.reason) == (Outcome.FAILED, True)


@pytest.mark.parametrize("kept", [(), (Kind.APPLYING, Kind.RANK_UP)])
def test_nothing_seen_is_inconclusive(trainer: Any, kept: tuple[Kind, ...]) -> None:
    """Without a fault, or without steps, there is nothing to say."""
    run = trainer(kills=KILL).record()
    finding = RestartTier().judge(replace(run, events=tuple(e for e in run.events if e.kind in kept)), [])
    assert finding.outcome is Outcome.INCONCLUSIVE


def test_each_landing_of_one_fault(trainer: Any) -> None:
    """A fault that lands twice is judged twice, in either order: the one recovery that was dear is not forgotten."""
    for again in (1, 2):  # the attempt that is restarted in place
        run = trainer(kills=[(8, 1), (18, 1)], resubmitted=True).record()
        events = tuple(
            e for e in run.events
            if not (e.kind is Kind.JOB_STARTED and e.data["submission"] == again)
            and not (e.kind is Kind.JOB_EXITED and e.data["submission"] == again - 1)
        )  # fmt: skip
        mixed = replace(run, events=events)
        finding = RestartTier(most="in_place").judge(mixed, [])
        assert finding.outcome is Outcome.FAILED, finding.reason
        assert f"kill in attempt {2 - again}: the job was submitted again as a whole" in finding.reason
        assert finding.measured == {"tier": "resubmitted", "kill": "resubmitted"}
        passed = RestartTier().judge(mixed, [])
        assert (passed.outcome, passed.reason.count("kill in attempt")) == (Outcome.PASSED, 2)


def _without(run: Any, without: set[tuple[int, int]]) -> Any:
    """The record without the starts of these ranks, by (attempt, rank)."""
    kept = (e for e in run.events if e.kind is not Kind.RANK_UP or (e.attempt, e.rank) not in without)
    return replace(run, events=tuple(kept))


@pytest.mark.parametrize(
    ("worlds", "nodes", "tier"),
    [
        ({0: 2, 1: 1}, {(0, 0): 0, (0, 1): 1, (1, 0): 0}, "shrunk"),
        ({0: 2, 1: 1}, {(0, 0): 0, (0, 1): 1, (1, 0): 2}, "shrunk"),  # the one that is left is a standby
        ({0: 3, 1: 2}, {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 0, (1, 1): 3}, "shrunk"),  # one of two is replaced
        ({0: 2, 1: 1}, {(0, 0): 0, (0, 1): 0, (1, 0): 0}, "shrunk"),  # a rank less on the only node
        ({0: 2, 1: 2}, {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 0}, "shrunk"),  # both ranks on one node
        ({0: 2, 1: 3}, {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 1, (1, 2): 2}, "grown"),
        ({0: 2, 1: 2}, {(0, 0): 0, (0, 1): 0, (1, 0): 0, (1, 1): 1}, "grown"),
        ({0: 2, 1: 2}, {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 0}, "in_place"),  # numbered again
        ({0: 2, 1: 2}, {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 5}, "node_replaced"),
    ],
)
def test_fewer_and_more_are_no_replacement(
    trainer: Any, worlds: dict[int, int], nodes: dict[tuple[int, int], int], tier: Tier
) -> None:
    """A job that lost a rank or a node for good has replaced none, even if another of its nodes was replaced."""
    run = _on_nodes(trainer(kills=KILL, world=worlds[0], worlds=worlds, global_batch=True).record(), nodes)
    for bound in TIERS:
        finding = RestartTier(least=bound, most=bound).judge(run, [])
        assert finding.measured["tier"] == tier
        assert (finding.outcome is Outcome.PASSED) == (bound == tier), finding.reason


def test_a_standby_that_was_not_needed(trainer: Any) -> None:
    """Standby nodes start when the job has begun; ranks that come back on the same nodes replaced none."""
    run = trainer(kills=KILL).record()
    up = next(e for e in run.events if e.kind is Kind.STEP)
    spare = Event(Kind.NODE_STARTED, "harness", 9_999, 0.0, up.mono_s, data={"submission": 0, "node": 2, "pid": 77})
    finding = RestartTier(most="in_place").judge(replace(run, events=(*run.events, spare)), [])
    assert (finding.outcome, finding.measured["tier"]) == (Outcome.PASSED, "in_place"), finding.reason


def test_an_attempt_without_a_step_is_no_tier(trainer: Any) -> None:
    """The job met without its second node, made no step, and met again with it: it never trained with fewer ranks."""
    run = trainer(kills=[(18, 1), (16, 0)], worlds={1: 1}, global_batch=True).record()
    idle = replace(run, events=tuple(e for e in run.events if not (e.attempt == 1 and e.kind is Kind.STEP)))
    landed = [e for e in idle.events if not (e.kind is Kind.APPLYING and e.attempt == 1)]
    assert RestartTier().judge(run, []).measured["tier"] == "grown"
    assert RestartTier().judge(replace(idle, events=tuple(landed)), []).measured["tier"] == "in_place"


def test_nodes_that_were_not_seen(trainer: Any) -> None:
    """Where the node of a rank is not known, only what is sure whatever the node decides: no false passed."""
    one = trainer(kills=KILL).record()
    assert RestartTier(most="in_place").judge(_without(one, {(1, 1)}), []).outcome is Outcome.PASSED  # it has one node
    run = replace(one, plan=replace(one.plan, job=replace(one.plan.job, nodes=2)))
    blind = _without(run, {(1, 1)})
    cases: tuple[tuple[dict[str, Any], Outcome], ...] = (
        ({"most": "in_place"}, Outcome.INCONCLUSIVE), ({"least": "node_replaced"}, Outcome.INCONCLUSIVE),
        ({"least": "in_place", "most": "node_replaced"}, Outcome.PASSED), ({"most": "none"}, Outcome.FAILED),
        ({"least": "shrunk"}, Outcome.FAILED),
    )  # fmt: skip
    for bounds, outcome in cases:
        finding = RestartTier(**bounds).judge(blind, [])
        assert finding.outcome is outcome, (bounds, finding.reason)
    assert "the nodes of some ranks were not seen" in RestartTier(most="in_place").judge(blind, []).reason


def test_a_node_that_was_evicted_without_a_fault(trainer: Any) -> None:
    """Rank 1 dies on node 1. A job that comes back on node 2 alone has given up node 0, which nothing had hit."""
    run = trainer(kills=KILL).record()
    at_first = {(0, 0): 0, (0, 1): 1}
    spared = _on_nodes(run, {**at_first, (1, 0): 0, (1, 1): 2})
    finding = RestartTier(evicted=0).judge(spared, [])
    assert (finding.outcome, finding.measured["evicted"]) == (Outcome.PASSED, 0)
    both = _on_nodes(run, {**at_first, (1, 0): 3, (1, 1): 2})
    finding = RestartTier(evicted=0).judge(both, [])
    assert (finding.outcome, "1 node (node 0) lost all ranks for good" in finding.reason) == (
        Outcome.FAILED, True,
    )  # fmt: skip
    assert RestartTier(evicted=1).judge(both, []).outcome is Outcome.PASSED


def test_evictions_of_nodes_that_were_not_seen(trainer: Any) -> None:
    """Nobody knows who was evicted."""
    run = trainer(kills=KILL).record()
    unseen = replace(run, events=tuple(
        replace(e, data={**e.data, "node": None}) if e.kind is Kind.RANK_UP else e for e in run.events
    ))  # fmt: skip
    assert RestartTier(evicted=0).judge(unseen, []).outcome is Outcome.INCONCLUSIVE
    assert RestartTier().judge(unseen, []).outcome is not Outcome.INCONCLUSIVE


def _twice_on(trainer: Any, last: tuple[int, int]) -> Any:
    """Rank 1 dies on node 1 in two attempts. `last`: the nodes of the third attempt, by rank."""
    run = trainer(kills=[(18, 1), (18, 1)]).record()
    nodes = {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 1, (2, 0): last[0], (2, 1): last[1]}
    return _on_nodes(run, nodes)


@pytest.mark.parametrize(
    ("last", "after", "outcome", "words"),
    [
        ((0, 2), 2, Outcome.PASSED, ""),
        ((0, 1), 2, Outcome.FAILED, "node 1 had rank 1 again in attempt 2, after 2 faults had hit it"),
        ((1, 0), 2, Outcome.FAILED, "node 1 had rank 0 again"),  # another rank is there, and it is the same node
        ((0, 2), 1, Outcome.FAILED, "node 1 had rank 1 again in attempt 1, after 1 fault"),
        ((0, 1), 3, Outcome.INCONCLUSIVE, "no node was hit 3 times"),
    ],
)
def test_a_node_that_failed_too_often(
    trainer: Any, last: tuple[int, int], after: int, outcome: Outcome, words: str
) -> None:
    """It is kept out from then on, whatever its ranks are called; until then it may come back."""
    finding = RestartTier(excluded_after=after).judge(_twice_on(trainer, last), [])
    assert finding.outcome is outcome, finding.reason
    assert words in finding.reason


def test_an_offender_that_was_not_seen(trainer: Any) -> None:
    """Where the node of a rank is not known, nobody says that the bad node was kept out, or that it was not."""
    run = _twice_on(trainer, (0, 1))
    for blind in (1, 2):
        unseen = replace(run, events=tuple(
            replace(e, data={**e.data, "node": None}) if (e.kind, e.attempt, e.rank) == (Kind.RANK_UP, blind, 1) else e
            for e in run.events
        ))  # fmt: skip
        assert RestartTier(excluded_after=2).judge(unseen, []).outcome is Outcome.INCONCLUSIVE


def test_each_fault_counts_that_hit_the_node(trainer: Any) -> None:
    """Offences are counted over all faults, and only those of that node."""
    run = trainer(kills=[(18, 1), (18, 0), (18, 1)]).record()
    nodes = {(attempt, rank): rank for attempt in range(4) for rank in range(2)}
    assert "in attempt 3" in RestartTier(excluded_after=2).judge(_on_nodes(run, nodes), []).reason
    nodes[3, 1] = 2
    assert RestartTier(excluded_after=2).judge(_on_nodes(run, nodes), []).outcome is Outcome.PASSED
