"""What most faults share. An injector may build on it or fit `contracts.Injector` in its own way.

Standard library only: the agent loads injectors, and with them this file, inside the job's own Python.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

if TYPE_CHECKING:
    from torchaos.harness.contracts import Hits, Probe, Site, Target

Self = TypeVar("Self")


class Fault:
    """Defaults for a fault that hits rank processes and draws nothing. `name`, `where`, `needs`, `changes`, `apply` and
    `felt` are the injector's own: above all, each says itself how it is taken back."""

    hits: ClassVar[Hits] = "ranks"
    lethal: ClassVar[bool] = False

    def plan(self: Self, target: Target, draw: random.Random) -> Self:
        return self

    def probes(self, site: Site) -> Sequence[Probe]:
        return ()
