"""The commands that run on a node: `torchaos node` connects a launcher to the agent of a node; `torchaos exec` starts
one node's part of a job, under any scheduler. Each run starts `node` on each node as a pipe, and again when a pipe
dies. So it must start quickly: modules that only others need are imported when these are used."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import click

from torchaos.harness.cli.options import PATH, cli
from torchaos.harness.interfaces import UsageError
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.nodes.agent_socket import WAIT_S, join, place_of, remove_place, socket_of

NO_AGENT = 6  # exit code: nobody listens
LEFT = 4  # exit code: something is left


@cli.command("node")
@click.option("--join", "joined", metavar="RUN", help="Connect standard input and output with the agent.")
@click.option("--wait", "wait_s", type=float, default=WAIT_S, help="Seconds to wait for the agent.")
@click.option("--receive", "received", type=PATH, metavar="DIR", help="Make the run directory from standard input.")
@click.option("--attach", "attached", metavar="RUN", help="Be the agent of a torchrun that runs here already.")
@click.option("--recover", "recovered", metavar="RUN", help="Undo what a dead agent left on this node.")
@click.option("--left", metavar="RUN", help="Fail if an agent, or what it left, is on this node.")
def node(
    joined: str | None, wait_s: float, received: Path | None, attached: str | None, recovered: str | None,
    left: str | None,
) -> None:  # fmt: skip
    """Reach the agent of this node; launchers start this command. RUN is the name of the node's part of a run. Standard
    input and output carry lines of JSON."""
    if joined:
        sys.exit(0 if join(socket_of(joined), wait_s) else NO_AGENT)
    if received:
        from torchaos.harness.running.launchers.node_channel import receive

        click.echo("shared" if receive(received, sys.stdin.buffer) else "made")
        return
    if attached:
        from torchaos.harness.running.nodes.node_exec import attach

        attach(attached, sys.stdin.buffer)
        return
    if recovered:
        sys.exit(recover(recovered))
    if left:
        sys.exit(LEFT if place_of(left).root.exists() else 0)
    raise click.UsageError("write --join, --receive, --attach, --recover or --left")


def recover(mark: str) -> int:
    """Undoes what a dead agent left on this node, or waits until a living one has done so. Returns 0 if everything is
    undone; otherwise standard output has the reason."""
    folder = place_of(mark).root
    if not folder.exists():
        return 0
    from torchaos.harness.rollback import orphaned_runs, undo_log
    from torchaos.harness.rollback.undo_log import is_begun

    # An agent that lost its controller ends by itself.
    orphaned_runs.await_ends(lambda: orphaned_runs.find([folder])[0], WAIT_S)
    runs, bad = orphaned_runs.find([folder])
    done = [*bad, *(orphaned_runs.recover(run) for run in runs)]
    wrong = [orphaned_runs.why(one) for one in done if not one.clean]
    if wrong and is_begun(folder):
        click.echo("; ".join(wrong))
        return LEFT
    with suppress(OSError):
        undo_log.remove(mark)  # it is still there if they died when everything was undone
    remove_place(mark)
    return 0


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
    from torchaos.harness.running.launchers.node_channel import PATIENCE_S, await_place, is_made
    from torchaos.harness.running.nodes.node_exec import NodeExec, node_index, node_of

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
    from torchaos.harness.protocol.agent_plan import AgentPlan
    from torchaos.harness.protocol.check_sums import sample_bytes_of_each
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
