"""Handles of what is made in a Docker engine, and of what is done to a container.

All of it bears the run's id as a label, and nothing without that is ever touched. Where the engine does not answer,
nothing is known, so nothing counts as taken back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torchaos.harness.docker.engine import RUN, EngineError, engine, of_run

_SETTLE_S = 0.3  # the engine may still be at what somebody asked before dying
_END_S = 30.0


@dataclass(frozen=True)
class _OfRun:
    engine: str  # its address
    run_id: str

    def __post_init__(self) -> None:
        if not (self.run_id and self.engine.startswith("unix://")):
            raise ValueError("what a run made can't be told without its id, nor without the engine's socket")

    def restore(self) -> None:
        end, empty = time.monotonic() + _END_S, 0
        with engine(self.engine) as client:
            while True:
                found = self._found(client)
                removed = [self._remove(client, name, time.monotonic() > end) for name in found]
                empty = 0 if found else empty + 1
                if empty == 2:
                    return
                if empty or not all(removed):
                    time.sleep(_SETTLE_S)

    def restored(self) -> bool:
        with engine(self.engine) as client:
            return not self._found(client)

    def _remove(self, client: Any, name: str, last: bool) -> bool:
        """False where it is to be tried again: the engine refuses what it is in the middle of."""
        from docker.errors import APIError

        try:
            self._take_away(client, name)
        except APIError:
            if last:
                raise
            return False
        return True

    def _found(self, client: Any) -> list[str]:
        raise NotImplementedError

    def _take_away(self, client: Any, name: str) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class Containers(_OfRun):
    """All containers of a run, running, paused or dead: they are removed."""

    kind: ClassVar[str] = "containers"

    def _found(self, client: Any) -> list[str]:
        return [one["Id"] for one in client.containers(all=True, filters=of_run(self.run_id))]

    def _take_away(self, client: Any, name: str) -> None:
        client.remove_container(name, force=True, v=True)


@dataclass(frozen=True)
class DockerNetwork(_OfRun):
    """The network of a run: it is removed. Its containers go first."""

    kind: ClassVar[str] = "docker_network"

    def _found(self, client: Any) -> list[str]:
        return [one["Id"] for one in client.networks(filters=of_run(self.run_id))]

    def _take_away(self, client: Any, name: str) -> None:
        client.remove_network(name)


@dataclass(frozen=True)
class DockerImage(_OfRun):
    """An image that was made for a run: it is removed. Its containers go first."""

    kind: ClassVar[str] = "docker_image"

    def _found(self, client: Any) -> list[str]:
        return [one["Id"] for one in client.images(all=True, filters=of_run(self.run_id))]

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
