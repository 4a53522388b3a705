"""Plans the faults of a scenario, and checks each fault against the job, the launcher and the limits."""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchaos.harness import registry
from torchaos.harness.agent.plan import Moment
from torchaos.harness.contracts import Injector, UsageError, Where
from torchaos.harness.record.plan import After, PlannedFault, PlannedJob
from torchaos.harness.running.launchers.fits import misfit
from torchaos.harness.running.launchers.pod_manifest import Manifest
from torchaos.harness.running.planner.named import ignore
from torchaos.harness.running.planner.targets import FaultAt, target_of, trigger_of
from torchaos.harness.running.planner.transport import Machine, kept_from_plugin, transport_of
from torchaos.harness.scenario.grammar import Fault, Limits, Scenario
from torchaos.harness.scenario.parameters import check_parameters


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
