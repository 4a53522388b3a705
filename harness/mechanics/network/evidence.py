"""Evidence that a network fault was felt, from the kernel's counters of the job's own connections. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Evidence
from torchaos.harness.record.record import Record


def counted(record: Record, fault: str, *names: str, least: float = 1) -> Evidence | None:
    """Evidence that one of the counters `names` grew by at least `least` while the fault was on."""
    for event in record.of_fault(fault, Kind.NETWORK):
        for name in names:
            if (number := event.data["counts"].get(name, 0)) >= least:
                return Evidence.of(_WORDS.get(name, name + ": {n}").format(n=f"{number:g}"), event)
    return None


_WORDS = {
    "dropped": "{n} TCP packets of the job were dropped between the nodes",
    "resent": "the job's connections sent {n} segments again",
    "timeouts": "{n} retransmission timers of the job's connections ran out",
    "resets": "{n} established connections of the job were reset",
    "bad_checksums": "{n} segments of the job came with a bad checksum",
    "duplicates": "{n} segments of the job came twice",
    "out_of_order": "{n} segments of the job came out of order",
    "rtt_ms": "the round trip on the job's connections rose to {n} ms",
    "overlimits": "{n} packets of the job had to wait for the rate limit",
    "refused": "{n} connections of the job were refused",
}


def late(record: Record, fault: str, seconds: float) -> Evidence | None:
    """Evidence that no rank finished a step for at least `seconds` while the fault was on."""
    hits = [event.mono_s for event in record.of_fault(fault, Kind.APPLIED)]
    if not hits:
        return None
    steps = record.steps_made.in_order_of_time.after(hits[0])
    first = steps.event(0) if len(steps) else None
    if first is None or first.mono_s - hits[0] < seconds:
        return None
    return Evidence.of(f"no rank finished a step for {first.mono_s - hits[0]:.1f} s", first)


def logged(record: Record, fault: str, cause: str, words: str, naming: Sequence[str] = ("",)) -> Evidence | None:
    """Evidence that, while the fault was on, the job's log had a line of that cause (see watching/probes/causes.py)
    that contains one of the texts `naming`."""
    on = [event.mono_s for event in record.of_fault(fault, Kind.APPLYING)]
    off = [event.mono_s for event in record.of_fault(fault, Kind.ROLLED_BACK)]
    for event in record.of_kind(Kind.LOG_CAUSE):
        is_on = on and on[0] <= event.mono_s <= (off[0] + 1.0 if off else float("inf"))
        if is_on and event.data["cause"] == cause and any(name in event.data["line"] for name in naming):
            return Evidence.of(f"{words}: {event.data['line']}", event)
    return None
