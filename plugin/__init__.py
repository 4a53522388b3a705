"""All that a plug-in imports, for a fault, an assertion, a launcher, a condition, a probe or a checkpoint format. Names
that only some plug-ins need are in `evidence`, `undo`, `analysis`, `families`, `launchers`, `checkpoints` and
`testing`.

Semantic versioning covers the names in `__all__`, here and in these modules, and nothing else: modules of
`torchaos.harness` may move at any time. A plug-in may state in its module for which API it is written, as in `API = 1`;
a torchaos with another API refuses it.

In a rank, the agent loads an injector by the path of its file. There torchaos need not be installed, and a name that
needs the harness can only be used in annotations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchaos.harness.agent.injection.rank_site import RankSite
from torchaos.harness.base_classes import API, Assertion, Condition, Count, Fault, Positive, Seconds, Share, Size, drawn
from torchaos.harness.interfaces import (
    ChaosError,
    Emit,
    Evidence,
    Finding,
    First,
    Handle,
    Harm,
    Irreversible,
    Need,
    NodeSite,
    Outcome,
    Probe,
    Site,
    Target,
    UsageError,
    Watched,
    What,
    failed,
    inconclusive,
    passed,
    unhit,
)
from torchaos.harness.protocol import IN_RANK
from torchaos.harness.protocol.wire import Event, Kind, Phase

if TYPE_CHECKING or not IN_RANK:
    from torchaos.harness.fault_drivers.site import TargetGone
    from torchaos.harness.record.history import History
    from torchaos.harness.record.record import Record
else:
    from torchaos.plugin._outside import stand_ins

    __getattr__ = stand_ins(__name__)

__all__ = [
    "API", "Assertion", "ChaosError", "Condition", "Count", "Emit", "Event", "Evidence", "Fault", "Finding",
    "First", "Handle", "Harm", "History", "Irreversible", "Kind", "Need", "NodeSite", "Outcome", "Phase",
    "Positive", "Probe", "RankSite", "Record", "Seconds", "Share", "Site", "Size", "Target", "TargetGone",
    "UsageError", "Watched", "What", "drawn", "failed", "inconclusive", "passed", "unhit",
]  # fmt: skip
