"""The facts from which the base of an attempt is determined, and how what its ranks show becomes witnesses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy.typing as npt

from torchaos.harness.record.history.checkpoints import Load, Save
from torchaos.harness.record.history.evidence import Witness
from torchaos.harness.record.history.snapshots import Snapshots
from torchaos.harness.record.steps import Execution, Executions
from torchaos.harness.record.steps.execution import with_values

Array = npt.NDArray[Any]
Said = tuple[tuple[int, ...], str]  # bases that fit; the fact that this is based on
FEW = 8  # only the first steps after a resume; later steps may differ for other reasons
OTHER_RANKS = 0.2  # the trust in the lesser part of the ranks


@dataclass(frozen=True)
class Scene:
    """The facts about an attempt, or about a point in it, from which its base is determined. Local steps are counted
    from that point."""

    number: int  # of the attempt
    first: bool  # no attempt before it made a step or a save
    alone: bool  # there was no attempt before it
    own: Executions  # up to the next point at which the job may have gone back
    loads: Sequence[Load]  # before its first step
    lines: Sequence[tuple[float, int]]  # (mono_s, step) of the job's log in this part
    saves: Sequence[Save]  # of earlier attempts, placed
    blind: bool  # the saves of some earlier attempt may not have been seen
    known: Sequence[Executions]  # of earlier attempts, and of the twin: placed
    log_offset: int | None  # by how much the log's count is usually ahead of ours; None: no log of an earlier attempt
    snapshots: Snapshots = field(default_factory=Snapshots)  # of earlier attempts
    foreign: Mapping[str, int] = field(default_factory=dict)  # files of another run: the base of the first attempt
    after: int = 0  # steps of the attempt before that point
    straight: int | None = None  # the global step at that point, if the steps before simply go on
    trust: float = 1.0  # in that the attempt simply goes on there
    unseen: bool = False  # no state of the attempt was recorded, so that a state that is put back may not be seen
    # By rank: by how much the optimizer's own counter is ahead of the training, if it was new in this attempt.
    ahead: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def start(self) -> list[Execution]:
        """The first steps, which show which state was restored."""
        first = self.own.at(self.own.local_step <= self.after + FEW)
        return [with_values(execution, {"local_step": execution.local_step - self.after}) for execution in first]

    @cached_property
    def _of_same_ranks(self) -> list[Executions]:
        own = [steps.of_attempt(number) for steps in self.known for number in sorted(steps.attempts)]
        return [steps for steps in own if steps.ranks == self.own.ranks]

    def known_where(self, wanted: Callable[[Executions], Array], of_any_ranks: bool = True) -> list[Execution]:
        """The known steps for which `wanted` is true. Not `of_any_ranks`: only those of attempts with the same ranks,
        since others share the data out in another way."""
        known = self.known if of_any_ranks else self._of_same_ranks
        return [execution for steps in known for execution in steps.at(wanted(steps))]


def open_to(name: str, fits: Sequence[int], rests_on: str, ranks: Sequence[int] = (), trust: float = 1.0) -> Witness:
    """A witness that prefers none of the steps that fit, unless only one fits."""
    only = len(fits) == 1
    return Witness(name, fits[0] if only else None, rests_on, () if only else tuple(fits), tuple(ranks), trust)


def grouped(name: str, by_rank: Mapping[int, Said], trust: float = 1.0) -> list[Witness]:
    """A witness for each group of ranks that agree, the largest group first. The others are trusted less, so that some
    ranks that have another state do not make the step of all unknown."""
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in sorted(by_rank):
        groups[by_rank[rank][0]].append(rank)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[1]))
    return [
        open_to(name, fits, by_rank[ranks[0]][1], ranks, trust if not place else trust * OTHER_RANKS)
        for place, (fits, ranks) in enumerate(ordered)
    ]
