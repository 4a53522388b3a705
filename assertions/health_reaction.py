"""Did the job, or the agent that watches its node, react in time to a failing GPU?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchaos.harness import registry
from torchaos.harness.analysis.hit_targets import Gpu, gpus_of, ranks_on, unplaced
from torchaos.plugin import Assertion, Finding, Harm, Kind, Need, Record, Seconds, failed, inconclusive, passed, unhit
from torchaos.plugin.analysis import Landing, landings

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
        hits = [landing for landing in landings(run) if _is_health(run, landing)]
        if not hits:
            return unhit("no fault in a GPU's health landed, so there was nothing to react to")
        hit = hits[0]
        gpus = gpus_of(run, hit)
        drained = _drained(run, hit, gpus)
        took = {"noticed": _noticed(run, hit), "checkpointed": _checkpointed(run, hit), "drained": drained}
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
        if self.excluded:
            if not gpus:
                return inconclusive(
                    f"{hit.fault}: it is not known which GPU was hit: no rank was seen to come up on it"
                )
            if took["drained"] is None:
                return failed(f"{hit.fault}: the ranks on that GPU never left")
            for up in ranks_on(run, gpus):
                if (up.attempt or 0) > hit.attempt:
                    return failed(
                        f"{hit.fault}: rank {up.rank} was started on the same GPU again, in attempt {up.attempt}"
                    )
            for up in unplaced(run, {node for node, _ in gpus}):
                if (up.attempt or 0) > hit.attempt:
                    return inconclusive(
                        f"{hit.fault}: it is not known which GPU rank {up.rank} uses in attempt {up.attempt}"
                    )
        parts = [f"{name} after {seen:.2f} s" for name, seen in took.items() if seen is not None]
        return passed(f"{hit.fault}: {', '.join(parts)}")


def _is_health(run: Record, hit: Landing) -> bool:
    return any(fault.id == hit.fault and registry.family_of(fault.inject) == "gpu" for fault in run.plan.faults)


def _noticed(run: Record, hit: Landing) -> float | None:
    """Seconds from the fault until a process that watches GPUs got the first changed answer; None: no process did."""
    answers = [e for e in run.of_fault(hit.fault, Kind.EFFECT) if "served_to" in e.data]
    at = min((float(event.data.get("served_mono_s", event.mono_s)) for event in answers), default=None)
    return None if at is None else round(max(0.0, at - hit.at_s), 6)


def _checkpointed(run: Record, hit: Landing) -> float | None:
    """Seconds from the fault until the first save that began after the fault was complete. None: there was no such
    save."""
    ends = [save.ended_s for save in run.history.saves if save.ok and save.begun_s >= hit.at_s]
    at = min((end for end in ends if end is not None), default=None)
    return None if at is None else round(at - hit.at_s, 6)


def _drained(run: Record, hit: Landing, gpus: frozenset[Gpu]) -> float | None:
    """Seconds from the fault until the last rank on those GPUs had ended with an error. None: not all of them did."""
    there = {up.data["pid"] for up in ranks_on(run, gpus) if up.attempt == hit.attempt} or hit.pids
    gone = {
        e.data["pid"]: e.mono_s
        for e in run.of_kind(Kind.RANK_EXITED)
        if e.mono_s >= hit.at_s and e.data["exit_code"] != 0
    }
    if not there or not there <= gone.keys():
        return None
    return round(max(gone[pid] for pid in there) - hit.at_s, 6)
