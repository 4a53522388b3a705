"""What is run: one small scenario for each kind of fault and each way in which a run can go."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).parent / "stand_in"
# The stand-in runs under the interpreter that our own environment was made from: it has few packages to look through.
BARE_PYTHON = str(Path(sys.executable).resolve())
REAL = "torchrun --nproc-per-node 2 --max-restarts 1 {jobs}/gpt_ddp.py --steps 14 --checkpoint-dir {run}/checkpoints"


@dataclass(frozen=True)
class Family:
    """`job` and `more` are parts of a scenario. `attached`: the job is there before the harness, and goes on after."""

    name: str
    faults: tuple[Mapping[str, Any], ...]
    job: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    restarts: int = 1
    steps: int = 24  # of 4 ms
    attached: bool = False
    real: bool = False  # real torchrun and torch; else stand-ins

    def scenario(self, folder: Path) -> dict[str, Any]:
        """`folder`: where `{stage}` in a text of the scenario is."""
        command = f"{BARE_PYTHON} {STAND_IN}/torchrun --nproc-per-node 2 --max-restarts {self.restarts} "
        command += f"{STAND_IN}/train.py {self.steps} --save {{run}}/checkpoints"
        env = {"OMP_NUM_THREADS": "1"}
        if self.real:
            command = REAL
            env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        job = {
            "command": command,
            "checkpoints": {"path": "{run}/checkpoints"},
            "timeout": "60s",
            "env": env,
            **self.job,
        }
        faults = [{"id": "first", **fault} for fault in self.faults[:1]] + [dict(fault) for fault in self.faults[1:]]
        whole = {
            "scenario": self.name,
            "job": job,
            "faults": faults,
            "assert": ["completed"],
            "twin": "none",
            **self.more,
        }
        filled: dict[str, Any] = _fill(whole, folder)
        return filled


def _fill(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _fill(one, folder) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fill(one, folder) for one in value]
    return value.replace("{stage}", str(folder)) if isinstance(value, str) else value


def _fault(name: str, when: Mapping[str, Any], /, **more: Any) -> dict[str, Any]:
    return {"inject": name, "target": {"rank": 1}, "when": dict(when), **more}


STEP: Mapping[str, Any] = {"step": 8, "phase": "backward"}
RESUBMIT: Mapping[str, Any] = {"resubmit": {"times": 1, "delay": "50ms"}}
UP: Mapping[str, Any] = {"steady_state": ["ranks_up"]}  # whatever the machine's load, there is somebody to hit
UNTIL_STUCK: Mapping[str, Any] = {"stop": [{"no_progress": {"longer_than": "1500ms"}}]}
STORE: Mapping[str, Any] = {"checkpoints": {"path": "{stage}/store"}}

FAMILIES = {
    one.name: one
    for one in (
        Family("kill", (_fault("process.kill", STEP),)),
        Family("kill-from-outside", (_fault("process.kill", {"time": "200ms"}),), more=UP, steps=120),
        Family("kill-in-save", (
            {**_fault("process.kill", {"step": 11, "phase": "checkpoint_write"}), "target": {"rank": 0}},
        )),
        Family("segfault", (_fault("process.segfault", STEP),)),
        Family("abort", (_fault("process.abort", STEP),)),
        Family("raise", (_fault("process.raise", STEP),)),
        Family("exit", (_fault("process.exit", STEP, **{"with": {"code": 0}}),)),
        Family("hold-gil", (_fault("process.hold_gil", STEP, **{"with": {"time": "100ms"}}),)),
        Family("terminate", (_fault("process.terminate", STEP, **{"with": {"grace": "200ms"}}),)),
        Family("freeze-for", (_fault("process.freeze", STEP, **{"for": "150ms"}),)),
        Family("freeze-on", (_fault("process.freeze", STEP),), more=UNTIL_STUCK),
        Family("freeze-again", (_fault("process.freeze", STEP, times=2, **{"for": "50ms"}),
                                _fault("process.kill", {"step": 9, "attempt": 0}, id="second"))),
        Family("kill-agent", ({**_fault("process.kill_agent", STEP), "target": {"node": 0}},), RESUBMIT, restarts=0),
        Family("preempt", ({**_fault("process.terminate", STEP, **{"with": {"grace": "2s"}}), "target": {"node": 0}},),
               RESUBMIT, restarts=0),
        Family("kill-twice", (_fault("process.kill", STEP), _fault("process.kill", {"step": 18}, id="second")),
               restarts=2),
        Family("kill-in-recovery", (
            _fault("process.kill", STEP),
            _fault("process.kill", {"attempt": 1, "phase": "checkpoint_load"}, id="second"),
        ), restarts=2),
        Family("two-at-once", (
            _fault("process.freeze", {"time": "200ms"}, **{"for": "300ms"}),
            {**_fault("dying.damage", {"after": "first"}, **{"with": {"folder": "{stage}/store"}}), "id": "second"},
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
                {**_fault(f"storage.{kind}", STEP, **{"for": "150ms"}), "target": "all"},
            ), steps=60)
            for kind in ("read_only", "full", "slow", "stall")
        ),
        Family("real-kill", (_fault("process.kill", STEP),), real=True),
        Family("real-freeze", (_fault("process.freeze", STEP, **{"for": "300ms"}),), real=True),
        Family("real-kill-agent", ({**_fault("process.kill_agent", STEP), "target": {"node": 0}},), RESUBMIT,
               real=True),
    )
}  # fmt: skip
