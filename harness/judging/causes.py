"""Why a resumed job computes something else than its twin: the likeliest cause, from what else differs. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torchaos.harness.history import Execution, History
from torchaos.harness.judging.agreement import Difference, Steps, relative

_Counter = Callable[[Execution], float | None]


def likeliest_cause(history: History, ours: Steps, theirs: Steps, first: Difference) -> str:
    """A sentence about the attempt in which the first difference lies."""
    attempt = history.attempt(next(iter(ours[first.step].values())).attempt)
    if attempt is None or attempt.base is None or (attempt.base == 0 and attempt is history.attempts[0]):
        return (
            "It had not been restarted by then: the fault itself changed the numbers, or the job is not deterministic."
        )
    since = [step for step in sorted(ours.keys() & theirs.keys()) if attempt.base < step]
    resumed = f"resumed after step {attempt.base}"
    weights = _weights(attempt.base, ours, theirs)
    told = [
        _accumulation(attempt.base, first),
        _loss_scale(ours, theirs, first),
        _lost(attempt.base, weights),
        _data_order(since, ours, theirs),
        _counter(since, ours, theirs, "optimizer state was lost: its own step counter", lambda one: one.opt_step),
        _rate(since, ours, theirs),
    ]
    found = [sentence for sentence in told if sentence]
    if found:
        return f"Likeliest cause, in the attempt that {resumed}: " + "; ".join(found) + "."
    return f"In the attempt that {resumed}, " + _by_elimination(attempt.base, ours, theirs, first, weights)


def _accumulation(base: int, first: Difference) -> str | None:
    if first.what != "number of losses" or first.step != base + 1:
        return None
    return (
        f"gradient accumulation: the first step had {first.ours:g} backwards and {first.theirs:g} in the twin, so what "
        "had been accumulated when the checkpoint was written is lost"
    )


def _loss_scale(ours: Steps, theirs: Steps, first: Difference) -> str | None:
    """Scaling by a power of two changes no bit of a number but its exponent."""
    mine, twins = ours[first.step], theirs[first.step]
    if first.what != "loss" or mine.keys() != twins.keys():
        return None
    pairs = [pair for rank in mine for pair in zip(mine[rank].losses, twins[rank].losses, strict=False)]
    factors = {one / other if one and other else 0.0 for one, other in pairs}
    factor = next(iter(factors), 0.0)
    if len(factors) > 1 or not math.isfinite(factor) or factor <= 0 or math.frexp(factor)[0] != 0.5:
        return None
    return f"the loss scale (GradScaler) was not restored: every loss is exactly {factor:g} times the twin's"


def _weights(base: int, ours: Steps, theirs: Steps) -> dict[int, str] | None:
    """The ranks that began with other weights than the twin had after step `base`, in words; None where that was not
    seen. The first backward of a process is over before anything is trained."""
    begun, fresh = ours.get(base + 1, {}), theirs.get(min(theirs, default=0), {})
    due = {rank: one.parameters for rank, one in theirs.get(base, {}).items()}
    if not base:
        due = {rank: one.restored for rank, one in fresh.items()}
    if begun.keys() != due.keys() or any(one.restored is None or due[rank] is None for rank, one in begun.items()):
        return None
    as_new = {rank for rank, one in begun.items() if rank in fresh and one.restored == fresh[rank].restored}
    return {
        rank: "were those of a fresh start" if rank in as_new else "were others"
        for rank, one in begun.items()
        if one.restored != due[rank]
    }


def _lost(base: int, weights: dict[int, str] | None) -> str | None:
    if not weights:
        return None
    ranks, words = ", ".join(map(str, weights)), next(iter(weights.values()))
    return f"the model's weights were not restored: before step {base + 1} those of rank {ranks} {words}"


def _data_order(since: list[int], ours: Steps, theirs: Steps) -> str | None:
    for step in since:
        if ours[step].keys() != theirs[step].keys():
            mine, twins = _all_samples(ours[step]), _all_samples(theirs[step])
            if mine is not None and twins is not None and mine != twins:
                return f"the data: all ranks together were given other samples from step {step} on"
            continue
        for rank, one in sorted(ours[step].items()):
            other = theirs[step][rank]
            if one.samples_seen and other.samples_seen and one.samples != other.samples:
                if one.indices and one.indices == other.indices:
                    return (
                        f"an RNG: rank {rank} was given the right samples with other contents from step {step} on, so "
                        "what is drawn for a sample (augmentation) was not restored"
                    )
                return f"the data order: rank {rank} was given other samples from step {step} on"
    return None


def _all_samples(by_rank: Mapping[int, Execution]) -> list[str] | None:
    if not all(one.samples_seen for one in by_rank.values()):
        return None
    return sorted(str(sample) for one in by_rank.values() for sample in one.samples)


def _counter(since: list[int], ours: Steps, theirs: Steps, what: str, read: _Counter) -> str | None:
    for step in since:
        for rank in sorted(ours[step].keys() & theirs[step].keys()):
            mine, twins = read(ours[step][rank]), read(theirs[step][rank])
            if mine is not None and twins is not None and mine != twins:
                return f"the {what} stood at {mine:g} after step {step}, and at {twins:g} in the twin"
    return None


def _rate(since: list[int], ours: Steps, theirs: Steps) -> str | None:
    counted = _counter(since, ours, theirs, "LR schedule was restarted: its counter", lambda one: one.sched_step)
    if counted:
        return counted
    for step in since:
        for rank in sorted(ours[step].keys() & theirs[step].keys()):
            for mine, twins in zip(ours[step][rank].lr, theirs[step][rank].lr, strict=False):
                if relative(mine, twins) > 1e-9:
                    return f"the LR schedule was not restored: {mine:g} instead of {twins:g} in step {step}"
    return None


def _by_elimination(base: int, ours: Steps, theirs: Steps, first: Difference, weights: dict[int, str] | None) -> str:
    """Samples, counters and learning rates agree, so it is a state that nothing else shows."""
    if first.step > base + 1:
        return (
            f"the losses agreed up to step {first.step - 1}, so the weights and the RNG were restored; what acts "
            "in the update was not: optimizer state (momentum) or gradient scaling."
        )
    if weights is None and _like_the_start(ours, first):
        return "the loss is as it was at the start: the model's weights were not restored."
    mine, twins = ours[first.step], theirs[first.step]
    differ = [rank for rank in sorted(mine) if rank in twins and mine[rank].losses != twins[rank].losses]
    if 0 < len(differ) < len(mine):
        ranks = ", ".join(str(rank) for rank in differ)
        return (
            f"only rank {ranks} differs, and the weights are common to all: the RNG state of that rank (dropout) was "
            "not restored."
        )
    if weights is not None:
        return "samples, weights, optimizer counter and learning rate agree: the RNG state (dropout) was not restored."
    return (
        "samples, optimizer counter and learning rate agree: the RNG state (dropout) was not restored, or the model's "
        "weights were not."
    )


def _like_the_start(ours: Steps, first: Difference) -> bool:
    start = ours.get(min(ours), {}).get(first.rank or 0)
    if start is None or not start.loss_seen or first.ours is None or first.theirs is None or min(ours) == first.step:
        return False
    return abs(first.ours - (start.losses[0] or 0.0)) < abs(first.ours - first.theirs)
