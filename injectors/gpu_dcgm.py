"""gpu.dcgm: puts a value into the cache of the node's DCGM host engine. All clients of the engine read that value for a
while."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchaos.plugin import ChaosError, Emit, Evidence, Fault, Irreversible, Kind, NodeSite, Probe, Record
from torchaos.plugin.families.gpu import first_effect


@dataclass(frozen=True)
class DcgmInject(Fault):
    """Runs `dcgmi test --inject`: a DCGM field of the GPU gets `value`, until DCGM samples the next value. `field`:
    DCGM's number of the field (230 is XID_ERRORS)."""

    field: int
    value: int
    gpu: int = 0

    name = "gpu.dcgm"
    where = ("node",)
    imitates = "DCGM's samples of the driver"
    needs = frozenset({"dcgmi"})
    consent = "dcgm"

    def changes(self, site: NodeSite) -> Irreversible:
        return Irreversible("DCGM replaces the value with the next one that it samples")

    def apply(self, site: NodeSite) -> None:
        done = _dcgmi("test", "--inject", "--gpuid", str(self.gpu), "-f", str(self.field), "-v", str(self.value))
        if done.returncode:
            raise ChaosError(f"dcgmi test --inject: {(done.stderr or done.stdout).strip()[:500]}")

    def probes(self, site: NodeSite) -> Sequence[Probe]:
        return [Shown(site.fault, self.field, self.value, self.gpu, shown(self.field, self.gpu) == self.value)]

    def felt(self, record: Record, fault: str) -> Evidence | None:
        """Evidence that DCGM shows the value to its clients, and did not show it before."""
        return first_effect(record, fault, "DCGM shows")


@dataclass
class Shown:
    """A probe that reads the field as DCGM's clients do, and reports when the field shows `value` for the first time.
    `told`: the value was there already, or was reported."""

    fault: str
    number: int
    value: int
    gpu: int
    told: bool
    period_s: float = field(default=1.0)

    def sample(self, emit: Emit) -> None:
        if not self.told and shown(self.number, self.gpu) == self.value:
            self.told = True
            effect = f"DCGM shows {self.value} in field {self.number} of GPU {self.gpu}"
            emit(Kind.EFFECT, {"fault": self.fault, "effect": effect})


def shown(number: int, gpu: int) -> float | None:
    """The value that `dcgmi dmon` shows in a field of the GPU, in a row such as `GPU 0 79`. None if it shows no
    number."""
    rows = _dcgmi("dmon", "-e", str(number), "-i", str(gpu), "-c", "1").stdout.splitlines()
    found = next((words[2] for words in map(str.split, rows) if words[:2] == ["GPU", str(gpu)] and words[2:]), "")
    try:
        return float(found)
    except ValueError:
        return None


def _dcgmi(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["dcgmi", *words], capture_output=True, text=True, timeout=30, check=False)
