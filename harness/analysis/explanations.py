"""Explanations for a verdict. Pure.

- Known failures of torch, gloo and NCCL in the log of a run change the reason, and never the verdict.
- Split brain: two groups of ranks write the same checkpoints at the same time. A group is the set of ranks of one
  rendezvous; torchelastic gave all of them the same store. After a restart a new group takes over. If the old group
  still writes then, no torchrun controls it.
- Consequences: a failure may follow from another failure. The quantity that differed first, and its step, show this. A
  consequence may hide a second defect, so the user should correct the cause and run again."""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchaos.harness.analysis.ending import TeardownAbort, aborts_at_exit, survived, teardown_aborts
from torchaos.harness.analysis.hangs import hang_at_end
from torchaos.harness.analysis.recovery_times import recoveries
from torchaos.harness.interfaces import Finding, First, What
from torchaos.harness.monitoring.probes.known_failures import BY_NAME
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import final_path, number_in_name
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import Case, Verdict


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
    """A sentence about the first two groups that wrote at the same time. None if there was only one at any time, or if
    it is not known which ranks wrote, because there was no agent or no watch on checkpoints."""
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
    """The place of what was wrong first in the order of the steps and of what they compute. None if it has none."""
    return (first.step, _COMPUTED.index(first.what)) if first and first.what in _COMPUTED else None


def linked(cases: Sequence[Case], findings: Sequence[Finding], faults: Sequence[Case] = ()) -> list[Case]:
    """The cases of the assertions, each failed case with the failed case from which it follows, and each case that
    lacks a landed fault with the case of the faults. `faults`: the case of the faults, if there is one."""
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
    """Whether the first failure follows from the second. Each failure comes with its place in the scenario: if neither
    is earlier in the run, the first place in the scenario is the cause."""
    (own, place), (other, at) = ours, theirs
    if own == other:
        return at < place
    if own.what in _ENDS and other.what is What.ENDING:
        return own.what is not What.ENDING
    later = _LATER.get(own.what, {}).get(other.what)
    return later is not None and own.step >= other.step + later
