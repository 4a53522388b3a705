"""Tells what a round does while it runs: follows the log of its process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

EVERY_S = 1.0
_NEWS = (" hits ", " is applied", " missed", "the run is ended early")


@contextmanager
def following(log: Path, faults: Collection[str], tell: Callable[[str], None]) -> Iterator[None]:
    """Tells each line of the log that says what became of one of the faults, or that the round is ended early."""
    over = Event()
    thread = Thread(target=_follow, args=(log, faults, tell, over), name="follow the round", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _follow(log: Path, faults: Collection[str], tell: Callable[[str], None], over: Event) -> None:
    at, last = 0, False
    while not last:
        last = over.wait(EVERY_S)  # once more after the end of the round
        try:
            with open(log, "rb") as file:
                file.seek(at)
                text = file.read()
        except OSError:  # it is not there yet
            continue
        whole = text[: text.rfind(b"\n") + 1]
        at += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            ours = any(fault in line for fault in faults) or "ended early" in line
            if ours and any(news in line for news in _NEWS):
                tell(f"  {line.strip()}")
