"""The job of sdc.py, started by torchrun: the reference trainer on two ranks in one long-lived process group. It runs
short trainings one after another, all from the same state and with the same batches, each with one corrupted number.

The agent is torchaos's agent with its usual hooks, and the corruption is the injectors' own `apply`. Two things differ
from a real run: when the guard has stopped a step, the rank returns to its last checkpoint by itself, without a
restart; and a checkpoint is a digest of each tensor that would be in it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(os.environ["SDC_FOLDER"])
WARM_UP, STEPS, EVERY = 30, 20, 5


def arm() -> Any:
    """Starts the agent, before torch is imported, as in a rank."""
    from torchaos.harness.agent.agent import Agent
    from torchaos.harness.agent.hooks import install
    from torchaos.harness.agent.startup import identify
    from torchaos.harness.protocol import wire
    from torchaos.harness.protocol.agent_plan import AgentPlan

    os.environ[wire.ENV_PLAN] = "none"
    who = identify(os.environ, os.getpid())
    assert who is not None
    plan = AgentPlan("sdc", str(FOLDER / "events"), ("steps", "loss", "state", "collectives"))
    events = wire.EventFile(FOLDER / "events" / f"rank{who.rank}.jsonl", f"rank{who.rank}", who.rank, 0)
    agent = Agent(plan, who, events)
    install(agent)
    return agent


AGENT = arm()

import torch  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios" / "jobs"))

import gpt  # noqa: E402
import gpt_ddp  # noqa: E402
import torch.distributed as dist  # noqa: E402

NO_NOTICE: Any = SimpleNamespace(leave=False, save=False)


class Trial:
    def __init__(self, run: Any, batches: list[Any]) -> None:
        self.run, self.batches = run, batches
        self.start = self.keep()

    def keep(self) -> dict[str, Any]:
        parts = {name: part for name, part in self.run.parts.items() if name != "sampler"}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def put_back(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            self.run.parts[name].load_state_dict(copy.deepcopy(part))
        self.run.optimizer.zero_grad()

    def __call__(self, flip: dict[str, Any] | None) -> dict[str, Any]:
        """Runs one training. Returns what this rank did: each step with its attempt, the saves, and where the guard
        stopped it."""
        self.put_back(self.start)
        steps: list[dict[str, Any]] = []
        saves: list[dict[str, Any]] = []
        stops: list[dict[str, Any]] = []
        told: list[dict[str, Any]] = []
        watch = _Watch(told)
        kept, done, attempt = (self.start, 0), 0, 0
        while done < STEPS and attempt < 3:
            at = done + 1
            if flip and attempt == 0 and flip["step"] == at and flip["rank"] == dist.get_rank():
                told.append({"kind": "applying", "at": _now()})
                apply(flip, watch)
            watch.take()
            try:
                self.run.step(self.batches[done], NO_NOTICE)
            except RuntimeError as error:
                if "can't be right" not in str(error):  # not the guard's message
                    raise
                watch.take()
                stops.append({"step": at, "attempt": attempt, "at": _now(), "error": str(error)})
                done, attempt = kept[1], attempt + 1
                self.put_back(kept[0])
                continue
            done += 1
            steps.append({"step": done, "attempt": attempt, "at": _now(), **watch.take()})
            if done % EVERY == 0:
                kept = (self.keep(), done)
                saves.append({"step": done, "attempt": attempt, "at": _now(), "tensors": digests(kept[0])})
        AGENT.lasting.on_calls.clear()
        return {"steps": steps, "saves": saves, "stops": stops, "told": told, "flip": flip, "rank": dist.get_rank()}


class _Watch:
    """Receives the agent's events of a step, in place of its file."""

    def __init__(self, told: list[dict[str, Any]]) -> None:
        self.told, self._steps = told, list[dict[str, Any]]()
        AGENT.emit = self.emit

    def emit(self, kind: Any, data: Any, step: int | None = None) -> Any:
        if kind.value == "step":
            self._steps.append(dict(data))
        elif kind.value in ("run.note", "fault.effect", "fault.missed", "agent.failed"):
            self.told.append({"kind": kind.value, "at": _now(), **data})
        return SimpleNamespace(seq=0)

    def take(self) -> dict[str, Any]:
        """The data of the last step's event, with the last loss only: a step that was stopped leaves its loss before
        it."""
        taken, self._steps = self._steps, []
        if not taken:
            return {}
        data = taken[-1]
        return {"parameters": data["parameters"], "norm": data["norm"], "losses": data["losses"][-1:]}


def apply(flip: dict[str, Any], watch: _Watch) -> None:
    """Calls the injector's own `apply` at the place of its Moment."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from torchaos.harness import registry

    injector = registry.find("injectors", f"numeric.{flip['site']}")(bit=flip["bit"], place=flip["place"])
    always = SimpleNamespace(on=True)
    site = SimpleNamespace(
        fault="flip", optimizers=list(AGENT.optimizers), emit=watch.emit,
        at_collectives=lambda then: AGENT.lasting.on_calls.append((always, then)),
    )  # fmt: skip
    if flip["site"] != "reduced_gradient":
        injector.apply(site)
        return

    def once(*_: Any) -> None:
        handle.remove()
        injector.apply(site)

    handle = register_optimizer_step_pre_hook(once)


def digests(state: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found.update(digests(value, f"{prefix}{name}."))
        elif isinstance(value, torch.Tensor) and "rng" not in prefix:
            found[f"{prefix}{name}"] = blake2b(value.detach().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
    return found


def _now() -> float:
    import time

    return time.monotonic()


def main() -> None:
    sys.argv[1:] = ["--steps", str(WARM_UP + STEPS), "--checkpoint-dir", str(FOLDER / "none")]
    args = gpt.options()
    from datetime import timedelta

    device = gpt.start(timedelta(seconds=120))
    run = gpt.Run(args, gpt_ddp.replicate, device)
    batches = [batch for batch, _ in zip(iter(run.loader), range(WARM_UP + STEPS), strict=False)]
    for batch in batches[:WARM_UP]:
        run.step(batch, NO_NOTICE)
    trial = Trial(run, batches[WARM_UP:])
    with open(FOLDER / f"trials-{dist.get_rank()}.jsonl", "w") as file:
        for flip in [None, None, *json.loads((FOLDER / "flips.json").read_text())]:
            file.write(json.dumps(trial(flip)) + "\n")
            file.flush()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


main()
