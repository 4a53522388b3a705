"""The interfaces on which plug-ins and the harness agree. No interface mentions a particular implementation. All names
are imported from this package. The base classes of faults, assertions and conditions are in `base_classes`."""

from torchaos.harness.interfaces.errors import ChaosError, UsageError
from torchaos.harness.interfaces.faults import Evidence, Handle, Hits, Irreversible, Target, Touches, Where
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
    JobSpec,
    Launcher,
    LiveNode,
    Node,
    NodeSite,
    RankProcess,
    RemoteLauncher,
    Site,
)
from torchaos.harness.interfaces.observers import CheckpointFormat, Emit, Probe, Watched

__all__ = [
    "ChaosError", "CheckpointFormat", "Emit", "Evidence", "RemoteLauncher", "Finding", "First",
    "Handle", "Harm", "Hits", "Irreversible", "JobSpec", "Launcher", "LiveNode", "Need", "Node", "NodeSite",
    "Outcome", "Probe", "RankProcess", "Site", "Target", "Touches", "UsageError", "Watched", "What", "Where", "failed",
    "inconclusive", "passed", "unhit",
]  # fmt: skip
