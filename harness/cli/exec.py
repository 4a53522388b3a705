"""torchaos exec: starts one node's part of a job, under any scheduler."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from torchaos.harness.cli.options import PATH, cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.check_sums import sample_bytes_of_each
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.launchers.node_channel import PATIENCE_S, await_place, is_made
from torchaos.harness.running.nodes.node_exec import NodeExec, node_index, node_of


@cli.command("exec", context_settings={"ignore_unknown_options": True})
@click.option("--run", "folder", type=PATH, required=True, help="The run directory, in a folder that all nodes share.")
@click.option("--scenario", type=PATH, help="On node 0: the scenario for a run directory that does not exist yet.")
@click.option("--node", type=click.IntRange(0), help="This node's number; by default the scheduler's.")
@click.option("--served", type=click.IntRange(0), help="Be the node's agent, for the submission with this number.")
@click.option("--hosts", default="", help="The names of all nodes, with commas between them.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def exec_(
    folder: Path, scenario: Path | None, node: int | None, served: int | None, hosts: str, command: Sequence[str]
) -> None:  # fmt: skip
    """Record one node's part of a job that a scheduler starts.

    COMMAND is what the node runs, such as `srun torchaos exec --run DIR -- torchrun ...`; all nodes share DIR.
    Afterwards `torchaos judge DIR` judges the run.
    """
    names = hosts.split(",") if hosts else []
    run = RunDir(folder.absolute())
    if served is not None and node is None and not names:
        node, names = await_place(run.root, served, PATIENCE_S)
    index = node if node is not None else node_of(names, os.environ) if names else node_index(os.environ)
    if index == 0 and scenario is not None and not is_made(run):
        make(run, scenario)
    code = NodeExec(run, index, command, served, names)()
    sys.exit(128 - code if code < 0 else code)


def make(run: RunDir, scenario: Path) -> None:
    """Makes the run directory of a job that a scheduler starts, or completes a half-made one. Raises UsageError if the
    scenario has faults: only `torchaos run`, which starts the job itself, injects faults."""
    from torchaos.harness.running.planner import make_plan  # the agent of a node starts without them
    from torchaos.harness.scenario.loader import load

    plan = replace(make_plan(load(scenario), scenario, 0), twin={})
    if plan.faults:
        raise UsageError(f"{scenario}: exec records, and injects nothing; use `torchaos run`, or remove the faults")
    if plan.job.checkpoints_size:
        raise UsageError(f"{scenario}: exec mounts nothing; leave job.checkpoints.size out")
    run.create(finish=True)
    plan.write(run.plan)
    run.scenario.write_bytes(scenario.read_bytes())
    root = None if plan.job.checkpoints is None else plan.job.checkpoints.replace("{run}", str(run.job))
    partial = run.agent_plan.with_name(".plan.json")
    mark, size = f"{run.root.name}-{secrets.token_hex(4)}", plan.job.world_size
    agent = AgentPlan(mark, str(run.events), plan.hooks, (), root, sample_bytes_of_each(size))
    agent.write(partial)
    os.replace(partial, run.agent_plan)  # the other nodes wait for this file
