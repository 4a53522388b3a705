"""Prints a plan before it is carried out, and the list of plug-ins, on a terminal.

The list says how the effect of each fault was shown: *real* (by the hardware, the kernel or a library), *replayed*
(from the record of a real machine) or *synthetic* (an imitation of a report). For faults of GPUs and NCCL it names the
card. These claims come from injectors/shown.yaml, which lab/gpu-check writes. Nothing else may claim a GPU."""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from torchaos.harness import registry
from torchaos.harness.interfaces import Irreversible, UsageError
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.record.plan import (
    Named,
    Plan,
    PlannedFault,
    PlannedJob,
    counted,
    moment_in_words,
    seconds_in_words,
    target_in_words,
)
from torchaos.harness.record.redaction import mask, mask_env
from torchaos.harness.reporting.terminal.text import Pen, name_in_words, pairs_in_words, printable
from torchaos.harness.running.planner.fault_plans import Machine, transport_of
from torchaos.harness.scenario.checks import parameters_of
from torchaos.harness.scenario.field_types import size_in_words

Record = Mapping[str, str]
_OF_GPUS = frozenset({"gpu", "cuda", "nccl"})
TIERS = ("synthetic", "replayed", "real")  # the weakest first


@cache
def records() -> tuple[Record, ...]:
    """The records of demonstrations, oldest first. Keys: injector, row, tier, card, driver, nccl, torch, date, commit.
    `row`: a row of lab/gpu-check, such as the name of a ready scenario."""
    return tuple(yaml.safe_load((files("torchaos.injectors") / "shown.yaml").read_text()))


def tier_of(injector: Any) -> str:
    return "replayed" if injector.replays else "synthetic" if injector.imitates else "real"


def needs_a_gpu(injector: Any) -> bool:
    """Whether only a GPU can show the whole effect: faults of GPUs, CUDA and NCCL."""
    return injector.name.partition(".")[0] in _OF_GPUS or "nvtx" in injector.needs


def shown_in_words(injector: Any, known: Sequence[Record] | None = None) -> str:
    """A line for `torchaos list` about how the fault was shown. `known`: the records; None: those of this
    installation."""
    told = {"real": "real", "replayed": f"replayed: it says again what {injector.replays} said"}
    effect = told.get(tier_of(injector), f"synthetic: it imitates {injector.imitates}")
    if not needs_a_gpu(injector):
        return f"effect: {effect}"
    record = _newest("injector", injector.name, known)
    if record is None:  # only a record may say that it is real, or replayed
        synthetic = tier_of(injector) == "synthetic"
        return f"effect: {effect}; not shown on a GPU yet" if synthetic else "effect: not shown on a GPU yet"
    return f"effect: {effect}; shown on {_machine(record)}"


def scenario_in_words(name: str, injectors: Sequence[Any], known: Sequence[Record] | None = None) -> str:
    """The line for a ready scenario with faults of these injectors. The scenario is only as real as its least real
    fault."""
    tier = min(map(tier_of, injectors), key=TIERS.index, default="real")
    if not any(map(needs_a_gpu, injectors)):
        return f"effect: {tier}"
    record = _newest("row", name, known)
    if record is None:
        return f"effect: {tier}; not shown on a GPU yet" if tier == "synthetic" else "effect: not shown on a GPU yet"
    return f"effect: {tier}; shown on {_machine(record)}"


def injectors_in(scenario: str) -> list[Any]:
    """The injectors of a ready scenario."""
    faults = yaml.safe_load((registry.scenarios_folder() / f"{scenario}.yaml").read_text()).get("faults") or ()
    return [registry.find("injectors", name) for name in dict.fromkeys(fault["inject"] for fault in faults)]


def _newest(key: str, value: str, known: Sequence[Record] | None) -> Record | None:
    return next((one for one in reversed(records() if known is None else known) if one[key] == value), None)


def _machine(record: Record) -> str:
    versions = f"driver {record['driver']}, NCCL {record['nccl']}, torch {record['torch']}"
    return f"{record['card']} ({versions}; {record['date']}, commit {record['commit']})"


_LABEL = 12
_END_OF_SENTENCE = re.compile(r"(?<=[.:;]) (?=[A-Z`])")


def plan(plan: Plan, console: Console) -> None:
    """Prints a plan: the actions, their targets and times, their undo, and their requirements. Secrets are masked."""
    pen = Pen(console)
    pen.banner("PLAN", "", plan.scenario, f"seed {plan.seed}, nothing has been changed")
    if plan.description:
        pen.row([], pen.text(plan.description, "dim"))
    pen.heading("Job")
    _rows(pen, _job(plan, plan.job))
    pen.heading("Faults")
    for fault in plan.faults:
        target = target_in_words(fault.target, fault.params.get("endpoint"), plan.job)
        title = pen.text(f"{fault.inject} {pen.marks.arrow} {target}", "bold")
        if fault.id != fault.inject:
            title.append("  ").append_text(pen.text(fault.id, "dim"))
        pen.row([], title, indent=3)
        _rows(pen, _fault(fault), indent=5)
    if not plan.faults:
        pen.row([], pen.text("none"), indent=3)
    pen.heading("Judged by")
    twins = int(plan.twin.get("runs", 0))
    against = "1 fault-free twin" + (f"; {twins - 1} more if the run differs from it" if twins > 1 else "")
    bounds = {one.name: given("assertions", one) for one in plan.asserts}
    _rows(pen, bounds, width=22)
    _rows(pen, {"without bounds": ", ".join(name for name, text in bounds.items() if not text)}, width=22)
    _rows(pen, {"against": against if twins else "no twin"}, width=22)
    pen.gap()


def warnings(texts: Iterable[str], console: Console) -> None:
    """Prints a line for each warning."""
    for text in texts:
        console.print(Text.assemble(("warning: ", "bold yellow"), printable(mask(text))), soft_wrap=True)


def ready_scenarios(abouts: Mapping[str, str], console: Console, *, whole: bool = True, counted: bool = False) -> None:
    """Prints the name and the description of each ready scenario. If `whole` is false, each gets one line. If `counted`
    is true, only the scenarios to start with are listed."""
    pen = Pen(console)
    first = [name for name in registry.FIRST_SCENARIOS if name in abouts]
    rest = [] if counted else [name for name in abouts if name not in first]
    parts = [("More ready scenarios", rest), ("Start with these, by `torchaos run NAME`", first)]
    for title, names in parts:  # the end of a long list is what is seen
        if names:
            pen.heading(title)
        for name in names:
            _listed(pen, name, 35, abouts[name], whole, console)
            if whole:
                pen.row([(Text(), 35)], pen.text(scenario_in_words(name, injectors_in(name)), "dim"), indent=3)


def overview(groups: Mapping[str, Sequence[str]], console: Console) -> None:
    """Prints how many plug-ins of each kind exist, and their families."""
    pen = Pen(console)
    pen.heading("All, by `torchaos list WORD`")
    for group, names in groups.items():
        families = sorted({found[0] for name in names if len(found := re.split("[/.]", name)) > 1})
        told = f"{len(names)}{': ' if families else ''}{', '.join(families)}"
        pen.row([(pen.text(group), _LABEL)], pen.text(told), indent=3)
    pen.gap()


def _listed(pen: Pen, name: str, width: int, about: str, whole: bool, console: Console) -> None:
    """Prints a name and its description. `whole`: the full description; otherwise one line: cut to the width on a
    terminal, only the first sentence elsewhere."""
    first = about if whole else _END_OF_SENTENCE.split(about, maxsplit=1)[0]
    if whole or console.is_terminal:
        pen.row([(pen.text(name, "bold"), width)], pen.text(first), indent=3, most=0 if whole else 1)
    else:
        pen.long_line(Text("  ").append_text(pen.text(name, "bold")), width + 2, first)


def catalogue(groups: Mapping[str, Mapping[str, Any]], console: Console, *, whole: bool = True) -> None:
    """Prints plug-ins by group, with their parameters and defaults. If `whole` is false, each gets one line."""
    pen = Pen(console)
    for group, named in groups.items():
        pen.heading(group.capitalize())
        for name, found in sorted(named.items()):
            _listed(pen, name, 22, summary_of(found), whole, console)
            if not whole:
                continue
            if group == "injectors" and found.consent:
                pen.row([(Text(), 22)], pen.text(f"can hurt the host: needs the consent {found.consent}"), indent=3)
            own = parameters_of(found) if is_dataclass(found) else []
            if own:
                pen.row([(Text(), 22)], pen.text(", ".join(map(_parameter, own)), "dim"), indent=3)
            if group == "injectors":
                pen.row([(Text(), 22)], pen.text(shown_in_words(found), "dim"), indent=3)
    pen.gap()


def summary_of(plugin: object) -> str:
    """The first paragraph of a plug-in's docstring."""
    return (inspect.getdoc(plugin) or "").partition("\n\n")[0]


def _rows(pen: Pen, rows: Mapping[str, str], indent: int = 3, width: int = _LABEL) -> None:
    for label, text in rows.items():
        if text:
            pen.row([(pen.text(name_in_words(label), "dim"), width)], pen.text(text), indent=indent)


def _transport(plan: Plan) -> str:
    """What carries the collectives of a job that is started here, in words."""
    over = transport_of({**os.environ, **plan.job.env}, plan.job.nodes, Machine.this())
    return f"{over.name}: {over.why}"


def _job(plan: Plan, job: PlannedJob) -> dict[str, str]:
    command = mask(shlex.join(job.command))
    nodes = f"{job.nodes} {'node' if job.nodes == 1 else 'nodes' if job.replicas == 1 else 'replicas'}"
    again = f"{_times(job.resubmit_times)} at most, {seconds_in_words(job.resubmit_delay_s)} after it ended"
    limits = {
        "ranks": plan.max_ranks, "nodes": plan.max_nodes, "percent": plan.max_percent,
        "seconds": plan.max_duration_s,
        "never ranks": plan.never_ranks or None, "never nodes": plan.never_nodes or None,
    }  # fmt: skip
    return {
        "command": f"attach to {job.attached}" if job.attached else command,
        "directory": job.cwd,
        "environment": ", ".join(f"{name}={value}" for name, value in mask_env(job.env).items()),
        "size": f"{counted(job.world_size, 'rank')} {'on' if job.replicas == 1 else 'in'} {nodes}, "
        f"launcher {plan.launcher}",
        "collectives": _transport(plan) if job.nodes > 1 else "",
        "endpoints": ", ".join(f"{name} {address}" for name, address in job.endpoints.items()),
        "checkpoints": (job.checkpoints or "none named")
        + (f", a tmpfs of {size_in_words(job.checkpoints_size)}" if job.checkpoints_size else ""),
        "time-out": seconds_in_words(job.timeout_s),
        "resubmit": again if job.resubmit_times else "",
        "steady state": _named(plan.steady_state),
        "stops when": _named(plan.stop),
        "limits": ", ".join(f"{what} {_limit(limit)}" for what, limit in limits.items() if limit is not None),
        "consent": ", ".join(plan.consent),
    }


def _limit(limit: float | tuple[int, ...]) -> str:
    return ", ".join(map(str, limit)) if isinstance(limit, tuple) else f"{limit:g}"


def _fault(fault: PlannedFault) -> dict[str, str]:
    paced = isinstance(fault.trigger, Moment) and fault.where == "node"
    held = f"; rank {fault.trigger.pacer} is held there" if isinstance(fault.trigger, Moment) and paced else ""
    until = "when the run ends" if fault.duration_s is None else f"after {seconds_in_words(fault.duration_s)}"
    undo = _no_undo(fault)
    return {
        "when": moment_in_words(fault.trigger) + held,
        "applied": "by the agent in the rank" if fault.where == "rank" else "from outside the rank",
        "with": given("injectors", Named(fault.inject, fault.params)),
        "again": f"{_times(fault.times)} in all" if fault.times > 1 else "",
        "undo": f"none: {undo}" if undo else f"undone {until}",
    }


def _no_undo(fault: PlannedFault) -> str | None:
    """Why the fault can't be undone. None if it can be undone, or if this is known only with a live job."""
    from torchaos.harness.fault_drivers.site import OutsideSite

    try:
        changes = registry.injector_of(fault).changes(OutsideSite(fault.id, (), lambda *_: None))  # type: ignore[arg-type]
    except Exception:  # an injector that needs a live job
        return None
    return changes.why if isinstance(changes, Irreversible) else None


def _named(named: tuple[Named, ...]) -> str:
    """The conditions, with their parameters."""
    return "; ".join(f"{one.name} {given('conditions', one)}".strip() for one in named)


def given(group: str, named: Named) -> str:
    """The parameters of a plug-in in words. Durations have a unit."""
    try:
        seconds = registry.seconds_of(registry.find(group, named.name))
    except UsageError:  # the plan comes from a machine with other plug-ins
        seconds = frozenset()
    there = {name: value for name, value in named.params.items() if value not in (None, "", (), [], {})}
    return pairs_in_words(there, seconds)


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _parameter(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return field.name
    required = field.default is MISSING
    return (
        f"{field.name} (required)"
        if required
        else field.name + ("" if field.default is None else f" = {field.default}")
    )
