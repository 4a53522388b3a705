"""The commands about the results of runs: report, history, compare, explain, and repro."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import fill

import click
from rich.console import Console

from torchaos.harness.analysis.verdict import judge, records_of, verdict_of
from torchaos.harness.cli.options import (
    AS_JSON,
    OTEL,
    PATH,
    RUN_DIR,
    RUN_DIRS,
    RUNS,
    SUMMARY,
    VERBOSE,
    Command,
    Ranks,
    RunFolder,
    cli,
    is_told,
)
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.record.record import Record
from torchaos.harness.record.result import ExitCode, Result, Verdict
from torchaos.harness.record.rundir import RunDir, commit_in
from torchaos.harness.reporting import compare_runs, html, notifications, telemetry, trend_store
from torchaos.harness.reporting.compare_runs import TOLERANCE, Change, Night, compare, overall
from torchaos.harness.reporting.html import index
from torchaos.harness.reporting.repro import case_of, script_of
from torchaos.harness.reporting.story import story_of, tell, tell_short
from torchaos.harness.reporting.terminal import headline, many_runs
from torchaos.harness.reporting.trend_store import Kept, path_of

Records = tuple[Record, list[Record]]

_OUT = click.option("--out", type=PATH, default=RUNS, help="The folder of the run directories.", show_default=True)
_DB = click.option("--db", type=PATH, help="The history's file, if it is not OUT.sqlite.")
_CODES = {Change.WORSE: ExitCode.FAILED, Change.UNCLEAR: ExitCode.INCONCLUSIVE}


def keep(result: Result, folder: RunDir, records: Records | None = None) -> list[str]:
    """Writes the page of a run, and adds the run to the history beside its folder. Returns a sentence for each problem;
    no problem changes a verdict. `records`: those of the run and its twins, if they were read already."""
    problems = []
    try:
        html.write(folder, result, records)
    except Exception as error:  # an error in the page never changes the verdict
        problems.append(f"report.html can't be written: {type(error).__name__}: {error}")
    try:
        trend_store.add_runs(path_of(folder.root.parent), [trend_store.kept_of(folder)])
    except UsageError as error:
        problems.append(str(error))
    return problems


def trace(result: Result, folder: RunDir, run: Record | None = None) -> list[str]:
    """Sends the run as a trace. Returns a sentence if that failed; the verdict does not change."""
    try:
        problem = telemetry.send(run or Record.load(folder), result, commit_in(folder))
    except ChaosError as error:
        problem = str(error)
    return [f"the trace was not sent: {problem}"] if problem else []


@cli.command()
@RUN_DIRS
@click.option(
    "-o", "--output", type=PATH, metavar="FILE", help="Write the page of a single run here, not into its directory."
)
@SUMMARY
@click.option("--card", type=PATH, help="Write a small picture of a single run here, as SVG.")
@click.option("--ranks", type=Ranks(), default=(), help="Ranks to show in the timeline of a large run, as 0-3,7.")
@OTEL
def report(
    folders: Sequence[Path], output: Path | None, summary: Path | None, card: Path | None, ranks: Sequence[int],
    otel: bool,
) -> None:  # fmt: skip
    """Write report.html, which opens offline, for run directories."""
    if (output or card) and len(folders) > 1:
        raise UsageError(f"{'--output' if output else '--card'} names one file; give one run directory")
    results = []
    for path in folders:
        folder = RunDir(path.absolute()).check()
        result = trend_store.kept_of(folder).result if folder.result.is_file() else judge(folder)
        results.append(replace(result, run_dir=str(folder.root)))
        records = records_of(folder)
        size = records[0].plan.job.world_size
        if strange := [rank for rank in ranks if rank >= size]:
            raise UsageError(f"--ranks: there is no rank {strange[0]}; the job has {size}, counted from 0")
        _write(output or folder.report, html.text(folder, result, records, ranks), "-o", private=True)
        if card:
            _write(card, html.card(result, *records), "--card")
        for problem in trace(results[-1], folder, records[0]) if otel else ():
            click.echo(problem, err=True)
    summarize(results, summary)


def _write(to: Path, text: str, option: str, private: bool = False) -> None:
    try:
        write_atomically(to, text, private=private)
    except OSError as error:
        raise UsageError(f"{to}: the report can't be written: {error.strerror}; name another with {option}") from error
    click.echo(to)


def notify(url: str | None, kind: str, name: str, verdict: Verdict, why: Sequence[str], folder: str = "") -> None:
    """Sends the verdict to the server, if the user named a server. A server that does not answer changes no verdict."""
    if url and (problem := notifications.post(url, kind, name, verdict, why, folder)):
        click.echo(f"the verdict was not sent to the webhook: {problem}", err=True)


def summarize(results: Sequence[Result], path: Path | None) -> None:
    """Writes the results as Markdown, if the user named a file. Raises UsageError if it can't be written."""
    if path is None:
        return
    happened = {}
    for result in results:
        with suppress(ChaosError):  # a run that left too few files has no summary, only a reason
            happened[result.run_dir] = headline.happened(Record.load(RunDir(Path(result.run_dir))), result)
    try:
        notifications.write(results, path, happened)
    except OSError as error:
        raise UsageError(f"{path}: the summary can't be written: {error.strerror}") from error


@cli.command()
@click.argument("scenarios", nargs=-1)
@_OUT
@_DB
@click.option("--last", type=click.IntRange(1), default=20, show_default=True, help="The last N runs of each scenario.")
@AS_JSON
@click.option("--html", "page", type=PATH, help="Write a page over all runs here.")
@click.option("--prometheus", type=PATH, help="Write metrics of the newest runs here, as Prometheus text.")
def history(
    scenarios: Sequence[str], out: Path, db: Path | None, last: int, json_file: Path | None, page: Path | None,
    prometheus: Path | None,
) -> None:  # fmt: skip
    """Show the results of past runs and game days over time. SCENARIOS: their names, if not all."""
    path = db or path_of(out)
    runs = trend_store.kept(path, scenarios, beside=trend_store.found_in(out))
    days = compare_runs.kept(path, scenarios, beside=compare_runs.found_in(out))
    if not runs and not days:
        which = f" of {', '.join(scenarios)}" if scenarios else ""
        raise UsageError(f"{path}: no run{which} in it yet; --out names the folder of the run directories")
    try:
        if page:
            index.write(page.absolute(), runs, days)
        if prometheus:
            telemetry.write_metrics(prometheus, runs, days)
    except OSError as error:
        raise UsageError(f"{error.filename}: it can't be written: {error.strerror}") from error
    told = [{**run.result.to_json(), "commit": run.commit} for run in runs]
    is_printed = is_told(json_file, [*told, *({**day.raw, "folder": day.folder} for day in days)])
    if page or prometheus:
        click.echo("\n".join(str(path) for path in (page, prometheus) if path), err=is_printed)
    elif not is_printed:
        many_runs.history(_last(runs, last), Console())
        many_runs.nights(days[-last:], Console())


@cli.command("compare")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@_OUT
@_DB
@click.option("--tolerance", type=click.FloatRange(0), default=TOLERANCE, show_default=True,
              help="The share by which a recovery may take longer.")  # fmt: skip
@AS_JSON
def compare_(before: str, after: str, out: Path, db: Path | None, tolerance: float, json_file: Path | None) -> None:
    """Compare two runs, game days or commits: is B worse than A?

    A and B are each the directory of a run or a game day, a folder of them, a file that --json wrote, or a commit. Exit
    code 0: nothing got worse; 1: something did; 2: it can't be decided."""
    kept = db or path_of(out)
    (runs, days), (newer_runs, newer_days) = (_side(text, kept, out) for text in (before, after))
    rows = compare(runs, newer_runs, tolerance) + compare_runs.compare_nights(days, newer_days, tolerance)
    if not is_told(json_file, [asdict(row) for row in rows]):
        many_runs.comparison(rows, Console())
    sys.exit(_CODES.get(overall(rows), ExitCode.PASSED))


def _side(text: str, kept: Path, out: Path) -> tuple[list[Kept], list[Night]]:
    path, days = RunFolder()(text), list[Night]()
    if path.is_file():
        found = trend_store.in_file(path)
    elif (path / "plan.json").is_file():
        found = [trend_store.kept_of(RunDir(path.absolute()))]
    elif (path / "day.json").is_file():
        found, days = [], [Night.of(path.absolute())]
    elif path.is_dir():
        found, days = trend_store.found_in(path), compare_runs.found_in(path)
    else:
        found = trend_store.kept(kept, commit=text, beside=trend_store.found_in(out))
        days = compare_runs.kept(kept, commit=text, beside=compare_runs.found_in(out))
    if not found and not days:
        raise UsageError(
            f"{text}: no run, file of results or commit of that name; `torchaos history` lists what {kept} has"
        )
    return found, days


def _last(runs: Sequence[Kept], most: int) -> list[Kept]:
    names = dict.fromkeys(kept.result.scenario for kept in runs)
    return [one for name in names for one in [kept for kept in runs if kept.result.scenario == name][-most:]]


@cli.command()
@RUN_DIRS
@AS_JSON
@VERBOSE
def explain(folders: Sequence[Path], json_file: Path | None, verbose: bool) -> None:
    """Tell the story of a run in plain words. It has the verdict, its cause, and the turning points with their times;
    with -v also the plan, all events, and the evidence. Only the run directory is read. Exit code 0, whatever the
    verdict. The JSON has everything; that of several runs is a list."""
    runs = [RunDir(folder.absolute()).check() for folder in folders]
    if json_file:
        told = [asdict(story_of(run)) for run in runs]
        if is_told(json_file, told if len(told) > 1 else told[0]):
            return
    for run in runs:
        if verbose:
            tell(story_of(run), Console())
        else:
            tell_short(run, Console())


class _Repro(Command):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [re.sub("^--out(?=$|=)", "--output", word) for word in args])  # its earlier name


@cli.command(cls=_Repro)
@RUN_DIR
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    help="The script's file; by default RUN_DIR's name with -repro.py.",
)
@click.option(
    "--promise", default="", metavar="TEXT", help="A quotation from the trainer's documentation, with its source."
)
def repro(folder: Path, output: Path | None, promise: str) -> None:
    """Write a script that shows a finding without torchaos.

    The script runs the job once as a control and three times with the kill. It exits with 0 if the finding shows each
    time. If only torchaos can show the finding, the command says so, with exit code 3."""
    run_dir = RunDir(folder.absolute()).check()
    run = Record.load(run_dir)
    twins = [Record.load(RunDir(path)) for path in sorted(run_dir.twins.iterdir())] if run_dir.twins.is_dir() else []
    result = verdict_of(run, twins, str(run_dir.root))
    try:
        text = script_of(case_of(run, twins, result, promise))
    except UsageError as error:
        raise UsageError(f"{folder}: {error}") from error
    path = output or Path(f"{run_dir.root.name}-repro.py")
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path}: the script can't be written: {error.strerror}; choose another with -o") from error
    nothing = "most likely nothing, since the run passed"
    click.echo(f"{path}: written; run it with python, without torchaos")
    shown = nothing if result.verdict is Verdict.PASSED else result.reason
    click.echo(fill(shown, 100, initial_indent="  shows     ", subsequent_indent=" " * 12))
