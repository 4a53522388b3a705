"""The agent: the code of torchaos that runs inside each rank of the job.

It reads its plan (`AgentPlan`: the hooks and the faults of this rank) and one control page for each fault: a small file
in shared memory, through which the harness and the rank agree when the fault fires. It writes events to a file, and
applies each fault at its Moment (attempt, step and phase), or holds the rank there while the harness applies the fault
from outside. It imports only the standard library, the job's torch and `protocol`, because the job's Python may not
have torchaos.

Inside a job, this folder and `protocol` are loaded by path as `_torchaos.agent` and `_torchaos.protocol` (see
bootstrap/sitecustomize.py), so their modules import each other relatively. The harness imports the same files as
`torchaos.harness.agent` and `torchaos.harness.protocol`."""


def start() -> None:
    """Starts the agent if this process is a rank of a torchaos job. In a torchrun process, counts the attempts (a job
    on one node) or records the rounds of the rendezvous (on several nodes). Raises the errors of its imports."""
    import os

    from . import startup

    if "RANK" in os.environ:
        startup.start_in_rank()
    elif "TORCHAOS_NODE" in os.environ:
        startup.record_rounds()
    elif "TORCHAOS_REPLICA" not in os.environ:
        startup.count_attempts()
