"""`torchaos bisect` and `torchaos shrink`: the release of a package that broke a recovery, and the smallest scenario
that still fails."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import click

from torchaos.harness import registry
from torchaos.harness.analysis.verdict import judge
from torchaos.harness.cli.options import JOB, PATH, QUIET, RUN_DIR, SEED, SET, ScenarioFile, WithCommand, cli
from torchaos.harness.cli.run import plans_of, signals
from torchaos.harness.host.disk import write_atomically
from torchaos.harness.interfaces import ChaosError, UsageError
from torchaos.harness.minimize.package_bisect import Bisect, Packages, Range, Tries
from torchaos.harness.minimize.scenario_shrink import Shrink
from torchaos.harness.record.environment import installed, job_python
from torchaos.harness.record.result import ExitCode
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.release.repeats import ask_of
from torchaos.harness.running.twin_key import key_of
from torchaos.harness.scenario.loader import other_job
from torchaos.harness.scenario.yaml_source import dumped


@cli.command(cls=WithCommand)
@click.argument("file", type=ScenarioFile(), metavar="SCENARIO")
@click.argument("texts", nargs=-1, required=True, metavar="PACKAGE[=FIRST..LAST]...")
@JOB
@click.option("--assertion", metavar="NAME", help="Only this assertion counts, not the whole verdict.")
@click.option("--samples", type=click.IntRange(0), default=0, metavar="N",
              help="Try up to N releases between two that have the same verdict.")  # fmt: skip
@click.option("--out", type=PATH, default=Path("torchaos-bisect"), show_default=True, help="The folder for the runs.")
@SEED
@SET
@QUIET
def bisect(
    file: Path, texts: Sequence[str], job_file: Path | None, assertion: str | None, samples: int, out: Path,
    seed: int | None, overrides: Sequence[str], quiet: bool, given: Sequence[str] = (),
) -> None:  # fmt: skip
    """Find the release of a package that broke a recovery. Runs SCENARIO with releases from FIRST (default: the
    installed release) to LAST (default: the newest release), or with releases of several packages. FIRST..BAD..LAST
    names a bad release between two good ones. Installed packages are not changed. Exit code: the verdict with the
    newest releases; 2 if the release that changed the verdict could not be named. COMMAND: as for `torchaos run`."""
    if samples and len(texts) > 1:
        raise UsageError("--samples is for a single package; name one")
    planned = partial(plans_of, file, seed=seed, asked=ask_of, attach=None, out=out, consent=(),
                      job=other_job(job_file, given, None))  # fmt: skip
    first = next(planned(overrides)).plan
    if not registry.find("launchers", first.launcher).here:
        raise UsageError(f"the launcher {first.launcher} is not supported: the releases are installed on this machine")
    names = [one.name for one in first.asserts]
    if assertion is not None and assertion not in names:
        raise UsageError(f"--assertion {assertion}: the scenario does not have it; it has {', '.join(names)}")
    python = job_python(first.job.command)
    path = first.job.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    packages = Packages(python, path, Path(first.job.cwd))
    now = {name.lower(): found for name, found in installed(python).items()}
    ranges = [Range.of(text, packages.releases, now.get(text.partition("=")[0].lower())) for text in texts]

    def prepare(path: str) -> tuple[list[str], str]:
        one = next(planned([*overrides, f"job.env.PYTHONPATH={json.dumps(path)}"]))
        parts = (version("torchaos"), one.plan.to_json(), key_of(one.plan))
        key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        return [str(file), "--seed", str(one.plan.seed), *one.options], f"{one.plan.scenario}-{key}"

    tries = Tries(
        packages, prepare, out.absolute(), assertion, (lambda text: None) if quiet else partial(click.echo, err=True)
    )
    search = Bisect(ranges, tries, samples)
    with signals() as interrupted:
        interrupted.ends(tries.child)
        try:
            found = search()
            code = search.exit_code(found)
        except ChaosError as error:
            if not interrupted.reason:
                raise
            click.echo(str(error))
            sys.exit(ExitCode.INCONCLUSIVE)
    for one in found:
        click.echo(str(one))
    if not {True, False} & set(search.tried.values()):
        click.echo("none of these releases has a verdict; do first what the reasons above ask for")
    elif not found:
        more = "--samples tries more of them" if len(texts) == 1 else "name a single package to change it alone"
        click.echo(f"no change was found among these releases; {more}")
    click.echo(f"{len(search.tried)} sets of releases were tried, and {tries.runs} of them run by this call")
    sys.exit(code)


@cli.command()
@RUN_DIR
@click.option(
    "--tries", type=click.IntRange(1), default=3, show_default=True, help="How many tries each set of faults gets."
)
@click.option(
    "--fails", type=click.IntRange(1), default=2, show_default=True, help="How many of these tries must fail."
)
@click.option(
    "-o",
    "--output",
    type=PATH,
    metavar="FILE",
    default=Path("shrunk.yaml"),
    show_default=True,
    help="The scenario to write.",
)
@click.option(
    "--out", type=PATH, default=Path("torchaos-shrink"), show_default=True, help="The folder for the runs of the tries."
)
@QUIET
def shrink(folder: Path, tries: int, fails: int, output: Path, out: Path, quiet: bool) -> None:
    """Find the smallest set of a game day's faults that still fails.

    RUN_DIR is a run that failed, or a game day, whose first failed round is used."""
    if fails > tries:
        raise UsageError(f"--fails {fails} of --tries {tries} is impossible; write a smaller number")
    found = RunDir(_failed_round(folder.absolute())).check()
    home = (out / f"{found.root.name}-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    task = Shrink.of(
        found, judge(found), home, tries, fails, (lambda text: None) if quiet else partial(click.echo, err=True)
    )
    with signals() as interrupted:
        interrupted.ends(task.child)
        smallest = task()
    if smallest is None:
        click.echo(f"with all its faults, it did not fail again in {fails} of {tries} tries, so chance decides")
        sys.exit(ExitCode.INCONCLUSIVE)
    try:
        write_atomically(output, task.evidence() + dumped(smallest))
    except OSError as error:
        raise UsageError(f"{output}: it can't be written: {error.strerror}; choose another --output") from error
    needed, all_ = len(smallest["faults"]), len(task.scenario["faults"])
    click.echo(f"{needed} of {all_} faults {'is' if needed == 1 else 'are'} needed: {output}")


def _failed_round(folder: Path) -> Path:
    if not (folder / "day.json").is_file():
        return folder
    for path in sorted((folder / "rounds").glob("[0-9]*/score.json")):
        for run in sorted((path.parent / "run").iterdir() if (path.parent / "run").is_dir() else ()):
            if run.is_dir() and judge(RunDir(run).check()).exit_code == ExitCode.FAILED:
                return run
    raise UsageError(f"{folder}: no round of this game day failed, or its run directory is gone")
