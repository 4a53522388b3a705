"""Whether the attempts of a job began with the state that had been saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchaos.harness.analysis.checkpointing.carried_state import Carried, mixed_state, resumes_carried
from torchaos.harness.analysis.checkpointing.resumed_from import name_of, ranks_apart_in_words
from torchaos.harness.analysis.checkpointing.state_differences import in_words as others_in_words
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.ending import not_restarted
from torchaos.harness.analysis.missing_data import why_unplaced
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.plan import enumerated, numbered
from torchaos.harness.record.record import Record


def restored_state(run: Record) -> Finding:
    """Judges whether every resume began with the state that the job had when it saved it."""
    history = run.history
    if history.unplaced:
        return inconclusive(why_unplaced(run, history.unplaced))
    found = list(resumes_carried(run))
    if not found:
        return _nothing_restored(run)
    for one in found:
        part = one.attempt.segments[0] if one.attempt.segments else None
        if part and (words := mixed_state(history, part) or ranks_apart_in_words(part)):
            return failed(words, First(What.PARAMETERS, one.step), step=one.step)
    if lost := next((one for one in found if one.lost), None):
        first_s = history.executions.of_attempt(lost.attempt.number).first_s()
        return replace(_lost(lost), at_s=first_s)
    blind = next((one for one in found if one.parameters is None or one.moments is None), None)
    return _not_comparable(blind) if blind else _restored(run, found)


def _nothing_restored(run: Record) -> Finding:
    """The finding for a run in which no attempt resumed from a step that the run had done."""
    if loaded := _loaded_again(run):
        return inconclusive(
            f"{loaded} was loaded after the fault, in the same attempt, and nothing shows "
            "whether that was to restore the state of an earlier step"
        )
    if len(run.history.attempts) == 1:
        return not_restarted(run, "so nothing had to be restored")
    if _nothing_was_saved(run):
        return passed(
            "no save of a checkpoint was complete when the job was restarted, so nothing could be restored",
            resumes=0,
        )
    return inconclusive("no attempt resumed from a step that this run had done, so nothing was restored")


def _not_comparable(blind: Carried) -> Finding:
    if blind.trained:
        told = f"{said('trained', found=blind.trained)}, over {blind.in_words}"
        return inconclusive(f"{told}: the check sums of all parameters are of other parameters, and can't be compared")
    return inconclusive(
        f"over {blind.in_words}, the check sums of the ranks can't be added up, and each rank's sum differs "
        "from its earlier sum: not all ranks reported a sum, or they hold parts of the model that are not "
        "DTensors"
    )


def _restored(run: Record, found: Sequence[Carried]) -> Finding:
    restored = said("restored", found=enumerated(found[-1].kept))
    more = f" and {len(found) - 1} more before it" if len(found) > 1 else ""
    unseen = "; no moments of an optimizer were seen" if found[-1].no_moments else ""
    if idle := sorted(set(range(found[-1].attempt.world_size)) - run.history.executions.ranks):
        unseen += f"; {said('restored elsewhere', ranks=numbered('rank', idle))}"
    well = passed(f"{restored}, over {found[-1].in_words}{more}{unseen}", resumes=len(found))
    odd = next((one for one in found if one.generators), None)
    if odd is None:
        return well
    told = f"{well.reason}. It does not judge RNG states: {odd.generators}"
    return replace(well, reason=told, cause="but the RNG state differs")


def _loaded_again(run: Record) -> str:
    """If the only attempt went back to an earlier step after a fault: the name of the checkpoint that it loaded.
    Otherwise empty."""
    history = run.history
    hits = [hit.mono_s for hit in run.of_kind(Kind.APPLYING)]
    back = history.put_back(history.attempts[0].number, min(hits)) if hits and len(history.attempts) == 1 else []
    return next((name_of(part.loaded) for part in back if part.loaded), "")


def _nothing_was_saved(run: Record) -> bool:
    """Whether the last restart came before the first checkpoint, in a job whose saves can be seen."""
    ends = [save.ended_s for save in run.history.saves if save.ended_s is not None]
    return bool(ends) and min(ends) > max(attempt.started_s for attempt in run.history.attempts)


def _lost(carried: Carried) -> Finding:
    state, world = " and the ".join(carried.lost), carried.attempt.world_size
    # What some ranks lost makes them differ from the others.
    on_some = bool(carried.others) and all(other.equal and len(other.ranks) < world for other in carried.others)
    again = "lost in the process" if carried.attempt.segments[0].after else "lost"
    claim = "lost in forward" if carried.lost == ["buffers"] and carried.after_forward else again
    return failed(
        said(
            claim, state=state, attempt=carried.attempt.number, saver=carried.saver.number, step=carried.step,
            found=others_in_words(carried.others, world) or carried.instead("parameters", "moments"),
            sizes=carried.sizes,
        ),
        First(What.REPLICAS if on_some else What.PARAMETERS, carried.step), step=carried.step, lost=len(carried.lost),
    )  # fmt: skip
