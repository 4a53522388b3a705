"""The same scenario under every launcher: the same verdict, and the same kind of evidence.

Every job is a torchrun of two ranks: on two nodes, or on the one node of launcher: local."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clusters.here import DockerRun, Here, LocalRun, NetnsRun
from clusters.kubernetes import KubernetesRun
from clusters.runs import ClusterRun
from clusters.slurm import SlurmRun
from clusters.ssh import SshRun

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.result import Verdict
from torchaos.harness.running import capabilities

pytestmark = [pytest.mark.long, pytest.mark.job, pytest.mark.timeout(900)]

AT = {"step": 15, "phase": "backward"}
DEATH = {"id": "death", "inject": "process.kill", "target": {"rank": 1}, "when": AT}
WATCHED = {
    "TORCHAOS_NVML_PATH": "{nvml}",
    "TORCHAOS_NVML_CONTROL": "{run}",
    "TORCHAOS_NVML_GPUS": "2",
}


@dataclass(frozen=True)
class Case:
    """`evidence`: the kinds of events that prove each fault."""

    faults: Sequence[Mapping[str, Any]]
    asserts: Sequence[Any]
    evidence: Sequence[set[Kind]]
    before: str = ""  # of the command
    env: Mapping[str, str] | None = None


LOSS = ["completed", {"recovery_time": {"catch_up": "60s"}}, "loss_continuity"]
CASES = {
    "kill": Case([DEATH], [*LOSS, "no_lost_work"], [{Kind.RANK_EXITED}]),
    "stall": Case(
        [{"inject": "collective.stall", "target": {"rank": 1}, "when": {"step": 15, "operation": "all_reduce"},
          "for": "3s"}],
        LOSS, [{Kind.STEP}],
    ),
    "freeze": Case([{"inject": "node.freeze", "when": AT, "for": "3s"}], LOSS, [{Kind.RANK_STATE}]),
    "flip-bits": Case(
        [DEATH, {"id": "damage", "inject": "checkpoint.flip_bits", "when": {"attempt": 1, "phase": "start"},
                 "with": {"bits": 1}}],
        [*LOSS, "checkpoint_integrity"], [{Kind.RANK_EXITED}, {Kind.EFFECT}],
    ),
    "xid": Case(
        [{"inject": "gpu.xid", "target": {"rank": 1}, "when": {"step": 15, "phase": "forward"}, "for": "4s",
          "with": {"number": 79, "kernel_log": True}}],
        ["completed", "loss_continuity"], [{Kind.EFFECT}], "{python} {jobs}/health_agent.py ", WATCHED,
    ),
}  # fmt: skip


def _here(request: pytest.FixtureRequest, kind: type[ClusterRun], env: Mapping[str, str]) -> Callable[..., ClusterRun]:
    folder: Path = request.getfixturevalue("tmp_path")
    (folder / "shared").mkdir()
    return partial(kind, Here(folder, folder, env))


def _started(request: pytest.FixtureRequest, launcher: str) -> Callable[..., ClusterRun]:
    """What starts a run under the launcher. Skips the test, and names the missing part, if the machine has no such
    launcher."""
    if launcher == "local":
        return _here(request, LocalRun, {})
    if launcher == "netns":
        if (lacks := capabilities.check("links")) and not lacks.present:
            pytest.skip(f"no links between nodes: {lacks}")
        return _here(request, NetnsRun, {})
    if launcher == "docker":
        return _here(request, DockerRun, {"DOCKER_HOST": request.getfixturevalue("docker_engine")})
    cluster = request.getfixturevalue(launcher)
    if launcher == "kubernetes":
        (cluster.shared / "runs").mkdir(exist_ok=True)
        return partial(KubernetesRun, cluster, pods={"share": [cluster.shared / "runs", cluster.base / "home"]})
    return partial(SlurmRun if launcher == "slurm" else SshRun, cluster)


@pytest.mark.parametrize("launcher", ["local", "netns", "docker", "slurm", "ssh", "kubernetes"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_scenario(
    request: pytest.FixtureRequest, name: str, launcher: str, record_property: Callable[[str, object], None]
) -> None:  # fmt: skip
    """A scenario that passes under one launcher passes under every other, and the same kinds of events prove its
    faults."""
    start, case = _started(request, launcher), CASES[name]
    one = launcher == "local"
    faults = [
        {**fault, "target": {"node": 0 if one else 1}} if fault["inject"] == "node.freeze" else fault
        for fault in case.faults
    ]
    shape = "--nproc-per-node 2" if one else "--nnodes 2 --nproc-per-node 1"
    script = "{jobs}/gpt_ddp.py --steps 30 --checkpoint-dir {run}/checkpoints --step-timeout 20"
    job = {
        "command": f"{case.before}torchrun {shape} --max-restarts 3 {script}", "timeout": "5m",
        "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **(case.env or {})},
    }  # fmt: skip
    run = start(f"{name}-{launcher}", *faults, job=job, twin={"runs": 1}, **{"assert": case.asserts})
    said = run.end()
    assert run.result.verdict is Verdict.PASSED, said
    proofs = run.proofs()
    record_property("evidence", [sorted(kind.value for kind in proof) for proof in proofs])
    for recovery in run.result.recoveries:
        record_property(f"recovery {recovery.fault}", recovery.parts)
    assert proofs == case.evidence
    run.is_clean()
