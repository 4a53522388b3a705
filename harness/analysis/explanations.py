"""Explanations for a verdict: known failures, split brain, consequences, and advice about time-outs. Pure."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchaos.harness.analysis.ending import TeardownAbort, aborts_at_exit, survived, teardown_aborts
from torchaos.harness.analysis.hangs import hang_at_end
from torchaos.harness.analysis.hit_targets import Landing
from torchaos.harness.analysis.recovery_times import recoveries
from torchaos.harness.interfaces import Finding, First, What
from torchaos.harness.monitoring.probes.known_failures import BY_NAME
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import final_path, number_in_name
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, Recovery, Verdict

# How long a recovery waited for torchelastic and the process group, and which setting would shorten each wait. This is
# advice; no verdict depends on it. A wait is named only if the time was really spent, and an event shows the cause of
# the wait. The defaults are those of torch 2.4 to 2.15: torchrun's `--rdzv-conf` (dynamic_rendezvous.py,
# `create_handler`), and the 30 s of `LocalElasticAgent._shutdown` at a restart, which no option changes.
_LEAST_S, _SHARE = 3.0, 0.25  # seconds, and share of the recovery: shorter waits are not named
_MOSTLY = 0.6  # the share of a wait that its setting must explain: the last heartbeat may be one interval old
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
    """Yields a sentence if a time-out had to pass before torchelastic saw the failure; about the time-out that passed
    first."""
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
    """Seconds from the end of the part `since` (None: from the fault) to the end of `part`; 0 if one of the two was not
    seen."""
    begin, end = 0.0 if since is None else recovery.parts.get(since), recovery.parts.get(part)
    return 0.0 if begin is None or end is None else end - begin


def _whole(recovery: Recovery) -> float:
    return max((at for at in recovery.parts.values() if at is not None), default=0.0)


def _counts(took: float, recovery: Recovery) -> bool:
    return took >= max(_LEAST_S, _SHARE * _whole(recovery))


def _of(took: float, recovery: Recovery) -> str:
    return f"{took:.1f} of {_whole(recovery):.1f} s"


# - Known failures of torch, gloo and NCCL in the log of a run change the reason, and never the verdict.
# - Split brain: two groups of ranks write the same checkpoints at the same time. A group is the set of ranks of one
#   rendezvous; torchelastic gave all of them the same store. After a restart a new group takes over. If the old group
#   still writes then, no torchrun controls it.
# - Consequences: a failure may follow from another failure. The quantity that differed first, and its step, show this.
#   A consequence may hide a second defect, so the user should correct the cause and run again.


def causes_in_words(run: Record) -> list[str]:
    """Each cause in the log, once, and the aborts that were set aside. Log lines that only follow from something else
    are left out."""
    events = (event for event in run.of_kind(Kind.LOG_CAUSE) if not _is_consequence(event))
    return list(dict.fromkeys([*map(_in_words, events), *_aside(run)]))


def because(run: Record) -> str:
    """Clauses for the reason of a job that did not come back, or did not end successfully: how it hung at the end, and
    whether attempts died of a known failure of its libraries. Empty if nothing is known."""
    if any(event.data.get("interrupted", True) for event in run.of_kind(Kind.STOPPED)):
        return ""  # the job might still have come back
    return "".join(f"; {clause}" for clause in (_hang(run), _failure(run)) if clause)


def _hang(run: Record) -> str:
    found = hang_at_end(run)
    return found.words if found else ""


def _failure(run: Record) -> str:
    if run.exit_code == 0 and all(recovery.parts["caught_up"] is not None for recovery in recoveries(run)):
        return ""
    hit = {event.attempt for event in run.of_kind(Kind.APPLYING)}
    died = [
        event for event in run.of_kind(Kind.LOG_CAUSE)
        if _is_of_the_stack(event) and event.attempt not in hit and _died(run, event.attempt)
        and not survived(run, event)
    ]  # fmt: skip
    if not died:
        return ""
    name = str(died[0].data["cause"])
    attempts = sorted({event.attempt or 0 for event in died if event.data["cause"] == name})
    which = f"attempt {attempts[0]}" if len(attempts) == 1 else f"attempts {', '.join(map(str, attempts))}"
    return f"the log of {which}, which ended with an error, shows a known failure, {_in_words(died[0])}"


def _is_consequence(event: Event) -> bool:
    known = BY_NAME.get(str(event.data["cause"]))
    return known is not None and known.is_consequence


def _is_of_the_stack(event: Event) -> bool:
    known = BY_NAME.get(str(event.data["cause"]))
    return known is not None and known.of_the_stack


def _died(run: Record, attempt: int | None) -> bool:
    life = run.history.attempt(attempt or 0)
    return life is not None and any(code not in (0, None) for code in life.exit_codes.values())


def _in_words(event: Event) -> str:
    """`gloo-stale-store (torch, pytorch/pytorch#135712): what to do`; without advice, the line of the log."""
    name = str(event.data["cause"])
    known = BY_NAME.get(name)
    about = f" ({', '.join((known.whose, *known.issues))})" if known else ""
    return f"{name}{about}: {event.data.get('advice', event.data['line'])}"


def _aside(run: Record) -> Iterator[str]:
    aside = teardown_aborts(run)
    for abort in aborts_at_exit(run):
        yield _abort(abort, abort in aside)


def _abort(abort: TeardownAbort, aside: bool) -> str:
    done = "set aside and counted" if aside else "not set aside, since no whole checkpoint of that step was seen"
    return (
        f"rank {abort.rank} aborted at interpreter exit in attempt {abort.attempt}, after "
        f"step {abort.last_step}: {done}"
    )


Group = tuple[str, int]  # the store's address, and the attempt


def split_brain(run: Record) -> str | None:
    """A sentence about the first two groups of ranks (each with a store or an attempt of its own) that wrote
    checkpoints into the same folder at the same time. None if there are none, or if it is not known which ranks wrote,
    because there was no agent or no assertion that watches checkpoints."""
    groups = {
        event.source: (str(event.data["group"]), event.attempt or 0)
        for event in run.of_kind(Kind.AGENT_STARTED)
        if event.data.get("group")
    }
    writes: dict[str, dict[Group, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in run.of_kind(Kind.SAVE_BEGIN, Kind.SAVE_END):
        if event.source in groups:
            writes[_folder(str(event.data["path"]))][groups[event.source]].append(event)
    for folder, by_group in sorted(writes.items()):
        ordered = sorted(by_group.items(), key=lambda item: item[1][0].mono_s)
        for number, (old, events) in enumerate(ordered):
            for new, others in ordered[number + 1 :]:
                if events[-1].mono_s > others[0].mono_s:
                    return (
                        f"two groups of ranks wrote checkpoints to {folder} at the same time: the group of the store "
                        f"{old[0]} until {events[-1].mono_s - others[0].mono_s:.1f} s after the group of the store "
                        f"{new[0]} had begun"
                    )
    return None


def _folder(path: str) -> str:
    """The folder that contains the checkpoints of all steps."""
    parts = final_path(posixpath.normpath(path)).split("/")
    for number in range(len(parts) - 1, 0, -1):
        if number_in_name(parts[number]) is not None:
            return "/".join(parts[:number]) or "/"
    return posixpath.dirname("/".join(parts)) or "/"


# The least number of steps by which a consequence comes later. Step 11 computes its loss from its samples and from the
# parameters after step 10. Its update then makes the parameters after step 11, which the checkpoint of step 11 holds.
# Samples that the job computes come from the parameters after the step before.
_ENDS = (What.ENDING, What.LAST, What.ABSENT)
_INPUTS = {What.SAMPLES: 0, What.COMPUTED: 0}
_LATER = {
    What.SAMPLES: {What.LOSSES: 0},
    What.COMPUTED: {
        What.LOSSES: 0, What.LOSS: 1, What.RATE: 1, What.PARAMETERS: 1, What.REPLICAS: 1, What.LOADED: 1,
    },
    What.LOSS: {**_INPUTS, What.RATE: 1, What.PARAMETERS: 1, What.REPLICAS: 1, What.LOADED: 1},
    What.PARAMETERS: {
        **_INPUTS, What.LOSSES: 0, What.LOSS: 0, What.RATE: 0, What.PARAMETERS: 1, What.REPLICAS: 1, What.LOADED: 1,
    },
    What.REPLICAS: {What.REPLICAS: 1},
    What.LAST: {
        **_INPUTS, What.LOSSES: 0, What.LOSS: 0, What.RATE: 0, What.PARAMETERS: 0, What.REPLICAS: 0, What.LOADED: 0,
        What.SAVED: 0, What.LAST: 1,
    },
    What.SAVED: {
        **_INPUTS, What.LOSSES: 0, What.LOSS: 0, What.RATE: 0, What.PARAMETERS: 0, What.REPLICAS: 0, What.LOADED: 1,
    },
}  # fmt: skip


# The order in which a step computes its quantities.
_COMPUTED = (
    What.SAMPLES, What.COMPUTED, What.RATE, What.LOSSES, What.LOSS, What.PARAMETERS, What.REPLICAS, What.SAVED,
    What.LOADED,
)  # fmt: skip


def came_at(first: First | None) -> tuple[float, int] | None:
    """When the first wrong thing happened, as a key for sorting: its global step, and the place of its quantity in
    `_COMPUTED` (the order in which a step computes quantities). None if nothing was wrong, or if the quantity is not in
    `_COMPUTED`."""
    return (first.step, _COMPUTED.index(first.what)) if first and first.what in _COMPUTED else None


def linked(cases: Sequence[Case], findings: Sequence[Finding], faults: Sequence[Case] = ()) -> list[Case]:
    """The cases of the assertions. A failed case gets the name of the failed case from which it follows; a case that
    lacks a landed fault gets that of the case of the faults. `faults`: the case of the faults, if there is one."""
    firsts = [
        finding.first if case.verdict is Verdict.FAILED else None for case, finding in zip(cases, findings, strict=True)
    ]
    fallen = next((case.name for case in faults if case.verdict is Verdict.FAILED), None)
    unproved = next((case.name for case in faults if case.verdict is Verdict.INCONCLUSIVE), None)
    unhit = [finding.first is not None and finding.first.what is What.UNHIT for finding in findings]
    return [
        replace(case, follows=unproved if unhit[place] else _root(place, cases, firsts, fallen))
        for place, case in enumerate(cases)
    ]


def _root(place: int, cases: Sequence[Case], firsts: Sequence[First | None], fallen: str | None) -> str | None:
    own = firsts[place]
    if own is None:
        return None
    if fallen and own.what in _ENDS:
        return fallen
    causes = [at for at, other in enumerate(firsts) if other and _comes_of((own, place), (other, at))]
    if not causes:
        return None
    earliest = min(causes, key=lambda at: (firsts[at] or own).step)
    return _root(earliest, cases, firsts, fallen) or cases[earliest].name


def _comes_of(ours: tuple[First, int], theirs: tuple[First, int]) -> bool:
    """Whether the first failure follows from the second. If neither came earlier in the run, that with the first place
    in the scenario counts as the cause."""
    (own, place), (other, at) = ours, theirs
    if own == other:
        return at < place
    if own.what in _ENDS and other.what is What.ENDING:
        return own.what is not What.ENDING
    later = _LATER.get(own.what, {}).get(other.what)
    return later is not None and own.step >= other.step + later
