"""Plans the faults, assertions and conditions of a scenario, and checks each fault against the job, the launcher, the
limits, and the transport of the job's collectives."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Mapping, Sequence
from ctypes.util import find_library
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchaos.harness import registry
from torchaos.harness.agent.agent_plan import Moment
from torchaos.harness.interfaces import Injector, UsageError, Where
from torchaos.harness.record.plan import After, Named, PlannedFault, PlannedJob
from torchaos.harness.running.launchers.compatibility import misfit
from torchaos.harness.running.launchers.pod_manifest import Manifest
from torchaos.harness.running.planner.job_plan import placeholders
from torchaos.harness.running.planner.targets import FaultAt, target_of, trigger_of
from torchaos.harness.scenario.grammar import Fault, Item, Limits, Scenario
from torchaos.harness.scenario.plugin_parameters import check_parameters
from torchaos.harness.scenario.values import fill

# Resolves the assertions and conditions of a plan: a name and checked parameters.


def named(group: str, item: Item) -> Named:
    """The assertion or condition `item` with all its parameters, defaults included. `group`: "assertions" or
    "conditions"."""
    found: Any = registry.find(group, item.name)
    return Named(item.name, check_parameters(found, item.params, (), ignore))


def ignore(*_: object) -> None:
    """Accepts and drops mistakes in parameters, which the loader has already reported."""


def condition(item: Item, file: Path) -> Named:
    """A condition of the plan. Placeholders in its commands are filled. `file`: the scenario file."""
    found, values = named("conditions", item), placeholders(file.parent.absolute())
    filled = {
        name: [fill(word, values) for word in value] if isinstance(value, list) else value
        for name, value in found.params.items()
    }
    return Named(found.name, filled)


def with_facts_of(condition: Named, faults: Sequence[PlannedFault]) -> Named:
    """The condition with the parameters that depend on the planned faults (see `of_faults` of a condition)."""
    facts = registry.find("conditions", condition.name).of_faults(condition.params, faults)
    return replace(condition, params={**condition.params, **facts})


# Predicts the transport of the job's collectives before the job starts: a fault in TCP affects only TCP. The order is
# NCCL's (its user guide, "Environment Variables"): NCCL_NET, NCCL_IB_DISABLE, then the hardware of the machine. Gloo
# and the rendezvous always use TCP.

# Gives each attempt of torchrun a store of its own, without the gloo addresses of the attempt before.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@dataclass(frozen=True)
class Machine:
    """The hardware and libraries of a machine that collectives could use."""

    gpus: int = 0
    adapters: tuple[str, ...] = ()  # InfiniBand or RoCE
    plugin: str | None = None  # a network plug-in of NCCL

    @classmethod
    def this(cls) -> Machine:
        adapters = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
        return cls(gpus, tuple(adapters), find_library("nccl-net") if gpus else None)


@dataclass(frozen=True)
class Transport:
    """The transport of a job's collectives, and why it is used."""

    name: str  # such as "NCCL over InfiniBand"
    why: str
    instead: str = ""  # how the user can switch the job to TCP; empty if it uses TCP

    @property
    def is_tcp(self) -> bool:
        return not self.instead


def transport_of(env: Mapping[str, str], nodes: int, machine: Machine) -> Transport:
    """The transport of a job on this number of nodes. `env`: the job's complete environment."""
    if nodes < 2:
        return Transport(
            "loopback and shared memory", "all ranks are on one node", "let the job run on two nodes or more"
        )
    if not machine.gpus or env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Transport("gloo over TCP", "there is no GPU for NCCL")
    if "NCCL_HOSTID" in env:
        return Transport(
            "NVLink and shared memory", "NCCL_HOSTID makes NCCL take all nodes for one machine", "remove NCCL_HOSTID"
        )
    sockets = 'write env: {NCCL_NET: Socket, NCCL_IB_DISABLE: "1"}'
    net = env.get("NCCL_NET", "").lower()
    if net == "socket":
        return Transport("NCCL over TCP", "NCCL_NET is Socket")
    if net and net != "ib":
        return Transport(f"NCCL over {env['NCCL_NET']}", "NCCL_NET says so", sockets)
    if machine.plugin and env.get("NCCL_NET_PLUGIN", "").lower() != "none" and net != "ib":
        return Transport("NCCL over a plugin's network", f"{machine.plugin} is installed", sockets)
    if machine.adapters and env.get("NCCL_IB_DISABLE", "0") == "0":
        return Transport("NCCL over InfiniBand or RoCE", f"there is {', '.join(machine.adapters)}", sockets)
    return Transport("NCCL over TCP", "there is no other network that NCCL would take")


def kept_from_plugin(env: Mapping[str, str], nodes: int) -> str | None:
    """Why the job's NCCL would not use the plug-in that the harness names, and what to write instead. None if it would
    use the plug-in."""
    if set_ := next((name for name in ("NCCL_NET", "NCCL_NET_PLUGIN") if env.get(name)), None):
        return (
            f"the job's environment has {set_}={env[set_]}, and the fault needs a network plug-in of torchaos, which "
            f"sends over TCP; remove {set_}"
        )
    switches = [name for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE") if env.get(name) != "1"]
    if nodes < 2 and switches:
        wanted = ", ".join(f'{name}: "1"' for name in switches)
        return f"on one node NCCL sends through NVLink or shared memory; write env: {{{wanted}}}"
    return None


# Plans the faults of a scenario, and checks each fault against the job, the launcher and the limits.


def planned_fault(
    fault: Fault, scenario: Scenario, job: PlannedJob, draw: random.Random, at: FaultAt
) -> PlannedFault:  # fmt: skip
    """The planned fault: its target, trigger and parameters are fixed. `at`: its place, for messages. Raises UsageError
    if the fault does not fit the job, the launcher or the limits."""
    found = registry.find("injectors", fault.inject)
    target = target_of(fault, job, scenario.limits, draw, replace(at, key="target"))
    trigger = trigger_of(fault.when, target, draw, registry.phase_of(fault.inject))
    # A fault that is triggered from outside should be applied from outside too, because then it needs no agent.
    where: Where = "node" if isinstance(trigger, After) and "node" in found.where else found.where[0]
    if job.attached and isinstance(trigger, Moment):
        problem = "a job that torchaos attaches to has no agent that sees steps"
        raise UsageError(f"{at}: {problem}; write time or after")
    if job.attached and where == "rank":
        problem = "needs the agent in the rank, and a job that torchaos attaches to has none"
        raise UsageError(f"{at}: {fault.inject} {problem}")
    if fault.times > 1 and isinstance(trigger, After) and where == "node":
        raise UsageError(
            f"{at}: times counts landings at a point of the training loop, and an event from "
            "outside comes once; write several faults"
        )
    if wrong := misfit(found, scenario.launcher):
        raise UsageError(f"{at}: {wrong}")
    if job.attached and "links" in found.needs:
        problem = "torchaos changes the network only of pods that it has made"
        raise UsageError(f"{at}: {problem}; write job.pods.manifest")
    if job.pods.get("manifest") and "links" in found.needs:
        Manifest.read(Path(job.pods["manifest"]), job.pods["objects"]).check_network(job.pods["container"])
    if target.nodes == () and found.hits in ("agents", "nodes"):
        noun = "a node's agent" if found.hits == "agents" else "whole nodes"
        raise UsageError(f"{at}: {fault.inject} hits {noun}; write target: {{node: 0}}")
    if found.on_collectives and not fault.with_.get("ports"):
        over = transport_of({**os.environ, **job.env}, job.nodes, Machine.this())
        if not over.is_tcp:
            raise UsageError(
                f"{at}: {fault.inject} can't reach this job's collectives, which go over {over.name} "
                f"({over.why}); {over.instead}"
            )
    if "nccl_net" in found.needs and (wrong := kept_from_plugin({**os.environ, **job.env}, job.nodes)):
        raise UsageError(f"{at}: {fault.inject} can't reach NCCL's connections: {wrong}")
    injector: Injector = found(**check_parameters(found, fault.with_, (), ignore)).plan(target, draw)
    return PlannedFault(
        id=fault.id or fault.inject,
        inject=fault.inject,
        where=where,
        target=target,
        trigger=trigger,
        params=asdict(injector),  # type: ignore[call-overload]
        source=inspect.getfile(found),
        injector=found.__name__,
        duration_s=_duration(fault, found, scenario.limits, replace(at, key="for")),
        times=fault.times,
    )


def _duration(fault: Fault, found: Any, limits: Limits, where: FaultAt) -> float | None:
    """How long the fault lasts, in seconds: its own `for`; if it has none and this kind of fault lasts,
    `limits.duration`."""
    most = limits.duration
    if most is not None and fault.for_ is not None and fault.for_ > most:
        raise UsageError(
            f"{where}: it lasts {fault.for_:g} s, and limits.duration allows {most:g} s; write a shorter for"
        )
    return fault.for_ if fault.for_ is not None or not registry.lasts(fault.inject) else most


def link_recoveries(faults: Sequence[PlannedFault]) -> tuple[PlannedFault, ...]:
    """Completes triggers that wait for the recovery from another fault, with two facts about that fault.

    `lasting`: the other fault has a duration, so its rollback must come too. `lethal`: its target dies, so steps that
    the target still makes before its death are no recovery."""
    by_id = {fault.id: fault for fault in faults}
    linked = []
    for fault in faults:
        when = fault.trigger
        if isinstance(when, After) and when.state == "recovered" and when.fault in by_id:
            first = by_id[when.fault]
            when = replace(when, lasting=first.duration_s is not None, lethal=registry.is_lethal(first.inject))
        linked.append(replace(fault, trigger=when))
    return tuple(linked)


def check_consent(scenario: Scenario, faults: Sequence[PlannedFault], file: Path, given: Sequence[str]) -> None:
    """Raises UsageError if a fault that can harm the host lacks the scenario's consent, or the user's consent
    (`given`)."""
    _check_words(given)
    for fault in faults:
        wanted = str(registry.find("injectors", fault.inject).consent)
        missing = [] if wanted in scenario.consent else [f"`consent: [{wanted}]` in the scenario"]
        missing += [] if wanted in given else [f"--consent {wanted} on the command line"]
        if wanted and missing:
            raise UsageError(
                f"{file}: fault {fault.id}: {fault.inject} can hurt the host, not only the job; "
                f"if you want that, write {' and '.join(missing)}"
            )


def _check_words(given: Sequence[str]) -> None:
    """Raises UsageError for an unknown consent. A misspelt word would permit nothing."""
    if not given:
        return
    known = consents()
    if unknown := [word for word in given if word not in known]:
        near = registry.suggest(unknown[0], known)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
        raise UsageError(f"--consent {unknown[0]}: no fault asks for that; {hint}")


def consents() -> list[str]:
    return sorted({injector.consent for injector in registry.injectors().values() if injector.consent})
