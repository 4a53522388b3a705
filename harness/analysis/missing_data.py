"""Says why an assertion could not see the data that it needs, by clauses that name the missing source.

Finds out whether a journal lost events that, by other parts of the record, must have existed."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history import Load, saved_as
from torchaos.harness.record.history.step_evidence import RECORD
from torchaos.harness.record.record import Record


def missing_in_words(run: Record, twins: Sequence[Record]) -> str:
    """A clause about the first gap in the journal of the run or of a twin; empty if no gap is known."""
    records = (run, *twins)
    seen, ended = set[int](), set[int]()
    for record in records:
        seen |= {rank for rank, _ in _who(record, Kind.AGENT_STARTED)}
        ended |= {rank for rank, _ in set(_ended_well(record)) & set(_who(record, Kind.AGENT_ENDED))}
    for journal, record in (("the journal", run), *(("the journal of a twin", twin) for twin in twins)):
        if why := next(chain(record.gaps, _cut(record, seen, ended)), None):
            return f"{journal} is damaged: {why}"
    return ""


def _cut(record: Record, seen: set[int], ended: set[int]) -> Iterator[str]:
    """Yields a clause for each rank that succeeded, in a job that succeeded, and whose last events (or all events) are
    missing. Only another record of the same job can show this: there, the rank wrote its agent's last event (`ended`),
    or an agent started in it (`seen`). In one record alone it can't be told, because a job may always leave by
    os._exit, which ends the agent without a last event."""
    made = {(rank, attempt) for attempt, rank in record.sources_of_steps}
    has, whole = made | set(_who(record, Kind.AGENT_STARTED)), set(_who(record, Kind.AGENT_ENDED))
    excused = set(_who(record, Kind.AGENT_FAILED, Kind.APPLYING))
    for rank, attempt in sorted(set(_ended_well(record)) - whole - excused):
        if (rank, attempt) in has:
            if rank in ended:
                yield f"rank {rank} ended well in attempt {attempt}, and its last events are missing"
        elif rank in seen:
            yield f"rank {rank} ended well in attempt {attempt}, and all of its events are missing"


def _ended_well(record: Record) -> list[tuple[int, int]]:
    """(rank, its last attempt) of each rank that ended with exit code 0, if the job ended with exit code 0 too."""
    if record.exit_code != 0:
        return []
    codes = {(e.rank, e.attempt): e.data["exit_code"] for e in record.of_kind(Kind.RANK_EXITED)}
    last = dict(sorted(_who(record, Kind.RANK_EXITED)))
    return [who for who in last.items() if codes[who] == 0]


def _who(record: Record, *kinds: Kind) -> Iterable[tuple[int, int]]:
    return (
        (event.rank, event.attempt)
        for event in record.of_kind(*kinds)
        if event.rank is not None and event.attempt is not None
    )


_NEVER = {
    "loss": "the backward hook never fired (it can't see a job that calls the autograd engine itself, as "
    "Megatron does)",
    "samples": "the model got no input through DDP, FSDP or FSDP2 that could be identified. Take sample_accounting "
    "out of the scenario if the job makes its own data, such as in reinforcement learning",
    "steps": "no optimizer step was seen, and no line of the log shows one",
    "parameters": "no optimizer of torch's made a step in a rank with the agent",
}


def why_unseen(record: Record, what: str) -> str:
    """Why a quantity was not seen in a run, as a clause. `what`: "loss", "samples", "steps" or "parameters"."""
    if ended := ended_before_steps(record):
        return ended
    if unfound := no_rank_found(record):
        return unfound
    failed = [event for event in record.of_kind(Kind.AGENT_FAILED) if _concerns(str(event.data["hook"]), what)]
    if failed:
        return f"the agent's hook {failed[0].data['hook']} failed: {failed[0].data['error']}"
    note = next((event for event in record.of_kind(Kind.NOTE) if event.data.get("unseen") == what), None)
    if note:
        return str(note.data["text"])
    if not any(record.of_kind(Kind.AGENT_STARTED, Kind.SAVE_BEGIN, Kind.LOAD_END)):
        return f"there was no agent in the job, and its log does not show {what}"
    if record.history.source == "log":
        return f"the agent saw no optimizer step, and the job's log, which shows steps, does not show {what}"
    return (of_an_earlier_run(record) if what == "steps" else "") or _NEVER[what]


def ended_before_steps(record: Record) -> str:
    """A clause: the run was ended before any step was seen. Empty if it was not."""
    early = record.stopped and not record.ended_on_purpose and not record.history.executions
    return "the run was ended before the job's first step was seen" if early else ""


def no_rank_found(record: Record) -> str:
    """A clause: the job worked, and none of its ranks was found. Empty if a rank was found, or if the job ended with an
    error before a step was seen."""
    worked = record.exit_code == 0 or record.history.highest_step() is not None
    if not worked or any(attempt.ranks for attempt in record.history.attempts):
        return ""
    if any(event.rank is not None and event.kind is not Kind.LOG_STEP for event in record.events):
        return ""
    return (
        "no rank was found; a process is a rank if it has RANK, LOCAL_RANK and TORCHELASTIC_RUN_ID in its environment, "
        "as under torchrun"
    )


def of_an_earlier_run(record: Record) -> str:
    """A clause: the job went on from a checkpoint of an earlier run or of the twin, and so made no step. Empty if it
    did not, or if the job has a folder of its own in each run."""
    job = record.plan.job
    if record.history.executions or any("{run}" in text for text in (*job.command, *job.env.values())):
        return ""
    first = next(iter(record.of_kind(Kind.SAVE_BEGIN, Kind.LOAD_END)), None)
    if first is None or not first.data.get("ok"):
        return ""
    return (
        f"the job loaded {posixpath.basename(first.data['path'])}, which this run had not saved, and no optimizer step "
        "followed; if it is of an earlier run, write {run} in the job's command, so that each run has its own folder"
    )


def why_unplaced(record: Record, attempts: tuple[int, ...]) -> str:
    """A clause: why the steps of the first of these attempts have no global number, with the facts that were seen, and
    those that were not."""
    history, number = record.history, attempts[0]
    if history.uneven:
        return (
            f"it is not known which global steps attempt {number} made: the ranks make different numbers of steps "
            f"({' and '.join(map(str, history.uneven))}), so after a restart they have no common step"
        )
    part = next((segment for segment in history.segments if segment.number == number and segment.base is None), None)
    loads = [load for load in history.loads if load.attempt == number]
    said = (
        sorted((witness for witness in part.witnesses if witness.fits), key=lambda each: -each.weight) if part else []
    )
    seen = [] if any(each.name == RECORD for each in said) else [_of_load(record, loads)]
    seen += [f"{each.name} says {' or '.join(map(str, each.fits[:3]))}" for each in said[:2]]
    if not said:
        seen.append("no counter, sample or loss shows an earlier step")
    known = any(record.of_kind(Kind.BEGUN))
    remedy = (
        "let the job print its step" if known else "with `state_restored`, the state itself is recorded and shows it"
    )
    return f"it is not known which global steps attempt {number} made: {', and '.join(seen)}; {remedy}"


def _of_load(record: Record, loads: Sequence[Load]) -> str:
    if not loads:
        return "no load of a checkpoint was seen in it"
    read = [load for load in loads if load.ok]
    name = posixpath.basename((read or loads)[-1].path)
    if not read:
        return f"{name} could not be loaded"
    was_saved = saved_as(read[-1].path, record.history.saves, read[-1].mono_s)
    unknown = "whose step is not known" if was_saved else "whose save was not seen"
    return f"{name} was loaded, {unknown}"


def _concerns(hook: str, what: str) -> bool:
    words = {
        "loss": ("loss", "backward"), "samples": ("sample", "data"), "steps": ("step", "optimizer", "import"),
        "parameters": ("state",),
    }  # fmt: skip
    return any(word in hook.lower() for word in words[what])
