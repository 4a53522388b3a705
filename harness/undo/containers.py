"""Handles of what is made in a Docker engine, and of what is done to a container.

All of it bears the run's id as a label, and nothing without that is ever touched. Where the engine does not answer,
nothing is known, so nothing counts as taken back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torchaos.harness.machine.docker_engine import ANSWER_S, NODE, RUN, EngineError, engine, of_run
from torchaos.harness.undo.touches import Touches

_SETTLE_S = 0.3  # the engine may still be at what somebody asked before dying
_QUIET_S = 3.0  # so long it may be at making a container
_END_S = 30.0  # with the last request, less than the healer's bound
_LEAST_S = 1.0  # of one request, when the time is up
_AT_ONCE = 16


@dataclass(frozen=True)
class _OfRun:
    engine: str  # its address
    run_id: str

    def __post_init__(self) -> None:
        if not (self.run_id and self.engine.startswith("unix://")):
            raise ValueError("what a run made can't be told without its id, nor without the engine's socket")

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def restore(self) -> None:
        """Raises EngineError, with what the engine says of the first that did not go within `_END_S` and a little."""
        end, empty, quiet_from = time.monotonic() + _END_S, 0, time.monotonic()
        seen: set[str] = set()
        with engine(self.engine) as client:
            while True:
                found, problems = self._round(client, end)
                seen |= {one["Labels"][NODE] for one in found if NODE in (one["Labels"] or {})}
                if found or problems:
                    empty, quiet_from = 0, time.monotonic()
                    if quiet_from > end:
                        raise next(iter(problems), EngineError("others are made as fast as these are removed"))
                else:
                    empty += 1
                    if empty >= 2 and (self._all_came(seen) or time.monotonic() > quiet_from + _QUIET_S):
                        return
                if problems or not found:
                    time.sleep(_SETTLE_S)

    def restored(self) -> bool:
        with engine(self.engine) as client:
            return not self._found(client)

    def _round(self, client: Any, end: float) -> tuple[list[Any], list[Exception]]:
        """What is there, and what kept some of it from being removed: to be tried again, since the engine refuses what
        it is in the middle of, and may be slow. All go at once."""
        from docker.errors import APIError
        from requests.exceptions import RequestException

        def ask(request: Callable[[], Any]) -> Exception | None:
            client.timeout = max(_LEAST_S, min(ANSWER_S, end - time.monotonic()))
            try:
                request()
            except (APIError, RequestException) as error:
                return error
            return None

        found: list[Any] = []
        problems = [ask(lambda: found.extend(self._found(client)))]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            problems += pool.map(lambda one: ask(lambda: self._take_away(client, one["Id"])), found)
        return found, [problem for problem in problems if problem]

    def _all_came(self, seen: Collection[str]) -> bool:
        """Whether none can come any more that somebody had asked the engine for: it has shown those of these nodes."""
        return True

    def _found(self, client: Any) -> list[Any]:
        raise NotImplementedError

    def _take_away(self, client: Any, name: str) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Containers(_OfRun):
    """All containers of a run, running, paused or dead: they are removed. Each of the `nodes` has one, so for a node
    that has not shown its own, one that is being made is waited for."""

    kind: ClassVar[str] = "containers"
    nodes: int = 0

    def _found(self, client: Any) -> list[Any]:
        return list(client.containers(all=True, filters=of_run(self.run_id)))

    def _take_away(self, client: Any, name: str) -> None:
        client.remove_container(name, force=True, v=True)

    def _all_came(self, seen: Collection[str]) -> bool:
        return len(seen) >= self.nodes


@dataclass(frozen=True)
class DockerNetwork(_OfRun):
    """The network of a run: it is removed. Its containers go first."""

    kind: ClassVar[str] = "docker_network"

    def _found(self, client: Any) -> list[Any]:
        return list(client.networks(filters=of_run(self.run_id)))

    def _take_away(self, client: Any, name: str) -> None:
        client.remove_network(name)


@dataclass(frozen=True)
class DockerImage(_OfRun):
    """An image that was made for a run: it is removed. Its containers go first."""

    kind: ClassVar[str] = "docker_image"

    def _found(self, client: Any) -> list[Any]:
        return list(client.images(all=True, filters=of_run(self.run_id)))

    def _take_away(self, client: Any, name: str) -> None:
        client.remove_image(name, force=True)


@dataclass(frozen=True)
class Container:
    """One container of a run as it was: `part` says in what, `good` how. One that does not run any more, or is no
    longer there, has nothing to be set right."""

    kind: ClassVar[str] = "container"
    engine: str
    run_id: str
    id: str
    part: Literal["running", "network", "limits"]
    good: Mapping[str, Any] = field(
        default_factory=dict
    )  # network: its id, and the address there; limits: see `limits_of`

    def __post_init__(self) -> None:
        if self.part not in ("running", "network", "limits") or not (self.id and self.run_id):
            raise ValueError(f"container {self.id} can't be guarded with the part {self.part!r}")

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def restore(self) -> None:
        with engine(self.engine) as client:
            found = self._look(client)
            if found is None or self._is_good(found):
                return
            if self.part == "running":
                client.unpause(self.id)
            elif self.part == "network":
                client.connect_container_to_network(
                    self.id, self.good["network"], ipv4_address=self.good["address"]
                )  # fmt: skip
            else:
                client.update_container(self.id, **self.good)

    def restored(self) -> bool:
        with engine(self.engine) as client:
            found = self._look(client)
            return found is None or self._is_good(found)

    def _look(self, client: Any) -> Any:
        """None where it does not run, or is gone. Raises EngineError where it is a stranger's."""
        from docker.errors import NotFound

        found = None
        with suppress(NotFound):
            found = client.inspect_container(self.id)
        if found is not None and found["Config"]["Labels"].get(RUN) != self.run_id:
            raise EngineError(f"container {self.id[:12]} does not bear the label of the run, so it is left alone")
        return found if found and found["State"]["Running"] else None

    def _is_good(self, found: Any) -> bool:
        if self.part == "running":
            return not found["State"]["Paused"]
        if self.part == "network":
            joined = found["NetworkSettings"]["Networks"].values()
            return any(one["NetworkID"] == self.good["network"] for one in joined)
        return limits_of(found) == dict(self.good)


def limits_of(found: Any) -> dict[str, int]:
    """Of what the engine says of a container: in CPU microseconds per period, and in bytes."""
    names = {"cpu_quota": "CpuQuota", "cpu_period": "CpuPeriod", "mem_limit": "Memory", "memswap_limit": "MemorySwap"}
    return {name: found["HostConfig"][said] for name, said in names.items()}
