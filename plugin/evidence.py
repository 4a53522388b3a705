"""Proofs that a fault was felt. In a rank, they can be imported but not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchaos.harness.protocol import IN_RANK

if TYPE_CHECKING or not IN_RANK:
    from torchaos.harness.analysis.felt_evidence import (
        all_waited,
        broke_off,
        died,
        ended_before_twin,
        gone,
        out_of_step,
        slower,
        stood_still,
        stopped,
        took_turns,
    )
    from torchaos.harness.analysis.findings.corruption import seen_by_others, seen_by_twin
else:
    from torchaos.plugin._outside import stand_ins

    __getattr__ = stand_ins(__name__)

__all__ = [
    "all_waited", "broke_off", "died", "ended_before_twin", "gone", "out_of_step", "seen_by_others", "seen_by_twin",
    "slower", "stood_still", "stopped", "took_turns",
]  # fmt: skip
