"""Whether a launcher makes what a fault needs."""

from __future__ import annotations

from typing import Any

from torchaos.harness import registry

_MADE = {
    "links": ("needs links between nodes", "write launcher: netns, and two nodes or more"),
    "docker": ("hits containers", "write launcher: docker"),
}


def misfit(injector: Any, launcher: str) -> str | None:
    """What is wrong with the injector under the launcher of that name, and what to write instead."""
    found = registry.find("launchers", launcher)
    cannot = getattr(found, "cannot", {})
    if instead := cannot.get(injector.name) or cannot.get(injector.hits):
        return f"{injector.name} can't be done under launcher: {launcher}: {instead}"
    for name, (needs, instead) in _MADE.items():
        if name in injector.needs and name not in getattr(found, "needs", ()):
            return f"{injector.name} {needs}, and the launcher {launcher} makes none; {instead}"
    return None
