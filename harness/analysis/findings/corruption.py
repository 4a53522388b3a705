"""Whether silent corruption was found, and how somebody reacted to a failing GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Clash, checkpoints_of
from torchaos.harness.analysis.checkpointing.checkpoint_diff import clashes
from torchaos.harness.analysis.corruption_evidence import Sighting, Step, bad_steps, sightings
from torchaos.harness.analysis.hit_targets import Gpu, Landing, landings, ranks_on, unplaced_on
from torchaos.harness.interfaces import Finding, failed, inconclusive, passed, unhit
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record
from torchaos.harness.registry import family_of

_WHO = {
    "replicas": "comparing the replicas' parameters", "norm": "the gradient norm, over 10 times its rolling mean",
    "loss": "the loss, which is not finite", "job": "the job itself, which ended the attempt",
}  # fmt: skip


@dataclass(frozen=True)
class Corruption:
    """Whether corruption was found in at most `within` steps, by anybody or by the job, and no checkpoint holds bad
    state."""

    within: int = 10
    by: Literal["anybody", "job"] = "anybody"

    def finding(self, run: Record, twins: Sequence[Record]) -> Finding:
        hits = _corruptions(run)
        if not hits:
            return unhit("no fault landed, so there was nothing to find")
        bad = bad_steps(run, twins)
        if bad is None:
            return inconclusive("the state of no step could be seen, so it is not known whether it was bad")
        since_s = hits[0].at_s
        early = [step for step in bad if step.over_s < since_s]
        if early:
            return inconclusive(f"the state was not as in the twin after step {early[0].number}, before any fault")
        seen = [
            sighting for sighting in sightings(run, since_s, twins) if self.by == "anybody" or sighting.who == "job"
        ]
        own = [step for step in bad if step.attempt == hits[0].attempt]
        saved = _saved_bad(run, twins, own)
        measured = _measured(run, since_s, bad, seen, saved)
        return replace(
            self._judge(run, twins, hits[0], bad, seen, saved), measured=measured, bound={"within": self.within}
        )

    def _judge(
        self,
        run: Record,
        twins: Sequence[Record],
        hit: Landing,
        bad: list[Step],
        seen: list[Sighting],
        saved: str | None,
    ) -> Finding:
        since_s = hit.at_s
        if saved:
            found = f"; {_told(seen[0], since_s, run)}" if seen else "; nobody found it"
            return failed(f"bad state reached a checkpoint: {saved}{found}")
        later = [step for step in bad if step.attempt > hit.attempt]
        if later:
            return inconclusive(
                f"the job resumed from good state, and after step {later[0].number} it still differs from the twin's: "
                "perhaps only because numbers are added in another order; see loss_continuity"
            )
        if not twins and not bad:
            return inconclusive("without a twin, a corruption that all replicas share can't be found")
        if not seen and not bad:
            return inconclusive("the state was that of the twin after each step, so there was nothing to find")
        if not seen:
            return failed(f"nobody found it in {len(bad)} bad steps, the first of them step {bad[0].number}")
        took = _steps_until(run, seen[0], since_s)
        if took > self.within:
            return failed(f"it took {counted(took, 'step')} until it was found: {_told(seen[0], since_s, run)}")
        if not twins:
            return inconclusive(
                f"{_told(seen[0], since_s, run)}; without a twin, checkpoints with bad state can't be found"
            )
        unseen = _unseen(run, twins)
        clash = _clash(run, twins)
        if clash is not None:
            return inconclusive(f"{clash.path}, saved after the restart, differs from the twin's in {clash.name}")
        if unseen:
            return inconclusive(f"{_told(seen[0], since_s, run)}; {unseen}")
        return passed(f"{_told(seen[0], since_s, run)}; no checkpoint holds bad state")


def _told(first: Sighting, since_s: float, run: Record) -> str:
    took = _steps_until(run, first, since_s)
    who = _WHO[first.who] if first.back_to is None else f"the job itself, which went back to step {first.back_to}"
    return f"found after {counted(took, 'step')} by {who}"


def _steps_until(run: Record, first: Sighting, since_s: float) -> int:
    """The number of steps that ended from the moment when the fault landed until the corruption was found. It is 1 if
    the corruption was found in the step that it hit."""
    before = run.history.highest_step(before_s=since_s) or 0
    return max(1, (first.step or before) - before)


def _corruptions(run: Record) -> list[Landing]:
    """The landings of faults that corrupt numbers; all landings if no fault is known to do so."""
    hits, planned = landings(run), {fault.id: fault.inject for fault in run.plan.faults}
    return [hit for hit in hits if family_of(planned.get(hit.fault, "")) == "numeric"] or hits


def _saved_bad(run: Record, twins: Sequence[Record], own: list[Step]) -> str | None:
    """Names a checkpoint that holds bad state. In the attempt that was hit, these are the checkpoints that were saved
    after one of the bad steps (`own`). Otherwise, if nothing was restarted, the contents on disk decide."""
    steps = {(step.attempt, step.number) for step in own}
    for save in run.history.saves:
        if save.ok and (save.attempt, save.global_step) in steps:
            return f"{save.path}, saved after step {save.global_step}, whose parameters were bad"
    clash = _clash(run, twins)
    saved_in = {save.global_step: save.attempt for save in run.history.saves}
    hit = _corruptions(run)[0].attempt
    if clash is not None and saved_in.get(clash.step, hit) <= hit:
        return f"{clash.path} differs from the twin's in {clash.name}"
    return None


def _clash(run: Record, twins: Sequence[Record]) -> Clash | None:
    ours, theirs = checkpoints_of(run), checkpoints_of(twins[0]) if twins else None
    if ours is None or theirs is None:
        return None
    varying = {clash.name for other in twins[1:] for clash in clashes(checkpoints_of(other) or [], theirs)}
    return next((clash for clash in clashes(ours, theirs, varying) if clash.kind == "tensor"), None)


def _unseen(run: Record, twins: Sequence[Record]) -> str | None:
    """Why it is not known whether a checkpoint is bad. None if it is known."""
    ours, theirs = checkpoints_of(run), checkpoints_of(twins[0])
    if ours is None or theirs is None:
        return "the contents of the checkpoints could not be read"
    if not [one for one in ours if one.good]:
        return "no checkpoint that could be compared is left"
    return None


def _measured(run: Record, since_s: float, bad: list[Step], seen: list[Sighting], saved: str | None) -> dict[str, Any]:
    first = seen[0] if seen else None
    return {
        "found_by": first.who if first else None, "after_steps": _steps_until(run, first, since_s) if first else None,
        "bad_steps": len(bad), "bad_checkpoint": saved, "seen_by": [sighting.who for sighting in seen],
    }  # fmt: skip


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
    """Seconds from the fault until the last rank on those GPUs had ended with an error; 0 if none was on them. None:
    not all of them did."""
    there = {up.data["pid"] for up in ranks_on(run, gpus) if up.attempt == hit.attempt} or hit.pids
    if not hit.ranks and gpus and there == hit.pids:
        return 0.0
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
