"""`torchaos gameday`: many faults over a long run, and its score."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import click
from rich.console import Console
from rich.markdown import Markdown

from torchaos.harness.cli.options import (
    AS_JSON,
    CONSENT,
    JUNIT,
    PATH,
    QUIET,
    SEED,
    SET,
    SUMMARY,
    VERBOSE,
    WEBHOOK,
    cli,
    is_told,
)
from torchaos.harness.cli.results import notify, summarize
from torchaos.harness.cli.run import GONE, signals, write_reports
from torchaos.harness.gameday import report
from torchaos.harness.gameday.day import Day, DayRun
from torchaos.harness.gameday.day_grammar import GameDay
from torchaos.harness.gameday.fault_schedule import cut, draw, load, mix_of, presets
from torchaos.harness.gameday.score import (
    RoundScore,
    Score,
    cases_of,
    not_finished,
    result_of,
    settled,
    total,
    verdict_of,
)
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.result import Case, ExitCode
from torchaos.harness.reporting import compare_runs, trend_store
from torchaos.harness.reporting.compare_runs import Night
from torchaos.harness.reporting.trend_store import path_of


@cli.command()
@click.argument("file", required=False, type=PATH)
@click.option(
    "--out",
    type=PATH,
    default=Path("torchaos-days"),
    help="The folder in which its directory is made.",
    show_default=True,
)
@SEED
@SET
@CONSENT
@JUNIT
@SUMMARY
@WEBHOOK
@QUIET
@click.option("--plan", "only_plan", is_flag=True, help="Print the drawn faults, and do nothing else.")
@AS_JSON
@click.option("--resume", type=PATH, metavar="DIR", help="Continue a game day that was interrupted.")
@click.option("--keep", is_flag=True, help="Also keep the run directories of rounds that passed.")
@click.option(
    "--presets", "list_presets", is_flag=True, help="Print the published tables that faults can be drawn from."
)
@VERBOSE
def gameday(
    file: Path | None, out: Path, seed: int | None, overrides: Sequence[str], consent: Sequence[str],
    junit_file: Path | None, only_plan: bool, json_file: Path | None, resume: Path | None, keep: bool,
    list_presets: bool, summary: Path | None, webhook: str | None, quiet: bool, verbose: bool,
) -> None:  # fmt: skip
    """Inject faults for hours, at the rates of a real cluster."""
    if json_file and not only_plan:  # otherwise a script that only wants to look would start a day of faults
        raise UsageError("--json prints the plan of a day: write --plan too; the score of a day is in its score.json")
    console = Console()
    if list_presets:
        console.print(Markdown(_tables()))
        sys.exit(ExitCode.PASSED)
    ignored = {"--seed": seed is not None, "--set": overrides, "--consent": consent}
    if resume is not None and (given := [name for name, value in ignored.items() if value]):
        raise UsageError(f"{given[0]} changes nothing in a game day that was begun; leave it out, or begin another day")
    if (file is None) == (resume is None):
        raise UsageError("give the file of a game day, or --resume and the directory of one")
    if resume is not None:
        plan = Day.read(resume)
        day, folder = load(resume / "gameday.yaml", plan.overrides), resume.absolute()
    else:
        assert file is not None
        day = load(file, overrides)
        plan = _drawn(day, file, day.seed if seed is None else seed, overrides, consent)
        folder = (out / f"{plan.name}-s{plan.seed}-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}").absolute()
    if only_plan:
        if not is_told(json_file, plan.to_json()):
            console.print(Markdown(report.drawn(plan)))
        sys.exit(ExitCode.PASSED)
    nothing = result_of(plan.name, plan.seed, str(folder), "", 0.0, cases_of(total([]), day.score, []))
    # Until the day is judged, its JUnit file holds an error, so that a gate stays closed.
    write_reports([not_finished(nothing)], junit_file, None)
    if resume is None:
        assert file is not None
        _create(folder, file, plan)
    sys.exit(_run(day, plan, folder, keep, junit_file, summary, console, webhook, quiet, verbose))


def _drawn(day: GameDay, file: Path, seed: int, overrides: Sequence[str], consent: Sequence[str]) -> Day:
    mix = mix_of(day)
    rounds = cut(day, draw(day, mix.risks, seed))
    if not report.faults_of(rounds):
        raise UsageError(f"{file}: no fault comes in {day.duration:g} s; write a longer duration, or other arrivals")
    here = str(file.parent.absolute())
    return Day(day.gameday, seed, here, tuple(overrides), tuple(consent), tuple(rounds), mix.without)


def _create(folder: Path, file: Path, plan: Day) -> None:
    try:
        (folder / "job").mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        write_atomically(folder / "gameday.yaml", file.read_text(), private=True)
        write_atomically(folder / "day.json", json.dumps(plan.to_json(), indent=1) + "\n", private=True)
    except OSError as error:
        raise UsageError(f"{folder}: it can't be made: {error.strerror}; choose another --out") from error


def _run(
    day: GameDay, plan: Day, folder: Path, keep: bool, junit_file: Path | None, summary: Path | None, console: Console,
    webhook: str | None, quiet: bool, verbose: bool,
) -> ExitCode:  # fmt: skip
    with signals() as interrupted:
        run = DayRun(day, plan, folder, keep, (lambda text: None) if quiet else _tell)
        interrupted.ends(run)
        rounds, cut_short = run()
    rounds = settled(rounds)
    score = total(rounds)
    cases = cases_of(score, day.score, rounds, cut_short, [one.id for each in plan.rounds for one in each.faults])
    started, commit = _first(folder)
    result = result_of(plan.name, plan.seed, str(folder), started, score.clock.wall_s, cases)
    code, why = verdict_of(cases)
    told = {
        "name": plan.name, "seed": plan.seed, "started": started, "commit": commit, "verdict": code.name.lower(),
        "why": why, "score": asdict(score), "rounds": [game_round.to_json() for game_round in rounds],
    }  # fmt: skip
    write_atomically(folder / "score.json", json.dumps(told, indent=1) + "\n", private=True)
    _write_pages(plan, folder, rounds, score, cases)
    write_reports([result], junit_file, None)
    summarize([result], summary)
    with suppress(*GONE):
        if verbose:
            console.print(Markdown(report.page(plan, str(folder), rounds, score, cases)))
        else:
            report.show(plan, str(folder), rounds, score, cases, console)
    again = ["torchaos", "gameday", "--resume", str(folder), *(["--junit", str(junit_file)] if junit_file else [])]
    if cut_short:
        with suppress(*GONE):
            click.echo(f"To continue: {shlex.join(again)}")
    notify(webhook, "game day", plan.name, code.verdict, why, str(folder))
    return code


def _tell(text: str) -> None:
    """Prints progress. If nobody reads the output any more, the day continues, with the same verdict."""
    with suppress(*GONE):
        click.echo(text, err=True)


def _write_pages(
    plan: Day, folder: Path, rounds: Sequence[RoundScore], score: Score, cases: Sequence[Case]
) -> None:  # fmt: skip
    """Writes the pages about the day, and its line in the history."""
    write_atomically(folder / "report.md", report.page(plan, str(folder), rounds, score, cases), private=True)
    try:
        html = report.text(plan, folder, rounds, score, cases)
        write_atomically(folder / "report.html", html, private=True)
    except Exception as error:  # an error in the page never changes the verdict
        _tell(f"report.html can't be written: {type(error).__name__}: {error}")
    try:
        compare_runs.add(path_of(folder.parent), [Night.of(folder)])
    except UsageError as error:  # an error in the history never changes the verdict
        _tell(str(error))


def _first(folder: Path) -> tuple[str, str]:
    """The time at which the first round began, and its commit. They come from the history, because the round's run
    directory may be gone."""
    runs = trend_store.kept(path_of(folder / "rounds" / "000" / "run"))
    return (runs[0].result.started, runs[0].commit) if runs else ("", "")


def _tables() -> str:
    lines = []
    for name, table in presets().tables.items():
        lines += [f"## {name}", "", table.source, *([table.says] if table.says else []), ""]
        lines += ["| cause | count | GPU time | injector |", "|---|---|---|---|"]
        for cause in table.causes:
            stand_ins = presets().stand_ins.get(cause.stands or "", [])
            words = " or ".join(risk.inject for risk in stand_ins) or "nothing"
            lines.append(f"| {cause.cause} | {_figure(cause.count)} | {_figure(cause.gpu_time)} | {words} |")
        lines.append("")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
