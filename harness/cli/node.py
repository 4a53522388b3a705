"""torchaos node: connects a launcher to the agent of a node. Each run starts this command on each node as a pipe, and
again when a pipe dies. So it must start quickly: modules that only other options need are imported when these are
used."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import click

from torchaos.harness.cli.options import PATH, cli
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
    from torchaos.harness.rollback import recovery, undo_log
    from torchaos.harness.rollback.undo_log import is_begun

    recovery.await_ends(lambda: recovery.find([folder])[0], WAIT_S)  # an agent that lost its controller ends by itself
    runs, bad = recovery.find([folder])
    done = [*bad, *(recovery.recover(run) for run in runs)]
    wrong = [recovery.why(one) for one in done if not one.clean]
    if wrong and is_begun(folder):
        click.echo("; ".join(wrong))
        return LEFT
    with suppress(OSError):
        undo_log.remove(mark)  # it is still there if they died when everything was undone
    remove_place(mark)
    return 0
