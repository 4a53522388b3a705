"""gpu.dcgm: puts a value into the cache of the node's DCGM host engine. All clients of the engine read that value for a
while."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from torchaos.harness.fault_drivers.gpu.gpu_fault import first_effect
from torchaos.plugin import ChaosError, Evidence, Fault, Irreversible, Kind, NodeSite, Record


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
        gpu, field = str(self.gpu), str(self.field)
        done = _dcgmi("test", "--inject", "--gpuid", gpu, "-f", field, "-v", str(self.value))
        if done.returncode:
            raise ChaosError(f"dcgmi test --inject: {(done.stderr or done.stdout).strip()[:500]}")
        seen = _dcgmi("test", "--introspect", "--gpuid", gpu, "-f", field).stdout
        if str(self.value) in seen.split():
            site.emit(Kind.EFFECT, {"fault": site.fault, "effect": f"DCGM shows {self.value} in field {field}"})

    def felt(self, record: Record, fault: str) -> Evidence | None:
        return first_effect(record, fault, "DCGM shows")


def _dcgmi(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["dcgmi", *words], capture_output=True, text=True, timeout=30, check=False)
