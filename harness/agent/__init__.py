"""What runs inside a rank: the standard library and the job's own torch, nothing else of ours.

It gets a file of orders and the pages of memory by which it is controlled. It writes events to one file per rank, fires
faults at their Moments, and holds a rank for a fault that is applied from outside. It imports no other room, because
the job's Python may not have torchaos.

Inside a job this folder is loaded by path as the package `_torchaos_agent` (see bootstrap/sitecustomize.py), so its
modules import each other relatively. The harness imports the very same files as `torchaos.harness.agent`."""


def start() -> None:
    """Arm, if this process is a rank of a job that the harness runs; in the torchrun of one node of several, watch the
    rendezvous. Whatever goes wrong is the caller's to say."""
    import os

    if "RANK" in os.environ:
        from . import arming

        arming.start()
    else:
        from . import rounds

        rounds.start()
