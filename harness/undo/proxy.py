"""The handle of a change to a proxy of Toxiproxy: toxics with the fault's mark, or a proxy that was disabled."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from torchaos.harness.machine.toxiproxy.api import Api
from torchaos.harness.undo.touches import Touches


@dataclass(frozen=True)
class Toxic:
    """A change to a proxy. `pid`, `start_ticks` and `port` identify the server (see machine/toxiproxy/api.py). If the
    server is gone, the fault is gone too. `mark`: the names of the fault's toxics begin with it. `down`: the fault
    disabled the proxy, so undo enables it."""

    kind: ClassVar[str] = "toxic"
    pid: int
    start_ticks: int
    port: int
    proxy: str
    mark: str
    down: bool = False

    def __post_init__(self) -> None:
        if not self.mark.startswith("torchaos_"):
            raise ValueError(f"{self.mark!r} is not a mark of torchaos, so these toxics are not removed")

    def touches(self) -> Touches:
        return Touches(marked=self.mark)

    @property
    def _api(self) -> Api:
        return Api(self.pid, self.start_ticks, self.port)

    def restore(self) -> None:
        """Removes the toxics, and enables the proxy if it was disabled. Tries three times, because a last order of the
        dead harness may arrive in between. Raises OSError."""
        for _again in range(3):
            if self.restored():
                return
            with suppress(ProcessLookupError):
                self._api.ask(proxy=self.proxy, remove=self.mark, **({"enabled": True} if self.down else {}))

    def restored(self) -> bool:
        if not self._api.alive():
            return True
        try:
            proxy = self._api.ask().get(self.proxy)
        except ProcessLookupError:
            return True
        if proxy is None:
            return True
        return not any(name.startswith(self.mark) for name in proxy["toxics"]) and (proxy["enabled"] or not self.down)
