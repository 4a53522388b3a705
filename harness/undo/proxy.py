"""The handle of what a fault does to a proxy: toxics that bear the fault's mark, or that the proxy is down."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from torchaos.harness.machine.toxiproxy.api import Api
from torchaos.harness.undo.touches import Touches


@dataclass(frozen=True)
class Toxic:
    """`pid`, `start_ticks` and `port` name the server (see machine/toxiproxy/api.py); when that is gone, so is the
    fault.

    `mark`: what the names of the fault's toxics begin with. `down`: the fault took the proxy down; it is to be up.
    """

    kind: ClassVar[str] = "toxic"
    pid: int
    start_ticks: int
    port: int
    proxy: str
    mark: str
    down: bool = False

    def __post_init__(self) -> None:
        if not self.mark.startswith("torchaos_"):
            raise ValueError(f"{self.mark!r} does not bear our mark, so these toxics are not ours to take away")

    def touches(self) -> Touches:
        return Touches(marked=self.mark)

    @property
    def _api(self) -> Api:
        return Api(self.pid, self.start_ticks, self.port)

    def restore(self) -> None:
        """Again, since what the dead harness had just ordered may come in between. Raises OSError."""
        for _again in range(3):
            if self.restored():
                return
            with suppress(ProcessLookupError):
                self._api.ask(proxy=self.proxy, remove=self.mark, **({"enabled": True} if self.down else {}))

    def restored(self) -> bool:
        if not self._api.alive():
            return True
        try:
            found = self._api.ask().get(self.proxy)
        except ProcessLookupError:
            return True
        if found is None:
            return True
        return not any(name.startswith(self.mark) for name in found["toxics"]) and (found["enabled"] or not self.down)
