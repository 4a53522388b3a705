"""Known failures of torch, gloo and NCCL that a run met: they change the reason, never the verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from torchaos.harness.agent.wire import Event, Kind
from torchaos.harness.judging.ending.hung import hang_at_end
from torchaos.harness.judging.ending.teardown import TeardownAbort, aborts_at_exit, teardown_aborts
from torchaos.harness.judging.ending.unstarted import survived
from torchaos.harness.judging.recovery.recovery import recoveries
from torchaos.harness.record.record import Record
from torchaos.harness.watching.probes.known_failures import BY_NAME


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
