"""Checks what a plan would refuse and the files alone show, for `torchaos validate`: the script, and the targets of a
job whose size is written."""

from __future__ import annotations

import random
from pathlib import Path

from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.plan import PlannedJob
from torchaos.harness.running.planner.job_plan import missing_script, written_size
from torchaos.harness.running.planner.targets import target_of
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.job_grammar import Job
from torchaos.harness.scenario.plugin_parameters import Tell
from torchaos.harness.scenario.yaml_source import Keys

_COMMAND: Keys = ("job", "command")
_SIZE: tuple[Keys, ...] = (
    _COMMAND, ("job", "env"), ("job", "world_size"), ("job", "nodes"), ("job", "hosts"), ("job", "replicas"),
    ("limits", "never"),
)  # fmt: skip


def check_script(job: Job, file: Path, tell: Tell) -> None:
    """Reports a script that does not exist. `file`: the file with the job."""
    try:
        missing = missing_script(job, file)
    except (UsageError, ValueError):  # the command can't be read, which the loader reports
        return
    if missing:
        tell(_COMMAND, missing, False, [("job", "cwd")])


def check_targets(scenario: Scenario, file: Path, tell: Tell) -> None:
    """Reports targets that the job does not have."""
    try:
        size = written_size(scenario.job, file)
    except (UsageError, ValueError):
        return
    if size is None:
        return
    world, nodes = size
    job = PlannedJob((), "", {}, world, nodes, 0.0, replicas=scenario.job.replicas)
    for number, fault in enumerate(scenario.faults):
        try:
            target_of(fault, job, scenario.limits, random.Random(0), fault.id or fault.inject)
        except UsageError as error:
            tell(("faults", number, "target"), str(error), False, _SIZE)
