"""Makes manifests, in the background: of all this a save waits for the digests alone, since the tensors may change as
soon as it is over, and for a system call that tells its file from any later one of the same name."""

from __future__ import annotations

import os
import threading
from itertools import count
from pathlib import Path
from typing import BinaryIO, Callable

from .agent import Agent
from .hashing import ALGORITHM, Tensors
from .helper import Helper
from .manifest import FOLDER, Manifest
from .spans import differs, rest_of, with_crcs
from .writers import Tee

HOOK = "manifests"
_KEPT = 3  # folders that DCP may be writing to at the same time
_BEHIND = 16  # files that may wait for their CRCs; later ones do without
_PATIENCE_S = 10.0  # for the CRCs at the end of the process
SpansOf = Callable[[BinaryIO, "dict[str, tuple[int, str]]"], "list[tuple[int, int, str]]"]


class Ledger:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._folder = Path(agent.plan.events).parent / "agent" / FOLDER
        self._number, self._lock = count(), threading.Lock()
        self._helpers: dict[str, Helper] = {}
        self._by_folder: dict[str, Manifest] = {}  # the newest of each folder that DCP saves to

    def digester(self) -> Helper:
        """What a save waits for at its end."""
        return self._helper("digests")

    def wait_for_digests(self) -> None:
        if "digests" in self._helpers:
            self._helpers["digests"].lend_a_hand(lambda: False)
            self._helpers["digests"].finish()

    def settle(self) -> None:
        """Wait until manifests are written of all that was saved so far, but for CRCs."""
        for name in ("digests", "layouts"):
            if name in self._helpers:
                self._helpers[name].finish()

    def ended(self) -> None:
        """The process ends: what is still being digested is waited for, and for a while the CRCs."""
        self.settle()
        if "crcs" in self._helpers:
            self._helpers["crcs"].finish(_PATIENCE_S)

    def from_file(self, path: str, tensors: Tensors, spans_of: SpansOf, crcs: bool) -> None:
        """A file that a library wrote by itself: what lies where is read from it. It is opened now, for it may be
        renamed at once. `crcs`: of it, since its format keeps none."""
        file = None if tensors.error else self._opened(path)

        def work() -> None:
            manifest = self._new(path)
            try:
                if file is None:
                    raise ValueError(tensors.error)
                if isinstance(file, OSError):
                    raise file
                spans = spans_of(file, tensors.digests)
                rest = rest_of(file, os.fstat(file.fileno()).st_size, spans)
                manifest.add(path, file.fileno(), spans, rest, differs(file, spans))
            except Exception as error:
                manifest.lose(path, f"{type(error).__name__}: {error}")
                manifest.write()
                return
            manifest.write()
            if crcs:
                self._crcs_later(manifest, path, file, spans)
            else:
                file.close()

        self._helper("layouts").do(self._agent.careful(HOOK)(work))

    def whole(self, path: str, save: str, tee: Tee, about: os.stat_result | None, crcs: bool) -> None:
        """A file of which every byte was digested on its way. `save`: what was saved, the file or its folder."""

        def work() -> None:
            manifest = self._by_folder.get(save) if save != path else None
            if manifest is None or manifest.has(path):
                manifest = self._new(save)
                if save != path:
                    self._by_folder = {save: manifest, **dict(list(self._by_folder.items())[:_KEPT])}
            digester = tee.digester
            spans = [(0, digester.size, digester.digests())]
            if tee.error:
                manifest.lose(path, tee.error)
            else:
                manifest.add_whole(path, about, spans)
            manifest.write()
            if crcs and about is not None and not tee.error:
                try:
                    self._crcs_later(manifest, path, open(path, "rb"), spans)  # noqa: SIM115 (closed there)
                except OSError:
                    pass  # renamed already: it does without

        self._helper("layouts").do(self._agent.careful(HOOK)(work))

    def _helper(self, what: str) -> Helper:
        with self._lock:
            if what not in self._helpers:
                self._helpers[what] = Helper(idle=what == "crcs")
            return self._helpers[what]

    def _opened(self, path: str) -> BinaryIO | OSError:
        """By a thread of ours, so that no fault of the storage mistakes it for something that the job does."""
        found: list[BinaryIO | OSError] = []

        def work() -> None:
            try:
                found.append(open(path, "rb"))  # noqa: SIM115 (whoever reads it closes it)
            except OSError as error:
                found.append(error)
            finally:
                done.set()

        done = threading.Event()
        self._helper("files").do(work)  # nobody lends that one a hand
        done.wait()
        return found[0]

    def _crcs_later(self, manifest: Manifest, path: str, file: BinaryIO, spans: list[tuple[int, int, str]]) -> None:
        def work() -> None:
            with file:
                try:
                    found = with_crcs(file, spans)
                except OSError:
                    return
            if found is not None:
                manifest.add_crcs(path, found)
                manifest.write()

        if ALGORITHM == "crc32" or self._helper("crcs").waiting() >= _BEHIND:
            file.close()
        else:
            self._helper("crcs").do(self._agent.careful(HOOK)(work))

    def _new(self, save: str) -> Manifest:
        who = self._agent.who
        name = f"rank{who.rank}-attempt{who.attempt}-{next(self._number)}-{who.pid}.json"
        return Manifest(self._folder, name, save, who.attempt)
