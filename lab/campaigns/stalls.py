"""Tests the observers with stalls of real jobs and with healthy jobs that make long pauses: how soon they notice, whom
they blame, and how many false alarms they raise.

The jobs use gloo and have 2 to 8 ranks; half of them have no agent. A stall is a SIGSTOP of one rank, or user code of
one rank that blocks: in a sleep, at a lock that is never released, in a read of a pipe that is never written, or in the
wait in which the agent holds a rank. Each
stall ends when it was declared (or after 15 s), and the same job goes on to the next stall. The healthy jobs have slow
first steps, checkpoints that rank 0 writes while the others wait, evaluations, one of them long, and a compiler that
runs for seconds. In half of them, the ranks spin while they wait.

A partition separates two nodes, each a network namespace with one rank (as root). There are jobs whose ranks sleep
while they wait, and jobs whose ranks spin, as hosts of GPUs do. It is declared without py-spy, and no rank is to blame.

With --load N, N busy processes run beside the jobs all the time, as on a busy machine.

The observers see the processes, the log and the stamps; they do not know what this script does to the job. All their
opinions are recorded, so that the curve of detection time against false alarms can be computed later for other values
of k.

Usage: python lab/campaigns/stalls.py [--stalls 100] [--partitions 0] [--healthy-minutes 60] [--seed 1] [--json FILE]
           [--load 8] [--without-py-spy]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KINDS = ("sigstop", "sleep", "lock", "read", "held")
PARTITIONS = ("cut, ranks sleep", "cut, ranks spin")
GIVE_UP_S, PARALLEL, HEALTHY_RANKS = 15.0, 4, 2
KS = (1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def train(folder: Path, healthy: bool, spins: bool) -> None:
    """The job."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, stop = dist.get_rank(), folder / "stop"
    signal.signal(signal.SIGUSR1, _go_on)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order, lock = folder / f"stall-{rank}", threading.Lock()
    lock.acquire()
    step, flag = 0, torch.zeros(1)
    while True:
        step += 1
        if healthy:
            _pause(step, rank, folder)
            dist.barrier()
        loss = model(torch.randn(16, 64)).pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            work = dist.all_reduce(parameter.grad, async_op=True)
            while spins and not work.is_completed():
                pass
            work.wait()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1 if healthy else 0.02)  # as a host waits for its GPU
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if order.exists():
            _stall(order, lock, folder)
        flag.fill_(float(stop.exists()))
        dist.all_reduce(flag)
        if flag.item() > 0:
            break
    dist.barrier()
    os._exit(0)


class GoOn(Exception):
    pass


def _go_on(number: int, frame: object) -> None:
    raise GoOn


def _stall(order: Path, lock: threading.Lock, folder: Path) -> None:
    try:
        kind = order.read_text()
        if kind == "sleep":
            time.sleep(3600)
        elif kind == "lock":
            lock.acquire()
        elif kind == "read":
            with open(folder / "pipe", "rb", buffering=0) as file:
                file.read(1)
        elif kind == "held":
            from torchaos.harness.protocol.control_pages import wait_until

            wait_until(lambda: False, time.monotonic() + 3600)
    except GoOn:
        order.unlink()


def _pause(step: int, rank: int, folder: Path) -> None:
    """The pauses of healthy jobs."""
    import torch

    if step <= 3:
        _work(2.0 + step / 2)  # slow first steps
    if step % 300 == 60 and rank == 0:  # a checkpoint
        state = {f"layer {number}": torch.randn(1 << 18) for number in range(24)}
        for number in range(3):
            torch.save(state, folder / f"checkpoint-{number}.pt")
            with open(folder / f"checkpoint-{number}.pt", "rb") as file:
                os.fsync(file.fileno())
            _work(0.7)
    if step % 400 == 120:  # an evaluation
        _work(12.0 if step == 520 else 3.0)
    if step % 800 == 180 and rank == 0:  # a compiler
        os.spawnv(
            os.P_WAIT,
            sys.executable,
            [sys.executable, "-S", "-c", "import time\ne=time.monotonic()+4\nwhile time.monotonic()<e: pass"],
        )


def _work(seconds: float) -> None:
    import torch

    end, a = time.monotonic() + seconds, torch.randn(128, 128)
    while time.monotonic() < end:
        a = torch.tanh(a @ a)


@dataclass
class Session:
    """One job under observation."""

    ranks: int
    agent: bool
    folder: Path
    healthy: bool = False
    nodes: int = 1
    spins: bool = False
    stacks: bool = True
    ticks: list[Any] = field(default_factory=list)
    watching: Any = None

    def start(self) -> Session:
        from torchaos.harness.interfaces import JobSpec
        from torchaos.harness.protocol.agent_plan import AgentPlan
        from torchaos.harness.record.events.journal import Journal
        from torchaos.harness.rollback.handles import JobProcesses
        from torchaos.harness.running.launchers.job import job_env
        from torchaos.harness.running.launchers.local import Local, Netns, keepers
        from torchaos.harness.running.launchers.local_job import LocalJob

        for name in ("events", "agent", "agent/stamps"):
            (self.folder / name).mkdir()
        os.mkfifo(self.folder / "pipe")
        plan = self.folder / "agent" / "plan.json" if self.agent else None
        mark = f"stalls-{os.getpid()}-{self.folder.name}"
        if plan:
            AgentPlan(mark, str(self.folder / "events"), ("steps", "collectives", "stamps")).write(plan)
        self.journal = Journal(self.folder / "events")
        self.log = self.folder / "job.log"
        command = ["--nproc-per-node", str(self.ranks // self.nodes), __file__, "--train", str(self.folder)]
        options = [*(["--pauses"] if self.healthy else []), *(["--spins"] if self.spins else [])]
        env = job_env(os.environ, run_id=mark, agent_plan=plan, extra={"OMP_NUM_THREADS": "1"})
        argv = (sys.executable, "-m", "torch.distributed.run", *command, *options)
        self.launcher = Netns() if self.nodes > 1 else Local()
        self.nets = JobProcesses(keepers(mark))
        self.job = LocalJob(
            lambda number: JobSpec(argv, self.folder, env, self.log, number, self.nodes), self.launcher, self.journal,
            record_undo=lambda handles, number: None,
        )  # fmt: skip
        self.job.start()
        self.watch()
        return self

    def watch(self) -> None:
        """Starts new observers: the old ones would have learned the last stall as a usual pause of this job."""
        from torchaos.harness.monitoring.diagnosis import live_job
        from torchaos.harness.monitoring.observers.hang_watch import HangWatch, Watching

        if self.watching:
            self.watching.stop()
        stamps = self.folder / "agent" / "stamps" if self.agent else None
        py_spy = live_job.find_py_spy if self.stacks else lambda: None
        probe = HangWatch(self.job.ranks, lambda: [self.log], stamps, record=self.ticks.append, py_spy=py_spy)
        self.watching = Watching(probe, self.journal.emit)
        self.watching.start()

    def steps(self) -> int:
        return self.log.read_bytes().count(b"step ") if self.log.exists() else 0

    def wait_for_steps(self, many: int, timeout_s: float = 180.0) -> bool:
        end = time.monotonic() + timeout_s
        while self.steps() < many and not self.job.done:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return not self.job.done

    def said(self, kind: str, since_s: float, until_s: float) -> Any:
        """The first event of a kind after `since_s`, waited for until `until_s` (CLOCK_MONOTONIC); None if there is
        none."""
        while True:
            events = (e for e in self.journal.snapshot() if e.kind.value == kind and e.mono_s >= since_s)
            if (found := next(events, None)) or time.monotonic() > until_s:
                return found
            time.sleep(0.02)

    def stop(self) -> None:
        self.watching.stop()
        self.job.stop(0.0)
        if self.nodes > 1:
            self.nets.undo()
        self.journal.close()


def stall(session: Session, kind: str, victim: int | None) -> dict[str, Any]:
    """Makes a stall, and ends it when it was declared or after GIVE_UP_S seconds. `victim` None: a partition."""
    before, first_tick = session.steps(), len(session.ticks)
    at = time.monotonic()
    take_back = _cut(session) if victim is None else _hold(session, kind, victim)
    try:
        declared = session.said("hang.declared", at, at + GIVE_UP_S)
        suspected = session.said("hang.suspected", at, time.monotonic())
    finally:
        take_back()
    went_on = session.wait_for_steps(before + 10, 2 * GIVE_UP_S)
    ticks = [(tick.at_s - at, tick.opinions) for tick in session.ticks[first_tick:]]
    return {
        "kind": kind, "ranks": session.ranks, "agent": session.agent, "victim": victim, "went_on": went_on,
        "suspected_s": suspected and suspected.mono_s - at,
        "declared_s": declared and declared.data["declared_s"] - at,
        "told_s": declared and declared.mono_s - at,  # with the culprits
        "culprits": declared and declared.data["ranks"], "by": declared and declared.data["observers"],
        "bound_s": declared and declared.data["bound_s"],
        "ticks": [(t, o) for t, o in ticks if declared and t <= declared.data["declared_s"] - at],
    }  # fmt: skip


def _hold(session: Session, kind: str, victim: int) -> Callable[[], None]:
    """Stops one rank. Returns the function that lets it go on."""
    process = session.job.ranks()[victim]
    order = session.folder / f"stall-{victim}"
    if kind == "sigstop":
        os.kill(process.pid, signal.SIGSTOP)
    else:
        order.with_suffix(".new").write_text(kind)
        order.with_suffix(".new").rename(order)
    return lambda: os.kill(process.pid, signal.SIGCONT if kind == "sigstop" else signal.SIGUSR1)


def _cut(session: Session) -> Callable[[], None]:
    """Separates the two nodes. Returns the function that connects them again."""
    from torchaos.harness.fault_drivers.network.links import PacketDrop

    links = [live.node.link for live in session.job.nodes()]
    cut = PacketDrop("stalls", links[:1], links[1:])
    cut.apply()
    (table,) = cut.handles
    return table.undo


def partitions(many: int) -> list[dict[str, Any]]:
    """Runs `many` partitions of each kind, each in its own job, with two nodes and without py-spy."""
    found = []
    for kind in PARTITIONS * many:
        with tempfile.TemporaryDirectory() as name:
            session = Session(2, False, Path(name), nodes=2, spins=kind == PARTITIONS[1], stacks=False).start()
            try:
                if not session.wait_for_steps(100):
                    raise SystemExit(f"the job did not start:\n{session.log.read_text()[-2000:]}")
                found.append(stall(session, kind, None))
                print(_line(found[-1]), flush=True)
            finally:
                session.stop()
    return found


SIZES = [(ranks, agent) for ranks in (2, 3, 4, 6, 8) for agent in (True, False)]


def stalls(
    many: int, draw: random.Random, sizes: Sequence[tuple[int, bool]] = SIZES, stacks: bool = True
) -> list[dict[str, Any]]:
    """Runs `many` stalls in total, all kinds in turn. `sizes`: for each job, its number of ranks, and whether it has
    the agent. `stacks`: with py-spy."""
    found: list[dict[str, Any]] = []
    for number, (ranks, agent) in enumerate(sizes):
        share = many // len(sizes) + (number < many % len(sizes))
        with tempfile.TemporaryDirectory() as name:
            session = Session(ranks, agent, Path(name), stacks=stacks).start()
            try:
                if not session.wait_for_steps(60):
                    raise SystemExit(f"the job did not start:\n{session.log.read_text()[-2000:]}")
                for _ in range(share):
                    session.watch()
                    session.wait_for_steps(session.steps() + draw.randint(40, 80))
                    kind = KINDS[len(found) % len(KINDS)]
                    found.append(stall(session, kind, draw.randrange(ranks)))
                    stall_result = found[-1]
                    print(_line(stall_result), flush=True)
            finally:
                session.stop()
    return found


@contextmanager
def load(many: int) -> Iterator[None]:
    """Busy processes, as of other users of the machine."""
    code = "while True: pass"
    running = [subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True) for _ in range(many)]
    try:
        yield
    finally:
        for one in running:
            one.kill()
            one.wait()


def healthy(minutes: float, stacks: bool = True) -> dict[str, Any]:
    """Runs healthy jobs side by side, for `minutes` of job time in total. `stacks`: with py-spy."""
    seconds = minutes * 60 / PARALLEL
    with tempfile.TemporaryDirectory() as name:
        sessions = []
        for number in range(PARALLEL):
            folder = Path(name) / str(number)
            folder.mkdir()
            sessions.append(
                Session(
                    HEALTHY_RANKS, number % 2 == 0, folder, healthy=True, spins=number >= PARALLEL // 2, stacks=stacks
                ).start()
            )
        cpu = time.process_time()
        try:
            for session in sessions:
                session.wait_for_steps(1)
            begun = time.monotonic()
            while time.monotonic() - begun < seconds and not any(session.job.done for session in sessions):
                time.sleep(0.5)
            took = time.monotonic() - begun
            events = [
                (session.folder.name, e.kind.value, e.data) for session in sessions for e in session.journal.snapshot()
            ]
            return {
                "job_minutes": took * PARALLEL / 60,
                "ended": [session.folder.name for session in sessions if session.job.done],
                "steps": [session.steps() for session in sessions],
                "suspected": sum(kind == "hang.suspected" for _, kind, _ in events),
                "declared": [data for _, kind, data in events if kind == "hang.declared"],
                "watch_cpu": sum(session.watching.cpu_s for session in sessions) / took / PARALLEL,
                "harness_cpu": (time.process_time() - cpu) / took / PARALLEL,
                "ticks": [session.ticks for session in sessions],
            }  # fmt: skip
        finally:
            for session in sessions:
                session.stop()


def curve(found: Sequence[dict[str, Any]], calm: dict[str, Any] | None) -> list[dict[str, float | None]]:
    """Detection time and false alarms for other values of k, from the recorded opinions. A stall whose record ends
    counts as lasting."""
    from torchaos.harness.monitoring.observers.hang_detectors import Opinion, Rule

    rows: list[dict[str, float | None]] = []
    for k in KS:
        rule, times = Rule(k=k), []
        for stalled in found:
            if not stalled["ticks"]:
                continue
            at, last = stalled["ticks"][-1]
            hit = next((t for t, opinions in stalled["ticks"] if t > 0.3 and rule.agree(opinions)), None)
            more = 0.0
            while hit is None and more < 60.0:
                more += 0.1
                later = [Opinion(o.observer, o.quiet_s + more, o.usual_s, o.ready) for o in last]
                hit = at + more if rule.agree(later) else None
            times += [hit] if hit is not None else []
        alarms, on = 0, False
        for ticks in (calm or {}).get("ticks", []):
            for tick in ticks:
                now = bool(rule.agree(tick.opinions))
                alarms, on = alarms + (now and not on), now
        hours = (calm or {}).get("job_minutes", 0.0) / 60
        rows.append({
            "k": k, "p50_s": _at(times, 0.5), "max_s": max(times, default=None),
            "false_alarms_per_hour": alarms / hours if hours else None,
        })  # fmt: skip
    return rows


def _at(values: Sequence[float], share: float) -> float | None:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else None


def _line(stalled: dict[str, Any]) -> str:
    times = " ".join(
        f"{name} {stalled[name]:.2f}" if stalled[name] else f"{name} never" for name in ("suspected_s", "declared_s")
    )
    right = "right" if _is_right(stalled) else f"WRONG: {stalled['culprits']}"
    agent = "agent" if stalled["agent"] else "no agent"
    what = f"{stalled['ranks']} ranks, {agent:8} {stalled['kind']:8} rank {stalled['victim']}"
    return f"{what}: {times} bound {stalled['bound_s']} by {stalled['by']}, {right}"


def _is_right(stalled: dict[str, Any]) -> bool:
    return stalled["culprits"] == ([] if stalled["victim"] is None else [stalled["victim"]])


def summary(found: Sequence[dict[str, Any]], calm: dict[str, Any] | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, some in (
        ("all", found), ("with the agent", [o for o in found if o["agent"]]),
        ("without", [o for o in found if not o["agent"]]),
        *((kind, [o for o in found if o["kind"] == kind]) for kind in PARTITIONS),
    ):  # fmt: skip
        if not some:
            continue
        out[name] = {
            "stalls": len(some), "right": sum(map(_is_right, some)),
            "declared": sum(o["declared_s"] is not None for o in some), "went_on": sum(o["went_on"] for o in some),
        }  # fmt: skip
        for what in ("suspected_s", "declared_s", "told_s"):
            times = [o[what] for o in some if o[what] is not None]
            out[name][what] = {"p50": _at(times, 0.5), "max": max(times, default=None)}
    if calm:
        out["healthy"] = {name: value for name, value in calm.items() if name != "ticks"}
    out["curve"] = curve(found, calm)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stalls", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=0, help="of each of the two kinds; needs root")
    parser.add_argument("--healthy-minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the jobs")
    parser.add_argument("--without-py-spy", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pauses", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--spins", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.pauses, args.spins)
    with load(args.load):
        stacks = not args.without_py_spy
        found = stalls(args.stalls, random.Random(args.seed), stacks=stacks) if args.stalls else []
        found += partitions(args.partitions)
        calm = healthy(args.healthy_minutes, stacks) if args.healthy_minutes else None
    result = summary(found, calm)
    print(json.dumps(result, indent=1, default=str))
    if args.json:
        kept = [{name: value for name, value in stalled.items() if name != "ticks"} for stalled in found]
        args.json.write_text(json.dumps({**result, "stalls": kept}, indent=1, default=str))


if __name__ == "__main__":
    main()
