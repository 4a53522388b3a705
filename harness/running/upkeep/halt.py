"""Ends runs of this user normally, with rollback. Processes that do not end in time are killed, and their changes
are then undone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torchaos.harness.machine import proc
from torchaos.harness.running.upkeep import commands
from torchaos.harness.undo.open_runs import OpenRun, Who
from torchaos.harness.undo.recovery import Recovered, await_reapers, find, left_over, recover

IN_ORDER_S = 120.0  # seconds for a run to end with evidence and verdict; then it must hurry
HURRIED_S = 60.0  # more seconds for the rollback alone; then it is killed, and its reaper takes over
REAPER_S = 120.0
_LOOK_S = 0.05


def halt(chosen: Sequence[int] | None, now: bool, say: Callable[[str], None]) -> tuple[int, list[Recovered]]:
    """Ends the runs of these harnesses, or all runs. `chosen`: the pids of the harnesses; None: all. `now`: without
    waiting for evidence and verdicts. `say`: receives progress messages.

    Returns the number of harnesses that were ended, and the results of all recoveries, including the runs that can't be
    recovered. Raises OSError if the state directory can't be used."""
    ended = [who for who in _living() if chosen is None or who[0] in chosen]

    def own() -> list[OpenRun]:
        return [run for run in find(())[0] if chosen is None or run.harness in ended]

    _send(ended, signal.SIGTERM, signal.SIGCONT)  # a stopped process can't act on SIGTERM
    if not now:
        _wait(ended, IN_ORDER_S)
    if slow := [who for who in ended if proc.is_alive(*who)]:
        if not now:
            say(f"{_pids(slow)} did not end within {IN_ORDER_S:.0f} s; now it is hurried")
        _send(slow, signal.SIGINT)  # not SIGTERM again: the kernel merges pending signals of the same number
        _wait(slow, HURRIED_S)
    if stuck := [who for who in ended if proc.is_alive(*who)]:
        say(f"{_pids(stuck)} did not end within {HURRIED_S:.0f} s; killed, and rolled back by the reaper")
        proc.kill(dict(stuck), time.monotonic() + HURRIED_S)
    await_reapers(own, REAPER_S)
    runs, problems = own(), find(())[1] if chosen is None else []
    hung = [run.reaper for run in runs if run.here and run.lives(run.reaper) and not run.lives(run.harness)]
    if hung:
        say(f"reaper {_pids(hung)} did not end within {REAPER_S:.0f} s; killed, and rolled back from the log")
        proc.kill(dict(hung), time.monotonic() + HURRIED_S)
    return len(ended), [*problems, *(recover(run) for run in left_over(runs))]


def _living() -> list[Who]:
    runs, _problems = find(())
    found = {command.who for command in commands.living()} | {r.harness for r in runs if r.here and r.lives(r.harness)}
    return sorted(who for who in found if not proc.is_own(who[0]))


def _send(processes: Iterable[Who], *numbers: int) -> None:
    for pid, ticks in processes:
        with suppress(OSError), proc.hold(pid, ticks) as fd:
            for number in numbers if fd is not None else ():
                assert fd is not None
                signal.pidfd_send_signal(fd, number)


def _wait(processes: Iterable[Who], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and any(proc.is_alive(*who) for who in processes):
        time.sleep(_LOOK_S)


def _pids(processes: Iterable[Who]) -> str:
    return ", ".join(f"process {pid}" for pid, _ticks in processes)
