"""torchaos gate: judges runs by a file of bounds and waivers, and decides on a release."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click
from rich.console import Console

from torchaos.harness.cli.explore import explore
from torchaos.harness.cli.options import CONSENT, JSON, JUNIT, PATH, QUIET, RUNS, SUMMARY, VERBOSE, WEBHOOK, cli
from torchaos.harness.cli.results import notify, summarize
from torchaos.harness.cli.run import run as run_scenarios
from torchaos.harness.cli.run import write_reports
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.redaction import mask_words
from torchaos.harness.record.result import Verdict
from torchaos.harness.registry import suggest
from torchaos.harness.release.gate_file import Gate, load
from torchaos.harness.release.gate_runs import Terms, found_in
from torchaos.harness.release.gate_verdict import Judged, judge_gate
from torchaos.harness.reporting.terminal import many_runs as report


@cli.command()
@click.argument("file", type=PATH, metavar="GATE.yaml")
@click.argument("runs", nargs=-1, type=PATH)
@click.option("--env", "environment", metavar="NAME", help="The environment; needed if the file has several.")
@click.option("--commit", metavar="SHA", help="Only runs of a job at this commit count; seven digits are enough.")
@click.option(
    "--run",
    "run_missing",
    is_flag=True,
    help="First run each scenario that has no run that counts. The runs go into the first folder of RUNS.",
)
@CONSENT
@JUNIT
@JSON
@SUMMARY
@WEBHOOK
@QUIET
@VERBOSE
@click.pass_context
def gate(
    context: click.Context, file: Path, runs: Sequence[Path], environment: str | None, commit: str | None,
    run_missing: bool, consent: Sequence[str], junit_file: Path | None, json_file: Path | None, summary: Path | None,
    webhook: str | None, quiet: bool, verbose: bool,
) -> None:  # fmt: skip
    """Decide on a release: judge runs by a gate's bounds and waivers.

    RUNS: folders of run directories, however deep [default: torchaos-runs]. Exit code 0: it may be released; 1: it may
    not; 2: the runs are no evidence; 3: the gate's file is wrong; 4: a run left something behind; 5: an error.
    """
    if commit is not None and not re.fullmatch("[0-9a-f]{7,64}", commit):  # probably from an empty variable
        raise UsageError(f"--commit {commit!r}: this is no commit; give at least seven of its hexadecimal digits")
    loaded, folders = load(file), list(runs) or [RUNS]
    where = _environment(loaded.gate, environment)
    setting = loaded.gate.environments[where]
    terms = Terms(
        datetime.now(timezone.utc), timedelta(seconds=loaded.gate.max_age_s(where)), commit or "",
        {str(name): one for name, one in setting.versions.items()},
        tuple(mask_words(["--set", one])[1] for one in setting.set),
    )  # fmt: skip

    def judged() -> Judged:
        now = replace(terms, now=datetime.now(timezone.utc))
        result = judge_gate(loaded, where, found_in(folders), now)
        write_reports(result.results, junit_file, json_file, result.repeats, f"gate {result.gate}, {where}")
        return result

    if not run_missing:
        for folder in folders:
            if not folder.exists():
                click.echo(f"{folder}: there is no such folder", err=True)
    else:
        folders[0].mkdir(parents=True, exist_ok=True)
        missing = judged().missing  # until these runs are made, the reports list them
        files = tuple(one.path for one in missing if not one.explored)
        if files:
            with suppress(SystemExit):  # the gate judges the results, and tells them
                context.invoke(
                    run_scenarios, files=files, out=folders[0], overrides=setting.set, consent=consent, quiet=quiet,
                    results_told=False,
                )  # fmt: skip
        for one in missing:
            if one.explored:
                with suppress(SystemExit):
                    context.invoke(explore, file=one.path, out=folders[0], overrides=setting.set, quiet=quiet)
    found = judged()
    report.show_gate(found, Console(), whole=verbose)
    summarize(found.results, summary)
    bad = [f"{one.scenario}: {one.reason}" for one in found.results if one.verdict is not Verdict.PASSED]
    notify(webhook, "gate", f"{found.gate} ({where})", found.exit_code.verdict, bad)
    sys.exit(found.exit_code)


def _environment(gate: Gate, asked: str | None) -> str:
    known = list(gate.environments)
    if asked is None and len(known) == 1:
        return known[0]
    if asked is None:
        raise UsageError(f"the gate has several environments; name one with --env: {', '.join(known)}")
    if asked not in known:
        near = suggest(asked, known)
        hint = f"did you mean {near!r}?" if near else f"it has {', '.join(known)}"
        raise UsageError(f"--env {asked}: the gate has no such environment; {hint}")
    return asked
