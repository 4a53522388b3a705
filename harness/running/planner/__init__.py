"""Makes a plan from a scenario: fills placeholders, draws targets and parameters, and checks that the machine can carry
out the scenario.

Input: a scenario and a seed. Output: a `Plan`, the same for the same seed. Nothing is started or changed.

`check_script` and `check_targets` are for a file that is only checked. They report what the planner would refuse: a
script that does not exist, and targets that the job does not have. `warnings_of` warns about a scenario that can be
carried out but probably does not test what the user intends. Each warning has its place in the file, and says what to
do."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from torchaos.harness import registry
from torchaos.harness.interfaces import Need, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Phase
from torchaos.harness.record.environment import installed, job_python
from torchaos.harness.record.plan import Plan, PlannedFault, PlannedJob, stream
from torchaos.harness.record.record import Record
from torchaos.harness.running import capabilities
from torchaos.harness.running.fault_checks import beyond, needs_of, needs_of_controller
from torchaos.harness.running.launchers.job_factory import kind_of_job
from torchaos.harness.running.launchers.torchrun_line import keeps_one_store, restarts_of
from torchaos.harness.running.planner.fault_plans import (
    OWN_STORE,
    FaultAt,
    Machine,
    check_consent,
    condition,
    consents,
    link_recoveries,
    named,
    planned_fault,
    target_of,
    with_facts_of,
)
from torchaos.harness.running.planner.job_plan import (
    at,
    at_the_command,
    check_remote,
    check_replicas,
    missing_script,
    planned_job,
    warnings_in,
    written_size,
    wrong_line,
)
from torchaos.harness.running.twin import check_reached, kept_twin_of, too_late, unreached
from torchaos.harness.scenario.checks import Tell
from torchaos.harness.scenario.grammar import Job, Scenario
from torchaos.harness.scenario.loader import with_job
from torchaos.harness.scenario.yaml_source import Keys, Source, read

# The hooks of every rank that a need of an assertion, or a trigger in a phase, requires. "steps" is always on.
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
_HOOKS_OF_TRIGGER: dict[Phase, tuple[str, ...]] = {
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
    is_here = kind_of_job(scenario.launcher, attach).is_here
    if not is_here:
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
        elif is_here and not installed(python).keys() & {"nvidia-ml-py", "pynvml"}:
            why = "lacks nvidia-ml-py, by which the health agent asks about GPUs; install it there"
            raise UsageError(f"{at_the_command(job_file or file)}: {python} {why}")
    # What only the nodes need is checked on the nodes.
    here = needs if is_here else needs_of_controller(scenario.launcher, (fault.inject for fault in faults))
    try:
        _check_machine(here, file)
    except UsageError as error:  # what is doubtful in the command holds on another machine, too
        place, doubts = at_the_command(job_file or file), warnings_in(job.command, scenario.launcher)
        raise UsageError("\n".join([str(error), *(f"{place}: {text}" for text in doubts)])) from error
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
    return (*own, *(_HOOKS_OF_TRIGGER[phase] if phase else ()))


def _check_machine(needs: Iterable[str], file: Path) -> None:
    for name in sorted(needs):
        found = capabilities.check(name)
        if not found.present:
            raise UsageError(f"{file}: this machine lacks {name} ({found.detail}); {found.remedy}")


_COMMAND: Keys = ("job", "command")
_SIZE: tuple[Keys, ...] = (
    _COMMAND, ("job", "env"), ("job", "world_size"), ("job", "nodes"), ("job", "replicas"), ("limits", "never"),
)  # fmt: skip


def check_script(job: Job, launcher: str, file: Path, tell: Tell) -> None:
    """Reports a script that does not exist, and a command that can't start the job. `file`: the file with the job."""
    try:
        missing, wrong = missing_script(job, launcher, file), wrong_line(job, launcher, file)
    except (UsageError, ValueError):  # the command can't be read, which the loader reports
        return
    if missing:
        tell(_COMMAND, missing, False, [("job", "cwd")])
    if wrong:
        tell(_COMMAND, wrong, False, [("launcher",), ("job", "nodes")])


def check_targets(scenario: Scenario, file: Path, tell: Tell) -> None:
    """Reports targets that the job does not have."""
    try:
        size = written_size(scenario.job, scenario.launcher, file)
    except (UsageError, ValueError):
        return
    if size is None:
        return
    world, nodes = size
    job = PlannedJob((), "", {}, world, nodes, 0.0, replicas=scenario.job.replicas)
    for number, fault in enumerate(scenario.faults):
        try:
            target_of(fault, job, scenario.limits, random.Random(0), fault.id or fault.inject)
        except UsageError as error:
            settings = (("job", key) for key in scenario.job.settings)
            tell(("faults", number, "target"), str(error), False, [*_SIZE, *settings])


def moments_in(plan: Plan, file: Path) -> list[str]:
    """For each fault, the place of its moment in the file of the scenario, as `file:line:column`."""
    source = read(file)
    return [source.place(("faults", number, *_MOMENT)).within(file) for number in range(len(plan.faults))]


_MOMENT: Keys = ("when", "step")
_STEPS = re.compile(r"--((max|total|num|train|training)[-_])?(train[-_])?(steps|iters|iterations)")


def warnings_of(plan: Plan, scenario: Scenario, file: Path, job: Source | None = None) -> list[str]:
    """The warnings as `file:line:column: what is wrong; what to do`, in the order of the file. `job`: the file with the
    job, if this is another file. Raises UsageError if a twin in the cache shows that no fault would come."""
    found = [*_of_assertions(plan), *_of_consent(scenario)]
    if not plan.job.attached:
        twin = kept_twin_of(plan) if plan.faults else None
        if twin:
            check_reached(plan, twin, moments_in(plan, file))
        found += [*_of_folder(plan), *_of_restarts(plan), *_of_steps(plan, twin)]
        found += [(_COMMAND, text) for text in warnings_in(plan.job.command, plan.launcher)]
    source = with_job(read(file), job) if job else read(file)
    placed = sorted((source.place(keys), text) for keys, text in found)
    return [f"{place.within(file)}: {text}" for place, text in placed]


def _of_folder(plan: Plan) -> Iterator[tuple[Keys, str]]:
    if not any("{run}" in text for text in (*plan.job.command, *plan.job.env.values())):
        problem = "nothing tells the job to write its checkpoints below {run}, the run's own folder"
        yield _COMMAND, f"{problem}: it may resume from the last run's; name {{run}} in the command or in job.env"


def _of_restarts(plan: Plan) -> Iterator[tuple[Keys, str]]:
    job = plan.job
    lethal = [fault.inject for fault in plan.faults if registry.is_lethal(fault.inject)]
    to_fail = any(
        "gives_up_within" in item.params and item.params["gives_up_within"] is not None for item in plan.asserts
    )
    if not lethal or to_fail or job.resubmit_times or job.replicas > 1:
        return
    env = {**os.environ, **job.env}
    restarts = restarts_of(job.command, env)
    if restarts == 0:
        problem = f"{lethal[0]} ends a rank, and torchrun starts none again (--max-restarts 0)"
        yield _COMMAND, f"{problem}; write --max-restarts 3, or job.resubmit"
    launcher = registry.find("launchers", plan.launcher)
    if not restarts or not launcher.in_host_network or Machine.this().gpus:
        return
    problem = "there is no GPU here, so the ranks may use gloo, with which most restarts by torchrun fail"
    if env.get(OWN_STORE) != "1":
        yield _COMMAND, f'{problem} (pytorch/pytorch#135712); write job.env: {{{OWN_STORE}: "1"}}, or export it'
    if not launcher.sets_rendezvous and keeps_one_store(job.command, env):
        instead = "--standalone" if job.nodes == 1 else "--rdzv-backend c10d and --rdzv-endpoint"
        yield _COMMAND, f"{problem} if it keeps one store for all attempts, as it does here; write {instead}"


def _of_steps(plan: Plan, twin: Record | None) -> Iterator[tuple[Keys, str]]:
    """Warns about faults whose moment the job does not reach, as the twin or, without a twin, the number of steps in
    the command shows."""
    option, last = _asked_for(plan.job.command)
    late = too_late(plan, last, f"as {option} says") if last is not None else {}
    for number, text in (unreached(plan, twin) if twin else late).items():
        yield ("faults", number, *_MOMENT), text


def _asked_for(command: Sequence[str]) -> tuple[str, int | None]:
    """An option of the command that gives the number of steps, and that number. The number is None if there is no such
    option."""
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for option, value in pairwise(words):
        if _STEPS.fullmatch(option) and value.isdecimal():
            return option, int(value)
    return "", None


def _of_assertions(plan: Plan) -> Iterator[tuple[Keys, str]]:
    place = plan.job.checkpoints
    if place is not None and "://" not in place:
        return
    remedy = f"a run reads no {place}, only torchaos explore does" if place else "write job.checkpoints.path"
    for number, assertion in enumerate(plan.asserts):
        if Need.INVENTORY in registry.find("assertions", assertion.name).needs:
            yield ("assert", number), f"{assertion.name} can't read the checkpoints; {remedy}"


def _of_consent(scenario: Scenario) -> Iterator[tuple[Keys, str]]:
    known = consents() if scenario.consent else []  # `consents` loads every injector
    for number, word in enumerate(scenario.consent):
        if word not in known:
            near = registry.suggest(word, known)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(known)}"
            yield ("consent", number), f"consent: no fault asks for {word!r}; {hint}"
