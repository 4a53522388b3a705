"""Whether resumes began with the state that was saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchaos.harness.analysis.checkpointing.carried_state import Carried, resumes_carried, torn
from torchaos.harness.analysis.checkpointing.restored_state import in_words
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.ending import not_restarted
from torchaos.harness.analysis.missing_data import why_unplaced
from torchaos.harness.analysis.replica_verdict import each
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed
from torchaos.harness.record.record import Record


def restored_state(run: Record) -> Finding:
    """Whether every resume began with the state that the job had when it saved it."""
    history = run.history
    if history.unplaced:
        return inconclusive(why_unplaced(run, history.unplaced))
    found = list(resumes_carried(run))
    if not found:
        if len(history.attempts) == 1:
            return not_restarted(run, "so nothing had to be restored")
        if _nothing_was_saved(run):
            return passed(
                "no save of a checkpoint was complete when the job was restarted, so nothing could be restored",
                resumes=0,
            )
        return inconclusive("no attempt resumed from a step that this run had done, so nothing was restored")
    for one in found:
        if words := torn(history, one.attempt.segments[0]) if one.attempt.segments else "":
            return failed(words, First(What.PARAMETERS, one.step), step=one.step)
    lost = next((one for one in found if one.lost), None)
    if lost:
        first_s = history.executions.of_attempt(lost.attempt.number).first_s()
        return replace(_lost(lost), at_s=first_s)
    blind = next((one for one in found if one.parameters is None or one.moments is None), None)
    if blind:
        return inconclusive(
            f"over {blind.in_words}, the check sums of the ranks can't be added up, and each rank's sum differs "
            "from its earlier sum: not all ranks reported a sum, or they hold parts of the model that are not "
            "DTensors"
        )
    restored = said("restored", found=_list(found[-1].kept))
    more = f" and {len(found) - 1} more before it" if len(found) > 1 else ""
    well = passed(f"{restored}, over {found[-1].in_words}{more}", resumes=len(found))
    odd = next((one for one in found if one.generators), None)
    if odd is None:
        return well
    return replace(well, reason=f"{well.reason}; {odd.generators}", cause="but the RNG state differs")


judge_replicas = each


def _nothing_was_saved(run: Record) -> bool:
    """Whether the last restart came before the first checkpoint, in a job whose saves can be seen."""
    ends = [save.ended_s for save in run.history.saves if save.ended_s is not None]
    return bool(ends) and min(ends) > max(attempt.started_s for attempt in run.history.attempts)


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _lost(carried: Carried) -> Finding:
    state, world = " and the ".join(carried.lost), carried.attempt.world_size
    # What some ranks lost makes them differ from the others.
    on_some = bool(carried.others) and all(other.equal and len(other.ranks) < world for other in carried.others)
    return failed(
        said(
            "lost", state=state, attempt=carried.attempt.number, saver=carried.saver.number, step=carried.step,
            found=in_words(carried.others, world) or carried.instead("parameters", "moments"), sizes=carried.sizes,
        ),
        First(What.REPLICAS if on_some else What.PARAMETERS, carried.step), step=carried.step, lost=len(carried.lost),
    )  # fmt: skip
