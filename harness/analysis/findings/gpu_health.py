"""When somebody reacted to a failing GPU."""

from __future__ import annotations

from torchaos.harness.analysis.hit_targets import Gpu, Landing, ranks_on, unplaced_on
from torchaos.harness.interfaces import Finding, failed, inconclusive
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.registry import family_of


def is_of_gpu(run: Record, hit: Landing) -> bool:
    return any(fault.id == hit.fault and family_of(fault.inject) == "gpu" for fault in run.plan.faults)


def noticed_s(run: Record, hit: Landing) -> float | None:
    """Seconds from the fault until a process that watches GPUs got the first changed answer; None: no process did."""
    answers = [e for e in run.of_fault(hit.fault, Kind.EFFECT) if "served_to" in e.data]
    at = min((float(event.data.get("served_mono_s", event.mono_s)) for event in answers), default=None)
    return None if at is None else round(max(0.0, at - hit.at_s), 6)


def checkpointed_s(run: Record, hit: Landing) -> float | None:
    """Seconds from the fault until the first save that began after the fault was complete. None: there was no such
    save."""
    ends = [save.ended_s for save in run.history.saves if save.ok and save.begun_s >= hit.at_s]
    at = min((end for end in ends if end is not None), default=None)
    return None if at is None else round(at - hit.at_s, 6)


def drained_s(run: Record, hit: Landing, gpus: frozenset[Gpu]) -> float | None:
    """Seconds from the fault until the last rank on those GPUs had ended with an error. None: not all of them did."""
    there = {up.data["pid"] for up in ranks_on(run, gpus) if up.attempt == hit.attempt} or hit.pids
    gone = {
        e.data["pid"]: e.mono_s
        for e in run.of_kind(Kind.RANK_EXITED)
        if e.mono_s >= hit.at_s and e.data["exit_code"] != 0
    }
    if not there or not there <= gone.keys():
        return None
    return round(max(gone[pid] for pid in there) - hit.at_s, 6)


def used_again(run: Record, hit: Landing, gpus: frozenset[Gpu]) -> Finding | None:
    """Whether a rank stayed on those GPUs, or was started on one again. None if none was."""
    if not gpus:
        return inconclusive(f"{hit.fault}: it is not known which GPU was hit: no rank was seen to come up on it")
    if drained_s(run, hit, gpus) is None:
        return failed(f"{hit.fault}: the ranks on that GPU never left")
    for up in ranks_on(run, gpus):
        if (up.attempt or 0) > hit.attempt:
            return failed(f"{hit.fault}: rank {up.rank} was started on the same GPU again, in attempt {up.attempt}")
    for up in unplaced_on(run, {node for node, _ in gpus}):
        if (up.attempt or 0) > hit.attempt:
            return inconclusive(f"{hit.fault}: it is not known which GPU rank {up.rank} uses in attempt {up.attempt}")
    return None
