"""nccl.error and nccl.refuse: NCCL's network gives an error, or makes no connection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchaos.plugin import Evidence, Record
from torchaos.plugin.evidence import all_waited, out_of_step
from torchaos.plugin.families.ranks import NcclNetFault, NcclTransferFault, NetKind

_CODES = {"system": 2, "remote": 6}  # ncclSystemError, ncclRemoteError


@dataclass(frozen=True)
class Error(NcclTransferFault):
    """From the `nth` matching transfer on, the network gives NCCL an error, as an InfiniBand adapter does after its
    last retry. `code`: a system error, or an error of the remote side. NCCL does not use the communicator again."""

    code: Literal["system", "remote"] = "system"

    name = "nccl.error"
    kind = NetKind.FAIL

    def amounts(self) -> tuple[int, int]:
        return _CODES[self.code], 0

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return out_of_step(record, fault)


@dataclass(frozen=True)
class Refuse(NcclNetFault):
    """The rank gets no new connection with `peers` (by default all ranks): a connection is never ready, or fails, as
    `how` says. NCCL connects when a communicator is made or first used, so trigger the fault in the phase `start` of an
    attempt."""

    peers: list[int] = field(default_factory=list)
    way: Literal["both", "out", "in"] = "both"
    how: Literal["never_ready", "system", "remote"] = "never_ready"

    name = "nccl.refuse"
    kind = NetKind.REFUSE

    def amounts(self) -> tuple[int, int]:
        return _CODES.get(self.how, 0), 0

    def which(self) -> Mapping[str, Any]:
        return {"peers": self.peers, "way": self.way}

    def proof(self, record: Record, fault: str) -> Evidence | None:
        return (all_waited if self.how == "never_ready" else out_of_step)(record, fault)
