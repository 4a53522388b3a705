"""`torchaos explore`: every moment at which the whole job can die."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import click
from rich.console import Console

from torchaos.harness import registry
from torchaos.harness.cli import manage
from torchaos.harness.cli.options import (
    JOB,
    JSON,
    JUNIT,
    PATH,
    QUIET,
    SEED,
    SET,
    SUMMARY,
    ScenarioFile,
    WithCommand,
    cli,
)
from torchaos.harness.cli.results import summarize
from torchaos.harness.cli.run import GONE, Planned, plans_of, signals, working_on, write_reports
from torchaos.harness.crash_explorer.exploration import FOLDER, Exploration, Limits, RecordedResume, faults_of
from torchaos.harness.crash_explorer.exploration_summary import ExplorationSummary, result_of
from torchaos.harness.crash_explorer.recorded_run import check
from torchaos.harness.crash_explorer.resume_outcomes import Outcome
from torchaos.harness.crash_explorer.s3_store import in_folder
from torchaos.harness.crash_explorer.state_selection import MODELS, models_of
from torchaos.harness.host.disk import owner_only, write_atomically
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.redaction import mask_words
from torchaos.harness.record.result import ExitCode, Result
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.release.repeats import ask_of
from torchaos.harness.reporting import result_files as files
from torchaos.harness.reporting.html import exploration_page as page
from torchaos.harness.reporting.result_files import placeholder_result
from torchaos.harness.reporting.terminal import many_runs as show
from torchaos.harness.rollback.orphaned_runs import before_a_run
from torchaos.harness.scenario.loader import other_job

OUT = Path("torchaos-explored")


@cli.command(cls=WithCommand)
@click.argument("file", type=ScenarioFile(), metavar="SCENARIO")
@JOB
@click.option("--out", type=PATH, default=OUT, help="The folder in which its directory is made.", show_default=True)
@click.option("--model", "models", multiple=True, type=click.Choice([*MODELS, "all"]), default=["process-death"],
              show_default=True, help="What dies; may be given several times.")  # fmt: skip
@click.option("--states", type=click.IntRange(1), metavar="N", help="Try at most N states, chosen by coverage.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), metavar="M", help="End after this many minutes.")
@click.option("--beyond", type=click.IntRange(1), default=3, show_default=True, metavar="STEPS",
              help="Train this many steps beyond the death.")  # fmt: skip
@click.option("--damage", is_flag=True, help="Try each state also after each checkpoint.* fault of the scenario.")
@click.option("--cold", is_flag=True, help="Start each resume by the job's own launcher: no forked ranks.")
@click.option("--resume", type=PATH, metavar="DIR", help="Go on with an exploration of the same scenario.")
@click.option("--after", metavar="STATE", help="With --resume: explore a second death, while the job resumes from this "
              "state.")  # fmt: skip
@SEED
@SET
@JUNIT
@JSON
@SUMMARY
@QUIET
def explore(
    file: Path, job_file: Path | None, out: Path, models: Sequence[str], states: int | None, minutes: float | None,
    beyond: int, damage: bool, cold: bool, resume: Path | None, after: str | None, seed: int | None,
    overrides: Sequence[str], junit_file: Path | None, json_file: Path | None, summary: Path | None, quiet: bool,
    given: Sequence[str] = (),
) -> None:  # fmt: skip
    """Try every moment at which the whole job can die.

    The job of SCENARIO runs once without faults, and every operation on its checkpoint folder is recorded. Then it is
    resumed from each state that a death could have left there, and its assertions judge each resume. The scenario's own
    faults are left out. COMMAND: as for `torchaos run`."""
    console, progress = Console(), Console(stderr=True, quiet=quiet)
    one = next(plans_of(file, overrides, seed, ask_of, None, out, (), other_job(job_file, given, None)))
    one = replace(one, plan=in_folder(one.plan))
    faults = faults_of(one.plan) if damage else ()
    limits = Limits(models_of(models, one.plan), states, minutes, beyond, one.plan.seed, not cold, faults)
    name = f"{one.plan.scenario}-s{one.plan.seed}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    first = (resume or out / name).absolute()
    home = first if after is None else first / FOLDER / after.replace("/", "-").replace(" ", "-")
    one = replace(one, folder=RunDir(home))
    again = ["torchaos", "explore", registry.scenario_name(file), "--seed", str(one.plan.seed), *one.options]
    again += [] if after is None else ["--after", after]
    check(one.plan, RunDir(first / "now"))

    def told(outcome: Outcome, number: int, of: int) -> None:
        with suppress(*GONE):
            progress.print(show.tell_outcome(outcome, number, of), markup=False, highlight=False, soft_wrap=True)

    def tell(text: str) -> None:
        with suppress(*GONE):
            progress.print(text, markup=False, highlight=False, soft_wrap=True)

    if after is not None and resume is None:
        raise UsageError("--after names a state of an exploration; name its directory with --resume")
    recorded = None if after is None else RecordedResume(one.plan, home, tell, first, after)
    write_reports(
        [placeholder_result(one.plan, home)], junit_file, json_file
    )  # until there is a result, the file holds an error, so that a gate stays closed
    if resume is not None:
        _prepare(one, first, is_new=False)
    if home != first or resume is None:
        _prepare(one, home, is_new=not home.exists())
    began_s, started = time.monotonic(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    exploration = Exploration(one.plan, home, limits, mask_words(again), tell, told, recorded)
    with signals() as interrupted, working_on([one]):
        manage.tell(before_a_run(given_up=lambda: interrupted.reason is not None))
        interrupted.ends(exploration)
        try:
            found = exploration()
        except OSError as error:
            raise UsageError(f"{error.filename or home}: {error.strerror or error}; choose another --out") from error
    if found is None:
        click.echo(f"Nothing was explored: {interrupted.reason}")
        sys.exit(ExitCode.ROLLBACK if exploration.left else ExitCode.INCONCLUSIVE)
    result = result_of(one.plan, found, str(home), started, time.monotonic() - began_s, exploration.left)
    _write(found, result, home, junit_file, json_file)
    with suppress(*GONE):
        show.show(found, result, console)
        if found.unfinished:
            again += ["--resume", str(first)]
            console.print(f" To go on: {' '.join(mask_words(again))}", markup=False, highlight=False, soft_wrap=True)
    summarize([result], summary)
    sys.exit(result.exit_code)


def _prepare(one: Planned, home: Path, is_new: bool) -> None:
    """Makes the directory of an exploration, or checks that it is one of the same scenario."""
    plan = home / "plan.json"
    text = one.plan.masked().to_json() + "\n"
    if is_new:
        try:
            home.mkdir(parents=True, mode=0o700)
            one.plan.write(plan)
            with open(home / "scenario.yaml", "wb", opener=owner_only) as file:
                file.write(one.text)
        except OSError as error:
            raise UsageError(f"{home}: it can't be made: {error.strerror}; choose another --out") from error
    elif not plan.is_file():
        raise UsageError(f"{home}: there is no exploration in it")
    elif plan.read_text() != text:
        raise UsageError(f"{home}: it is an exploration of another scenario, seed or job; leave --resume out")


def _write(
    found: ExplorationSummary, result: Result, home: Path, junit_file: Path | None, json_file: Path | None
) -> None:
    told = files.to_json(found, result)
    write_atomically(home / "explored.json", json.dumps(told, indent=1, allow_nan=False) + "\n", private=True)
    page.write(found, result, home / "report.html")
    write_reports([result], junit_file, None)
    if json_file:
        write_atomically(json_file, json.dumps(told, indent=1, allow_nan=False) + "\n")
