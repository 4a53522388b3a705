"""Judges from which step the attempts of a run continued, and what they lost."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import replace
from math import inf

from torchaos.harness.analysis import ending
from torchaos.harness.analysis.checkpointing.checkpoint_contents import Checkpoint, checkpoints_of, is_below, root_of
from torchaos.harness.analysis.checkpointing.damage_reaction import damages
from torchaos.harness.analysis.checkpointing.resume_points import points_of
from torchaos.harness.analysis.checkpointing.resumed_from import Apart, Resume, SavedCheckpoint, apart, name_of, resumes
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.ending import not_restarted
from torchaos.harness.analysis.missing_data import why_unplaced
from torchaos.harness.interfaces import Finding, Outcome, failed, inconclusive, passed
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import checkpoint_of, final_path, number_in_name
from torchaos.harness.record.history import Save, saved_as
from torchaos.harness.record.history.step_evidence import STATE
from torchaos.harness.record.plan import counted, numbered
from torchaos.harness.record.record import Record

_NOT_THERE = "Whether the newer one was still there is not known."
_NOT_KNOWN = "No load of a checkpoint was seen, and whether this one was still there is not known."


class Resumes:
    """The resumes of a run: whether each went on from the newest complete checkpoint of the earlier attempts, and lost
    at most `allowed` steps (None: any number)."""

    def __init__(self, run: Record, allowed: int | None = None) -> None:
        self._run, self._allowed, self._found = run, allowed, resumes(run)

    def finding(self) -> Finding:
        if not self._found:
            if len(self._run.history.attempts) == 1:
                return not_restarted(self._run, "so no step was lost")
            return _not_resumed(self._run)
        finding = self._worst()
        lost = [resume.reached - resume.attempt.base for resume in self._found if resume.attempt.base is not None]
        measured = {"resumes": len(self._found), "lost_steps": max(lost, default=None)}
        bound = {} if self._allowed is None else {"steps": self._allowed}
        return replace(finding, measured={**measured, **finding.measured}, bound=bound)

    def _worst(self) -> Finding:
        found = [self._of(resume) for resume in self._found]
        by_outcome = sorted(found, key=lambda one: ("failed", "inconclusive", "passed").index(one.outcome.value))
        if len(found) == 1 or by_outcome[0].outcome is not Outcome.PASSED:
            return by_outcome[0]
        costliest = found[max(range(len(found)), key=lambda at: _redone(self._found[at]))]
        many = f"each of {len(found)} resumes lost as little as possible; the costliest"
        return replace(costliest, reason=f"{many}: {costliest.reason}")

    def _of(self, resume: Resume) -> Finding:
        return replace(_OneResume(self._run, resume, self._allowed).finding(), at_s=_first_s(self._run, resume))


class _OneResume:
    """One resume. Its checks are made one after the other; the first that finds something makes the finding."""

    def __init__(self, run: Record, resume: Resume, allowed: int | None) -> None:
        self._run, self._resume, self._allowed = run, resume, allowed
        self._attempt, self._base = resume.attempt, resume.attempt.base or 0
        scratch = self._base == 0 and self._attempt.loaded is None
        begun = "started from scratch" if scratch else f"went on from step {self._base}"
        self._begun = f"attempt {self._attempt.number} {begun}"

    def finding(self) -> Finding:
        if self._attempt.base is None:
            return inconclusive(why_unplaced(self._run, (self._attempt.number,)))
        questions = (
            self._older_than_the_newest, self._older_weights, self._ranks_apart, self._more_than_allowed,
            self._perhaps_newer, self._nothing_again, self._from_elsewhere, self._without_files, self._no_checkpoint,
            self._newer_unseen,
        )  # fmt: skip
        if answer := next(filter(None, (ask() for ask in questions)), None):
            return answer
        first_s = _first_s(self._run, self._resume) or inf
        damaged = any(one.contents and one.step == self._base and one.at_s < first_s for one in damages(self._run))
        newest = "whose checkpoint the fault had damaged" if damaged else "the newest complete checkpoint"
        reached = f"after step {self._resume.reached} had been done"
        if self._best.step < self._base and not damaged:
            newest, reached = reached, f"and the newest checkpoint sure to be complete is of step {self._best.step}"
        return passed(
            f"attempt {self._attempt.number} went on from step {self._base}, {newest}, {reached}",
            base=self._base, newest=self._best.step,
        )  # fmt: skip

    @property
    def _best(self) -> SavedCheckpoint:
        assert self._resume.best is not None  # `_no_checkpoint` was asked before
        return self._resume.best

    def _older_than_the_newest(self) -> Finding | None:
        """Finds a resume from an older checkpoint, although a newer one was complete."""
        run, resume, best = self._run, self._resume, self._resume.best
        if not best or self._base >= best.step or _is_newest(run, resume):
            return None
        if best.late and (blind := self._why_late_is_unclear(best)):
            return inconclusive(
                f"{self._begun}, and {blind}. Training went on while {name_of(best.path)} was saved, so it may hold "
                f"the state of an earlier step than {best.step}"
            )
        needless = f"{counted(best.step - self._base, 'step', 'was/were')} lost needlessly"
        its = f"the checkpoint of step {best.step} ({name_of(best.path)})"
        if gone := _gone(run, resume, best):
            reason = f"{self._begun}: {its} had been complete, but {gone}: {needless}."
        else:
            cause = _cause(run, resume, best, self._base)
            was = "had been" if cause == _NOT_KNOWN or _NOT_THERE in cause else "was already"
            destroyed = _then_destroyed(run, resume, best)
            reason = f"{self._begun}, although {its} {was} complete: {needless}. {cause}{destroyed}"
        return failed(reason, base=self._base, newest=best.step, needless=best.step - self._base)

    def _older_weights(self) -> Finding | None:
        """Finds weights of an earlier step than the step from which everything else continued."""
        sure = (one for one in self._attempt.witnesses if one.name == STATE and one.fits and one.trust >= 1.0)
        weights = next((max(one.fits) for one in sure), self._base)
        if weights >= self._base:
            return None
        lost = counted(self._base - weights, "step")
        return failed(
            said("work lost", attempt=self._attempt.number, step=self._base, weights=weights, lost=lost),
            base=self._base, needless=self._base - weights,
        )  # fmt: skip

    def _why_late_is_unclear(self, best: SavedCheckpoint) -> str:
        """A clause: why the step of a checkpoint that was saved while training went on is not known. Empty if the
        attempt loaded another one, whose save was seen."""
        if any(load.ok and load.attempt == self._attempt.number and load.path in best.paths
               for load in self._run.history.loads):  # fmt: skip
            return f"it loaded {name_of(best.path)}"
        if _loaded(self._run, self._resume) is not None:
            return ""
        if self._attempt.loaded:
            return f"the save of {name_of(self._attempt.loaded)}, which it loaded, was not seen"
        return "no load of a checkpoint was seen in it"

    def _ranks_apart(self) -> Finding | None:
        """Finds ranks that went on from another step."""
        other = apart(self._attempt)
        if not other:
            return None
        short = replace(other, rests_on=_in_short(self._run, other.rests_on))
        return _of_several(self._begun, short)

    def _more_than_allowed(self) -> Finding | None:
        if self._allowed is None or _redone(self._resume) <= self._allowed:
            return None
        return failed(f"{self._begun}: {self._bounded()}")

    def _perhaps_newer(self) -> Finding | None:
        """Finds a newer checkpoint that may have been incomplete."""
        newer = self._resume.newer
        if not newer or self._base >= newer.step:
            return None
        lacks, gone = ", ".join(newer.lacks), numbered("node", newer.gone)
        state = f"it lacks {lacks}, which most checkpoints have" if lacks else "its files had been written"
        why = f"{state}, and nothing shows whether the job had finished that save"
        if newer.gone:
            why = f"its files on the local disk of {gone} were gone, and whether copies were left is not known"
        doubt = f", which may have been incomplete: {why}"
        if newer.upon:
            doubt = f", which may build upon {newer.upon}, and that was damaged"
        if newer.elsewhere:
            doubt = f" in {posixpath.dirname(checkpoint_of(newer.path))}: no resume loaded one from there"
        return inconclusive(
            f"{self._begun}, and not from the newer checkpoint of step {newer.step} ({name_of(newer.path)}){doubt}"
        )

    def _nothing_again(self) -> Finding | None:
        best = self._resume.best
        if self._base != self._resume.reached or self._attempt.conflicts or (best and best.step >= self._base):
            return None
        return passed(
            f"{self._begun}, the highest step that had been done: no step was done again",
            base=self._base,
        )  # fmt: skip

    def _from_elsewhere(self) -> Finding | None:
        """Finds a resume from a later step than that of any checkpoint that was seen."""
        known = [one for one in (self._resume.best, self._resume.newer) if one]
        seen = max(known, key=lambda one: one.step, default=None)
        if not seen or seen.step >= self._base or self._attempt.loaded is not None:
            return None
        return inconclusive(
            f"{self._begun}, from a source that was not seen. The newest checkpoint that was seen is of step "
            f"{seen.step} ({name_of(seen.path)}): whether one of a later step than {self._base} was there is not known"
        )

    def _without_files(self) -> Finding | None:
        if self._allowed is None or self._attempt.loaded is not None or not _has_no_files(self._run):
            return None
        return passed(
            f"{self._begun} after step {self._resume.reached} had been done: {self._bounded()}. No file was seen to "
            "hold a checkpoint, so whether a newer copy was in memory is not known",
            base=self._base,
        )

    def _no_checkpoint(self) -> Finding | None:
        if self._resume.best is not None:
            return None
        if self._base == 0 and _all_were_seen(self._run):
            return passed(
                f"no checkpoint was complete when attempt {self._attempt.number} was started: it had to begin from "
                "scratch",
                base=0,
            )
        return inconclusive(
            f"{self._begun}, and no checkpoint was seen to be complete before it{_unseen(self._run)}"
        )  # fmt: skip

    def _newer_unseen(self) -> Finding | None:
        newer = _newer_unseen(self._run, self._base, self._resume.reached)
        if not newer:
            return None
        return inconclusive(
            f"{self._begun}; {newer.at} is there at the end, and its save was not seen: nothing shows whether it was "
            "there when the attempt began"
        )

    def _bounded(self) -> str:
        allowed = f"{self._allowed} {'is' if self._allowed == 1 else 'are'} allowed"
        return f"{counted(_redone(self._resume), 'step', 'was/were')} lost, and {allowed}"


def beside_replicas(run: Record) -> Finding | None:
    """A replica that comes back takes its state from a replica that continued, so it must lose no step. None if no
    replica continued."""
    parts = run.of_replicas
    back = [(number, resume) for number, part in enumerate(parts) for resume in resumes(part)]
    if not back or not all(_went_on(parts, number, one) for number, one in back):
        return None
    return min((_beside(parts, *one) for one in back), key=lambda one: one.outcome is Outcome.PASSED)


def _redone(resume: Resume) -> int:
    """The number of steps that were done again."""
    return max(0, resume.reached - (resume.attempt.base or 0))


def _is_newest(run: Record, resume: Resume) -> bool:
    """Whether the attempt loaded the newest checkpoint, by the order of the saves. If training went on during the
    saves, a checkpoint may hold an earlier state than that of the step at which its save began."""
    own, best = _loaded(run, resume), resume.best
    return bool(best and own and own.in_thread and (own.ended_s or 0.0) >= best.whole_s)


def _loaded(run: Record, resume: Resume) -> Save | None:
    """The save of the checkpoint that the attempt loaded. None if it was not seen."""
    path = resume.attempt.loaded
    return saved_as(path, run.history.saves, resume.attempt.started_s) if path else None


def _first_s(run: Record, resume: Resume) -> float | None:
    """When the first step after the resume was done."""
    return run.history.of_segment(resume.attempt.number, resume.attempt.after).first_s()


def _in_short(run: Record, words: str) -> str:
    """`words`, with paths relative to the folder of the checkpoints."""
    root = root_of(run)
    return words.replace(f"{root}/", "") if root else words


def _of_several(begun: str, other: Apart) -> Finding:
    ranks = numbered("rank", other.ranks)
    if other.sure:
        return failed(
            f"{begun}, but {ranks} loaded the checkpoint of step {other.step}, as the optimizer's counter confirms: "
            f"{other.rests_on}. The state of the job is not of one step",
            ranks=list(other.ranks), base=other.step,
        )  # fmt: skip
    they, were = ("it", "was") if len(other.ranks) == 1 else ("they", "were")
    return inconclusive(
        f"{begun}, and {ranks} loaded a checkpoint of step {other.step}: nothing that was recorded shows whether "
        f"{they} went on from there, or {were} then given the state of the other ranks"
    )


def _newer_unseen(run: Record, base: int, reached: int) -> Checkpoint | None:
    """A checkpoint from which the job could have resumed, although its save was not seen: its step is after `base`, and
    was reached. None if there is none."""
    points, root = points_of(run), root_of(run)
    return next(
        (
            checkpoint
            for checkpoint in checkpoints_of(run) or []
            if checkpoint.saved_s is None and checkpoint.good and base < (checkpoint.step or 0) <= reached
            if points.kinds and points.has(posixpath.join(root, checkpoint.path))
        ),
        None,
    )


def _has_no_files(run: Record) -> bool:
    """Whether the job may keep its checkpoints elsewhere than in files: no save to a file was seen, and the scenario
    names no folder, or one without any checkpoint that can be read at the end."""
    return not run.history.saves and (run.plan.job.checkpoints is None or checkpoints_of(run) == [])


def _unseen(run: Record) -> str:
    """A clause about checkpoints at the end whose save was not seen, or about a job that may have none in files; else
    empty."""
    if _has_no_files(run):
        where = "in memory, or in a format that is not read here"
        return f": if the job keeps them {where}, give `steps`, which bounds what may be lost"
    alone = [checkpoint.path for checkpoint in checkpoints_of(run) or [] if checkpoint.saved_s is None]
    return (
        f": nothing shows when {alone[0]} was saved. A save is seen if torch.save, torch.distributed.checkpoint or "
        "safetensors writes the file, or if the file has the size and the last bytes of a buffer that torch.save filled"
        if alone
        else ""
    )


def _all_were_seen(run: Record) -> bool:
    """Whether the save of every checkpoint that exists at the end was seen. Then no other save can have been missed
    either."""
    there = checkpoints_of(run) or []
    return bool(there) and all(one.saved_s is not None for one in there)


def _not_resumed(run: Record) -> Finding:
    """The finding for a restarted job in which only one attempt made steps."""
    first = int(run.history.executions.attempt.min())
    if first == run.history.attempts[0].number:
        return inconclusive("the job was restarted and made no further step: there is no resume to judge")
    base = next((attempt.base for attempt in run.history.attempts if attempt.number == first), None)
    if base is None:
        return inconclusive(why_unplaced(run, (first,)))
    return passed(f"no step had been done when attempt {first} began, so none was lost", resumes=0, base=base)


def _gone(run: Record, resume: Resume, best: SavedCheckpoint) -> str:
    """A clause: how the job itself destroyed a complete checkpoint before the first step of the attempt, by removing it
    or by writing over it. Empty if that was not seen."""
    number, by_s = resume.attempt.number, _first_s(run, resume) or inf
    removed = _removed(run, best, best.whole_s, by_s)
    whole = removed.keys() == best.paths
    if removed and (whole or len({checkpoint_of(one) for one in best.paths}) == 1):
        what = "it" if whole else " and ".join(sorted(map(posixpath.basename, removed)))
        if any(event.attempt == number for event in removed.values()) and run.history.begins_attempt(resume.attempt):
            return f"attempt {number} itself removed {what} before its first step"
        return f"the job removed {what}" + ("" if resume.newer else " before a newer one was complete")
    looked = next(
        (one for one in run.history.loads if one.missing and one.path in best.paths and one.attempt == number), None
    )
    if looked:
        return f"rank {looked.rank} of attempt {number} looked for it, and it did not exist"
    if any(number_in_name(one) is not None for one in best.paths):
        return ""
    over = _written_over(run, best, best.whole_s, by_s)
    return f"the save of step {over.global_step} began to write over it" if over else ""


def _then_destroyed(run: Record, resume: Resume, best: SavedCheckpoint) -> str:
    """A sentence: the attempt did not load this checkpoint, and removed it or wrote over it before it had reached the
    checkpoint's step again. Empty if that was not seen."""
    made = run.history.executions
    here = made.mono_s[(made.attempt == resume.attempt.number) & (made.global_step >= best.step)]
    span = best.whole_s, float(here.min()) if here.size else inf
    if any(event.attempt == resume.attempt.number for event in _removed(run, best, *span).values()):
        return f" The attempt then removed {name_of(best.path)}."
    if over := _written_over(run, best, *span):
        return f" The save of step {over.global_step} then wrote over {name_of(best.path)}."
    return ""


def _removed(run: Record, best: SavedCheckpoint, after_s: float, before_s: float) -> dict[str, Event]:
    """The files of the checkpoint that the job removed between two times, each with the event of its removal."""
    removed: dict[str, Event] = {}
    for event in run.of_kind(Kind.REMOVED):
        if after_s < event.mono_s < before_s:
            path = posixpath.normpath(str(event.data["path"]))
            removed |= dict.fromkeys((one for one in best.paths if is_below(one, path)), event)
    return removed


def _written_over(run: Record, best: SavedCheckpoint, after_s: float, before_s: float) -> Save | None:
    """The first save of another step that began between two times and wrote to a file of the checkpoint."""
    if any(final_path(one) != one for one in best.paths):
        return None
    again = (one for one in run.history.saves if one.path in best.paths and after_s < one.begun_s < before_s)
    return next((one for one in again if one.global_step not in (None, best.step)), None)


def _cause(run: Record, resume: Resume, best: SavedCheckpoint, base: int) -> str:
    loaded, tried = (
        resume.attempt.loaded,
        ending.failed_loads(run, resume.attempt.number) if run.history.begins_attempt(resume.attempt) else [],
    )
    other = f" Moreover, {resume.attempt.conflicts[0]}." if resume.attempt.conflicts else ""
    if tried:
        then = f", and then it loaded {name_of(loaded)}" if loaded else ""
        return f"It tried to load {ending.in_words(tried)}, and that failed{then}.{other}"
    if absent := [one.path for one in run.history.loads if one.missing and one.attempt == resume.attempt.number]:
        then = f", and then loaded {name_of(loaded)}" if loaded else ""
        return f"It looked for {ending.in_words(absent)}, which did not exist{then}.{other}"
    if loaded is not None and _was_there(run, resume, best):
        return said("wrong checkpoint", name=name_of(loaded), other=other)
    if loaded is not None:
        return f"It loaded {name_of(loaded)}. {_NOT_THERE}{other}"
    if base == 0:
        if any(one.saved_s is not None and one.attempt == best.attempt and one.step == best.step and one.good
               for one in checkpoints_of(run) or []):  # fmt: skip
            return said("no load")
        return _NOT_KNOWN
    return f"Which checkpoint was loaded was not seen.{other}"


def _was_there(run: Record, resume: Resume, best: SavedCheckpoint) -> bool:
    """Whether a complete checkpoint was still there when the attempt made its first step, as far as known: it is there
    at the end, or was removed, written over or loaded later. True if the end was not looked at."""
    at_end = checkpoints_of(run)
    if at_end is None:
        return True
    since_s, root = _first_s(run, resume) or inf, root_of(run)
    there = [posixpath.join(root, one.path) for one in at_end]
    later = [str(event.data["path"]) for event in run.of_kind(Kind.REMOVED) if event.mono_s >= since_s]
    later += [load.path for load in run.history.loads if load.ok and load.mono_s >= since_s]
    later += [save.path for save in run.history.saves if save.begun_s >= since_s]
    return all(any(is_below(path, one) or is_below(one, path) for one in (*there, *later)) for path in best.paths)


def _went_on(parts: Sequence[Record], number: int, one: Resume) -> bool:
    """Whether another replica made steps both before and after this restart, without a restart of its own."""
    at_s = one.attempt.started_s
    steps = [(other, peer.history.executions) for other, peer in enumerate(parts)]
    made = {
        (other, *one) for other, own in steps
        for one in zip(own.attempt.tolist(), (own.mono_s <= at_s).tolist(), strict=True)
    }  # fmt: skip
    return any((other, attempt, True) in made for other, attempt, before in made if other != number and not before)


def _beside(parts: Sequence[Record], number: int, resume: Resume) -> Finding:
    """Judges whether the replica continued from the highest step that the other replicas had done when it was started
    again."""
    base, at_s = resume.attempt.base or 0, resume.attempt.started_s
    done = [part.history.highest_step(before_s=at_s) or 0 for part in parts]
    lost = max(0, max(done) - base)
    if lost:
        return failed(
            f"attempt {resume.attempt.number} of replica {number} went on from step {base}, although another replica "
            f"had done step {max(done)} and went on: {counted(lost, 'step', 'was/were')} lost",
            resumes=1, lost_steps=lost,
        )  # fmt: skip
    return passed(
        f"replica {number} went on from step {base}, beside a replica that had never stopped: nothing was done again",
        resumes=1, lost_steps=0,
    )  # fmt: skip
