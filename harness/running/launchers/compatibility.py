"""Checks whether a launcher provides everything that a fault needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchaos.harness import registry
from torchaos.harness.interfaces import Launcher

_MADE = {
    "links": ("needs links between nodes", "write launcher: netns, and two nodes or more"),
    "docker": ("hits containers", "write launcher: docker"),
    "kubectl": ("hits pods", "write launcher: kubernetes"),
    "slurm": ("is done by Slurm", "write launcher: slurm"),
}


def misfit(injector: Any, launcher: str) -> str | None:
    """Why the launcher with that name can't be used for the injector, and what to write instead. None if it can be
    used."""
    found = registry.find("launchers", launcher)
    keys = (injector.name, injector.hits, *injector.needs)
    if instead := next((found.cannot[key] for key in keys if key in found.cannot), None):
        return f"{injector.name} can't be done under launcher: {launcher}: {instead}"
    for name, (needs, instead) in _MADE.items():
        if name in injector.needs and name not in found.needs | found.offers:
            return f"{injector.name} {needs}, and the launcher {launcher} makes none; {instead}"
    return None


def is_controllers(injector: Any, launcher: str) -> bool:
    """Whether the controller itself applies the fault, because that takes what the launcher uses, such as kubectl. All
    other faults of a launcher whose nodes are other machines are applied on the node."""
    found = registry.find("launchers", launcher)
    return bool(found.on_nodes and injector.needs & found.needs)


def needs_of_controller(launcher: str, injectors: Iterable[str]) -> frozenset[str]:
    """The capabilities that the controller needs for a job on other machines, and for the faults that it applies
    itself."""
    found = (registry.find("injectors", name) for name in injectors)
    return frozenset(registry.find("launchers", launcher).needs).union(
        *(one.needs for one in found if is_controllers(one, launcher))
    )


def needs_of(launcher: str, command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
    """The capabilities of the machine that the launcher of that name needs for this job. Raises UsageError if it can't
    start the job."""
    found: type[Launcher] = registry.find("launchers", launcher)
    return frozenset(found.needs) | found.needs_of(command, env)
