"""The interfaces on which plug-ins and the harness agree. No interface mentions a particular implementation. All names
are imported from this package. The base classes of faults, assertions and conditions are in `base_classes`."""

from torchaos.harness.interfaces.findings import (
    Finding,
    First,
    Harm,
    Need,
    Outcome,
    What,
    failed,
    inconclusive,
    passed,
    unhit,
)
from torchaos.harness.interfaces.jobs import (
    Capability,
    CheckpointFormat,
    Emit,
    Evidence,
    Handle,
    Hits,
    Irreversible,
    JobSpec,
    Launcher,
    LiveNode,
    Node,
    NodeSite,
    Probe,
    RankProcess,
    RemoteLauncher,
    Site,
    Target,
    Touches,
    Watched,
    Where,
)

__all__ = [
    "Capability", "ChaosError", "CheckpointFormat", "Emit", "Evidence", "RemoteLauncher", "Finding", "First",
    "Handle", "Harm", "Hits", "Irreversible", "JobSpec", "Launcher", "LiveNode", "Need", "Node", "NodeSite",
    "Outcome", "Probe", "RankProcess", "Site", "Target", "Touches", "UsageError", "Watched", "What", "Where", "failed",
    "inconclusive", "passed", "unhit",
]  # fmt: skip


class ChaosError(Exception):
    """An error whose text is meant for the user: it says where the problem is, what is wrong, and what to do. It is
    shown without a traceback."""

    exit_code = 5


class UsageError(ChaosError):
    """The command line, the scenario or the machine can't do what is asked."""

    exit_code = 3
