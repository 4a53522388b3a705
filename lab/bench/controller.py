"""Measures the journal of a run in progress with many ranks: two processes write what the agents of a cluster write, an
event for each rank and second. Told are the processor time and memory of the controller, and the time from an event to
the listener that decides.

Usage: python lab/bench/controller.py [--ranks 2,64,1024] [--seconds 10]
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from multiprocessing.synchronize import Event as Flag
from pathlib import Path

from torchaos.harness.protocol.packed_lines import ROW
from torchaos.harness.protocol.wire import Event, EventFile, Kind
from torchaos.harness.record.events.journal import Journal

WRITERS = 2


def write(folder: Path, ranks: range, ended: Flag) -> None:
    """Steps of these ranks, evenly over each second."""
    files = [EventFile(folder / f"rank{rank}.jsonl", f"rank{rank}", rank, 0) for rank in ranks]
    began, step = time.monotonic(), 0
    while not ended.is_set():
        step += 1
        for place, file in enumerate(files):
            due = began + step + place / len(files)
            if (wait_s := due - time.monotonic()) > 0.001:
                time.sleep(wait_s)
            file.emit_step(step, losses=[1 / step], lr=[1e-3], opt_step=step, sched_step=step, skipped=False,
                           samples=bytes(8 * ROW), indices=tuple(range(8)), phases={"forward": 0.1})  # fmt: skip
            if ended.is_set():
                return


def measure(ranks: int, seconds: float) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as place:
        spawn = multiprocessing.get_context("spawn")
        ended, folder, seen = spawn.Event(), Path(place), list[float]()
        writers = [spawn.Process(target=write, args=(folder, range(number, ranks, WRITERS), ended))
                   for number in range(WRITERS)]  # fmt: skip
        journal = Journal(folder)

        def listen(event: Event) -> None:
            if event.kind is Kind.STEP:
                seen.append(time.monotonic() - event.mono_s)

        journal.listen(listen)
        idle = _share(2.0)
        for writer in writers:
            writer.start()
        while len(seen) < ranks:  # each has made a step
            time.sleep(0.1)
        seen.clear()
        busy = _share(seconds)
        late = sorted(seen)
        ended.set()
        for writer in writers:
            writer.join()
        journal.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    median, most = (late[int(len(late) * part)] * 1e3 for part in (0.5, 0.99))
    return (
        f"{ranks} ranks: {len(late) / seconds:.0f} events a second, {busy:.3f} of a core ({idle:.3f} with no file), "
        f"from event to listener {median:.1f} ms (median), {most:.1f} ms (p99); {memory:.0f} MiB"
    )


def _share(seconds: float) -> float:
    """The part of a core that this process takes."""
    start = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - start) / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,64,1024", help="one number or several")
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    for ranks in map(int, options.ranks.split(",")):
        print(measure(ranks, options.seconds), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
