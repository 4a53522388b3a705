"""What the payload of each kind of event looks like: a line that looks otherwise was damaged, and is not read.

Ranks write event files while they die, disks fill up, and run directories are copied about: whoever reads a journal
must not stumble over what became of it. Keys that are not named here are free.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from torchaos.harness.agent.wire import FIELDS, Event, Kind

Check = Callable[[Any], bool]

_WORD = 2**63  # of an integer's size: what is beyond it was never a pid, a step or a count


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _truth(value: Any) -> bool:
    return isinstance(value, bool)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_WORD <= value < _WORD


def _number(value: Any) -> bool:
    return isinstance(value, float) or _whole(value)


def _scalar(value: Any) -> bool:
    return _text(value) or _number(value)


def _mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _each(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _flat(value: Any) -> bool:
    """Indices of samples: numbers or words, in lists as deep as the data loader's own."""
    if isinstance(value, list):
        return all(map(_flat, value))
    return value is None or _scalar(value) or _truth(value)


def _by_name(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _kind_and_sum(value: Any) -> bool:
    return _each(_text)(value) and len(value) == 2 and re.fullmatch(r"([a-z]+-)?[0-9a-f]{16}", value[1]) is not None


_STEP: Mapping[str, Check] = {
    "losses": _maybe(_each(_maybe(_number))), "samples": _maybe(_each(_maybe(_scalar))), "indices": _maybe(_flat),
    "lr": _maybe(_each(_maybe(_number))), "opt_step": _maybe(_number), "sched_step": _maybe(_number),
    "phases": _by_name(_number), "skipped": _maybe(_truth),
}  # fmt: skip
_PROCESS: Mapping[str, Check] = {"pid": _whole, "start_ticks": _maybe(_whole), "local_rank": _maybe(_whole)}
_RANK: Mapping[str, Check] = {
    **_PROCESS, "world_size": _maybe(_whole), "node": _maybe(_whole), "inner_pid": _whole,
}  # fmt: skip
_HIT: Mapping[str, Check] = {
    "fault": _text,
    "phase": _maybe(_text),
    "global_step": _maybe(_whole),
    "pid": _maybe(_whole),
}
_FILE: Mapping[str, Check] = {"path": _text, "format": _text, "ok": _truth, "blocked_s": _number, "numbers": _mapping}
_EXIT: Mapping[str, Check] = {"exit_code": _maybe(_whole), "submission": _whole}
_UNDO: Mapping[str, Check] = {"fault": _text, "verified": _truth, "reason": _maybe(_text)}

# Of keys that a payload need not have, only what somebody reads is here.
_CHECKS: Mapping[Kind, Mapping[str, Check]] = {
    Kind.STAGE: {"stage": _text},
    Kind.NOTE: {"text": _text},
    Kind.STOPPED: {"reason": _text, "interrupted": _truth, "enough": _truth},
    Kind.JOB_STARTED: {**_PROCESS, **_EXIT},
    Kind.JOB_EXITED: {**_PROCESS, **_EXIT},
    Kind.CLOCK: {"node": _whole, "offset_s": _number, "error_s": _number},
    Kind.LOG_STEP: {"step": _maybe(_whole), "adapter": _text, "loss": _maybe(_number), "lr": _maybe(_number)},
    Kind.LOG_CAUSE: {"cause": _text, "line": _text, "advice": _text},
    Kind.ELASTIC_WORKER: {**_PROCESS, "state": _text},
    Kind.ELASTIC_FAILURE: {**_PROCESS, **_EXIT},
    Kind.ELASTIC_TEARDOWN: {**_PROCESS, "signal": _text},
    Kind.ELASTIC_RENDEZVOUS: {"done": _truth},
    Kind.ELASTIC_RESTART: {"attempts_left": _maybe(_whole)},
    Kind.RANK_UP: _RANK,
    Kind.RANK_STATE: {**_PROCESS, "state": _text},
    Kind.RANK_EXITED: {**_PROCESS, **_EXIT},
    Kind.AGENT_STARTED: {**_RANK, "python": _text, "torch": _maybe(_text), "hooks": _each(_text), "group": _text},
    Kind.AGENT_FAILED: {"hook": _text, "error": _text},
    Kind.AGENT_ENDED: {"unseen": _each(_text)},
    Kind.STEP: _STEP,
    Kind.LOSS: {"losses": _STEP["losses"]},
    Kind.SAVE_BEGIN: _FILE,
    Kind.SAVE_END: _FILE,
    Kind.KEPT: {"parameters": _by_name(_kind_and_sum)},
    Kind.RENAMED: {"path": _text, "to": _text},
    Kind.LOAD_BEGIN: _FILE,
    Kind.LOAD_END: _FILE,
    Kind.ARMED: {"fault": _text, "targets": _each(_whole)},
    Kind.HELD: _HIT,
    Kind.APPLYING: _HIT,
    Kind.APPLIED: {"fault": _text},
    Kind.ROLLED_BACK: _UNDO,
    Kind.MISSED: {"fault": _text, "reason": _text},
    Kind.EFFECT: {"fault": _text, "effect": _text},
    Kind.NETWORK: {"fault": _text, "counts": _by_name(_number), "measured": _by_name(_number)},
    Kind.CONTAINER: {"fault": _text, "node": _whole, "action": _text},
    Kind.GUARDED: {"record": _text, "handles": _each(_text), "why": _maybe(_text)},
    Kind.HEALED: {**_UNDO, "record": _text, "handle": _mapping},
}


def read(line: bytes | str) -> Event:
    """Raises ValueError where the line is torn or damaged, or of a kind that this version does not know."""
    event = Event.from_line(line)
    data = event.data
    if not (
        isinstance(event.source, str) and _whole(event.seq) and _finite(event.wall_s) and _finite(event.mono_s)
        and _place(event.rank) and _place(event.attempt) and _place(event.step) and isinstance(data, dict)
    ):  # fmt: skip
        raise ValueError("not an event: its envelope is damaged")
    if missing := FIELDS[event.kind] - data.keys():
        raise ValueError(f"not an event: {event.kind.value} lacks {min(missing)}")
    for name, check in _CHECKS.get(event.kind, {}).items():
        if name in data and not check(data[name]):
            raise ValueError(f"not an event: {name} of {event.kind.value} is {data[name]!r:.60}")
    return event


def of_later_version(line: bytes | str) -> tuple[str, int, str] | None:
    """Source, number and kind of a whole event of a kind that this version does not know; None for any other line."""
    try:
        raw = json.loads(line)
        source, number, kind = raw["source"], raw["seq"], raw["kind"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    known = not _text(kind) or kind in {one.value for one in Kind}
    return None if known or not _text(source) or not _whole(number) else (source, number, kind)


def _place(value: Any) -> bool:
    return value is None or (_whole(value) and value >= 0)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value) and 0 <= value < 2**62
