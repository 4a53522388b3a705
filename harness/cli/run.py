"""torchaos run and plan: from scenario files to plans, runs and results."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Protocol

import click
from rich.console import Console
from rich.text import Text

from torchaos.harness import registry
from torchaos.harness.cli import manage
from torchaos.harness.cli.options import (
    AS_JSON,
    AT_LEAST,
    ATTACH,
    CONFIDENCE,
    CONSENT,
    FILES,
    JOB,
    JSON,
    JUNIT,
    OTEL,
    PATH,
    QUIET,
    RATE,
    REPEAT,
    RUNS,
    SEED,
    SET,
    SUMMARY,
    VERBOSE,
    WithCommand,
    cli,
    is_told,
    remember,
)
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.redaction import mask, mask_words
from torchaos.harness.record.result import ExitCode, Result, Verdict, worst
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.release.repeats import Ask, Repeats, Repetitions, ask_of
from torchaos.harness.reporting import result_files
from torchaos.harness.reporting import result_files as jsonfile
from torchaos.harness.reporting.notifications import annotation
from torchaos.harness.reporting.result_files import placeholder_result
from torchaos.harness.reporting.terminal import console as show
from torchaos.harness.reporting.terminal.live import Live
from torchaos.harness.reporting.terminal.many_runs import show_repeats
from torchaos.harness.rollback.orphaned_runs import LeftBehind, before_a_run
from torchaos.harness.running.housekeeping import at_work, is_halted
from torchaos.harness.running.planner import make_plan, moments_in, warnings_of
from torchaos.harness.running.planner.job_plan import check_script
from torchaos.harness.running.scenario_run import ScenarioRun, error_result
from torchaos.harness.scenario.grammar import Repeat
from torchaos.harness.scenario.loader import COMMAND_LINE, load, other_job, text_of
from torchaos.harness.scenario.yaml_source import Source

GONE = (OSError, SystemExit)  # raised by rich if the terminal or the pipe is gone


@dataclass(frozen=True)
class Planned:
    plan: Plan
    folder: RunDir
    source: Path
    text: bytes  # options that change the run; they belong to the command line in the run directory
    options: tuple[str, ...]  # the part of the command line that changes what is run
    ask: Ask
    warnings: tuple[str, ...]
    moments: tuple[str, ...]  # for each fault, the place of its moment


@cli.command(cls=WithCommand)
@FILES
@JOB
@click.option("--out", type=PATH, default=RUNS, help="The folder for run directories.", show_default=True)
@SEED
@REPEAT
@AT_LEAST
@RATE
@CONFIDENCE
@JUNIT
@JSON
@SUMMARY
@OTEL
@SET
@ATTACH
@CONSENT
@QUIET
@VERBOSE
def run(
    files: Sequence[Path], out: Path, seed: int | None, repeat: int | None, at_least: int | None, rate: float | None,
    confidence: float | None, junit_file: Path | None, json_file: Path | None, overrides: Sequence[str],
    attach: int | None, consent: Sequence[str], job_file: Path | None, summary: Path | None, otel: bool,
    quiet: bool, verbose: bool, given: Sequence[str] = (), results_told: bool = True,
) -> None:  # fmt: skip
    """Run scenarios against live jobs and judge them. FILES: scenario files, folders of them, or names that `torchaos
    list scenarios` shows. Each scenario runs with its own job, or with your job: the COMMAND after `--`, or the job in
    the file of --job."""
    console = Console()
    job = other_job(job_file, given, attach)
    asked = partial(ask_of, times=repeat, at_least=at_least, rate=rate, confidence=confidence)
    runs = _apart([one for file in files for one in plans_of(file, overrides, seed, asked, attach, out, consent, job)])
    pending = [placeholder_result(run.plan, run.folder.root) for run in runs]
    series = Repetitions([(run.source, run.plan, run.ask, run.folder.root) for run in runs])
    # until a scenario is judged, its result is an error, so that a gate stays closed
    write_reports(pending, junit_file, json_file, series.judged([]))
    with suppress(*GONE):
        show.warnings(dict.fromkeys(text for run in runs for text in run.warnings), console)
    results: list[Result] = []

    def tell(result: Result, page: Path | None) -> None:
        """Prints the result. If there are several runs, a run that passed only has its line in the summary."""
        if results_told and (verbose or len(runs) == 1 or result.verdict is not Verdict.PASSED):
            show.show(result, console, page, whole=verbose)

    remember(out)
    with signals() as interrupted, working_on(runs):
        manage.tell(before_a_run(given_up=lambda: interrupted.reason is not None))
        for one in runs:
            if interrupted.reason:
                break
            results.append(_run_one(one, console, interrupted, otel, quiet, tell))
            write_reports([*results, *pending[len(results) :]], junit_file, json_file, series.judged(results))
    told = [*results, *pending[len(results) :]]
    if summary:
        from torchaos.harness.cli.results import summarize

        summarize(told, summary)
    _annotate(told, runs)
    repeats = series.judged(results, ended=True)
    write_reports(told, junit_file, json_file, repeats)
    if len(results) > 1 and results_told:
        with suppress(*GONE):
            show.summary(results, console)
            for one_series in repeats:
                show_repeats(one_series, console)
    sys.exit(worst(series.codes(results, repeats)))


def _annotate(results: Sequence[Result], runs: Sequence[Planned]) -> None:
    """In GitHub Actions, prints a line for each run that did not pass, by which its file is marked."""
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for result, planned in zip(results, runs, strict=True):
            if result.verdict is not Verdict.PASSED and not planned.ask.of_rate:
                click.echo(annotation(result, planned.source))


@contextmanager
def working_on(runs: Sequence[Planned]) -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(at_work([planned.plan.scenario for planned in runs]))
        except OSError as error:
            raise UsageError(f"the state directory can't be used: {error}; set XDG_STATE_HOME to another") from error
        yield


def write_reports(
    results: Sequence[Result], junit_file: Path | None, json_file: Path | None, repeats: Sequence[Repeats] = (),
    of: str = "",
) -> None:  # fmt: skip
    """Writes the reports. `of`: what the results belong to, such as a gate. Raises UsageError if a file can't be
    written."""
    try:
        if junit_file:
            result_files.write_junit(results, junit_file, repeats, of)
        if json_file:
            jsonfile.write_json(results, json_file, repeats)
    except OSError as error:
        raise UsageError(f"{error.filename}: the report can't be written: {error.strerror}") from error


def plans_of(
    file: Path, overrides: Sequence[str], seed: int | None, asked: Callable[[Repeat | None], Ask],
    attach: int | None, out: Path, consent: Sequence[str], job: Source | None,
) -> Iterator[Planned]:  # fmt: skip
    scenario = load(file, overrides, job)
    job_file = job.path if job else file
    ask = asked(scenario.repeat)
    first = scenario.seed if seed is None else seed
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in range(ask.times):
        plan = make_plan(scenario, file, first + number, attach, consent, job_file)
        if attach is None:
            check_script(scenario.job, scenario.launcher, job_file)
        name = f"{plan.scenario}-s{plan.seed}-{stamp}-{os.getpid()}"
        options = tuple(word for text in overrides for word in ("--set", text))
        options += ("--attach", str(attach)) if attach is not None else ()
        options += tuple(word for name in consent for word in ("--consent", name))
        options += ("--repeat", "1") if scenario.repeat is not None else ()
        options += _job_options(job)
        warnings = tuple(warnings_of(plan, scenario, file, job))
        # Without `..` in the path, unless a link makes it necessary.
        folder = RunDir((out.resolve() if ".." in out.parts else out.absolute()) / name)
        moments = tuple(moments_in(plan, file))
        yield Planned(plan, folder, file, text_of(file, job), options, ask, warnings, moments)


def _job_options(job: Source | None) -> tuple[str, ...]:
    if job is None:
        return ()
    return ("--", *shlex.split(job.data["job"]["command"])) if job.path == COMMAND_LINE else ("--job", str(job.path))


def _apart(runs: Sequence[Planned]) -> list[Planned]:
    """Gives each scenario a folder of its own, even if two files have the same scenario with the same seed."""
    seen = Counter[Path]()
    found = []
    for planned in runs:
        seen[planned.folder.root] += 1
        again = f"-{number}" if (number := seen[planned.folder.root]) > 1 else ""
        found.append(replace(planned, folder=RunDir(planned.folder.root.with_name(planned.folder.root.name + again))))
    return found


@lru_cache(maxsize=1)
def _prepare_results() -> None:
    """Imports what a run needs at its end, while its job starts."""

    def prepare() -> None:
        from torchaos.harness.checkpoints import inventory  # noqa: F401
        from torchaos.harness.cli import results  # noqa: F401
        from torchaos.harness.reporting.html.page import template_of

        template_of("report.html")

    Thread(target=prepare, name="results", daemon=True).start()


@contextmanager
def _watched(journal: Journal, plan: Plan, console: Console) -> Iterator[None]:
    journal.listen(lambda event: _prepare_results() if event.kind is Kind.JOB_STARTED else None)
    with Live(journal, plan, console):
        yield


def _run_one(
    planned: Planned, console: Console, interrupted: Interrupt, otel: bool, quiet: bool,
    tell: Callable[[Result, Path | None], None],
) -> Result:  # fmt: skip
    again = [
        *mask_words(
            [
                "torchaos",
                "run",
                registry.scenario_name(planned.source),
                "--seed",
                str(planned.plan.seed),
                *planned.options,
            ]
        )
    ]
    watcher = partial(_watched, console=Console(stderr=True, quiet=quiet))
    scenario_run = ScenarioRun(planned.plan, planned.folder, planned.text, again, watcher, planned.moments)
    interrupted.ends(scenario_run)
    try:
        result = _result_of(scenario_run)
    except ChaosError as error:
        with suppress(*GONE):
            console.print(Text.assemble(("error: ", "bold red"), mask(str(error))), soft_wrap=True)
        code = ExitCode.USAGE if isinstance(error, UsageError) else ExitCode.INTERNAL
        code = ExitCode.ROLLBACK if isinstance(error, LeftBehind) else code
        return error_result(planned.plan, planned.folder, ChaosError(mask(str(error))), code)
    from torchaos.harness.cli.results import keep, trace

    problems = keep(result, planned.folder, scenario_run.records)
    problems += trace(result, planned.folder) if otel else []
    with suppress(*GONE):
        tell(result, planned.folder.report if planned.folder.report.is_file() else None)
        for problem in problems:
            console.print(Text(f" note: {mask(problem)}", "yellow"), soft_wrap=True)
    return result


def _result_of(scenario_run: ScenarioRun) -> Result:
    """The result. Raises ChaosError if the run directory can't be written; everything has been undone by then."""
    try:
        return scenario_run()
    except OSError as error:
        what = f"{error.filename or scenario_run.folder.root}: {error.strerror or error}"
        raise ChaosError(f"{what}; make room, or choose another --out") from error


@cli.command(cls=WithCommand)
@FILES
@JOB
@SEED
@SET
@ATTACH
@CONSENT
@AS_JSON
def plan(
    files: Sequence[Path], seed: int | None, overrides: Sequence[str], attach: int | None, consent: Sequence[str],
    json_file: Path | None, job_file: Path | None, given: Sequence[str] = (),
) -> None:  # fmt: skip
    """Show what a run would do, and change nothing.

    FILES and COMMAND: as for `torchaos run`. The JSON of several files is a list.
    """
    job = other_job(job_file, given, attach)
    plans = [next(plans_of(file, overrides, seed, ask_of, attach, Path(), consent, job)) for file in files]
    if json_file:
        told = [json.loads(one.plan.masked().to_json()) | {"warnings": [*map(mask, one.warnings)]} for one in plans]
        told = [dict(sorted(one.items())) for one in told]
        if is_told(json_file, told if len(told) > 1 else told[0]):
            return
    for one in plans:
        show.plan(one.plan.masked(), Console())
        show.warnings(one.warnings, Console())
        if one.ask.times > 1:
            click.echo(f" Repeated {one.ask.times} times, with increasing seeds: {one.ask.in_words}.\n")


class Endable(Protocol):
    def stop(self, reason: str) -> None: ...
    def hurry(self, reason: str) -> None: ...


class Interrupt:
    """The signal handlers. After a signal, the current run is ended in order, rolled back and judged, and no other run
    starts. After a second signal, the job gets no grace period and no more evidence is collected; the rollback is still
    complete."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._target: Endable | None = None

    def ends(self, target: Endable) -> None:
        """Makes signals end this run from now on. If a signal came just before, the run is ended at once."""
        self._target = target
        if self.reason:
            target.stop(self.reason)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self.reason = self.reason is not None, self.reason or f"{_sender(number)} ended it"
        if self._target:
            self._target.hurry(self.reason) if again else self._target.stop(self.reason)


def _sender(number: int) -> str:
    if is_halted():
        return "torchaos halt"
    name = signal.Signals(number).name
    return f"Ctrl-C ({name})" if number == signal.SIGINT and _has_terminal() else name


def _has_terminal() -> bool:
    """Whether somebody may have pressed Ctrl-C: a run that pytest started has no terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


@contextmanager
def signals() -> Iterator[Interrupt]:
    interrupt = Interrupt()
    wanted = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup: the run outlives its terminal
        wanted.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
