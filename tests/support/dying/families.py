"""The scenarios: a small one for each kind of fault, and for each course that a run can take."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).parent / "stand_in"
# The stand-in uses the interpreter of our environment without its packages, since that starts faster.
BARE_PYTHON = str(Path(sys.executable).resolve())


def stand_in(name: str) -> str:
    """A program of the stand-in for a command line; its path may have a space."""
    path = shlex.quote(str(STAND_IN / name))
    return f"{shlex.quote(BARE_PYTHON)} {path}" if name == "torchrun" else path


REAL = "torchrun --nproc-per-node 2 --max-restarts 1 {jobs}/gpt_ddp.py --steps 14 --checkpoint-every 5 "
REAL += "--checkpoint-dir {run}/checkpoints"


@dataclass(frozen=True)
class Family:
    """`job` and `more` are parts of a scenario. `attached`: the job starts before the harness, and goes on after it."""

    name: str
    faults: tuple[Mapping[str, Any], ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    restarts: int = 1
    steps: int = 24  # steps of 4 ms
    attached: bool = False
    nodes: int = 1  # more than one: network namespaces with one rank each
    real: bool = False  # real torchrun and torch; else stand-ins

    def scenario(self, folder: Path) -> dict[str, Any]:
        """The whole scenario; `folder` replaces `{stage}` in its texts."""
        ranks = 2 if self.nodes == 1 else 1
        command = f"{stand_in('torchrun')} --nproc-per-node {ranks} --max-restarts {self.restarts} "
        command += f"{stand_in('train.py')} {self.steps} --save {{run}}/checkpoints"
        env = {"OMP_NUM_THREADS": "1"}
        if self.real:
            command = REAL
            env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        job = {
            "command": command,
            "checkpoints": {"path": "{run}/checkpoints"},
            "timeout": "60s",
            **({"nodes": self.nodes} if self.nodes > 1 else {}),
            **self.job,
            "env": {**env, **self.job.get("env", {})},
        }
        faults = [{"id": "first", **fault} for fault in self.faults[:1]] + [dict(fault) for fault in self.faults[1:]]
        whole = {
            "scenario": self.name,
            "job": job,
            "faults": faults,
            "assert": ["completed"],
            "twin": "none",
            **({"launcher": "netns"} if self.nodes > 1 else {}),
            **self.more,
        }
        filled: dict[str, Any] = _fill(whole, folder)
        return filled


def _fill(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _fill(item, folder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fill(item, folder) for item in value]
    return value.replace("{stage}", str(folder)) if isinstance(value, str) else value


def _fault(name: str, when: Mapping[str, Any], /, **more: Any) -> dict[str, Any]:
    """A fault at rank 1, if `more` names no other target. `target=None`: a fault that hits files."""
    whole = {"inject": name, "target": {"rank": 1}, "when": dict(when), **more}
    return {key: value for key, value in whole.items() if value is not None}


def _of_nodes(family: str, name: str, /, **more: Any) -> Family:
    """Two nodes, one of which is hit."""
    return Family(family, (_fault(name, STEP, target={"node": 1}, **more),), nodes=2, steps=60)


def _of_checkpoints(family: str, name: str, /, **more: Any) -> Family:
    """Damage while the job is down: the ranks of the next attempt are held before they run any code."""
    death = _fault("process.kill", {"step": 8, "phase": "backward"})
    return Family(family, (death, _fault(name, START, target=None, id="second", **more)))


STEP: Mapping[str, Any] = {"step": 8, "phase": "backward"}
START: Mapping[str, Any] = {"attempt": 1, "phase": "start"}
ALL_REDUCE: Mapping[str, Any] = {"step": 8, "operation": "all_reduce"}
RESUBMIT: Mapping[str, Any] = {"resubmit": {"times": 1, "delay": "50ms"}}
UP: Mapping[str, Any] = {"steady_state": ["ranks_up"]}  # so that there is a rank to hit, whatever the machine's load
UNTIL_STUCK: Mapping[str, Any] = {"stop": [{"no_progress": {"longer_than": "1500ms"}}]}
STORE: Mapping[str, Any] = {"checkpoints": {"path": "{stage}/store"}}
ENDPOINT: Mapping[str, Any] = {"endpoints": {"store": "127.0.0.1:9"}, "env": {"STORE": "http://{endpoint.store}"}}

FAMILIES = {
    family.name: family
    for family in (
        Family("kill", (_fault("process.kill", STEP),)),
        Family("kill-from-outside", (_fault("process.kill", {"time": "200ms"}),), more=UP, steps=120),
        Family("kill-in-save", (
            _fault("process.kill", {"step": 11, "phase": "checkpoint_write"}, target={"rank": 0}),
        )),
        Family("segfault", (_fault("process.segfault", STEP),)),
        Family("out-of-memory", (_fault("process.out_of_memory", STEP, **{"with": {"spare": 0}}),)),
        Family("abort", (_fault("process.abort", STEP),)),
        Family("raise", (_fault("process.raise", STEP),)),
        Family("exit", (_fault("process.exit", STEP, **{"with": {"code": 0}}),)),
        Family("hold-gil", (_fault("process.hold_gil", STEP, **{"with": {"time": "100ms"}}),)),
        Family("terminate", (_fault("process.terminate", STEP, **{"with": {"grace": "200ms"}}),)),
        Family("freeze-for", (_fault("process.freeze", STEP, **{"for": "150ms"}),)),
        Family("freeze-on", (_fault("process.freeze", STEP),), more=UNTIL_STUCK),
        Family("freeze-again", (_fault("process.freeze", STEP, times=2, **{"for": "50ms"}),
                                _fault("process.kill", {"step": 9, "attempt": 0}, id="second"))),
        Family("kill-agent", (_fault("process.kill_agent", STEP, target={"node": 0}),), RESUBMIT, restarts=0),
        Family("preempt", (_fault("process.terminate", STEP, target={"node": 0}, **{"with": {"grace": "2s"}}),),
               RESUBMIT, restarts=0),
        Family("kill-twice", (_fault("process.kill", STEP), _fault("process.kill", {"step": 18}, id="second")),
               restarts=2),
        Family("kill-in-recovery", (
            _fault("process.kill", STEP),
            _fault("process.kill", {"attempt": 1, "phase": "checkpoint_load"}, id="second"),
        ), restarts=2),
        Family("two-at-once", (
            _fault("process.freeze", {"time": "200ms"}, **{"for": "300ms"}),
            _fault("dying.damage", {"after": "first"}, id="second", **{"with": {"folder": "{stage}/store"}}),
        ), STORE, UP, steps=120),
        Family("damage", (_fault("dying.damage", STEP, **{"with": {"folder": "{stage}/store"}}),), STORE),
        Family("twin", (_fault("process.kill", STEP),),
               more={"assert": ["completed", "loss_continuity"], "twin": {"runs": 1}}),
        Family("attach", (_fault("process.freeze", {"time": "100ms"}, **{"for": "200ms"}),),
               {"timeout": "600ms", "checkpoints": None}, attached=True),
        Family("uninterruptible", (_fault("process.uninterruptible", STEP, **{"for": "150ms"}),)),
        Family("straggle-quota", (_fault("straggle.quota", STEP, **{"for": "150ms"}),)),
        Family("straggle-stop", (_fault("straggle.stop", STEP, **{"for": "150ms"}),)),
        *(
            Family(f"storage-{kind.replace('_', '-')}", (
                _fault(f"storage.{kind}", STEP, target="all", **{"for": "150ms"}),
            ), steps=60)
            for kind in ("read_only", "full", "slow", "stall")
        ),
        Family("storage-fill", (_fault("storage.fill", STEP, target=None, **{"for": "150ms"}),),
               {"checkpoints": {"path": "{run}/checkpoints", "size": "8MB"}}, steps=60),
        Family("data-stall", (_fault("data.stall", {"step": 8}, **{"for": "150ms"}),)),
        Family("straggle-sleep", (_fault("straggle.sleep", {"step": 8}, **{"for": "150ms"}),), steps=40),
        Family("collective-stall", (_fault("collective.stall", ALL_REDUCE, **{"for": "150ms"}),)),
        Family("collective-stall-on", (_fault("collective.stall", ALL_REDUCE),), more=UNTIL_STUCK),
        Family("collective-delay", (
            _fault("collective.delay", {"step": 8}, **{"with": {"time": "10ms"}, "for": "150ms"}),
        ), steps=40),
        Family("checkpoint-hang", (
            _fault("checkpoint.hang", {"step": 11}, target={"rank": 0}, **{"for": "150ms"}),
        )),
        Family("checkpoint-at-rest", (_fault("checkpoint.truncate", {"step": 13}, target=None, **{"for": "100ms"}),),
               steps=40),
        _of_checkpoints("checkpoint-flip-bits", "checkpoint.flip_bits"),
        _of_checkpoints("checkpoint-delete", "checkpoint.delete"),
        Family("gpu-xid", (_fault("gpu.xid", STEP, **{"with": {"number": 79, "kernel_log": True}, "for": "150ms"}),),
               {"env": {"TORCHAOS_NVML_CONTROL": "{run}"}}),
        _of_nodes("network-partition", "network.partition", **{"for": "150ms"}),
        _of_nodes("network-delay", "network.delay", **{"with": {"delay": "5ms"}, "for": "150ms"}),
        _of_nodes("network-bandwidth", "network.bandwidth", **{"for": "150ms"}),
        _of_nodes("network-link-flap", "network.link_down", **{"with": {"down": "20ms", "up": "20ms"}, "for": "150ms"}),
        _of_nodes("network-dns", "network.dns", **{"for": "150ms"}),
        _of_nodes("network-reset", "network.reset"),
        _of_nodes("node-kill", "node.kill"),
        _of_nodes("node-freeze", "node.freeze", **{"for": "150ms"}),
        _of_nodes("node-slow", "node.slow", **{"with": {"share": 0.5}, "for": "150ms"}),
        _of_nodes("node-preempt", "node.preempt", **{"with": {"notice": "200ms"}}),
        _of_nodes("node-reboot", "node.reboot", **{"with": {"away": "100ms"}}),
        Family("proxy-down", (
            _fault("proxy.down", STEP, target=None, **{"with": {"endpoint": "store"}, "for": "150ms"}),
        ), ENDPOINT, steps=40),
        Family("proxy-latency", (
            _fault("proxy.latency", STEP, target=None, **{"with": {"endpoint": "store"}, "for": "150ms"}),
        ), ENDPOINT, steps=40),
        Family("real-kill", (_fault("process.kill", STEP),), real=True),
        Family("real-freeze", (_fault("process.freeze", STEP, **{"for": "300ms"}),), real=True),
        Family("real-kill-agent", (_fault("process.kill_agent", STEP, target={"node": 0}),), RESUBMIT, real=True),
        Family("real-collective-stall", (_fault("collective.stall", ALL_REDUCE, **{"for": "300ms"}),), real=True),
        Family("real-numeric", (
            _fault("numeric.scaled_gradient", {"step": 8}, **{"for": "300ms"}),
            _fault("numeric.parameter", {"step": 10}, id="second"),
        ), real=True),
        Family("real-cuda", (_fault("cuda.error", STEP),), real=True),
        Family("real-checkpoint-flip-bits", (
            _fault("process.kill", {"step": 13}),  # by then a checkpoint has been written in the background
            _fault("checkpoint.flip_bits", START, target=None, id="second"),
        ), real=True),
    )
}  # fmt: skip
