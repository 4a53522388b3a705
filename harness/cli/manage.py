"""The commands for all runs of a user: status, halt, recover, prune."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import click

from torchaos.harness.base_classes import parse_duration
from torchaos.harness.cli.options import AS_JSON, PATH, RUNS, RunFolder, cli, is_told
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import counted
from torchaos.harness.record.result import ExitCode
from torchaos.harness.rollback import undo_log
from torchaos.harness.rollback.orphaned_runs import Recovered, await_reapers, find, in_words, recover
from torchaos.harness.running import housekeeping
from torchaos.harness.running.housekeeping import RunView, overview
from torchaos.harness.running.housekeeping import halt as halt_runs
from torchaos.harness.running.nodes import node_exec
from torchaos.harness.scenario.field_types import parse_size, size_in_words

_REAPERS_S = 120.0


@cli.command()
@AS_JSON
def status(json_file: Path | None) -> None:
    """Show your runs that are alive or that left something behind."""
    runs, problems = overview()
    if not is_told(json_file, {"runs": [asdict(run) for run in runs], "problems": [one.problem for one in problems]}):
        for run in runs:
            click.echo(_status(run))
        for problem in problems:
            click.echo(problem.problem)
        if not runs and not problems:
            click.echo("no run is alive, and none left anything behind")
    sys.exit(ExitCode.PASSED)


@cli.command()
@click.argument("names", nargs=-1, metavar="[RUN]...")
@click.option("-y", "--yes", is_flag=True, help="End all of them, without a question.")
@click.option(
    "--now", is_flag=True, help="Roll back at once: the job gets no grace period, and no more evidence is collected."
)
def halt(names: Sequence[str], yes: bool, now: bool) -> None:
    """End runs in order, with rollback. RUN: the scenario or the run directory of a run, or the pid of its harness, as
    `torchaos status` shows them. Without it, all your runs are shown, and ended after a question."""
    try:
        living = [run for run in overview()[0] if run.harness]
        chosen = _chosen(living, names) if names else living
        if chosen and not (names or yes):
            _ask(chosen)
        pids = [run.harness for run in chosen if run.harness] if names else None
        ended, recovered = halt_runs(pids, now, click.echo)
    except OSError as error:
        raise UsageError(f"the registry of runs can't be used: {error}") from error
    names = ", ".join(map(_name, chosen))
    click.echo(f"ended: {names or counted(ended, 'run')}" if ended else "no run was alive")
    sys.exit(_tell(recovered))


@cli.command("recover")
@click.argument("folders", nargs=-1, type=RunFolder())
@click.option(
    "--forget", is_flag=True, help="Forget changes that can't be undone, after you have repaired them yourself."
)
@click.option("--job", metavar="ID", help="On a node of Slurm: undo what this job left here; for a site's Epilog.")
@click.option("--any-host", is_flag=True, help="Also undo runs of another host name, if this machine was renamed.")
def recover_(folders: Sequence[Path], forget: bool, job: str | None, any_host: bool) -> None:
    """Undo what killed runs left behind, also after a reboot. FOLDERS: the run directories; default: all."""
    if job is not None:
        sys.exit(_of_job(job))
    if not folders:
        await_reapers(lambda: find(())[0], _REAPERS_S)
    runs, bad = find([folder.absolute() for folder in folders])
    # Without folders, this leaves out runs whose harness is alive, and runs of other machines.
    chosen = [run for run in runs if folders or (not run.lives(run.harness) and (run.here or any_host))]
    done = [*bad, *(recover(run, any_host) for run in chosen)]
    code = _tell(done)
    if forget and code is not ExitCode.PASSED:
        dropped = [one for one in done if not one.clean and not one.spared and one.run_id != "?"]
        for one in dropped:
            undo_log.remove(one.run_id)
            click.echo(f"{one.run_dir}: forgotten")
        code = ExitCode.PASSED if all(one.clean or one in dropped for one in done) else code
    if not done:
        click.echo("nothing was left behind")
    sys.exit(code)


@cli.command()
@click.argument("out", type=PATH, default=RUNS)
@click.option("--older-than", metavar="AGE", help="Remove runs that ended longer ago than this, such as 30d.")
@click.option(
    "--beyond",
    metavar="SIZE",
    help="Then remove the oldest runs, until the rest takes at most this much, such as 20GB.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
def prune(out: Path, older_than: str | None, beyond: str | None, dry_run: bool) -> None:
    """Remove finished run directories by age and size."""
    if older_than is None and beyond is None:
        raise UsageError("say what to remove: give --older-than or --beyond")
    try:
        age = None if older_than is None else parse_duration(older_than)
        size = None if beyond is None else parse_size(beyond)
        chosen = list(housekeeping.to_remove(housekeeping.finished(out), age, size))
        for one in chosen:
            if not dry_run:
                housekeeping.remove(one)
            click.echo(f"{'would remove' if dry_run else 'removed'} {one.folder} ({size_in_words(one.size)})")
    except ValueError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror}") from error
    click.echo(f"{len(chosen)} run directories, {size_in_words(sum(one.size for one in chosen))}")


def _chosen(living: Sequence[RunView], names: Sequence[str]) -> list[RunView]:
    """The runs of these names. Raises UsageError if there is none of a name."""
    found = {name: [run for run in living if _is(run, name)] for name in names}
    if unknown := [name for name in names if not found[name]]:
        raise UsageError(f"{unknown[0]}: no run that is alive has this name{_list(living) or ', and none is alive'}")
    return [run for run in living if any(run in own for own in found.values())]


def _list(runs: Sequence[RunView]) -> str:
    return "; alive: " + ", ".join(f"{_name(run)} ({run.harness})" for run in runs) if runs else ""


def _name(run: RunView) -> str:
    return run.scenario or Path(run.run_dir).name or f"pid {run.harness}"


def _is(run: RunView, name: str) -> bool:
    folder = Path(run.run_dir)
    called = {str(run.harness), *run.scenario.split(", "), *((str(folder), folder.name) if run.run_dir else ())}
    return (name != "" and name in called) or (bool(run.run_dir) and Path(name).absolute() == folder)


def _ask(runs: Sequence[RunView]) -> None:
    """Shows the runs, and asks whether to end them all. Raises UsageError if nobody can answer."""
    if not sys.stdin.isatty():
        raise UsageError(f"which runs are to end? name them, or write --yes for all{_list(runs)}")
    click.echo("\n".join(map(_status, runs)))
    click.confirm(f"End {'this run' if len(runs) == 1 else f'these {len(runs)} runs'}, with rollback?", abort=True)


def tell(done: Iterable[Recovered]) -> None:
    """Prints a line for each run and for each handle that was undone."""
    for run in done:
        click.echo(f"{run.run_dir or run.run_id}: {run.problem or ('undone' if run.clean else 'INCOMPLETE')}")
        for each in run.results:
            said = "verified" if each.verified else f"NOT verified: {each.reason}"
            click.echo(f"  {each.record}: {in_words(each.handle)}: {said}")
        if run.note:
            click.echo(f"  {run.note}")


def _of_job(job: str) -> ExitCode:
    wrong = {folder: node_exec.recover(folder) for folder in node_exec.of_job(job)}
    for folder, why in wrong.items():
        click.echo(f"{folder}: {why or 'undone'}")
    return ExitCode.ROLLBACK if any(wrong.values()) else ExitCode.PASSED


def _tell(done: Sequence[Recovered]) -> ExitCode:
    tell(done)
    return ExitCode.PASSED if all(run.clean for run in done) else ExitCode.ROLLBACK


def _status(run: RunView) -> str:
    pids = {"harness": run.harness, "reaper": run.reaper}
    since = ""
    with suppress(OverflowError, ValueError, OSError):
        since = f" since {datetime.fromtimestamp(run.since_s):%Y-%m-%d %H:%M:%S}"
    parts = [
        f"{run.life:<9} {_name(run)}{since}",
        f"stage {run.stage}" if run.stage else "",
        f"faults on: {', '.join(run.faults)}" if run.faults else "",
        ", ".join(f"{name} pid {pid}" for name, pid in pids.items() if pid),
        f"job {'pid' if len(run.job) == 1 else 'pids'} {', '.join(map(str, run.job))}" if run.job else "",
        run.run_dir,
    ]
    return "; ".join(part for part in parts if part)
