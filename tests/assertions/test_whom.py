"""The ranks that a fault really hit: of a node, the ranks that it had when the fault landed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.analysis.fault_results import fault_result
from torchaos.harness.interfaces import Target
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import FaultResult, Verdict

KILL = PlannedFault("kill", "node.kill", "node", Target((1,), (1,)), Moment(1, None, None), {}, "", "Kill")
XID = PlannedFault("kill", "gpu.xid", "node", Target((1,)), Moment(1, None, None), {"number": 48}, "", "Xid")


def run_on(trainer: Any, nodes: dict[int, int], fault: PlannedFault = KILL, *more: Event) -> Record:
    """A run that dies in step 18 by a fault of node 1; `nodes`: where each rank is, in every attempt."""
    run: Record = trainer(kills=[(18, 1)]).record()

    def change(event: Event) -> Event:
        if event.kind is Kind.RANK_UP and event.rank is not None:
            return replace(event, data={**event.data, "node": nodes[event.rank]})
        if event.kind is Kind.APPLYING and fault.target.nodes:
            return replace(event, rank=None, attempt=None, data={**event.data, "pid": None, "node": 1})
        return event

    events = tuple(map(change, run.events))
    hit = next(event for event in events if event.kind is Kind.APPLYING)
    held = {"fault": fault.id, "phase": None, "global_step": 18}
    told = [Event(Kind.HELD, "rank1-a0", 9000, 0.0, hit.mono_s, 1, 0, None, held)]
    for number, one in enumerate(more):
        told.append(replace(one, seq=9001 + number, mono_s=hit.mono_s + 1e-3))
    return Record(replace(run.plan, faults=(fault,)), tuple(sorted((*events, *told), key=lambda e: e.mono_s)), {})


def judged(run: Record) -> FaultResult:
    return fault_result(run, [], run.plan.faults[0], False)


def effect(**data: Any) -> Event:
    return Event(Kind.EFFECT, "harness", 0, 0.0, 0.0, None, None, None, {"fault": "kill", **data})


KILLED = effect(effect="2 processes of node 1 were killed", pids=[1001])
SERVED = {"effect": "gpu0.xid = 48", "served_mono_s": 0.0}


def test_a_node_that_is_a_standby_was_not_hit_in_the_job(trainer: Any) -> None:
    """The ranks are on nodes 0 and 2: nothing that the job lives by was on node 1, and the reason says so."""
    found = judged(run_on(trainer, {0: 0, 1: 2}, KILL, KILLED))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reason == "node 1 had no rank when the fault came; the ranks were on nodes 0, 2"
    assert found.target == "node 1 (no rank)"


@pytest.mark.parametrize(("nodes", "words"), [({0: 1, 1: 2}, "node 1 (rank 0)"), ({0: 0, 1: 1}, "node 1 (rank 1)")])
def test_the_report_says_which_rank_the_node_had(trainer: Any, nodes: dict[int, int], words: str) -> None:
    """By where the ranks were seen to come up, not by where they were planned."""
    found = judged(run_on(trainer, nodes, KILL, KILLED))
    assert (found.verdict, found.target) == (Verdict.PASSED, words), found.reason


def listed(gpu: int, pid: int) -> Event:
    """A sample in which the driver lists the process on this GPU of node 1."""
    data = {"node": 1, "gpu": gpu, "ranks": [1], "values": {}, "pids": [pid]}
    return Event(Kind.GPU, "harness", 0, 0.0, 0.0, None, None, None, data)


def test_a_gpu_fault_that_missed_the_ranks_gpu_landed_wrong(trainer: Any) -> None:
    """The driver shows the target's process on another GPU than its environment: the trainer chose its GPU itself.
    Samples of other processes, and a GPU that the scenario names, say nothing against it."""
    served = effect(**SERVED, served_to=50, node=1, gpu=0)
    found = judged(run_on(trainer, {0: 0, 1: 1}, XID, served, listed(3, 1001)))
    assert (found.verdict, found.reason) == (
        Verdict.INCONCLUSIVE, "it was shown for GPU 0, as the environment of rank 1 says, and the driver lists "
        "that rank on GPU 3; write gpu",
    )  # fmt: skip
    named = replace(XID, params={**XID.params, "gpu": 0})
    both = effect(effect="gpu3.xid = 48", served_mono_s=0.0, served_to=50, node=1, gpu=3)
    for fault, more in (
        (XID, [listed(0, 1001)]), (XID, [listed(3, 1000)]), (named, [listed(3, 1001)]), (XID, [both, listed(3, 1001)]),
    ):  # fmt: skip
        found = judged(run_on(trainer, {0: 0, 1: 1}, fault, served, *more))
        assert found.verdict is Verdict.PASSED, found.reason


def test_a_gpu_fault_that_another_node_felt_landed_wrong(trainer: Any) -> None:
    """GPUs are numbered on each node: who watches those of node 0 must hear nothing of rank 1's on node 1."""
    own, others = effect(**SERVED, served_to=50, node=1), effect(**SERVED, served_to=40, node=0)
    found = judged(run_on(trainer, {0: 0, 1: 1}, XID, own))
    assert found.verdict is Verdict.PASSED, found.reason
    found = judged(run_on(trainer, {0: 0, 1: 1}, XID, own, others))
    assert (found.verdict, found.reason) == (
        Verdict.INCONCLUSIVE, "it was felt on node 0, which is not its target",
    )  # fmt: skip
