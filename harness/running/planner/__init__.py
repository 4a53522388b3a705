"""Makes a plan from a scenario: fills placeholders, draws targets and parameters, and checks that the machine can carry
out the scenario.

Input: a scenario and a seed. Output: a `Plan`, the same for the same seed. Nothing is started or changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchaos.harness import registry
from torchaos.harness.interfaces import Need, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Phase
from torchaos.harness.record.environment import installed, job_python
from torchaos.harness.record.plan import Plan, PlannedFault, stream
from torchaos.harness.running import capabilities
from torchaos.harness.running.fault_checks import beyond, needs_of, needs_of_controller
from torchaos.harness.running.planner.fault_plans import (
    FaultAt,
    check_consent,
    condition,
    link_recoveries,
    named,
    planned_fault,
    with_facts_of,
)
from torchaos.harness.running.planner.job_plan import at, at_the_command, check_remote, check_replicas, planned_job
from torchaos.harness.scenario.grammar import Scenario

# The hooks of the agent that each need of an assertion, and each phase of a trigger, requires. "steps" is always on.
_HOOKS_OF_NEED = {
    Need.STEPS: ("steps",),
    Need.LOSS: ("loss", "lr"),
    Need.SAMPLES: ("samples",),
    Need.CHECKPOINTS: ("checkpoints", "kept"),
    Need.INVENTORY: ("checkpoints", "kept"),
    Need.TWIN: ("checkpoints", "kept"),
    Need.LEFTOVERS: (),
    Need.STATE: ("state", "checkpoints", "kept"),
    Need.COLLECTIVES: ("collectives", "stamps"),
    Need.HANGS: ("collectives", "stamps"),
}
_HOOKS_OF_PHASE: dict[Phase, tuple[str, ...]] = {
    Phase.START: (),
    Phase.DATA: ("samples",),
    Phase.FORWARD: ("samples", "loss"),
    Phase.BACKWARD: ("loss",),
    Phase.COLLECTIVE: ("collectives",),
    Phase.OPTIMIZER: (),
    Phase.CHECKPOINT_WRITE: ("checkpoints",),
    Phase.CHECKPOINT_WRITTEN: ("checkpoints",),
    Phase.CHECKPOINT_LOAD: ("checkpoints",),
    Phase.NEW_EPOCH: ("samples",),
}


def make_plan(
    scenario: Scenario, file: Path, seed: int, attach: int | None = None, consent: Sequence[str] = (),
    job_file: Path | None = None,
) -> Plan:  # fmt: skip
    """Makes the plan. `attach`: pid of a running torchrun. `consent`: the consents that the user gives on the command
    line. `job_file`: the file with the job, if it is not the scenario's file. Raises UsageError if the scenario can't
    be carried out on this machine; the text names the file and the fault."""
    job = planned_job(scenario.job, job_file or file, attach, scenario.launcher)
    if job.replicas > 1:
        check_replicas(scenario, file)
    faults = link_recoveries(
        [
            planned_fault(fault, scenario, job, stream(seed, fault.id or fault.inject), FaultAt(file, number, fault))
            for number, fault in enumerate(scenario.faults)
        ]
    )
    check_consent(scenario, faults, file, consent)
    asserts = tuple(named("assertions", item) for item in scenario.assert_)
    collect = {need for item in asserts for need in registry.find("assertions", item.name).needs}
    hooks = {"steps"} | {hook for need in collect for hook in _HOOKS_OF_NEED[need]}
    hooks |= {hook for fault in faults for hook in _hooks_of(fault)}
    needs = {"pidfd", "proc"} | {name for fault in faults for name in registry.find("injectors", fault.inject).needs}
    far = attach is None and registry.find("launchers", scenario.launcher).on_nodes
    if far:
        check_remote(scenario.launcher, job, faults, collect, file)
    try:
        needs |= needs_of(scenario.launcher, job.command, {**os.environ, **job.env})
    except UsageError as error:
        raise UsageError(f"{at_the_command(job_file or file)}: {error}") from error
    needs |= {"mount"} if job.checkpoints_size else set()
    if any(Path(word).name == "health_agent.py" for word in job.command):
        python = job_python(job.command)
        if python == sys.executable:
            needs |= {"pynvml"}
        elif not far and not installed(python).keys() & {"nvidia-ml-py", "pynvml"}:
            why = "lacks nvidia-ml-py, by which the health agent asks about GPUs; install it there"
            raise UsageError(f"{at_the_command(job_file or file)}: {python} {why}")
    # What only the nodes need is checked on the nodes.
    here = needs_of_controller(scenario.launcher, (fault.inject for fault in faults)) if far else needs
    _check_machine(here, file)
    limits = scenario.limits
    plan = Plan(
        scenario=scenario.scenario,
        description=scenario.description,
        seed=seed,
        job=job,
        faults=faults,
        asserts=asserts,
        steady_state=tuple(condition(item, file) for item in scenario.steady_state),
        stop=tuple(condition(item, file) for item in scenario.stop),
        until=tuple(with_facts_of(condition(item, file), faults) for item in scenario.until),
        launcher=scenario.launcher,
        max_ranks=limits.ranks,
        max_nodes=limits.nodes,
        max_percent=limits.percent,
        max_duration_s=limits.duration,
        never_ranks=tuple(limits.never.ranks),
        never_nodes=tuple(limits.never.nodes),
        consent=tuple(name for name in scenario.consent if name in consent),
        twin={"runs": scenario.twin.runs} if Need.TWIN in collect and scenario.twin.runs and not job.attached else {},
        hooks=() if job.attached else tuple(sorted(hooks)),
        collect=tuple(sorted(collect)),
        needs=tuple(sorted(needs)),
    )
    ranks, nodes = ({hit for fault in faults for hit in getattr(fault.target, kind)} for kind in ("ranks", "nodes"))
    if wrong := beyond(plan, ranks, nodes, job.world_size):
        raise UsageError(f"{at(file, 'limits')}: {wrong}; choose fewer or other targets")
    return plan


def _hooks_of(fault: PlannedFault) -> tuple[str, ...]:
    """The agent's hooks that a fault needs: its injector's own hooks, and those of the phase in which it lands."""
    usual = registry.phase_of(fault.inject) if fault.where == "rank" else None
    phase = fault.trigger.phase if isinstance(fault.trigger, Moment) else usual
    own: tuple[str, ...] = registry.find("injectors", fault.inject).hooks
    return (*own, *(_HOOKS_OF_PHASE[phase] if phase else ()))


def _check_machine(needs: Iterable[str], file: Path) -> None:
    for name in sorted(needs):
        found = capabilities.check(name)
        if not found.present:
            raise UsageError(f"{file}: this machine lacks {name} ({found.detail}); {found.remedy}")
