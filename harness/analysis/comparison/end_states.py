"""Whether a job ended with the state with which its twin ended. Then it made the same updates as its twin, from the
same samples, however its steps were counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import history_of
from torchaos.harness.analysis.ending import own_exit_code
from torchaos.harness.interfaces import Finding, Outcome, What, inconclusive, passed
from torchaos.harness.protocol.check_sums import without_order
from torchaos.harness.record.history import Execution
from torchaos.harness.record.history.snapshots import QUANTITIES, State, parameters_of, states
from torchaos.harness.record.plan import enumerated
from torchaos.harness.record.record import Record

_READINGS = (What.LOSS, What.LOSSES, What.RATE)  # a step may differ in these and leave the same parameters
_NAMES = {what: what for what in QUANTITIES} | {"frozen": "frozen parameters", "moments": "optimizer's moments"}
_RESULTS = (What.SAMPLES, What.COMPUTED, What.PARAMETERS)


def against_the_end(finding: Finding, run: Record, twins: Sequence[Record]) -> Finding:
    """The finding. If the job ended with the twin's state, bit for bit, the difference that the finding names had no
    effect, and the finding becomes passed; or inconclusive if the difference is another last step, which may be a
    matter of counting.

    A loss or a learning rate stays a difference, unless the step seems to have left other parameters than in the twin,
    and so was taken for another one: the update does not depend on the loss scale, nor frozen parameters on the
    rate."""
    first = finding.first
    if finding.outcome is Outcome.PASSED or first is None or first.what not in (*_READINGS, *_RESULTS, What.LAST):
        return finding
    if first.what in _READINGS and not _has_another_result(run, twins, first.step):
        return finding
    if not (equal := equal_at_the_end(run, twins)):
        return finding
    same = said("same end", found=enumerated([_NAMES[what] for what in equal]))
    if first.what is What.LAST:
        return inconclusive(f"{finding.reason}. But {same}: the steps may be counted wrongly")
    return passed(f"{same}, so the difference in step {first.step} ({first.what.value}) did not change the training")


def _has_another_result(run: Record, twins: Sequence[Record], step: int) -> bool:
    """Whether the step left other parameters than in the twin, as it was counted. False if they were not recorded."""
    ours = history_of(run, twins).by_step().get(step, {})
    theirs = twins[0].history.by_step().get(step, {}) if twins else {}
    pairs = [(ours[rank].parameters, theirs[rank].parameters) for rank in ours.keys() & theirs.keys()]
    return any(None not in pair and pair[0] != pair[1] for pair in pairs)


def equal_at_the_end(run: Record, twins: Sequence[Record]) -> list[str]:
    """The quantities of the state with which the job ended by itself, if all equal those of a twin: the states of the
    last saves are equal by rank, and so are the parameters after the last steps. Empty if they are not, or if the job
    did not train after its last resume."""
    if not twins or run.plan.job.replicas > 1 or own_exit_code(run) != 0:
        return []
    mine = _End.of(run)
    if mine.has_moved and any(mine.equals(_End.of(twin)) for twin in twins if own_exit_code(twin) == 0):
        return mine.seen
    return []


class _End:
    """The end of the last attempt with steps: by rank, the state of the last save, and the last step."""

    def __init__(self, saves: Mapping[int, State], steps: Mapping[int, Execution], before: Sequence[State]) -> None:
        self._saves, self._steps, self._before = saves, steps, before

    @classmethod
    def of(cls, record: Record) -> _End:
        made = record.history.executions
        last = int(made.attempt.max(initial=0))
        seen = list(states(record.beside_steps))
        own = [state for state in seen if state.event.attempt == last]
        saves = {state.event.rank or 0: state for state in own if not state.begun}
        steps = {execution.rank: execution for execution in made.of_attempt(last).with_state if execution.parameters}
        first = [state for state in own if state.begun and not state.event.step]
        return cls(saves, steps, [state for state in seen if state.event.attempt != last] + first)

    @property
    def seen(self) -> list[str]:
        """The quantities of the states of the last saves."""
        return [what for what in QUANTITIES if any(state.sums.get(what) for state in self._saves.values())]

    @property
    def has_moved(self) -> bool:
        """Whether the parameters of the last saves are new: neither this attempt nor an earlier one began with them."""
        before = [parameters_of(state) for state in self._before]
        own = [parameters_of(state) for state in self._saves.values()]
        return bool(own) and all(own) and not any(sums in before for sums in own)

    def equals(self, other: _End) -> bool:
        if not self._saves or self._saves.keys() != other._saves.keys() or self._steps.keys() != other._steps.keys():
            return False
        if any(_values(state) != _values(other._saves[rank]) for rank, state in self._saves.items()):
            return False
        return all(
            (self._is_last(rank) and other._is_last(rank))
            or without_order(step.parameters or "") == without_order(other._steps[rank].parameters or "")
            for rank, step in self._steps.items()
        )

    def _is_last(self, rank: int) -> bool:
        """Whether this rank's last save came after its last step, or such a save of another rank with the same
        parameters."""
        own = self._steps[rank]
        return any(
            (state.event.step or 0) >= self._steps[saver].local_step and self._steps[saver].parameters == own.parameters
            for saver, state in self._saves.items() if saver in self._steps
        )  # fmt: skip


def _values(state: State) -> Mapping[str, Counter[tuple[str, ...]]]:
    """By quantity, the check sums of all tensors, without names: these may depend on the order of the optimizers."""
    return {what: Counter(map(tuple, state.sums.get(what, {}).values())) for what in QUANTITIES}
