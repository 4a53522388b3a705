"""Checks whether a fault is possible and permitted: the launcher provides what the fault needs, the fault stays within
the limits of the scenario, and it touches only things that belong to the job.

The planner checks the limits for the whole plan. Limits and permission are checked again just before a fault lands."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchaos.harness import registry
from torchaos.harness.interfaces import ChaosError, Handle, Launcher, Touches, UsageError
from torchaos.harness.record.plan import Plan


def misfit(injector: Any, launcher: str) -> str | None:
    """Why this launcher can't be used with the injector, and what to write instead. None if it can be used. `launcher`:
    its name."""
    found = registry.find("launchers", launcher)
    keys = (injector.name, injector.hits, *injector.needs)
    if instead := next((found.cannot[key] for key in keys if key in found.cannot), None):
        return f"{injector.name} can't be done under launcher: {launcher}: {instead}"
    lacks = injector.needs - found.needs - found.offers
    for other in _loadable(registry.names("launchers")) if lacks else ():
        if words := next((words for name, words in other.makes.items() if name in lacks), None):
            return f"{injector.name} {words}, and the launcher {launcher} makes none; write launcher: {other.name}"
    return None


def _loadable(names: Iterable[str]) -> Iterator[type[Launcher]]:
    """The launchers with these names, without those that can't be loaded."""
    for name in names:
        with suppress(UsageError):
            yield registry.find("launchers", name)


def is_controllers(injector: Any, launcher: str) -> bool:
    """Whether the controller itself applies the fault, in a job on other machines: it does if the fault needs a tool
    that the launcher uses, such as kubectl. All other faults are applied on the nodes."""
    return bool(injector.needs & registry.find("launchers", launcher).needs)


def needs_of_controller(launcher: str, injectors: Iterable[str]) -> frozenset[str]:
    """The capabilities that the controller needs for a job on other machines, with those for faults that the controller
    applies itself."""
    found = (registry.find("injectors", name) for name in injectors)
    return frozenset(registry.find("launchers", launcher).needs).union(
        *(one.needs for one in found if is_controllers(one, launcher))
    )


def needs_of(launcher: str, command: Sequence[str], env: Mapping[str, str]) -> frozenset[str]:
    """The capabilities of the machine that the named launcher needs for this job. Raises UsageError if the launcher
    can't start the job."""
    found: type[Launcher] = registry.find("launchers", launcher)
    return frozenset(found.needs) | found.needs_of(command, env)


class NotPermitted(ChaosError):
    """The fault would exceed the limits of the scenario, or touch something that does not belong to the job."""


def beyond(plan: Plan, ranks: Iterable[int], nodes: Iterable[int], world_size: int) -> str | None:
    """The first limit of the plan that is exceeded if faults hit all of these ranks and nodes in one run, as a clause.
    None if no limit is exceeded. `world_size`: the number of ranks in the job."""
    ranks, nodes = set(ranks), set(nodes)
    per_node = max(1, world_size // max(1, plan.job.busy_nodes or plan.job.nodes))
    hit = {rank // per_node for rank in ranks} | nodes
    if spared := ranks & set(plan.never_ranks):
        return f"rank {min(spared)} is on the list of limits.never"
    if spared := hit & set(plan.never_nodes):
        return f"node {min(spared)} is on the list of limits.never"
    for noun, found, most in (("ranks", ranks, plan.max_ranks), ("nodes", nodes, plan.max_nodes)):
        if most is not None and len(found) > most:
            return f"the faults hit {len(found)} {noun}, and limits.{noun} allows {most}"
    if plan.max_percent is not None and len(ranks) > (most := math.floor(world_size * plan.max_percent / 100 + 1e-9)):
        return (
            f"the faults hit {len(ranks)} of {world_size} ranks, and limits.percent {plan.max_percent:g} "
            f"allows {most}"
        )  # fmt: skip
    return None


@dataclass
class Permits:
    """Checks each fault against the limits of the scenario, and each change against the things that belong to the job.
    Thread-safe."""

    plan: Plan
    run_id: str
    folders: Sequence[Path]  # the run directory first, then the scenario's checkpoints
    members: Callable[[], Mapping[int, int]]  # the job's processes now: start time in clock ticks, by pid
    world_size: Callable[[], int | None]
    has_network: bool = False  # the network of this process is the job's own, because both are in a pod
    _ranks: set[int] = field(default_factory=set)  # hit so far
    _nodes: set[int] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, ranks: Iterable[int], nodes: Iterable[int], land: bool = True) -> None:
        """Checks that these ranks and nodes may be hit, in addition to all that were hit before. `land`: they count as
        hit from now on. Raises NotPermitted if they may not be hit."""
        with self._lock:
            all_ranks, all_nodes = self._ranks | set(ranks), self._nodes | set(nodes)
            wrong = beyond(self.plan, all_ranks, all_nodes, self.world_size() or self.plan.job.world_size)
            if wrong:
                raise NotPermitted(f"{wrong}; nothing was injected")
            if land:
                self._ranks, self._nodes = all_ranks, all_nodes

    def check_changes(self, changes: Sequence[Handle]) -> None:
        """Raises NotPermitted if a change touches a process, a file or a page that belongs neither to the job nor to
        the run, or if it touches the network of the host."""
        members: Mapping[int, int] | None = None
        for handle in changes:
            touches = _touches(handle)
            if touches.process is not None:
                members = self.members() if members is None else members
                pid, start_ticks = touches.process
                if members.get(pid) != start_ticks:
                    raise NotPermitted(f"process {pid} is not one of the job's, so it is left alone")
            if touches.run_id is not None and not touches.run_id.startswith(self.run_id):
                raise NotPermitted(f"{touches.run_id} is another run, so its resources are left alone")
            if touches.network is not None and not (self.has_network and touches.network.is_here):
                check_network(touches.network.proc / "ns/net", self.plan.consent)
            if touches.path is not None:
                self.check_path(Path(touches.path))
            if touches.own:
                self._check_own(Path(touches.own))

    def _check_own(self, path: Path) -> None:
        """Raises NotPermitted if the path is outside the run directory: its undo would be refused."""
        if not path.resolve().is_relative_to(self.folders[0].resolve()):
            raise NotPermitted(f"{path}: outside the run directory; for a copy, give File.of the site's undo_copies")

    def check_path(self, path: Path) -> None:
        """Raises NotPermitted unless the path, with links resolved, is below the run directory or the checkpoints."""
        found = path.resolve()
        if not any(found.is_relative_to(folder.resolve()) for folder in self.folders):
            allowed = " or ".join(str(folder) for folder in self.folders)
            raise NotPermitted(f"{path}: it is not in {allowed}, so it is not touched")


def _touches(handle: Handle) -> Touches:
    """The things that the handle touches. Raises NotPermitted if the handle does not declare them."""
    try:
        return handle.touches()
    except (AttributeError, ValueError) as error:
        raise NotPermitted(f"{type(handle).__name__} does not declare what it touches: {error}") from error


def check_network(namespace: Path, consent: Iterable[str]) -> None:
    """Checks a network before an interface or a rule is changed. Raises NotPermitted if `namespace` is the network of
    the host (of this process, or of process 1) and the consent `host-network` is not given."""
    try:
        found, hosts = os.stat(namespace).st_ino, {os.stat("/proc/self/ns/net").st_ino}
        with suppress(PermissionError):  # process 1 of another user can't be inspected
            hosts.add(os.stat("/proc/1/ns/net").st_ino)
    except OSError as error:
        raise NotPermitted(f"{namespace}: this network can't be identified: {error.strerror}") from error
    if found in hosts and "host-network" not in consent:
        raise NotPermitted("this would change the network of the whole host; it needs the consent host-network")
