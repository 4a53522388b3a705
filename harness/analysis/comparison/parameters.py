"""Compares the parameters of a run with those of its twins, step by step, and makes the finding; and the clauses for
checkpoints that differ from the twin's, or are equal except for some entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torchaos.harness.analysis.checkpointing.checkpoint_contents import Checkpoint, Clash, checkpoints_of
from torchaos.harness.analysis.checkpointing.checkpoint_diff import Compared, clashes
from torchaos.harness.analysis.checkpointing.resumed_from import apart, resumed_in_words
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import Difference, differences, uneven, until
from torchaos.harness.analysis.comparison.causes import Cause, likeliest_cause
from torchaos.harness.analysis.ending import final_step, own_exit_code
from torchaos.harness.analysis.tolerance import (
    CAP,
    CERTAIN,
    PUT_BACK,
    ROUNDING,
    WEIGHTS,
    Loaded,
    Steps,
    but_for_rounding,
    certainly_beyond,
    distances,
    drift,
    learned,
    loaded,
    relative,
    rounded_from,
)
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed
from torchaos.harness.record.history import Execution, History
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record


def but(made: Compared, run: Record) -> str:
    """Phrases about the differences that were allowed, for the reason of an assertion that passes."""
    phrases = []
    if made.rounded:
        phrases.append(but_for_rounding(made.rounded, run.history))
    if made.within:
        phrases.append(f"within the tolerance, at most {made.within:.1g} apart")
    if made.learned:
        far = max(made.learned.values())
        phrases.append(f"except {listed(made.learned)}, at most {far:.1g} apart, as far as the twins are")
    if made.unsized:
        without = "the twins differ from each other, or from this run before any fault"
        many = "1 entry" if len(made.unsized) == 1 else f"{len(made.unsized)} entries"
        phrases.append(f"except {many} in which {without} ({listed(made.unsized)})")
    if made.restarts:
        phrases.append(f"except {listed(made.restarts)}, which show the restart")
    if made.ignored:
        phrases.append(f"except {listed(made.ignored)}, which the scenario ignores")
    return "".join(f", {phrase}" for phrase in phrases)


def left_out(other_world: int, other_base: int, alone: Sequence[Checkpoint]) -> str:
    """Clauses about checkpoints that were not compared. `other_world`: how many were saved on another number of ranks;
    `other_base`: how many are deltas that build upon others than the twin's; `alone`: the checkpoints that the twin
    lacks."""
    world = f"those of {other_world} more were not compared: they were saved on another number of ranks"
    base = f"those of {other_base} more were not compared: they build upon others than the twin's"
    extra = f"{listed([own.at for own in alone])} {'is' if len(alone) == 1 else 'are'} not in the twin"
    return (f"; {world}" if other_world else "") + (f"; {base}" if other_base else "") + (f"; {extra}" if alone else "")


def words(first: Clash) -> str:
    if first.kind == "checkpoint" and first.ours is None:
        return f"{first.path} ({first.theirs}) is missing, and the twin has it"
    if first.kind == "checkpoint":
        return f"{first.path} is of {first.ours}, and the twin's of {first.theirs}"
    where = f"{first.path} (step {first.step})" if first.step is not None else first.path
    if first.ours is None:
        return f"the {first.kind} {first.name} is missing in {where}, and is there in the twin's"
    if first.theirs is None:
        return f"the {first.kind} {first.name} in {where} is not in the twin's"
    instead = f": {first.ours} instead of {first.theirs}" if first.kind == "value" else ""
    size = f" by {first.distance:.1g} of its norm" if first.kind == "tensor" and first.distance else ""
    return f"the {first.kind} {first.name} in {where} differs from the twin's{instead}{size}"


def also(first: Clash, more: int) -> str:
    """A clause with the number of further clashes, to follow the clause about the first clash."""
    if not more:
        return ""
    if first.kind == "checkpoint":  # the others may be entries
        return f", and there {'is' if more == 1 else 'are'} {counted(more, 'other difference')}"
    others = "1 other entry" if more == 1 else f"{more} other entries"
    if first.ours is not None and first.theirs is not None:
        return f", and so {'does' if more == 1 else 'do'} {others}"
    return f", and {others} {'is' if more == 1 else 'are'} not as in the twin either"


def meaning(
    loss: Difference | None, bitwise: bool, first: Clash, *, seen: bool, clear: bool = True, what: str = ""
) -> str:  # fmt: skip
    """A sentence about the meaning of the first clash. `loss`: the first difference of the losses that neither noise
    nor rounding explains; None: there is none. `bitwise`: whether the losses agree bit by bit, as far as both runs show
    them. `seen`: whether both runs show losses. `clear`: whether it is known if they agree. `what`: what differs in
    `loss`, if not `loss.what`."""
    agree = said("losses agree" if bitwise else "losses near")
    name = first.name.rpartition(":")[2]
    hint = f" If it may differ: checkpoint_integrity: {{ignore: [{name}]}}." if first.kind == "value" else ""
    if loss is None and not seen:
        return f"No losses were recorded that would show whether the training differs, too.{hint}"
    if not clear:
        return f"Whether the losses agree is not clear.{hint}"
    if loss is None and first.kind == "checkpoint":
        return said("decides saves", agree=agree)
    if loss is None:
        return said("no loss shows", agree=agree, hint=hint)
    if first.step is not None and loss.step > first.step:
        return f"The losses differ only later, from step {loss.step} on."
    return f"The {what or loss.what} differs from step {loss.step} on, so the job had left the twin's path before."


def listed(names: Iterable[str]) -> str:
    """The first three names in order, and an ellipsis if there are more."""
    found = sorted(names)
    return ", ".join(found[:3]) + (", …" if len(found) > 3 else "")


_ASK = "`replicas_only: true` compares only the replicas"


class AgainstTwins:
    """Compares the parameters of a run with those of its twins.

    `ours`: the steps that count; `early`: the steps before the first fault, which show whether the twins can be used to
    judge the run."""

    def __init__(self, run: Record, history: History, twins: Sequence[Record], ours: Steps, early: Steps) -> None:
        self._run, self._history, self._twins, self._ours, self._early = run, history, twins, ours, early
        self._all = [until(twin.history.by_step(), final_step(twin)) for twin in twins]
        self._theirs = self._all[0]

    def finding(self, replicas: str) -> Finding:
        """The finding about the parameters. `replicas`: a clause about the comparison between the ranks."""
        varying = next((step for other in self._all[1:] if (step := _first(other, self._theirs)) is not None), None)
        if varying is not None and all(_sketched(steps) for steps in (self._ours, *self._all)):
            return self._under_noise(replicas)
        invalid = _first(self._early, self._theirs)
        if invalid is not None or varying is not None:
            what = "before any fault" if invalid is not None else "between the twins themselves"
            return inconclusive(
                f"{replicas}; it is not known whether the parameters are the twin's: they differ {what}, in step "
                f"{varying if invalid is None else invalid}. This job is not bitwise reproducible: {_ASK}",
            )
        first = _first(self._ours, self._theirs)
        if first is None:
            return self._well(replicas, "the twin's")
        if (since := rounded_from(self._history)) is not None and first >= since:
            return self._rounded(replicas, first)
        return self._other(replicas, first)

    def _well(self, replicas: str, equal: str) -> Finding:
        theirs, last = self._theirs, max(self._ours, default=0)
        common = [step for step in self._ours if step in theirs and _comparable(self._ours[step], theirs[step])]
        due = sorted({s.global_step for s in self._run.history.saves if s.global_step and s.global_step in theirs})
        ends = last, max(theirs)
        is_other = ends[0] != ends[1] and own_exit_code(self._run) == 0
        missed = [step for step in (*due, *([] if is_other else ends[1:])) if step not in common]
        if missed:
            return inconclusive(
                f"{replicas}; the parameters after step {missed[0]} were not seen on the same ranks as in the twin"
            )
        at = f"at {counted(len(due), 'checkpoint')}" if due else ""
        if is_other:
            return failed(
                f"{replicas}, and the parameters are {equal} after the {counted(len(common), 'step')} that both made"
                f"{f', {at}' if at else ''}; but the job ended with step {ends[0]}, and the twin with step {ends[1]}",
                First(What.LAST, min(ends) + 1), steps=len(common), checkpoints=len(due),
            )  # fmt: skip
        where = f"{at} and " if at else ""
        all_steps = f"all {counted(len(common), 'step')}"
        return passed(
            f"{replicas}, and the parameters are {equal} after {all_steps}, {where}at the end",
            steps=len(common), checkpoints=len(due),
        )  # fmt: skip

    # -- twins that differ from each other ----------------------------------------------------------------------

    def _under_noise(self, replicas: str) -> Finding:
        allowed = learned(self._all, WEIGHTS)
        early = learned(self._all, WEIGHTS, max(self._early, default=0))
        begun = distances(self._early, self._all, WEIGHTS, 0.0)
        odd = next((step for step, far in begun.items() if far > early.allowed(step, CERTAIN)), None)
        if odd is not None:
            return inconclusive(
                f"{replicas}; it is not known whether the parameters are the twins': before any fault, after step "
                f"{odd}, they are {begun[odd]:.1g} of their norm from the nearest twin's, and the twins are "
                f"{early.spreads[odd]:.1g} from each other. {_ASK}"
            )
        put_back = list(loaded(self._history))
        bound = max((min(allowed.allowed(resumed.step), CAP) for resumed in put_back), default=0.0)
        if inexact := _inexact(self._history, put_back, bound):
            return inexact
        far = distances(self._ours, self._all, WEIGHTS, 0.0)
        first = certainly_beyond(far, allowed)
        if first is not None:
            return self._beyond(replicas, first, far[first], allowed.spreads[first])
        exact = bool(put_back) and not any(resumed.off for resumed in put_back)
        restored = f"; {said('bits restored')}" if exact else ""
        dark = next((step for step in far if not allowed.judges(step)), None)
        if dark is not None:
            return inconclusive(
                f"{replicas}{restored}; too noisy to judge the later parameters: after step {dark} the twins' are "
                f"{allowed.spreads[dark]:.1g} of their norm from each other. Seed the job, or {_ASK}"
            )
        near = next((step for step in far if far[step] > allowed.allowed(step)), None)
        if near is not None:
            return inconclusive(
                f"{replicas}{restored}; after step {near} the parameters are {far[near]:.1g} of their norm from the "
                f"nearest twin's, and the twins are {allowed.spreads[near]:.1g} from each other: a defect, or chance. "
                f"{_ASK}"
            )
        words = f"as near to the twins' as the twins' are to each other (at most {allowed.largest:.1g} of their norm)"
        return self._well(f"{replicas}{restored}", words)

    def _beyond(self, replicas: str, first: int, far: float, spread: float) -> Finding:
        rank = min(self._ours[first])
        words = (
            f"after step {first} the parameters are {far:.1g} of their norm from the nearest twin's, and those of the "
            f"twins {spread:.1g} from each other, {resumed_in_words(self._history, self._ours[first][rank])}."
        )
        if odd := uneven(self._theirs):
            return inconclusive(f"{replicas}; {words} But {odd}: it is not known whether that is a defect.")
        return failed(words, First(What.PARAMETERS, first), step=first, rank=rank, off=far)

    # -- twins that are bitwise equal ----------------------------------------------------------------------------

    def _rounded(self, replicas: str, first: int) -> Finding:
        """The finding if the first difference may come from another order of summation."""
        if inexact := _inexact(self._history, loaded(self._history)):
            return inexact
        found = drift(self._ours, self._theirs)
        if found is None or found.other is not None:
            return self._other(replicas, first)
        if found.unclear is not None:
            return inconclusive(
                f"{replicas}; after step {found.unclear} the parameters moved away from the twin's by more than "
                f"rounding alone does at once ({found.farthest:.1g} of their norm at most): a defect, or rounding that "
                "has grown, or is of a low precision",
                step=found.unclear,
            )
        return self._well(replicas, f"the twin's, {but_for_rounding(found.farthest, self._history)},")

    def _other(self, replicas: str, first: int) -> Finding:
        theirs, by_rank = self._theirs, self._ours[first]
        rank = next(rank for rank in sorted(by_rank) if by_rank[rank].parameters != theirs[first][rank].parameters)
        since = {s.global_step for s in self._run.history.saves if s.global_step and s.global_step >= first}
        saved = sorted(step for step in since if _first(_at(self._ours, step), _at(theirs, step)) is not None)
        words = (
            f"the parameters differ from the twin's first after step {first}, on rank {rank}, "
            f"{resumed_in_words(self._history, by_rank[rank])}{self._by(first, rank)}."
        )
        measured = {"step": first, "rank": rank, "bad_checkpoints": len(saved)}
        if odd := uneven(theirs):
            words = f"{words} But {odd}: it is not known whether that is a defect."
            return inconclusive(f"{replicas}; {words}", First(What.PARAMETERS, first), **measured)
        if not _sketched(self._ours) and self._may_be_rounding():
            return inconclusive(
                f"{replicas}; {words} No loss differs by more than {ROUNDING:g}, and with three ranks or more DDP sums "
                "in another order after any restart, so this may be rounding: see loss_continuity.",
                **measured,
            )
        cause = self._why_other(first, rank)
        story = f"{words} {cause.words}{self._reached(saved)}"
        return replace(failed(story, First(What.PARAMETERS, first), **measured), cause=cause.short)

    def _by(self, first: int, rank: int) -> str:
        """The gradient norms of the step, in brackets. They show the size of a difference; check sums do not."""
        mine, twins = self._ours[first][rank].norm, self._theirs[first][rank].norm
        if mine is None or twins is None:
            return ""
        backwards = "backwards" if len(self._ours[first][rank].losses) > 1 else "backward"
        by = relative(mine, twins)
        of = f"{mine:.6g} instead of {twins:.6g}{f', {by:.2g} off' if math.isfinite(by) else ''}"
        return f" (the gradient's norm after the {backwards} is {of if by else 'the same'})"

    def _why_other(self, first: int, rank: int) -> Cause:
        found = next(differences(self._ours, self._theirs, 0.0), None)
        mine, twins = self._ours[first][rank], self._theirs[first][rank]
        life = self._history.attempt(mine.attempt)
        if found is None and (life is None or not life.number):
            seen = mine.loss_seen and twins.loss_seen
            return Cause(said("fault alone" if seen else "fault unseen"), said("fault changed"))
        if found is None or found.step > first:
            found = Difference("parameters", first, rank, mine.norm, twins.norm, 0.0)
        return likeliest_cause(self._run, self._history, self._ours, self._theirs, found, self._twins[0], self._all)

    def _reached(self, saved: Sequence[int | None]) -> str:
        if not saved:
            return ""
        ours, theirs = checkpoints_of(self._run), checkpoints_of(self._twins[0])
        names = [clash.name for clash in clashes(ours or [], theirs or []) if clash.kind == "tensor"]
        more = f" and {counted(len(set(names)) - 1, 'more tensor')}" if len(set(names)) > 1 else ""
        which = f" ({names[0]}{more})" if names else ""
        return f" It reached {counted(len(saved), 'checkpoint')}, first that of step {saved[0]}{which}."

    def _may_be_rounding(self) -> bool:
        if max(len(by_rank) for by_rank in self._ours.values()) < 3:
            return False
        return all(difference.relative <= ROUNDING for difference in differences(self._ours, self._theirs, 0.0))


def _inexact(history: History, put_back: Iterable[Loaded], bound: float = 0.0) -> Finding | None:
    """The finding about a rank that began an attempt with parameters that differ from the saved parameters by more than
    `bound`, relative to their norm. None if there is none."""
    least = max(PUT_BACK, bound)
    off = next((resumed for resumed in put_back if math.isfinite(resumed.off) and resumed.off > least), None)
    if off is None:
        return None
    life = history.attempt(off.attempt)
    other = apart(life.segments[0]) if life and life.segments else None
    why = said("not exact")
    if other and other.sure and off.rank in other.ranks:
        ranks = ", ".join(map(str, other.ranks))
        why = f": {said('steps apart', ranks=ranks, step=other.step, base=off.step)}"
    return failed(
        said("inexact", rank=off.rank, attempt=off.attempt, off=off.off, step=off.step, why=why),
        First(What.PARAMETERS, off.step + 1), step=off.step + 1, rank=off.rank, off=off.off,
    )  # fmt: skip


def _comparable(ours: Mapping[int, Execution], theirs: Mapping[int, Execution]) -> bool:
    return ours.keys() == theirs.keys() and all(
        done.parameters is not None for by_rank in (ours, theirs) for done in by_rank.values()
    )


def _first(ours: Steps, theirs: Steps) -> int | None:
    """The first step after which the parameters differ. Only steps count in which the same ranks' parameters were seen
    in both runs. None if there is none."""
    common = sorted(step for step in ours.keys() & theirs.keys() if _comparable(ours[step], theirs[step]))
    return next(
        (s for s in common if any(done.parameters != theirs[s][rank].parameters for rank, done in ours[s].items())),
        None,
    )


def _at(steps: Steps, step: int) -> Steps:
    return {step: steps[step]} if step in steps else {}


def _sketched(steps: Steps) -> bool:
    return all(done.sketch for by_rank in steps.values() for done in by_rank.values())
