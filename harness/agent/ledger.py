"""Makes manifests in the background. A save waits only until the digests are made, because the job may change the
tensors as soon as the save returns, and until the file is opened, because the job may soon replace it by another file
of the same name."""

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
_KEPT = 3  # folders of DCP saves whose newest manifest is remembered
_BEHIND = 16  # files that may wait for their CRCs; no CRCs are made for further files
_PATIENCE_S = 10.0  # seconds to wait for the CRCs at the end of the process
SpansOf = Callable[[BinaryIO, "dict[str, tuple[int, str]]"], "list[tuple[int, int, str]]"]


class Ledger:
    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._folder = Path(agent.plan.events).parent / "agent" / FOLDER
        self._number, self._lock = count(), threading.Lock()
        self._helpers: dict[str, Helper] = {}
        self._by_folder: dict[str, Manifest] = {}  # the newest manifest of each folder that DCP saves to

    def digester(self) -> Helper:
        """The thread that makes digests. A save does not end before they are done."""
        return self._helper("digests")

    def wait_for_digests(self) -> None:
        if "digests" in self._helpers:
            self._helpers["digests"].lend_a_hand(lambda: False)
            self._helpers["digests"].finish()

    def settle(self) -> None:
        """Waits until the manifests of all saves so far are written, but not for their CRCs."""
        for name in ("digests", "layouts"):
            if name in self._helpers:
                self._helpers[name].finish()

    def ended(self) -> None:
        """Must be called when the process ends. Waits for all manifests, and at most _PATIENCE_S seconds for the
        CRCs."""
        self.settle()
        if "crcs" in self._helpers:
            self._helpers["crcs"].finish(_PATIENCE_S)

    def from_file(self, path: str, tensors: Tensors, spans_of: SpansOf, crcs: bool) -> None:
        """Adds the manifest of a file that a library wrote by itself. `spans_of` finds the place of each tensor in the
        file. The file is opened now, because the job may rename it soon. `crcs`: make CRCs, because the format has
        none."""
        manifest = self._new(path)
        file = None if tensors.error else self._opened(path, manifest)

        def work() -> None:
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
        """Adds a file of which every byte passed through `tee`. `save`: this file, or the folder that is saved."""
        own = self._new(save) if save == path else None
        if own and about and not tee.error:
            own.announce(path, about)

        def work() -> None:
            manifest = own or self._by_folder.get(save)
            if manifest is None or (manifest is not own and manifest.has(path)):
                manifest = self._new(save)
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
                    pass  # the file was renamed already: it gets no CRCs

        self._helper("layouts").do(self._agent.careful(HOOK)(work))

    def _helper(self, name: str) -> Helper:
        with self._lock:
            if name not in self._helpers:
                self._helpers[name] = Helper(idle=name == "crcs")
            return self._helpers[name]

    def _opened(self, path: str, manifest: Manifest) -> BinaryIO | OSError:
        """Opens the file and announces it. This is done in a thread of the agent, so that a storage fault does not take
        these calls for calls of the job."""
        found: list[BinaryIO | OSError] = []

        def work() -> None:
            try:
                file = open(path, "rb")  # noqa: SIM115 (the reader closes it)
                manifest.announce(path, os.fstat(file.fileno()))
                found.append(file)
            except OSError as error:
                found.append(error)
            finally:
                done.set()

        done = threading.Event()
        self._helper("files").do(work)  # only this thread may do that work
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
