"""The pages about the injectors, assertions, conditions and launchers of torchaos."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field
from itertools import groupby
from typing import Any
from unittest.mock import Mock

from torchaos.harness import registry
from torchaos.harness.interfaces import Need
from torchaos.harness.running.capabilities import known
from torchaos.harness.scenario.checks import parameters_of, schema_of

from .markdown import NOTHING, code, default, doc, table, words

# Parameters that mean the same in all classes; the docstring of a class explains its other parameters.
SHARED = {
    "newest": "how many of the newest complete checkpoints are hit",
    "seed": "decides what is drawn (file, tensor, byte); without it the scenario's seed does",
    "gpu": "the GPU, by its index on the machine; without it that of each rank hit",
    "change": "what becomes of the number: one bit of it is inverted, or it is NaN, infinity or 0",
    "bit": "the bit that is inverted, from 0, the least significant one; without it the seed draws one",
    "place": "how far into the tensors, from 0 to 1; without it the seed draws it",
    "endpoint": "one of `job.endpoints`, by name",
    "stream": "the direction: `upstream` is from the job to the endpoint",
    "min_bytes": "only collectives (with `nccl`: transfers) of at least this size",
    "max_bytes": "only collectives (with `nccl`: transfers) of at most this size",
    "peers": "only connections with these ranks; without it all",
    "way": "only what the rank sends (`out`) or receives (`in`)",
    "connection": "only the connection of this number; each pair of ranks numbers its own, from 0, in each direction",
    "nth": "from this transfer on, of those that are meant",
}
HITS = {
    "ranks": "ranks",
    "agents": "torchrun itself, on the target's nodes",
    "as_targeted": "torchrun itself when the target names a node, else ranks",
    "ranks_or_node": "ranks; on a node without ranks, such as a standby, the GPU that `gpu` names",
    "nodes": "nodes",
    "files": "files under `job.checkpoints`; it takes no target",
    "endpoints": "an endpoint of the job; it takes no target",
}
WHERE = {"rank": "in the rank, exactly at the Moment", "node": "from outside, while the pacer is held at the Moment"}

INJECTORS = """# Injectors

This page lists every injector, to be named by `inject`, with the parameters that go under `with`. It is for
engineers who write [scenarios](../write-a-scenario.md#faults); `torchaos list` prints the same.

*Needs* are what the machine must have; they are explained [below](#needs). A fault that is *taken back* is undone after
`for`, or when the run ends, and the undo is verified: [what is left behind](../promises.md).
"""
ASSERTIONS = """# Assertions

This page lists every assertion, to be named under `assert`, with its bounds. It is for engineers who write scenarios;
[what a verdict means](../verdicts.md#what-each-assertion-sees-and-what-it-cant) says what each assertion can't see.

A bound that isn't given isn't checked. *Looks at* says what is collected for an assertion; the words are explained
[below](#what-is-looked-at).
"""
CONDITIONS = """# Conditions and launchers

This page lists every condition, to be named under `steady_state`, `stop` and `until`, with its parameters, and every
launcher. It is for engineers who write [scenarios](../write-a-scenario.md#steady-state-stop-conditions-limits-twin).
"""


def injectors() -> str:
    parts = [INJECTORS]
    for family, group in groupby(registry.injectors().items(), lambda item: item[0].partition(".")[0]):
        parts += [f"## {family}\n", *(_injector(name, found) for name, found in group)]
    needs = [(code(name), capability.used_for, capability.remedy) for name, capability in known().items()]
    return "\n".join([*parts, "## Needs\n\n`torchaos doctor` looks for these.\n", table(["", "for", "how"], needs)])


def _injector(name: str, found: type[Any]) -> str:
    facts = {
        "hits": HITS[found.hits],
        "applied": ", or ".join(WHERE[where] for where in found.where),
        "needs": ", ".join(code(need) for need in sorted(found.needs)) or "nothing",
        "undo": undo(found),
    }
    if found.consent:
        facts["consent"] = f"{code(found.consent)}, in the scenario and by `--consent`: it can hurt the host"
    listed = "\n".join(f"- **{key}**: {value}" for key, value in facts.items())
    return f"### {name}\n\n{doc(found)}\n\n{listed}\n\n{_parameters(found)}"


def undo(found: type[Any]) -> str:
    """Whether an injector can be undone; if not, the injector's own reason."""
    if "Irreversible" not in str(found.changes.__annotations__["return"]):
        return "taken back"
    injector = found(**{field.name: 0 for field in parameters_of(found) if _default(field) is NOTHING})
    return f"none: {injector.changes(Mock()).why}"


def assertions() -> str:
    parts = [_plugin(name, found, _looks_at(found)) for name, found in registry.assertions().items()]
    looked = "## What is looked at\n\n" + table(["", ""], [(code(need.value), NEEDS[need]) for need in Need])
    return "\n".join([ASSERTIONS, *parts, looked])


NEEDS = {
    Need.STEPS: "which steps were made, by which rank, and when",
    Need.LOSS: "losses and learning rates of each step",
    Need.SAMPLES: "digests, and where there are any indices, of the batches that were trained on",
    Need.CHECKPOINTS: "saves and loads, as they happen",
    Need.INVENTORY: "what lies under `job.checkpoints` when the job is over, tensor by tensor",
    Need.TWIN: "the same job without the fault",
    Need.STATE: "a check sum of the parameters after each step, and the gradient's norm",
    Need.HANGS: "the observers of hangs, from outside",
    Need.LEFTOVERS: "processes, ports and shared memory that are there when the job has ended",
    Need.COLLECTIVES: "when each collective began and ended",
}


def _looks_at(found: type[Any]) -> str:
    needs = ", ".join(sorted(code(need.value) for need in found.needs))
    return f"**Looks at**: {needs or 'the journal alone'}\n\n"


def conditions() -> str:
    parts = [_plugin(name, found) for name, found in registry.conditions().items()]
    launchers = [(code(name), doc(found), ", ".join(code(need) for need in sorted(getattr(found, "needs", ()))))
                 for name, found in registry.all_of("launchers").items()]  # fmt: skip
    return "\n".join([CONDITIONS, *parts, "## Launchers\n", table(["", "", "needs"], launchers)])


def _plugin(name: str, found: type[Any], more: str = "") -> str:
    return f"## {name}\n\n{doc(found)}\n\n{more}{_parameters(found)}"


def _parameters(found: type[Any]) -> str:
    schema = schema_of(found)["properties"]
    rows = [(code(field.name), words(schema[field.name]), default(_value(field)), shared(found, field.name))
            for field in parameters_of(found)]  # fmt: skip
    return table(["parameter", "takes", "default", ""], rows) if rows else "It has no parameters.\n"


def shared(found: type[Any], name: str) -> str:
    """The explanation of a parameter that its class does not explain."""
    return "" if code(name) in doc(found) else SHARED.get(name, "")


def undescribed(plugins: Iterable[type[Any]]) -> list[str]:
    """The parameters that are explained nowhere."""
    return [f"{found.__name__}.{field.name}" for found in plugins for field in parameters_of(found)
            if code(field.name) not in doc(found) and field.name not in SHARED]  # fmt: skip


def _value(field: Field[Any]) -> object:
    value = _default(field)
    seconds = isinstance(value, float) and any(word in str(field.type) for word in ("Seconds", "Time"))
    return f"{value:g}s" if seconds else value


def _default(field: Field[Any]) -> object:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return NOTHING if field.default is MISSING else field.default
