"""Whether checkpoints are whole, and have the contents that they would have without the fault."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from torchaos.harness.analysis.checkpointing.checkpoint_contents import (
    Checkpoint,
    Clash,
    checkpoints_of,
    is_below,
    root_of,
    unread_of,
)
from torchaos.harness.analysis.checkpointing.checkpoint_diff import (
    Compared,
    claimed_whole,
    compare,
    in_order,
    is_aside,
    may_be_a_clock,
    of_another_world,
    unexcused,
    unread_that_differ,
)
from torchaos.harness.analysis.checkpointing.damage_reaction import Damage, Did, counts, damages, meetings
from torchaos.harness.analysis.checkpointing.resume_points import Pair, pairs, unclear, without_unreadable
from torchaos.harness.analysis.checkpointing.save_schedule import saves_vary
from torchaos.harness.analysis.checkpointing.saved_parameters import Held
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import differences, history_of
from torchaos.harness.analysis.comparison.losses import Comparison, apart_before
from torchaos.harness.analysis.comparison.parameters import also, but, left_out, listed, meaning, words
from torchaos.harness.analysis.ending import final_step, teardown_aborts
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.missing_data import why_unplaced
from torchaos.harness.interfaces import Finding, First, Outcome, What, failed, inconclusive, passed
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.checkpoint_names import final_path, main_of
from torchaos.harness.record.history import Attempt
from torchaos.harness.record.history.saves_and_loads import saved_as
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record

_BLIND = "without a twin, checkpoints that are whole but have wrong contents can't be found"


class Checkpoints:
    """The checkpoints that a run left, compared with those of its twins. Each method returns a finding, or None if
    nothing is wrong."""

    def __init__(self, run: Record, twins: Sequence[Record]) -> None:
        self._run, self._twins = run, twins
        found = checkpoints_of(run)
        theirs = [one for twin in twins if (one := checkpoints_of(twin))]
        self._were_read = found is not None
        self._some = bool(found)
        # Left out are checkpoints that can be read neither here nor in the twins.
        self._ours, self._theirs, self._unread, self._partly = without_unreadable(found or [], theirs)

    def unread(self) -> Finding | None:
        """Why nothing can be said about the contents."""
        if not self._were_read:
            return inconclusive("the checkpoints were not read: give their folder in the scenario (job.checkpoints)")
        if problem := self._run.artifacts["inventory"].get("problem"):
            return inconclusive(f"not all checkpoints could be read: {problem}")
        if not self._some:
            return _none(self._run, self._twins)
        if not self._ours:
            return inconclusive(
                f"{listed(self._unread)} can't be read, and in the twin neither: nothing could be judged"
            )
        return _closed(self._ours, self._theirs)

    def damage_refused(self) -> Finding | None:
        return _resumed(self._run, self._twins, checkpoints_of(self._run) or []) if self._were_read else None

    def complete(self) -> Finding | None:
        """Finds a checkpoint that is marked as complete and is not, or a newest checkpoint that is torn or too old."""
        return self._dated(
            _broken(self._ours) or _claimed(self._run, self._ours) or _too_old(self._run, self._ours, self._unread)
        )

    def hold_parameters(self) -> Finding | None:
        """Finds a checkpoint that holds other parameters than the run had at its step."""
        return self._dated(self._held.finding)

    def match_twin(self, tolerance: float | None = None, ignore: Sequence[str] = ()) -> Finding:
        """Judges whether the newest checkpoint is of the twin's step, and all contents equal the twin's at the same
        step."""
        own = {"with_own_parameters": self._held.right} if self._held.right else {}
        if not self._theirs:
            torn = sum(not checkpoint.good for checkpoint in self._ours)
            return passed(f"{self._well}; {_BLIND}", checkpoints=len(self._ours), torn=torn, **own)
        finding = _as_in_the_twin(self._run, self._twins, self._ours, self._theirs, self._well, tolerance, ignore)
        bound = {} if tolerance is None else {"tolerance": tolerance}
        return replace(finding, bound=bound, measured={**finding.measured, **own})

    @cached_property
    def _held(self) -> Held:
        return Held(self._run)

    @property
    def _well(self) -> str:
        torn = [checkpoint for checkpoint in self._ours if not checkpoint.good]
        good = [checkpoint for checkpoint in self._ours if checkpoint.good]
        files = f" ({len(good)} files)" if _count(good) < len(good) else ""
        files += " is" if _count(good) == 1 else " are"
        newest, of_them = _newest(self._ours).at, "of them " if self._unread else ""
        well = f"{counted(_count(good), 'checkpoint')}{files} complete and loadable, the newest {of_them}is {newest}"
        well += f" ({len(torn)} torn and superseded: {torn[0].path})" if torn else ""
        well += f" ({listed(self._unread)} can't be read, and in the twin neither)" if self._unread else ""
        well += f" (parts of {listed(self._partly)} can't be read, and in the twin neither)" if self._partly else ""
        well += f" ({unread_of(self._run)})" if unread_of(self._run) else ""
        types = sorted({each for checkpoint in good for each in checkpoint.unread_types})
        well += f" (their files of the type {', '.join(types)} are not read)" if types else ""
        each = "files" if _count(good) < len(good) else "of them"
        hold = "holds" if self._held.right == 1 else "hold"
        return well + (
            f", {self._held.right} {each} {hold} the parameters that the run had at that step"
            if self._held.right
            else ""
        )

    def _dated(self, finding: Finding | None) -> Finding | None:
        if finding is None:
            return None
        return replace(finding, at_s=_changed_s(self._run, self._ours, str(finding.measured.get("checkpoint"))))


def _resumed(run: Record, twins: Sequence[Record], ours: Sequence[Checkpoint]) -> Finding | None:
    """Finds an attempt that resumed wrongly while a checkpoint was damaged. None if there is none. An attempt whose
    steps were all done again later does no harm, and is left out."""
    met = meetings(run)
    back = [meeting for meeting in met if counts(run, meeting.attempt.number)]
    for one in back:
        harmful = one.did is Did.LOADED and one.damage.contents
        if harmful and not _was_mended(one.damage, one.attempt, twins, ours):
            loaded = f"{one.upon}, which builds upon {_of_step(one.damage)}" if one.upon else _of_step(one.damage)
            found = failed(
                f"the job resumed from damaged data: attempt {one.attempt.number} loaded {loaded}, in "
                f"which {one.damage.words}, and did not notice",
                None if one.damage.step is None else First(What.LOADED, one.damage.step),
                step=one.damage.step, fault=one.damage.fault,
            )  # fmt: skip
            return replace(found, at_s=one.damage.at_s)
    for one in back:
        if one.lost and one.best:
            found = failed(
                f"attempt {one.attempt.number} went back to step {one.attempt.base}, although the checkpoint of step "
                f"{one.best[1]} ({posixpath.basename(one.best[0])}) was whole: "
                f"{counted(one.lost, 'step', 'was/were')} lost needlessly",
                lost=one.lost, fault=one.damage.fault,
            )  # fmt: skip
            return replace(found, at_s=one.damage.at_s)
    ended = [meeting for meeting in met if meeting.did is Did.ENDED]
    if ended and not any(meeting.attempt.number > ended[0].attempt.number for meeting in back):
        one, vain = ended[-1], len({each.attempt.number for each in ended})
        other = f"; {posixpath.basename(one.best[0])} (step {one.best[1]}) was whole" if one.best else ""
        found = failed(
            f"the job did not resume: in {_of_step(one.damage)} {one.damage.words}, and {vain} "
            f"{'attempt' if vain == 1 else 'attempts'} ended without a step{other}",
            fault=one.damage.fault,
        )  # fmt: skip
        return replace(found, at_s=one.damage.at_s)
    unknown = next((meeting for meeting in back if meeting.did is Did.UNKNOWN), None)
    if unknown:
        return inconclusive(f"nothing shows from which checkpoint attempt {unknown.attempt.number} resumed")
    return None


def _changed_s(run: Record, ours: Sequence[Checkpoint], path: str) -> float | None:
    """The last time at which a save or a fault changed a checkpoint. None if it is not known."""
    own = next((one for one in ours if one.path == path and one.saved_s is not None), None)
    if own is None:
        return None
    saves = [save for save in run.history.saves if save.begun_s == own.saved_s]
    lives = [one.ended_s for one in run.history.attempts if one.number == own.attempt]
    ends = [*(save.ended_s for save in saves), *(lives if any(save.ended_s is None for save in saves) else ())]
    hurt = [damage.at_s for damage in damages(run) if posixpath.normpath(damage.checkpoint).endswith("/" + path)]
    last: float = max([own.saved_s or 0.0, *(end for end in ends if end is not None), *hurt])
    return last


def _was_mended(damage: Damage, attempt: Attempt, twins: Sequence[Record], ours: Sequence[Checkpoint]) -> bool:
    """Whether all tensors that were saved after the attempt began, also the damaged tensor, equal the twin's bit for
    bit. A job with two copies may read a damaged file and then use the other copy."""
    since = [checkpoint for checkpoint in ours if checkpoint.good and (checkpoint.saved_s or 0.0) > attempt.started_s]
    theirs = [found for twin in twins[:1] if (found := checkpoints_of(twin))]
    both = pairs(since, theirs[0]) if theirs else []
    part = str(damage.event.data.get("part"))
    return bool(both) and len(both) == len(since) and all(
        part in one.tensors and one.tensors == other.tensors for one, other in both
    )  # fmt: skip


def _closed(ours: Sequence[Checkpoint], theirs: Sequence[Sequence[Checkpoint]]) -> Finding | None:
    """The finding about a checkpoint that could not be read at all. If the twin's could be read, bytes have changed."""
    closed = next((checkpoint for checkpoint in ours if checkpoint.closed), None)
    if closed is None:
        return None
    if closed.obstacle and theirs and all(_reads(each, closed.path) for each in theirs):
        return failed(f"{closed.at} can't be read, and the twin's can: {closed.closed}", checkpoint=closed.path)
    return inconclusive(f"{closed.at} was not read: {closed.closed}")


def _reads(theirs: Sequence[Checkpoint], path: str) -> bool:
    return any(other.path == path and other.good and not other.closed for other in theirs)


def _none(run: Record, twins: Sequence[Record]) -> Finding:
    """The finding for a run without any checkpoint. It fails only if the twin has checkpoints."""
    saved = [save for save in run.history.saves if save.ok and is_below(save.path, root_of(run))]
    seen = f"; {len(saved)} were saved during the run, and none of them was found" if saved else ""
    unread = f"; {unread_of(run)}" if unread_of(run) else ""
    if any(checkpoints_of(twin) for twin in twins):
        return failed(f"no checkpoint is left, but the twin has some{seen}{unread}", checkpoints=0)
    twin = ", and the twin has none" if twins else ""
    return inconclusive(
        f"no checkpoint of a known format is in {root_of(run) or 'the folder'} at the end{twin}{seen}{unread}: nothing "
        "could be judged"
    )


def _of_step(damage: Damage) -> str:
    name = posixpath.basename(damage.checkpoint)
    return name if damage.step is None else f"{name} (step {damage.step})"


def _broken(ours: Sequence[Checkpoint]) -> Finding | None:
    whole = [checkpoint for checkpoint in ours if checkpoint.good]
    for checkpoint in ours:
        if checkpoint.complete and not checkpoint.loadable:
            return failed(
                f"{checkpoint.at} is marked as complete but does not load: {checkpoint.problem}",
                checkpoint=checkpoint.path,
            )
        if checkpoint.complete and checkpoint.problem and checkpoint.raced:
            return failed(
                f"{checkpoint.at} loads, but differs from what was in memory when it was saved: {checkpoint.problem}",
                checkpoint=checkpoint.path,
            )
        if checkpoint.complete and checkpoint.problem:
            return failed(f"{checkpoint.at} loads, but is damaged: {checkpoint.problem}", checkpoint=checkpoint.path)
    for checkpoint in ours:
        newer = [
            other
            for other in whole
            if checkpoint.step is None or (other.step is not None and other.step >= checkpoint.step)
        ]
        if not checkpoint.complete and not newer:
            return failed(
                f"the newest checkpoint, {checkpoint.at}, is torn: {checkpoint.problem or 'not complete'}",
                checkpoint=checkpoint.path,
            )
    return None


def _claimed(run: Record, ours: Sequence[Checkpoint]) -> Finding | None:
    found = claimed_whole(run, ours)
    return failed(
        f"{found[0].at} could not be saved, but the job gave it the name of a complete checkpoint: {found[0].problem}",
        checkpoint=found[0].path, torn=len(found),
    ) if found else None  # fmt: skip


def _too_old(run: Record, ours: Sequence[Checkpoint], left_out: Sequence[str]) -> Finding | None:
    """Finds a newest checkpoint on disk that is older than the last save that was seen to finish. None if it is not.
    `left_out`: paths of checkpoints that are there and can't be read."""
    newest, root = _newest(ours).step, str(run.artifacts["inventory"].get("root", ""))
    saves = [save for save in run.history.saves if save.ok and save.global_step is not None]
    saved = [save for save in saves if is_below(save.path, root)]  # a model that is exported elsewhere is no checkpoint
    away = [posixpath.join(root, path) for path in left_out]
    saved = [save for save in saved if not any(is_below(final_path(save.path), path) for path in away)]
    last = max(saved, key=lambda save: save.global_step or 0, default=None)
    if newest is None or last is None or newest >= (last.global_step or 0):
        return None
    return failed(
        f"the newest checkpoint is of step {newest}, although a checkpoint was saved after step "
        f"{last.global_step} ({last.path})",
        newest=newest,
    )


def _as_in_the_twin(
    run: Record, twins: Sequence[Record], ours: list[Checkpoint], theirs: list[list[Checkpoint]], well: str,
    tolerance: float | None, ignore: Sequence[str],
) -> Finding:  # fmt: skip
    newest, due = _newest(ours).step, _newest(theirs[0]).step
    more = newest is not None and due is not None and newest > due
    last = twins[0].history.last_step
    known = more and (teardown_aborts(run, last) or (newest or 0) <= (last or 0))
    vary = saves_vary(run, twins)
    if newest != due and run.history.unplaced:
        return inconclusive(why_unplaced(run, run.history.unplaced))
    other = None if newest == due or known or vary else _other_newest(run, twins, newest, due)
    both = pairs(ours, theirs[0])
    same_world = [(one, other) for one, other in both if not of_another_world(run, twins[0], one.step)]
    # A delta holds what has changed since the checkpoints on which it builds. If these are others, other entries have
    # changed.
    alike = [(one, other) for one, other in same_world if {*one.builds_on} == {*other.builds_on}]
    landed_s = min((landing.at_s for landing in landings(run)), default=0.0)
    made = compare(alike, theirs, run.history, tolerance, ignore, landed_s)
    if other:
        clash = _clash(run, twins, in_order(made.clashes), tolerance) if made.clashes else other
        return clash if clash.outcome is Outcome.FAILED else other
    strange = unexcused(run, twins, ours, theirs)
    found = in_order([*made.clashes, *([] if vary else strange)])
    if found:
        return _clash(run, twins, found, tolerance)
    if several := unclear(ours, theirs[0]):
        return inconclusive(
            f"{well}; nothing shows with which one of the twin's {listed([one.at for one in several])} is to be "
            "compared, and none has the same contents"
        )
    if not made.entries:
        why = "the twins differ from each other in all of them" if alike else _without_a_pair(both, same_world)
        return inconclusive(f"{well}; their contents could not be compared: {why}")
    if doubt := _doubt(made):
        return inconclusive(f"{well}; {doubt}")
    aside = next((one for one in strange if vary and one.ours is not None and is_aside(run, one)), None)
    if aside:
        return inconclusive(f"{well}; {words(aside)}, and each run saves at other steps")
    if (more or vary) and not any((one.saved_s or 0.0) > run.history.attempts[-1].started_s for one, _other in alike):
        by_time = "each run saves at other steps" if vary else f"{_newest(ours).at} is not in the twin"
        return inconclusive(f"{well}; {by_time}, and no checkpoint since the last start could be compared")
    exact = not (made.rounded or made.within or made.learned)
    if exact and (odd := unread_that_differ(alike, theirs, ignore, landed_s)):
        name, one = odd
        return inconclusive(
            f"{well}; the contents of {len(alike)} equal the twin's at the same step, but {name} in {one.at} has other "
            "bytes than the twin's or is missing, and files of this kind are not read: it may hold other state. If it "
            "may differ, name it in `ignore`"
        )
    own = {one.path for one, _other in both}
    alone = [one for one in ours if one.good and one.path not in own]
    return passed(
        f"{well}; the contents of {len(alike)} equal the twin's at the same step{but(made, run)}"
        f"{left_out(len(both) - len(same_world), len(same_world) - len(alike), alone)}",
        checkpoints=len(ours), compared=len(alike), entries=len(made.entries),
    )  # fmt: skip


def _doubt(made: Compared) -> str:
    """Why chance may explain that the contents differ. Empty if it can't."""
    if made.noisy:
        return f"the twins differ too much from each other to judge {listed(made.noisy)}"
    if made.doubtful:
        far = max(made.doubtful.values())
        return (
            f"{listed(made.doubtful)} differ from the twin's by {far:.1g} of their norm at most, which may be chance "
            "or rounding: set a tolerance to decide"
        )
    return ""


def _without_a_pair(both: Sequence[Pair], same_world: Sequence[Pair]) -> str:
    """Why no checkpoint is compared with one of the twin's. `both`: those of the same step; `same_world`: of the same
    number of ranks, too."""
    if same_world:
        return "with the twin's, all build upon others than these"
    if both:
        return "with the twin's, all were saved on another number of ranks"
    return "with the twin's, none is of a step at which the twin has a checkpoint"


def _other_newest(run: Record, twins: Sequence[Record], newest: int | None, due: int | None) -> Finding:
    """The failure of a newest checkpoint that is of another step than the twin's. It is a consequence if the job itself
    ended in another step."""
    words = f"the newest checkpoint is of step {newest}, the twin's of step {due}"
    ends = final_step(run) or 0, final_step(twins[0]) or 0
    if ends[0] == ends[1] or max(newest or 0, due or 0) <= min(ends):
        return failed(words, newest=newest, twin=due)
    history = history_of(run, twins)
    seen = all(made.executions.loss_seen.any() for made in (history, twins[0].history))
    why = Comparison(run, history, twins, None).why_other_end() if seen else ""
    return failed(
        f"the job's last step is {ends[0]}, and the twin's {ends[1]}: {words}{f'. {why}' if why else ''}",
        First(What.LAST, min(ends) + 1), newest=newest, twin=due,
    )  # fmt: skip


def _removed(run: Record, first: Clash) -> str:
    """A clause about a whole checkpoint that the job saved and then removed. Empty if that was not seen."""
    if first.kind != "checkpoint" or first.ours is not None:
        return ""
    path = posixpath.join(root_of(run), first.path)
    save = saved_as(path, [one for one in run.history.saves if one.ok])
    gone = [one for one in run.of_kind(Kind.REMOVED) if is_below(path, posixpath.normpath(str(one.data["path"])))]
    if save is None or not gone or gone[-1].mono_s < save.begun_s:
        return ""
    return said("saved and removed", saved=save.attempt, attempt=gone[-1].attempt)


def _clash(run: Record, twins: Sequence[Record], found: list[Clash], tolerance: float | None) -> Finding:
    first, landed, history = found[0], landings(run), history_of(run, twins)
    invalid = apart_before(run, history, twins, tolerance)
    if invalid or not landed:
        where = f"the {invalid.what} differs in step {invalid.step}" if invalid else "no fault landed"
        return inconclusive(f"the twin can't be compared with this run: {where}, and {words(first)}")
    if len(twins) == 1 and all(map(may_be_a_clock, found)):
        return inconclusive(f"{words(first)}: it may be a clock; a second twin would show that", entries=len(found))
    bitwise = next(differences(history.by_step(), twins[0].history.by_step(), 0.0), None)
    if bitwise and all(clash.kind == "checkpoint" and clash.ours is not None for clash in found):
        return inconclusive(f"{words(first)}: the losses are not the twin's either, and may decide that")
    losses = Comparison(run, history, twins, tolerance) if bitwise else None
    loss = losses.first if losses else None
    clear = losses.are_clear if losses else not run.history.unplaced
    seen = all(made.executions.loss_seen.any() for made in (history, twins[0].history))
    more, what = len({clash.name for clash in found}) - 1, losses.first_in_words if losses else ""
    means = meaning(loss, bitwise is None, first, seen=seen, clear=clear, what=what)
    gone = _removed(run, first)
    return failed(
        f"{words(first)}{f': {gone}' if gone else ''}{also(first, more)}{'' if gone else f'. {means}'}",
        None if first.step is None else First(What.SAVED, first.step),
        step=first.step, entry=first.name, entries=more + 1,
    )  # fmt: skip


def _newest(ours: Sequence[Checkpoint]) -> Checkpoint:
    """The newest good checkpoint; of several files of its step, the one that holds the model."""
    last = next((checkpoint for checkpoint in reversed(ours) if checkpoint.good), ours[-1])
    same = {one.path: one for one in ours if one.good and one.step == last.step and last.step is not None}
    return same[main_of([last.path, *same])] if same else last


def _count(ones: Sequence[Checkpoint]) -> int:
    """The number of checkpoints: files of one step are one."""
    return len({one.path if one.step is None else one.step for one in ones})
