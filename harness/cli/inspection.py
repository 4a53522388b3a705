"""The commands that change nothing: judge, events, list, doctor, schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from pydantic import BaseModel
from rich.console import Console

from torchaos.harness import registry
from torchaos.harness.analysis.verdict import judge as judge_folder
from torchaos.harness.cli.options import AS_JSON, JSON, JUNIT, RUN_DIR, RUN_DIRS, SUMMARY, VERBOSE, cli, is_told
from torchaos.harness.cli.run import write_reports
from torchaos.harness.gameday.day_grammar import GameDay
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.events.journal import read_journal
from torchaos.harness.record.plan import counted
from torchaos.harness.record.result import ExitCode, Result, worst
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.release.gate_file import Gate
from torchaos.harness.reporting.terminal import console as show
from torchaos.harness.rollback.orphaned_runs import is_alive
from torchaos.harness.running import capabilities
from torchaos.harness.scenario.checks import DIALECT, json_schema
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.yaml_source import read

_MODELS: dict[str, type[BaseModel]] = {"scenario": Scenario, "gameday": GameDay, "gate": Gate}
_SIGNS = {True: "ok     ", False: "missing"}
_HOME = "https://github.com/torchaos/torchaos/schema"  # of the names of the schemas


@cli.command()
@RUN_DIRS
@JUNIT
@JSON
@SUMMARY
@VERBOSE
def judge(
    folders: Sequence[Path], junit_file: Path | None, json_file: Path | None, summary: Path | None, verbose: bool
) -> None:  # fmt: skip
    """Judge run directories again, offline."""
    runs = [RunDir(folder.absolute()).check() for folder in folders]
    for run in runs:
        if is_alive(run.root) and not run.result.is_file():
            raise UsageError(f"{run.root}: this run is still going on; `torchaos explain` tells what happened so far")
    results = [judge_folder(run) for run in runs]
    for result in results:
        show.show(result, Console(), _page_of(result), whole=verbose)
    write_reports(results, junit_file, json_file)
    if summary:
        from torchaos.harness.cli.results import summarize

        summarize(results, summary)
    sys.exit(worst([ExitCode(result.exit_code) for result in results]))


def _page_of(result: Result) -> Path | None:
    page = RunDir(Path(result.run_dir)).report
    return page if page.is_file() else None


@cli.command()
@RUN_DIR
def events(folder: Path) -> None:
    """Print the journal of a run as lines of JSON. All events, in order of time."""
    damaged: list[str] = []
    for event in read_journal(RunDir(folder.absolute()).check().events, damaged):
        click.echo(event.to_line(), nl=False)
    for place in damaged:
        click.echo(f"{place} is damaged", err=True)


@cli.command("list")
@click.argument("names", nargs=-1, metavar="[KIND | FAMILY | NAME]...")
@AS_JSON
@VERBOSE
def list_(names: Sequence[str], json_file: Path | None, verbose: bool) -> None:
    """List ready scenarios, faults, assertions and other parts. Without a name, it says how many there are. With KIND
    (scenarios, injectors, assertions, conditions, launchers or formats) or FAMILY, such as checkpoint, each has a line.
    NAME: shows one of them in full."""
    kinds = [name for name in names if name in ("scenarios", *registry.GROUPS)]
    every = {"scenarios": registry.scenario_names(), **{one: registry.names(one) for one in registry.GROUPS}}
    families = {_family(name) for many in every.values() for name in many} & set(names)
    parts = [name for name in names if name not in (*kinds, *families)]
    overview = not names and not verbose and json_file is None  # only the scenarios to start with are described

    def wanted(kind: str) -> list[str]:
        if overview:
            return [name for name in every[kind] if name in registry.FIRST_SCENARIOS]
        return [
            name for name in every[kind] if not names or kind in kinds or name in parts or _family(name) in families
        ]

    texts = {name: read(registry.scenarios_folder() / f"{name}.yaml").data for name in wanted("scenarios")}
    abouts = {name: str(data.get("description", "")) for name, data in texts.items()}
    groups = {one: {name: registry.find(one, name) for name in wanted(one)} for one in registry.GROUPS}
    known = {name for named in groups.values() for name in named} | abouts.keys()
    if strange := next((name for name in parts if name not in known), None):
        near = registry.suggest(strange, [*every, *(name for many in every.values() for name in many)])
        hint = f"did you mean {near!r}?" if near else "`torchaos list` shows what there is"
        raise UsageError(f"there is no kind, scenario or part {strange!r}; {hint}")
    groups = {one: named for one, named in groups.items() if named or one in kinds or not names}
    told = {one: {name: show.summary_of(found) for name, found in named.items()} for one, named in groups.items()}
    if is_told(json_file, {**({"scenarios": abouts} if abouts else {}), **told}):
        return
    some, whole = {one: named for one, named in groups.items() if named}, verbose or bool(parts)
    if abouts:
        show.ready_scenarios(abouts, Console(), whole=whole, counted=not names and not verbose)
    if names or verbose:
        show.catalogue(some, Console(), whole=whole)
    else:
        show.overview(every, Console())


@cli.command()
@AS_JSON
@VERBOSE
def doctor(json_file: Path | None, verbose: bool) -> None:
    """Show what this machine can do, what is missing, and how to get it.

    Exit code 0 if scenarios can run, although some may need a part that is missing."""
    findings = [capabilities.check(name) for name in capabilities.known()]
    lacking = [finding.name for finding in findings if not finding.present]
    families = _families(lacking)
    needed = [name for name in lacking if name in capabilities.NEEDED]
    if not is_told(json_file, {"parts": [asdict(finding) for finding in findings], "faults": families}):
        for finding in findings if verbose else [one for one in findings if not one.present]:
            advice = "" if finding.present else f" -> {finding.remedy}"
            click.echo(f"{_SIGNS[finding.present]}  {finding.name:<12} {finding.detail}{advice}")
        if not verbose:
            there = [finding.name for finding in findings if finding.present]
            click.echo(f"{_SIGNS[True]}  {counted(len(there), 'part')}: {', '.join(there)}")
        click.echo("\nFaults that this machine can inject:")
        for family, faults in families.items():
            if verbose or any(faults.values()):
                _tell_family(family, faults)
        if not verbose:
            whole = [family for family, faults in families.items() if not any(faults.values())]
            click.echo(f"{_SIGNS[True]}  all of {', '.join(whole) or 'no family'}")
        if needed:
            click.echo(f"\nNo scenario can run without {', '.join(needed)}.")
        else:
            click.echo(f"\nScenarios can run{', except those that need what is missing' if lacking else ''}.")
    sys.exit(ExitCode.USAGE if needed else ExitCode.PASSED)


def _family(name: str) -> str:
    """The family of a scenario (`checkpoint/torn-write`) or a fault (`checkpoint.nan`). Empty if it has none."""
    return name.partition("/")[0] if "/" in name else name.partition(".")[0] if "." in name else ""


def _families(lacking: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """The faults by family, each with the missing parts that it needs."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, injector in sorted(registry.injectors().items()):
        needs = sorted(set(lacking) & injector.needs)
        found.setdefault(registry.family_of(name), {})[name] = needs
    return found


def _tell_family(family: str, faults: Mapping[str, Sequence[str]]) -> None:
    stuck = [name for name, needs in faults.items() if needs]
    parts = ", ".join(sorted({need for needs in faults.values() for need in needs}))
    which = "all" if len(stuck) == len(faults) else ", ".join(stuck)
    lacks = f"; {which} {'lacks' if len(stuck) == 1 else 'lack'} {parts}" if stuck else ""
    click.echo(f"{_SIGNS[len(stuck) < len(faults)]}  {family:<12} {len(faults) - len(stuck)} of {len(faults)}{lacks}")


@cli.command()
@click.argument("kind", type=click.Choice([*_MODELS]), default="scenario", metavar="[KIND]")
def schema(kind: str) -> None:
    """Print the JSON Schema of scenario files, for editors.

    KIND: scenario, gameday or gate."""
    found = json_schema(_MODELS[kind])
    click.echo(json.dumps({"$schema": DIALECT, "$id": f"{_HOME}/{kind}.json", **found}, indent=1))
