"""The handles that undo what a run has in a Docker engine (containers, network, image), and changes to a container.

All these objects have the run's id as a label. An object without that label is never changed. If the engine does not
answer, no handle counts as undone."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torchaos.harness.host.cluster_tools import ANSWER_S, NODE, RUN, EngineError, engine, of_run
from torchaos.harness.rollback.file_handles import Touches

_SETTLE_S = 0.3  # seconds between rounds; the engine may still carry out a request of a dead process
_QUIET_S = 3.0  # seconds without a new object, after which no more objects are expected
_END_S = 30.0  # seconds for all rounds; together with the last request, less than the limit of the undo (BOUND_S)
_LEAST_S = 1.0  # seconds for a request when _END_S is over
_AT_ONCE = 16


@dataclass(frozen=True)
class _LabelledObjects:
    engine: str  # address of the engine, unix://...
    run_id: str

    def __post_init__(self) -> None:
        if not (self.run_id and self.engine.startswith("unix://")):
            raise ValueError("a run's containers can't be found without its id and the engine's socket")

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def undo(self) -> None:
        """Removes everything with the run's label, in rounds, until no new object appears. Raises EngineError with the
        engine's first problem if that takes longer than _END_S seconds."""
        end, empty, quiet_from = time.monotonic() + _END_S, 0, time.monotonic()
        seen: set[str] = set()
        with engine(self.engine) as client:
            while True:
                present, problems = self._round(client, end)
                seen |= {item["Labels"][NODE] for item in present if NODE in (item["Labels"] or {})}
                if present or problems:
                    empty, quiet_from = 0, time.monotonic()
                    if quiet_from > end:
                        raise next(iter(problems), EngineError("new ones appear as fast as they are removed"))
                else:
                    empty += 1
                    if empty >= 2 and (self._all_came(seen) or time.monotonic() > quiet_from + _QUIET_S):
                        return
                if problems or not present:
                    time.sleep(_SETTLE_S)

    def is_undone(self) -> bool:
        with engine(self.engine) as client:
            return not self._found(client)

    def _round(self, client: Any, end: float) -> tuple[list[Any], list[Exception]]:
        """Removes everything that has the run's label now. Returns the objects that were found, and the problems. A
        problem may be temporary: the engine may be slow, and refuses to remove an object that it is still making."""
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
            problems += pool.map(lambda item: ask(lambda: self._take_away(client, item["Id"])), found)
        return found, [problem for problem in problems if problem]

    def _all_came(self, seen: Collection[str]) -> bool:
        """Whether no more objects are expected: every container that a dead process may have requested has appeared.
        `seen`: the nodes whose container was seen."""
        return True

    def _found(self, client: Any) -> list[Any]:
        raise NotImplementedError

    def _take_away(self, client: Any, name: str) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Containers(_LabelledObjects):
    """All containers of a run, whether running, paused or dead. Undo removes them. `nodes`: how many nodes have a
    container. If fewer containers were seen, the undo waits, because the engine may still be making one."""

    kind: ClassVar[str] = "containers"
    nodes: int = 0

    def _found(self, client: Any) -> list[Any]:
        return list(client.containers(all=True, filters=of_run(self.run_id)))

    def _take_away(self, client: Any, name: str) -> None:
        client.remove_container(name, force=True, v=True)

    def _all_came(self, seen: Collection[str]) -> bool:
        return len(seen) >= self.nodes


@dataclass(frozen=True)
class DockerNetwork(_LabelledObjects):
    """The network of a run. Undo removes it, after the run's containers."""

    kind: ClassVar[str] = "docker_network"

    def _found(self, client: Any) -> list[Any]:
        return list(client.networks(filters=of_run(self.run_id)))

    def _take_away(self, client: Any, name: str) -> None:
        client.remove_network(name)


@dataclass(frozen=True)
class DockerImage(_LabelledObjects):
    """The image that was made for a run. Undo removes it, after the run's containers."""

    kind: ClassVar[str] = "docker_image"

    def _found(self, client: Any) -> list[Any]:
        return list(client.images(all=True, filters=of_run(self.run_id)))

    def _take_away(self, client: Any, name: str) -> None:
        client.remove_image(name, force=True)


@dataclass(frozen=True)
class Container:
    """A change of one container of a run. `part`: the part of the container that is changed. `good`: its state before
    the change. If the container does not run, or is gone, undo does nothing."""

    kind: ClassVar[str] = "container"
    engine: str
    run_id: str
    id: str
    part: Literal["running", "network", "limits"]
    good: Mapping[str, Any] = field(default_factory=dict)  # network: its id and the address in it; limits: `limits_of`

    def __post_init__(self) -> None:
        if self.part not in ("running", "network", "limits") or not (self.id and self.run_id):
            raise ValueError(f"container {self.id} can't be undone in the part {self.part!r}")

    def touches(self) -> Touches:
        return Touches(run_id=self.run_id)

    def undo(self) -> None:
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

    def is_undone(self) -> bool:
        with engine(self.engine) as client:
            found = self._look(client)
            return found is None or self._is_good(found)

    def _look(self, client: Any) -> Any:
        """The engine's description of the container. None if the container does not run. Raises EngineError if the
        container belongs to another run."""
        from docker.errors import NotFound

        found = None
        with suppress(NotFound):
            found = client.inspect_container(self.id)
        if found is not None and found["Config"]["Labels"].get(RUN) != self.run_id:
            raise EngineError(f"container {self.id[:12]} does not have the run's label, so it is left alone")
        return found if found and found["State"]["Running"] else None

    def _is_good(self, found: Any) -> bool:
        if self.part == "running":
            return not found["State"]["Paused"]
        if self.part == "network":
            joined = found["NetworkSettings"]["Networks"].values()
            return any(network["NetworkID"] == self.good["network"] for network in joined)
        return limits_of(found) == dict(self.good)


def limits_of(found: Any) -> dict[str, int]:
    """The limits in the engine's description of a container: CPU quota and period in microseconds, and memory limits in
    bytes."""
    names = {"cpu_quota": "CpuQuota", "cpu_period": "CpuPeriod", "mem_limit": "Memory", "memswap_limit": "MemorySwap"}
    return {name: found["HostConfig"][key] for name, key in names.items()}
