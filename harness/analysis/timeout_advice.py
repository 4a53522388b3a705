"""How long a recovery waited for torchelastic and the process group, and which setting would shorten each wait. This is
advice; no verdict depends on it. A wait is named only if the time was really spent, and an event shows the cause of the
wait. The defaults are those of torch 2.4 to 2.15: torchrun's `--rdzv-conf` (dynamic_rendezvous.py, `create_handler`),
and the 30 s of `LocalElasticAgent._shutdown` at a restart, which no option changes."""

from __future__ import annotations

from collections.abc import Iterator

from torchaos.harness.analysis.hit_targets import Landing
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Recovery

_LEAST_S, _SHARE = 3.0, 0.25  # seconds, and share of the recovery: shorter waits are not named
_MOSTLY = 0.6  # the share of a wait that its setting must explain: a heartbeat may be one interval old when a node dies
_STOP_S = 30.0
_KEEP_ALIVE_S, _KEEP_ALIVE_TRIES, _LAST_CALL_S = 5.0, 3.0, 30.0
# The time-out that ended a hang, by the cause in the log.
_GROUP = "the timeout of the process group, `init_process_group(timeout=...)`"
PATIENCE = {
    "gloo-timeout": _GROUP,
    "nccl-watchdog-timeout": _GROUP,
    "nccl-watchdog-stuck": "the time that NCCL's heartbeat monitor waits, TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "monitored-barrier": "the timeout of the job's `monitored_barrier(timeout=...)`",
    "elastic-timer": "the time that the job gave to a timer of torchelastic",
    "faulthandler": "the time that the job gave to `faulthandler.dump_traceback_later`",
    "rank-monitor": "the heartbeat timeout of NVIDIA's resiliency extension",
}


def advice(run: Record, landing: Landing, recovery: Recovery) -> tuple[str, ...]:
    """A sentence for each wait that a setting would shorten."""
    return (*_noticing(run, landing, recovery), *_stopping(run, landing, recovery), *_meeting(run, landing, recovery))


def _noticing(run: Record, landing: Landing, recovery: Recovery) -> Iterator[str]:
    """Yields a sentence if a timeout had to pass before torchelastic saw the failure. The first that passed counts."""
    took = _took(recovery, None, "detected")
    if not _counts(took, recovery):
        return
    until_s = landing.at_s + took + 1.0
    lines = (e for e in run.of_kind(Kind.LOG_CAUSE) if landing.at_s <= e.mono_s <= until_s)
    cause = next((str(e.data["cause"]) for e in lines if e.data["cause"] in PATIENCE), None)
    if cause:
        yield f"{_of(took, recovery)} passed until the hang was noticed ({cause}): this is {PATIENCE[cause]}"


def _stopping(run: Record, landing: Landing, recovery: Recovery) -> Iterator[str]:
    """Yields a sentence if torchelastic waited long until the ranks that it asked to end were gone."""
    took = _took(recovery, "detected", "torn_down")
    gone = landing.at_s + (recovery.parts.get("torn_down") or 0.0)
    killed = [
        event.rank for event in run.of_kind(Kind.RANK_EXITED)
        if event.rank is not None and event.data["exit_code"] == -9 and event.rank not in landing.ranks
        and abs(event.mono_s - gone) < 2.0
    ]  # fmt: skip
    if took >= 0.9 * _STOP_S and killed:
        yield (
            f"{_of(took, recovery)} passed until torchelastic killed rank {killed[0]}, which did not end at SIGTERM. "
            f"It waits {_STOP_S:.0f} s, and no setting of torchrun changes that at a restart. A rank that ends at "
            "SIGTERM saves the wait"
        )


def _meeting(run: Record, landing: Landing, recovery: Recovery) -> Iterator[str]:
    """Yields a sentence if the rendezvous waited for a node that was gone, or if fewer nodes came than the command
    allows."""
    took = _took(recovery, "torn_down", "rendezvous")
    if run.plan.job.nodes < 2 or not _counts(took, recovery):
        return
    given = _given(run)
    interval = given.get("keep_alive_interval", _KEEP_ALIVE_S)
    tries = given.get("keep_alive_max_attempt", _KEEP_ALIVE_TRIES)
    met_s = landing.at_s + (recovery.parts["rendezvous"] or 0.0)
    waits: dict[str, float] = {}
    settings: list[str] = []
    if any(landing.at_s <= e.mono_s <= met_s for e in run.of_kind(Kind.NODE_EXITED)):
        waits[f"{tries:g} × {interval:g} s for a node that is silent"] = tries * interval
        settings.append(f"keep_alive_interval={interval:g},keep_alive_max_attempt={tries:g}")
    if _came_fewer(run, landing):
        last_call = given.get("last_call_timeout", _LAST_CALL_S)
        waits[f"{last_call:g} s for more nodes than it needs"] = last_call
        settings.append(f"last_call_timeout={last_call:g}")
    if waits and took >= _MOSTLY * sum(waits.values()):
        yield (
            f"{_of(took, recovery)} was the rendezvous: torchelastic waits {' and '.join(waits)}. Shorter waits are "
            f"set by `--rdzv-conf` (now {','.join(settings)})"
        )


def _came_fewer(run: Record, landing: Landing) -> bool:
    attempts = run.history.attempts
    sizes = {attempt.number: attempt.world_size for attempt in attempts}
    after = next((attempt.world_size for attempt in attempts if attempt.number > landing.attempt), None)
    return after is not None and after < sizes.get(landing.attempt, 0)


def _given(run: Record) -> dict[str, float]:
    """The numbers of `--rdzv-conf`, by name."""
    words, text = run.plan.job.command, run.plan.job.env.get("PET_RDZV_CONF", "")
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in ("--rdzv-conf", "--rdzv_conf"):
            text = value if equals else "".join(words[number + 1 : number + 2])
    pairs = (pair.partition("=") for pair in text.split(","))
    return {name.strip(): float(value) for name, _, value in pairs if value.strip().isdecimal()}


def _took(recovery: Recovery, since: str | None, part: str) -> float:
    """Seconds from one part to another; 0 if one of the two was not seen. `since` None: from the fault."""
    begin, end = 0.0 if since is None else recovery.parts.get(since), recovery.parts.get(part)
    return 0.0 if begin is None or end is None else end - begin


def _whole(recovery: Recovery) -> float:
    return max((at for at in recovery.parts.values() if at is not None), default=0.0)


def _counts(took: float, recovery: Recovery) -> bool:
    return took >= max(_LEAST_S, _SHARE * _whole(recovery))


def _of(took: float, recovery: Recovery) -> str:
    return f"{took:.1f} of {_whole(recovery):.1f} s"
