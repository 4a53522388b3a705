"""Describes parts of a plan in words: targets, triggers, durations."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.agent.plan import Moment
from torchaos.harness.contracts import Target
from torchaos.harness.record.plan import After, PlannedJob


def target_in_words(target: Target, endpoint: object = None, job: PlannedJob | None = None) -> str:
    """The target in words. `endpoint`: the parameter of that name, for a fault that hits an endpoint. `job`: with
    replicas, ranks are shown by replica."""
    if not target.ranks and not target.nodes:
        return f"endpoint {endpoint}" if endpoint else "files"
    if job and job.replicas > 1:
        size = job.world_size // job.replicas
        own = {replica: tuple(rank % size for rank in target.ranks if rank // size == replica)
               for replica in sorted({rank // size for rank in target.ranks})}  # fmt: skip
        return " and ".join(f"{_list('rank', ranks)} of replica {replica}" for replica, ranks in own.items())
    nodes = _list("node", target.nodes)
    return f"{nodes} ({_list('rank', target.ranks)})" if target.nodes else _list("rank", target.ranks)


def moment_in_words(when: Moment | After) -> str:
    if isinstance(when, Moment):
        parts = [
            f"step {when.step}" if when.step is not None else "",
            f"attempt {when.attempt}" if when.attempt is not None else "",
            _phase_in_words(when),
            f"the {when.nth}. time" if when.nth > 1 else "",
        ]
        return ", ".join(part for part in parts if part) or "the next phase"
    start = f"{when.fault} was {when.state.replace('_', ' ')}" if when.fault else "launch"
    if when.checkpoints:
        return f"{when.delay_s:g} s after checkpoint {when.checkpoints} since {start}"
    return f"{when.delay_s:g} s after {start}"


def _phase_in_words(when: Moment) -> str:
    filter_ = when.collectives
    if filter_ is None:
        return when.phase.value.replace("_", " ") if when.phase else ""
    parts = [
        filter_.operation or "collective",
        f"of group {filter_.group}" if filter_.group else "",
        f"of at least {filter_.min_bytes} bytes" if filter_.min_bytes is not None else "",
        f"of at most {filter_.max_bytes} bytes" if filter_.max_bytes is not None else "",
    ]
    return " ".join(part for part in parts if part)


def counted(count: int, noun: str, verbs: str = "") -> str:
    """`1 step`, `2 steps`. `verbs`: for one and for several, as `was/were`."""
    one, _, several = verbs.partition("/")
    words = (str(count), noun, one) if count == 1 else (str(count), f"{noun}s", several)
    return " ".join(word for word in words if word)


def last_words_in_words(lines: Sequence[str]) -> str:
    """The clause of a reason about the last lines of a job's log. Empty if there is no line."""
    return f"; its log ends with: {' | '.join(lines)}" if lines else ""


def seconds_in_words(seconds: float | None) -> str:
    """A duration as all reports show it: `43 ms`, `6.84 s`, `60 s`, `5.7 min`."""
    if seconds is None:
        return "not seen"
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    return rounded(seconds) if seconds < 120 else f"{seconds / 60:.1f} min"


def rounded(seconds: float) -> str:
    """Seconds with the digits that reports show, whatever the length: two, or none of a whole number."""
    return f"{seconds:.2f}".removesuffix(".00") + " s"


def _list(word: str, numbers: tuple[int, ...]) -> str:
    if not numbers:
        return f"no {word}"
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(str(number) for number in numbers)}"
