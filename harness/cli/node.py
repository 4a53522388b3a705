"""torchaos node: connects a launcher to the agent of a node."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path

import click

from torchaos.harness.cli.options import PATH, cli
from torchaos.harness.running.launchers.handover import receive
from torchaos.harness.running.nodes.join import WAIT_S, join
from torchaos.harness.running.nodes.place import place_of, socket_of
from torchaos.harness.undo import open_runs, recovery

NO_AGENT = 6  # exit code: nobody listens


@cli.command("node")
@click.option("--join", "joined", metavar="RUN", help="Connect standard input and output with the agent.")
@click.option("--wait", "wait_s", type=float, default=WAIT_S, help="Seconds to wait for the agent.")
@click.option("--receive", "received", type=PATH, metavar="DIR", help="Make the run directory from standard input.")
@click.option("--recover", "recovered", metavar="RUN", help="Undo what a dead agent left on this node.")
def node(joined: str | None, wait_s: float, received: Path | None, recovered: str | None) -> None:
    """Reach the agent of this node; launchers start this command. RUN is the name of the node's part of a run. Standard
    input and output carry lines of JSON."""
    if joined:
        sys.exit(0 if join(socket_of(joined), wait_s) else NO_AGENT)
    if received:
        click.echo("shared" if receive(received, sys.stdin.buffer) else "made")
        return
    if recovered:
        sys.exit(_recover(recovered))
    raise click.UsageError("write --join RUN, --receive DIR or --recover RUN")


def _recover(mark: str) -> int:
    """Undoes what a dead agent left on this node. Returns 0 if everything is undone; otherwise standard output has the
    reason."""
    folder = place_of(mark).root
    if not folder.exists():
        return 0
    recovery.await_reapers(lambda: recovery.find([folder])[0], WAIT_S)
    runs, bad = recovery.find([folder])
    done = [*bad, *(recovery.recover(run) for run in runs)]
    wrong = [recovery.why(one) for one in done if not one.clean]
    if wrong and (folder / "undo" / "undo.jsonl").exists():  # without a log nothing was ever changed
        click.echo("; ".join(wrong))
        return 4
    with suppress(OSError):
        open_runs.remove(mark)  # it is still there if they died when everything was undone
    shutil.rmtree(folder, ignore_errors=True)
    return 0
