"""The story of a run in plain words: the plan, the notable events with the steps between them, the evidence, and the
reasons for the verdict. The short story has the verdict and the turning points. It is made from the run directory
alone, which may have been moved. No file is changed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import read_journal
from torchaos.harness.record.plan import Plan, counted, moment_in_words, seconds_in_words, target_in_words
from torchaos.harness.record.record import Record
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.result import Recovery, Result, Verdict, root_first
from torchaos.harness.record.rundir import RunDir, result_in
from torchaos.harness.reporting.event_timeline import Moment, Turn, happened
from torchaos.harness.reporting.terminal.console import tell_verdict
from torchaos.harness.reporting.terminal.headline import went_on
from torchaos.harness.reporting.terminal.plan_preview import given
from torchaos.harness.reporting.terminal.text import Pen, name_in_words, on_one_line
from torchaos.harness.rollback.orphaned_runs import is_alive

_SHORT = 20  # lines
_TIME = 9  # columns

_PARTS = {
    "felt": "the fault was felt", "detected": "torchelastic or the job's end showed it",
    "torn_down": "the last rank of that attempt was gone", "rendezvous": "the ranks had found each other again",
    "workers_up": "all ranks were up", "imported": "all had imported torch",
    "prepared": "all had called init_process_group", "joined": "all had joined the process group",
    "set_up": "all had been set up and began to load", "restored": "the checkpoint was loaded",
    "first_step": "the first step was done", "caught_up": "the job had caught up",
}  # fmt: skip
_VERBS = {
    Verdict.PASSED: "passed", Verdict.FAILED: "failed", Verdict.INCONCLUSIVE: "is inconclusive",
    Verdict.ERROR: "is an error",
}  # fmt: skip


@dataclass(frozen=True)
class Story:
    title: str
    about: str
    planned: tuple[str, ...]
    happened: tuple[Moment, ...]
    seen: tuple[str, ...]  # the effect of each fault, and how the job continued
    why: tuple[str, ...]  # the verdict
    doubts: tuple[str, ...]  # reasons why the story may be incomplete


def story_of(folder: RunDir) -> Story:
    """The story of a run. Raises UsageError if the plan can't be read."""
    run, result, doubts = _read(folder)
    return Story(
        _title(run, result),
        run.plan.description,
        tuple(_planned(run.plan)),
        tuple(happened(run)) or (Moment(0.0, "nothing was recorded: the run ended before it had begun"),),
        (*_start(run), *(_seen(result) if result else ())),
        tuple(_why(result)) if result else (),
        tuple(doubts),
    )


def _title(run: Record, result: Result | None) -> str:
    return f"{run.plan.scenario}, seed {run.plan.seed}: {result.verdict.value if result else 'not judged'}"


def _read(folder: RunDir) -> tuple[Record, Result | None, list[str]]:
    """The run, its result, and why the story may be incomplete."""
    run, doubts = _load(folder)
    return run, _judged(folder, doubts), doubts


def _load(folder: RunDir) -> tuple[Record, list[str]]:
    try:
        run = Record.load(folder)
    except UsageError as error:
        run = _without_artifacts(folder, error)
        return run, [str(error), *_unread(run)]
    return run, _unread(run)


def _without_artifacts(folder: RunDir, error: UsageError) -> Record:
    """The record from plan and journal only."""
    try:
        damaged: list[str] = []
        events = read_journal(folder.events, damaged) if folder.events.is_dir() else ()
        return Record(Plan.read(folder.plan), events, {}, tuple(damaged))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise error from None


def _unread(run: Record) -> list[str]:
    if not run.damaged:
        return []
    many = f"{len(run.damaged)} {'line' if len(run.damaged) == 1 else 'lines'} of the journal"
    return [f"{many} can't be read, such as {run.damaged[0]}: these events are missing here"]


def _judged(folder: RunDir, doubts: list[str]) -> Result | None:
    """The result, judged by the rules of this version. None if the run has not ended. If the stored result differs, a
    sentence about it is added to `doubts`."""
    then = _stored(folder)
    if then is None and is_alive(folder.root):
        doubts.append("the run is still going on, so there is no verdict yet")
        return None
    try:
        now = judge(folder)
    except ChaosError as error:
        if str(error) not in doubts:
            doubts.append(f"it can't be judged any more: {error}")
        return then
    if then and (then.verdict, then.exit_code) != (now.verdict, now.exit_code):
        doubts.append(
            f"at the time of the run, it was judged {then.verdict.value} (exit code {then.exit_code}): {then.reason}"
        )
    return now


def _stored(folder: RunDir) -> Result | None:
    try:
        return result_in(folder)
    except (OSError, UsageError):
        return None


def _planned(plan: Plan) -> Iterator[str]:
    ranks = f"{plan.job.world_size} {'rank' if plan.job.world_size == 1 else 'ranks'}"
    nodes = "" if plan.job.nodes == 1 else f" on {plan.job.nodes} nodes"
    nodes = nodes if plan.job.replicas == 1 else f" in {plan.job.replicas} replicas"
    command = mask(shlex.join(plan.job.command))
    attached = plan.job.attached
    description = f"{attached}, to which torchaos was attached" if attached else command
    yield f"The job, of {ranks}{nodes}: {description}"
    for fault in plan.faults:
        name = "" if fault.id == fault.inject else f" ({fault.id})"
        times = f", {fault.times} times" if fault.times > 1 else ""
        lasting = f", for {fault.duration_s:g} s" if fault.duration_s is not None else ""
        target = target_in_words(fault.target, fault.params.get("endpoint"), plan.job)
        yield f"{fault.inject}{name} at {target}: {moment_in_words(fault.trigger)}{lasting}{times}"
    if not plan.faults:
        yield "No fault."
    for when, conditions in (("No fault before", plan.steady_state), ("It would end early on", plan.stop)):
        if conditions:
            named = [" ".join((condition.name, given("conditions", condition))).strip() for condition in conditions]
            yield f"{when}: {'; '.join(named)}"
    if plan.asserts:
        against = ", against a fault-free twin" if plan.twin else ""
        yield f"It is judged by {', '.join(name_in_words(one.name) for one in plan.asserts)}{against}"


def _start(run: Record) -> Iterator[str]:
    if not any(run.of_kind(Kind.JOB_STARTED)) and not run.plan.job.attached:
        stages = [str(event.data["stage"]) for event in run.of_kind(Kind.STAGE)]
        how_far = f"; the last stage was {stages[-1]}" if stages else ""
        why = f": {run.stopped.data['reason']}" if run.stopped else how_far
        yield f"The job was never started{why}"
    elif not run.history.executions:
        yield "No step of the job was seen"


def _seen(result: Result) -> Iterator[str]:
    for fault in result.faults:
        if fault.applied is not None:
            proof = f"it was felt: {fault.evidence}" if fault.evidence else "nothing shows that it was felt"
            yield f"{fault.id} landed ({fault.applied}), and {proof}"
        if fault.reason not in result.reason and fault.verdict is not Verdict.PASSED:
            yield f"{fault.id}: {fault.reason}"
    yield from map(_recovered, result.recoveries)


def _recovered(recovery: Recovery) -> str:
    seen = [f"{_PARTS.get(part, name_in_words(part))} after {seconds_in_words(at)}"
            for part, at in recovery.parts.items() if at is not None]  # fmt: skip
    if recovery.parts.get("caught_up") is None:
        until = f"; {'; '.join(seen)}" if seen else ""
        return f"From {recovery.fault} the job never recovered{until}"
    lost = "an unknown number of" if recovery.lost_steps is None else recovery.lost_steps or "no"
    again = f"{lost} {'step was' if lost == 1 else 'steps were'} done again"
    how = "went on without a restart" if went_on(recovery.parts) else "came back"
    return f"From {recovery.fault} the job {how}, {again}; {'; '.join((*seen, *recovery.advice))}"


def _why(result: Result) -> Iterator[str]:
    """The verdict, then the other findings. Cases with the same reason share a line."""
    yield f"The run {_VERBS[result.verdict]}: {on_one_line(result.reason)}"
    held = [
        f"{name_in_words(case.name)}{f' ({on_one_line(case.cause)})' if case.cause else ''}"
        for case in result.cases if case.verdict is Verdict.PASSED
    ]  # fmt: skip
    told: dict[tuple[Verdict, str], list[str]] = {}
    for case in root_first(result.cases):
        if case.verdict is not Verdict.PASSED and case.name != result.decided_by:
            told.setdefault((case.verdict, on_one_line(case.full_reason)), []).append(name_in_words(case.name))
    for verdict in (Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.ERROR):
        for (found, reason), names in told.items():
            if found is verdict:
                verb = "are inconclusive" if verdict is Verdict.INCONCLUSIVE and len(names) > 1 else _VERBS[verdict]
                yield f"{', '.join(names)} {verb}: {reason}"
    if held:
        yield f"What held: {', '.join(held)}"
    yield from (f"Noted: {on_one_line(note)}" for note in result.notes if note not in result.reason)


def tell_short(folder: RunDir, console: Console) -> None:
    """Prints the short story of a run in at most 20 lines of a wide terminal: the verdict, its cause, what failed, and
    the turning points. Raises UsageError if the plan can't be read."""
    run, result, doubts = _read(folder)
    pen, events = Pen(console), happened(run)
    if result:
        tell_verdict(pen, result, 2)
    else:
        pen.gap()
        pen.row([], pen.text(_title(run, result), "bold"), indent=1)
    turns = [one for one in events if isinstance(one, Turn)]
    for text in [*([] if turns else _start(run)), *doubts]:
        pen.row([(pen.text("note", "dim"), 4)], pen.text(text), indent=3, most=2)
    kept = _fitting(turns, _SHORT - pen.lines - 5, pen.width - _TIME - 2)
    if kept:
        pen.heading(
            "What happened", f"seconds since the run began; {counted(len(events) - len(kept), 'more line')} with -v"
        )
    for number, moment in enumerate(kept):
        if len(kept) < len(turns) and number == (len(kept) + 1) // 2:
            pen.row([(Text(), _TIME)], pen.text(f"({len(turns) - len(kept)} left out here)", "dim"), indent=1)
        pen.row([(Text(f"{moment.at_s:{_TIME}.2f}", "dim"), _TIME)], pen.text(moment.text), indent=1, most=2)
    pen.gap()
    pen.long_line(pen.text("More", "dim"), 4, f"torchaos explain -v {shlex.quote(str(folder.root))}")
    pen.gap()


def _fitting(turns: Sequence[Turn], lines: int, width: int) -> list[Turn]:
    """The turning points that fit into `lines` lines. The middle ones are left out first; the first two and the last
    always stay."""
    kept = list(turns)
    while len(kept) > 3:
        needed = sum(2 if len(one.text) > width else 1 for one in kept) + (len(kept) < len(turns))
        if needed <= lines:
            break
        del kept[len(kept) // 2]
    return kept


def tell(story: Story, console: Console) -> None:
    """Prints the story of a run. Each event is shown with its time in seconds since the run began."""
    pen = Pen(console)
    pen.gap()
    pen.row([], pen.text(story.title, "bold"), indent=1)
    if story.about:
        pen.row([], pen.text(story.about, "dim"), indent=1)
    _chapter(pen, "What was planned", story.planned)
    pen.heading("What happened", "seconds since the run began")
    for moment in story.happened:
        pen.row([(Text(f"{moment.at_s:{_TIME}.2f}", "dim"), _TIME)], pen.text(moment.text), indent=1)
    _chapter(pen, "The outcome", story.seen)
    _chapter(pen, "Why", story.why)
    _chapter(pen, "What may be missing here", story.doubts)
    pen.gap()


def _chapter(pen: Pen, title: str, sentences: Sequence[str]) -> None:
    if sentences:
        pen.heading(title)
    for sentence in sentences:
        pen.row([(pen.text(pen.marks.dot, "dim"), 1)], pen.text(sentence), indent=3)
