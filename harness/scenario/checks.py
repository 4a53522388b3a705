"""Checks a scenario beyond the types of its keys: its parts must fit each other and the plug-ins that it names."""

from __future__ import annotations

import re
import shlex
from typing import Any

from torchaos.harness import registry
from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.probes.log_adapters import adapter_for
from torchaos.harness.scenario.grammar import Fault, Scenario
from torchaos.harness.scenario.plugin_parameters import Tell, check_parameters, parameters_of
from torchaos.harness.scenario.values import ENDPOINT, PLACEHOLDERS, unknown_placeholders
from torchaos.harness.scenario.yaml_source import Keys

_NO_RANKS = ("files", "endpoints")
_SHELL = ("&&", "||", "|", ";", ">", "<", "&")


def check(scenario: Scenario, tell: Tell) -> None:
    for part in (_check_job, _check_placeholders, _check_faults, _check_items):
        part(scenario, tell)


def _check_job(scenario: Scenario, tell: Tell) -> None:
    job = scenario.job
    try:
        words = shlex.split(job.command) if isinstance(job.command, str) else job.command
    except ValueError as error:
        tell(("job", "command"), f"the command can't be split into words: {str(error).lower()}; correct its quotes")
        return
    if not words:
        tell(("job", "command"), "the command is empty; write the torchrun command line")
    elif "=" in words[0]:
        tell(("job", "command"), f"no shell reads the command, so {words[0]!r} is not set; put it under env")
    elif isinstance(job.command, str) and (shell := [word for word in words if word in _SHELL]):
        tell(("job", "command"), f"no shell reads the command, so {shell[0]!r} means nothing; write [bash, -c, '...']")
    for name in job.env:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
            tell(("job", "env", name), f"{name!r} can't be the name of a variable; use letters, digits and _", True)
    try:
        adapter_for(job.log.model_dump() if job.log else None)
    except UsageError as error:
        tell(("job", "log"), str(error))


def _check_placeholders(scenario: Scenario, tell: Tell) -> None:
    job = scenario.job
    texts: list[tuple[Keys, str]] = [(("job", "cwd"), job.cwd)]
    if isinstance(job.command, str):
        texts.append((("job", "command"), job.command))
    else:
        texts += [(("job", "command", number), word) for number, word in enumerate(job.command)]
    texts += [(("job", "env", name), value) for name, value in job.env.items()]
    if job.checkpoints:
        texts.append((("job", "checkpoints", "path"), job.checkpoints.path))
    for keys, text in texts:
        for name in unknown_placeholders(text, job.endpoints):
            near = registry.suggest(name, PLACEHOLDERS)
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            hint = f"did you mean {{{near}}}?" if near else f"there are {known}."
            tell(keys, f"unknown placeholder {{{name}}}; {hint} To write a brace, double it")


def _check_faults(scenario: Scenario, tell: Tell) -> None:
    earlier: list[str] = []
    for number, fault in enumerate(scenario.faults):
        at: Keys = ("faults", number)
        name = fault.id or fault.inject
        if name in earlier:
            tell(
                (*at, "id") if fault.id else (*at, "inject"),
                f"there is a fault {name!r} already; give this fault another id",
            )
        if fault.when.after is not None and fault.when.after not in earlier:
            near = registry.suggest(fault.when.after, earlier)
            hint = f"did you mean {near!r}?" if near else f"the earlier ones are {', '.join(earlier) or 'none'}"
            names = [("faults", one, key) for one in range(number) for key in ("id", "inject")]
            tell((*at, "when", "after"), f"there is no earlier fault {fault.when.after!r}; {hint}", False, names)
        earlier.append(name)
        injector = _class("injectors", fault.inject, (*at, "inject"), tell)
        if injector is not None:
            _check_use(injector, scenario, fault, at, tell)


def _check_use(injector: Any, scenario: Scenario, fault: Fault, at: Keys, tell: Tell) -> None:
    """Checks what the scenario gives to the injector of a fault."""
    check_parameters(injector, fault.with_, (*at, "with"), tell)
    if fault.target is None and injector.hits not in _NO_RANKS:
        tell((*at, "target"), f"the key 'target' is missing here; write what {fault.inject} hits")
    elif fault.target is not None and injector.hits in _NO_RANKS:
        tell((*at, "target"), f"{fault.inject} hits {injector.hits}, not ranks; remove target", True)
    if injector.own_disk and not (scenario.job.checkpoints and scenario.job.checkpoints.size):
        text = f"{fault.inject} fills the file system that job.checkpoints.size makes; add that key, such as size: 64MB"
        tell((*at, "inject"), text, False, [("job", "checkpoints")])
    if injector.hits == "endpoints":
        _check_endpoint(scenario, fault.with_.get("endpoint"), (*at, "with"), tell)
    lasting = "node" in injector.where or injector.lasting
    if fault.for_ is not None and not lasting:
        tell((*at, "for"), f"{fault.inject} ends by itself; remove `for`, see its parameters")
    elif fault.for_ is not None and injector.lethal:
        tell((*at, "for"), f"{fault.inject} can't be undone, so `for` has no meaning; remove it")


def _check_endpoint(scenario: Scenario, name: object, at: Keys, tell: Tell) -> None:
    """Checks that the endpoint is in job.endpoints, and that the job uses the address of the proxy in front of it."""
    job = scenario.job
    if name not in job.endpoints:
        near = registry.suggest(str(name), job.endpoints)
        hint = f"did you mean {near!r}?" if near else "name it there, as host:port"
        text = f"job.endpoints has no {name or 'endpoint'!r}; {hint}"
        tell((*at, "endpoint") if name else at, text, False, [("job", "endpoints")])
        return
    words = [job.command] if isinstance(job.command, str) else job.command
    used = any(f"{{{ENDPOINT}{name}}}" in text for text in [*words, *job.env.values()])
    launcher = _class("launchers", scenario.launcher, ("launcher",), lambda *_, **__: None)  # another check reports it
    if not used and not (name == "rendezvous" and (launcher is None or launcher.sets_rendezvous)):
        tell(
            (*at, "endpoint"),
            f"the job does not use the proxy in front of {name}; in its command or env, write {{{ENDPOINT}{name}}} in "
            f"place of {job.endpoints[str(name)]}",
            False,
            [("job", "command"), ("job", "env"), ("job", "endpoints")],
        )


def _check_items(scenario: Scenario, tell: Tell) -> None:
    groups: list[tuple[str, str, Any]] = [
        ("assert", "assertions", scenario.assert_),
        ("steady_state", "conditions", scenario.steady_state),
        ("stop", "conditions", scenario.stop),
        ("until", "conditions", scenario.until),
    ]
    for key, group, items in groups:
        seen: set[str] = set()
        for number, item in enumerate(items):
            at: Keys = (key, number)
            if item.name in seen:
                tell(at, f"{item.name} occurs here a second time; write it once, with all its parameters")
            seen.add(item.name)
            found = _class(group, item.name, at, tell)
            if found is not None:
                check_parameters(found, item.params, (*at, item.name), tell)
    launcher = _class("launchers", scenario.launcher, ("launcher",), tell)
    if launcher is not None:
        own = {one.name for one in parameters_of(launcher)} & scenario.job.model_fields_set
        check_parameters(launcher, {name: scenario.job.settings[name] for name in own}, ("job",), tell)
    _check_end(scenario, tell)


def _check_end(scenario: Scenario, tell: Tell) -> None:
    """Checks the rest of a scenario that has `until`. Such a run is not the whole job, so it can't be compared with a
    twin, and `completed` can't hold."""
    if not scenario.until:
        return
    if scenario.twin.runs:
        text = "a run that until ends is not a whole job, so it can't be compared; add twin: none"
        tell(("until",), text, True, [("twin",)])
    for number, item in enumerate(scenario.assert_):
        if item.name == "completed":
            text = "until ends the run before the job is done; remove completed, or until"
            tell(("assert", number), text, False, [("until",)])


def _class(group: str, name: str, at: Keys, tell: Tell) -> Any:
    try:
        return registry.find(group, name)
    except UsageError as error:
        tell(at, str(error))
        return None
