"""Compares the sources of a job, as they are now, with those with which a run was made: the sources that are part of
the key of a twin (running/twin_runs/twin_key.py), and the configuration files that the job of the run's twin read.
Paths are relative to the job's working directory, so the run may have been made in another checkout, or on another
machine."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.planner.job_plan import folder_of
from torchaos.harness.running.twin_runs.twin import made_of
from torchaos.harness.running.twin_runs.twin_key import digest, sources_of
from torchaos.harness.scenario.job_grammar import Job

_CONFIGURATION = (".yaml", ".yml", ".json", ".toml", ".ini", ".cfg", ".conf", ".py")


class Unknown(Exception):
    """The sources can't be compared. The text is a clause that says why."""


def changed_since(run: RunDir, job: Job, file: Path) -> str:
    """A clause about the first source that has changed since the run. Empty if none has. `job`: the job of the scenario
    in `file`. Raises Unknown."""
    try:
        cwd = folder_of(job, file)
        plan = Plan.read(run.plan)
    except (OSError, ValueError, UsageError) as error:
        raise Unknown(f"the job can't be read: {error}") from error
    then = {**_read_by_the_twin(run, Path(plan.job.cwd)), **_recorded(run)}
    there = {name: digest(cwd / name) for name in then if (cwd / name).is_file()}
    if not there:
        raise Unknown(f"none of its files is in {cwd}")
    for name, was in then.items():
        if name not in there and name.startswith(os.pardir):
            raise Unknown(f"{cwd / name} is not here")
        if there.get(name) != was:
            return f"{name} {'has changed' if name in there else 'is gone'}"
    now = sources_of(replace(plan, job=replace(plan.job, cwd=str(cwd))))
    new = next((name for name in now if name not in then and not name.startswith(os.pardir)), None)
    return f"{new} is new" if new else ""


def _recorded(run: RunDir) -> Mapping[str, str]:
    """The digests that the run recorded, by path."""
    try:
        found = json.loads((run.artifacts / "sources.json").read_text())
        files = {str(name): str(was) for name, was in found["files"].items()}
        unknown = str(found["unknown"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unknown("the run did not record it") from error
    if unknown or not files:
        raise Unknown(unknown or "no source of the job is known")
    return files


def _read_by_the_twin(run: RunDir, cwd: Path) -> Mapping[str, str]:
    """The digests of the sources and configuration files below the job's working directory that the job of the twin
    read."""
    made = made_of(run.twins / "0")
    found = {
        os.path.relpath(path, cwd): was for path, (_, _, was) in (made.files if made else {}).items()
        if was and path.endswith(_CONFIGURATION)
    }  # fmt: skip
    return {name: was for name, was in found.items() if not name.startswith(os.pardir)}
