"""Whether parameters are equal: on the ranks that hold replicas, and in a run and its twins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchaos.harness.analysis.checkpointing.carried_state import carried_into
from torchaos.harness.analysis.checkpointing.restored_state import in_words
from torchaos.harness.analysis.checkpointing.resumed_from import resumed_in_words
from torchaos.harness.analysis.claims import said
from torchaos.harness.analysis.comparison.agreement import before, history_of, until
from torchaos.harness.analysis.comparison.parameters import AgainstTwins
from torchaos.harness.analysis.ending import final_step, teardown_aborts
from torchaos.harness.analysis.hit_targets import landings
from torchaos.harness.analysis.missing_data import why_unplaced
from torchaos.harness.analysis.tolerance import ROUNDING, relative
from torchaos.harness.interfaces import Finding, First, What, failed, inconclusive, passed
from torchaos.harness.protocol.check_sums import is_whole
from torchaos.harness.record.history import Execution
from torchaos.harness.record.plan import counted
from torchaos.harness.record.record import Record, records_of


def across_replicas(run: Record) -> Finding:
    """Whether ranks of the same number have equal parameters in all replicas that made a step."""
    parts = records_of(run)
    steps = [record.history.by_step() for record in parts]
    compared = 0
    for step in sorted(set().union(*steps)):
        of_rank: dict[int, dict[int, Execution]] = {}
        for number, by_step in enumerate(steps):
            for rank, one in by_step.get(step, {}).items():
                of_rank.setdefault(rank, {})[number] = one
        for rank, by_replica in of_rank.items():
            sums = {number: one.parameters for number, one in by_replica.items()}
            if None in sums.values():
                return inconclusive(f"the parameters after step {step} were not seen on rank {rank} of each replica")
            if len(set(sums.values())) > 1:
                base, odd = min(sums), next(number for number in sums if sums[number] != sums[min(sums)])
                resumed = resumed_in_words(parts[odd].history, by_replica[odd])
                return failed(
                    f"replicas are no longer equal: after step {step} the parameters of rank {rank} in replica {odd} "
                    f"are not those in replica {base}, {resumed}",
                    First(What.REPLICAS, step), step=step, replica=odd,
                )  # fmt: skip
            compared += len(sums) > 1
    if not compared:
        return inconclusive("no step was made by two replicas, so there is nothing to compare")
    return passed(f"the replicas are equal after each of {compared} steps that they made together", steps=compared)


class Parameters:
    """The parameters of a run after each step, compared between the ranks that hold replicas, and with the twins'."""

    def __init__(self, run: Record, twins: Sequence[Record]) -> None:
        history = history_of(run, twins)
        self._run, self._history, self._twins = run, history, twins
        self._theirs = [until(twin.history.by_step(), final_step(twin)) for twin in twins]
        last = max(self._theirs[0], default=0) if twins else None
        self._ours = until(history.by_step(), last if last and teardown_aborts(run, last) else None)
        landed = landings(run)
        self._early = before(history, landed[0].at_s if landed else float("inf"))

    def finding(self, replicas_only: bool = False) -> Finding:
        if self._history.unplaced:
            return inconclusive(why_unplaced(self._run, self._history.unplaced))
        apart = self._apart()
        if apart is not None:
            return apart
        replicas = self._replicas()
        if replicas_only or not self._twins:
            unseen = self._unseen() if self._are_replicas else None
            if unseen is not None:
                return inconclusive(f"{replicas}; {unseen}")
            why = "" if replicas_only else "; without a twin, a defect that all replicas share can't be found"
            return passed(f"{replicas}{why}") if self._are_replicas else inconclusive(f"{replicas}{why}")
        return AgainstTwins(self._run, self._history, self._twins, self._ours, self._early).finding(replicas)

    # -- between the ranks

    @property
    def _are_replicas(self) -> bool:
        """Whether the ranks are known to hold equal parameters when nothing goes wrong."""
        healthy = self._theirs[0] if self._twins else self._early
        seen = [_differ(by_rank) for by_rank in healthy.values()]
        return True not in seen and False in seen

    def _apart(self) -> Finding | None:
        if not self._are_replicas:
            return None
        first = next((step for step in sorted(self._ours) if _differ(self._ours[step])), None)
        if first is None:
            return None
        by_rank = self._ours[first]
        base = next(one.parameters for one in by_rank.values())
        odd = [rank for rank, one in by_rank.items() if one.parameters != base]
        until_ = [step for step in sorted(self._ours) if _differ(self._ours[step])]
        step = next(iter(by_rank.values()))
        resumed, why = resumed_in_words(self._history, step), self._why_apart(first, step.attempt)
        return failed(
            f"replicas are no longer equal: after step {first} the parameters of rank {_list(odd)} are not those of "
            f"rank {min(by_rank)}, {resumed}, and so in {counted(len(until_), 'step')} in all. {why}",
            First(What.REPLICAS, first), step=first, rank=odd[0], steps=len(until_),
        )  # fmt: skip

    def _why_apart(self, step: int, attempt: int) -> str:
        life = self._history.attempt(attempt)
        if life is None or life.base is None or (life.base == 0 and not life.number):
            return said("fault on a rank")
        carried = carried_into(self._run, attempt)
        if carried and carried.others:
            return said("apart by state", found=in_words(carried.others, life.world_size))
        exact = carried and carried.parameters and carried.moments
        norms = [one.norm for one in self._ours[step].values() if one.norm is not None]
        if norms and max(relative(norms[0], norm) for norm in norms) > ROUNDING:
            return said("apart by gradients")
        if exact:
            return said("apart unseen")
        begun = {one.restored for one in self._ours.get(life.base + 1, {}).values()}
        if None not in begun and len(begun) > 1:
            return said("apart by loads", step=life.base + 1)
        if len(norms) < 2:
            return said("apart unknown")
        return said("apart in the update")

    def _replicas(self) -> str:
        if not self._are_replicas:
            return f"{self._no_replicas()}, so there are no replicas to compare"
        steps = [step for step, by_rank in self._ours.items() if _differ(by_rank) is False]
        return f"the replicas are equal after each of {len(steps)} steps"

    def _no_replicas(self) -> str:
        healthy = self._theirs[0] if self._twins else self._early
        if all(len(by_rank) < 2 for by_rank in self._ours.values()):
            return "only one rank trains"
        if any(map(_differ, healthy.values())):
            return "the ranks hold different parameters without the fault too"
        return "the ranks hold parts of the model"

    def _unseen(self) -> str | None:
        """Says which parameters of replicas were not seen. The last step of a superseded attempt may be missing,
        because its rank may have died before it reported the step; the later steps are compared."""
        last_of = {self._attempt(step): step for step in sorted(self._ours)}
        first_of = {self._attempt(step): step for step in sorted(self._ours, reverse=True)}
        last = max(last_of.values())
        for step, by_rank in sorted(self._ours.items()):
            attempt = self._attempt(step)
            cut = step == last_of[attempt] and step not in (last, first_of[attempt])
            world = life.world_size if (life := self._history.attempt(attempt)) else 0
            if world > 1 and not cut and (_differ(by_rank) is None or len(by_rank) < world):
                return f"the parameters after step {step} were not seen on all {world} ranks"
        theirs = max(self._theirs[0], default=0) if self._twins else 0
        if last < theirs:
            return f"the final history ends with step {last}, and the twin's with step {theirs}"
        return None

    def _attempt(self, step: int) -> int:
        return max(one.attempt for one in self._ours[step].values())


def _differ(by_rank: Mapping[int, Execution]) -> bool | None:
    """Whether the ranks hold different parameters; None if that is not known."""
    sums = [one.parameters for one in by_rank.values()]
    if len(sums) < 2 or not all(sum_ is not None and is_whole(sum_) for sum_ in sums):
        return None
    return len(set(sums)) > 1


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)
