"""Everything that the author of a plug-in imports: for a fault, an assertion, a launcher, a condition, a probe or a
checkpoint format.

Semantic versioning covers the names in `__all__` and nothing else: modules of `torchaos.harness` may move at any time.
A name is loaded when it is first used, from the module that is given in the imports below.

In a rank, the agent loads an injector by the path of its file. There the harness can't be imported, and torchaos need
not be installed. So a name that needs the harness is a stand-in there. It can be imported and used in annotations; any
other use raises an error."""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # also read when the module runs: see _places
    from torchaos.harness.agent.agent_plan import Collectives
    from torchaos.harness.agent.collective_calls import Call
    from torchaos.harness.agent.nccl_connections import NetKind
    from torchaos.harness.agent.rank_faults import Count, Fault, Lease, Positive, RankSite, Seconds, Share, Size, drawn
    from torchaos.harness.agent.wire import Event, Kind, Phase
    from torchaos.harness.analysis.felt_evidence import (
        all_waited,
        died,
        gone,
        out_of_step,
        slower,
        stood_still,
        stopped,
        took_turns,
    )
    from torchaos.harness.analysis.hit_targets import Landing, landings
    from torchaos.harness.analysis.replica_verdict import as_one, each, each_hit
    from torchaos.harness.checkpoints.files import Files
    from torchaos.harness.checkpoints.formats.format import Format, note_missing, problem_of
    from torchaos.harness.checkpoints.layout import (
        ITEM_SIZES,
        Checkpoint,
        Checksum,
        Extent,
        Problem,
        Shard,
        TensorEntry,
        Trouble,
        Unreadable,
        torn,
    )
    from torchaos.harness.checkpoints.zip_records import records
    from torchaos.harness.fault_drivers.containers import ContainerDeath, ContainerFault, Hit
    from torchaos.harness.fault_drivers.damage_fault import CheckpointFault
    from torchaos.harness.fault_drivers.gpu.gpu_fault import OverlayFault
    from torchaos.harness.fault_drivers.network.link_faults import CutFault, ShapedFault
    from torchaos.harness.fault_drivers.network.node_processes import NodeDeath
    from torchaos.harness.fault_drivers.network.traffic_counters import counted, late, logged
    from torchaos.harness.fault_drivers.proxy import ProxyFault
    from torchaos.harness.fault_drivers.scheduler import PodDeath, SchedulerFault
    from torchaos.harness.fault_drivers.site import TargetGone
    from torchaos.harness.fault_drivers.storage_faults import FillFault, StorageFault
    from torchaos.harness.interfaces import (
        Assertion,
        ChaosError,
        Condition,
        Emit,
        Evidence,
        Finding,
        First,
        Handle,
        Harm,
        Hits,
        Injector,
        Irreversible,
        JobSpec,
        Launcher,
        LiveNode,
        Need,
        Node,
        NodeSite,
        Outcome,
        Probe,
        RankProcess,
        Site,
        Target,
        UsageError,
        Watched,
        What,
        Where,
        failed,
        inconclusive,
        passed,
        unhit,
    )
    from torchaos.harness.record.history import Attempt, Execution, History, Save
    from torchaos.harness.record.record import Record
    from torchaos.harness.rollback.cluster_handles import KubernetesNode, SlurmNodeState, SlurmWork
    from torchaos.harness.rollback.file_handles import File, Mount
    from torchaos.harness.rollback.handles import JobProcesses, Process
    from torchaos.harness.rollback.network_handles import LinkUp, Names, NftTable, Qdisc
    from torchaos.harness.running.conditions.commands import last_answer
    from torchaos.harness.running.launchers.torchrun_line import elastic_env
    from torchaos.harness.scenario.values import Regex
    from torchaos.plugin.faults import DeathFault, NcclNetFault, NcclTransferFault, WaitingFault

__all__ = [
    "Assertion", "Attempt", "Call", "ChaosError", "Checkpoint", "CheckpointFault", "Checksum", "Collectives",
    "Condition", "ContainerDeath", "ContainerFault", "Count", "CutFault", "DeathFault", "Emit", "Event", "Evidence",
    "Execution", "Extent", "Fault", "File", "Files", "FillFault", "Finding", "First", "Format", "Handle", "Harm",
    "History", "Hit", "Hits", "ITEM_SIZES", "Injector", "Irreversible", "JobProcesses", "JobSpec", "Kind",
    "KubernetesNode", "Landing", "Launcher", "Lease", "LinkUp", "LiveNode", "Mount", "Names", "NcclNetFault",
    "NcclTransferFault", "Need", "NetKind", "NftTable", "Node", "NodeDeath", "NodeSite", "Outcome", "OverlayFault",
    "Phase", "PodDeath", "Positive", "Probe", "Problem", "Process", "ProxyFault", "Qdisc", "RankProcess", "RankSite",
    "Record", "Regex", "Save", "SchedulerFault", "Seconds", "ShapedFault", "Shard", "Share", "Site", "Size",
    "SlurmNodeState", "SlurmWork", "StorageFault", "Target", "TargetGone", "TensorEntry", "Trouble", "Unreadable",
    "UsageError", "WaitingFault", "Watched", "What", "Where", "all_waited", "as_one", "counted", "died", "drawn",
    "each", "each_hit", "elastic_env", "failed", "gone", "inconclusive", "landings", "last_answer", "late", "logged",
    "note_missing", "out_of_step", "passed", "problem_of", "records", "slower", "stood_still", "stopped", "took_turns",
    "torn", "unhit",
]  # fmt: skip

_IN_RANKS = ("torchaos.harness.agent.", "torchaos.plugin.")


def _named(name: str) -> Any:
    """The object with that name, in the harness or in a rank. Raises AttributeError."""
    place = _places().get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    in_rank = getattr(sys.modules.get("torchaos.harness.agent"), "__name__", "torchaos.harness.agent")
    is_there = in_rank == "torchaos.harness.agent" or place.startswith(_IN_RANKS)
    found = getattr(import_module(place), name) if is_there else _Outside(name)
    globals()[name] = found
    return found


if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    __getattr__ = _named


def __dir__() -> list[str]:
    return __all__


@cache
def _places() -> dict[str, str]:
    """The module from which each name comes. This function reads the imports above, so that each place is written only
    once."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found = (node for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in found for alias in node.names}


class _Outside:
    """The stand-in, in a rank, for an object that exists only in the harness. A class that inherits from it is an
    ordinary class."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"{self._name} of torchaos.plugin can't be used in a rank, which has no harness")

    def __getattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"{self._name}.{attribute} can't be read in a rank, which has no harness")
