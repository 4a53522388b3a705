"""The interfaces that plug-ins and the harness agree on: for faults, assertions, launchers, probes, conditions and
checkpoint formats. No interface mentions a particular implementation. All names are imported from this package."""

from torchaos.harness.interfaces.errors import ChaosError, UsageError
from torchaos.harness.interfaces.faults import Evidence, Handle, Hits, Injector, Irreversible, Target, Where
from torchaos.harness.interfaces.findings import (
    Assertion,
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
from torchaos.harness.interfaces.observers import CheckpointFormat, Condition, Emit, Probe, Watched

__all__ = [
    "Assertion",
    "ChaosError",
    "CheckpointFormat",
    "Condition",
    "Emit",
    "Evidence",
    "RemoteLauncher",
    "Finding",
    "First",
    "Handle",
    "Harm",
    "Hits",
    "Injector",
    "Irreversible",
    "JobSpec",
    "Launcher",
    "LiveNode",
    "Need",
    "Node",
    "NodeSite",
    "Outcome",
    "Probe",
    "RankProcess",
    "Site",
    "Target",
    "UsageError",
    "Watched",
    "What",
    "Where",
    "failed",
    "inconclusive",
    "passed",
    "unhit",
]
