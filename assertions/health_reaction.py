"""Did the job, or the agent that watches its node, react in time to a failing GPU?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.plugin import Assertion, Finding, Harm, Need, Record, Seconds, failed, inconclusive, passed, unhit
from torchaos.plugin.analysis import (
    Gpu,
    Landing,
    checkpointed_s,
    drained_s,
    gpus_of,
    is_of_gpu,
    landings,
    noticed_s,
    used_again,
)

_PARTS = {
    "noticed": "a watcher of the GPUs was informed",
    "checkpointed": "a checkpoint was saved",
    "drained": "the ranks on that GPU had left",
}


@dataclass(frozen=True)
class HealthReaction(Assertion):
    """The longest time in seconds from the fault until a watcher of the GPUs was informed (`noticed`), a checkpoint was
    saved (`checkpointed`), and the ranks on that GPU had left (`drained`). Without a bound, a time is only measured.
    `excluded`: in later attempts, no rank uses that GPU."""

    noticed: Seconds | None = None
    checkpointed: Seconds | None = None
    drained: Seconds | None = None
    excluded: bool = False

    name = "health_reaction"
    harm = Harm.REACTION
    needs = frozenset({Need.STEPS, Need.CHECKPOINTS})

    def judge(self, run: Record, twins: Sequence[Record]) -> Finding:
        hits = [landing for landing in landings(run) if is_of_gpu(run, landing)]
        if not hits:
            return unhit("no fault in a GPU's health landed, so there was nothing to react to")
        hit = hits[0]
        gpus = gpus_of(run, hit)
        drained = drained_s(run, hit, gpus)
        took = {"noticed": noticed_s(run, hit), "checkpointed": checkpointed_s(run, hit), "drained": drained}
        bounds = {name: getattr(self, name) for name in _PARTS}
        return replace(self._judge(run, hit, took, gpus), measured=took, bound=bounds)

    def _judge(self, run: Record, hit: Landing, took: dict[str, float | None], gpus: frozenset[Gpu]) -> Finding:
        # A rank that left shows that somebody noticed, for example a program that reads the kernel's log.
        if took["noticed"] is None and (self.noticed is not None or took["drained"] is None):
            return inconclusive(
                "nobody asked about that GPU after the fault, so it is not known whether anybody would react"
            )
        for name, meaning in _PARTS.items():
            bound, seen = getattr(self, name), took[name]
            if bound is not None and seen is None:
                return failed(f"{hit.fault}: this never happened: {meaning}")
            if bound is not None and seen is not None and seen > bound:
                return failed(f"{hit.fault}: {seen:.2f} s until {meaning}, {seen - bound:.2f} s more than allowed")
        if self.excluded and (used := used_again(run, hit, gpus)):
            return used
        parts = [f"{name} after {seen:.2f} s" for name, seen in took.items() if seen is not None]
        return passed(f"{hit.fault}: {', '.join(parts)}")
