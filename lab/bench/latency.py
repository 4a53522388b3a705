"""Measures the time from trigger to effect: in the agent, and from outside. Aims: p99 under 1 ms and under 5 ms.

In the agent: a small training script with the agent in it has a trigger for each of its steps, each with its own page,
as a scenario has. The fault stamps CLOCK_MONOTONIC. The time runs from the line before `loss.backward()` (or
`optimizer.step()`) to that stamp, so it includes everything that the hooks do first. It is compared, in the same steps,
with a fault that is written into the script: os.kill of itself, until the first line of the handler.

From outside: the reference job under `torchaos run`, with a freeze of 50 ms in every second step. One time runs from
the pacer's stamp of `fault.held` to the harness's stamp of `fault.applied`, after the signal was sent; another until a
poll of /proc/PID/stat shows the rank as stopped (state T). They are compared with a bare os.kill(SIGSTOP) of a process
that sleeps as a held rank does, seen by the same poll, after each freeze.

Usage: python lab/bench/latency.py [--firings 300] [--freezes 60]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PHASES = ("backward", "optimizer")
POLL_S = 0.0002
WARM_UP = 20  # steps


class Stamp:
    """The fault: it writes the time at which it is applied. The agent loads it from this file, in the script's
    process."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def apply(self, site: Any) -> None:
        os.write(self._fd, struct.pack("<qq", site.step, time.monotonic_ns()))


def train(folder: Path, steps: int) -> None:
    """The training script with the agent in it. Writes the times at which its lines were reached."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(1)
    handled = 0

    def handle(number: int, frame: object) -> None:
        nonlocal handled
        handled = time.monotonic_ns()

    signal.signal(signal.SIGUSR1, handle)
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(8 * steps, 256), torch.randn(8 * steps))
    lines: dict[str, dict[int, float]] = {phase: {} for phase in (*PHASES, "by hand")}
    for step, (x, y) in enumerate(DataLoader(data, batch_size=8), start=1):
        loss = (model(x).squeeze() - y).pow(2).mean()
        lines["backward"][step] = time.monotonic_ns()
        loss.backward()
        lines["optimizer"][step] = time.monotonic_ns()
        optimizer.step()
        optimizer.zero_grad()
        at = time.monotonic_ns()
        os.kill(os.getpid(), signal.SIGUSR1)
        lines["by hand"][step] = handled - at
    (folder / "lines.json").write_text(json.dumps(lines))


def in_the_agent(firings: int) -> dict[str, list[float]]:
    """Times in milliseconds, by the name of the measurement."""
    from torchaos.harness.protocol.agent_plan import AgentPlan, Moment, RankFault
    from torchaos.harness.protocol.control_pages import ControlPage
    from torchaos.harness.protocol.wire import Phase
    from torchaos.harness.running.launchers.job import job_env

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "events").mkdir()
        per_phase = -(-firings // len(PHASES))
        last = WARM_UP + per_phase * len(PHASES)
        triggers = []
        for step in range(WARM_UP + 1, last + 1):
            phase = Phase(PHASES[step % len(PHASES)])
            path = folder / f"{step}.page"
            page = ControlPage(path, create=True)
            page.write(page.ALLOWED, 1)
            page.close()
            stamps = {"path": str(folder / f"{phase.value}.stamps")}
            triggers.append(RankFault(f"f{step}", Moment(0, step, phase), str(path), __file__, "Stamp", stamps))
        hooks = ("steps", "loss", "samples", "lr", "checkpoints")
        AgentPlan("bench", str(folder / "events"), hooks, tuple(triggers)).write(folder / "plan.json")
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "bench"}
        env = job_env(os.environ, run_id="bench", agent_plan=folder / "plan.json", extra=rank)
        command = [sys.executable, __file__, "--train", str(folder), "--firings", str(last)]
        subprocess.run(command, env=env, check=True)
        lines = json.loads((folder / "lines.json").read_text())
        found = {"by hand: os.kill to handler": [ns / 1e6 for ns in lines.pop("by hand").values()][WARM_UP:]}
        for phase_name in PHASES:
            stamps = dict(struct.iter_unpack("<qq", (folder / f"{phase_name}.stamps").read_bytes()))
            assert len(stamps) == per_phase, f"{len(stamps)} of {per_phase} firings in {phase_name}"
            times = [(at - lines[phase_name][str(step)]) / 1e6 for step, at in stamps.items()]
            found[f"agent: {phase_name} to fault"] = times
    return found


class Stops(threading.Thread):
    """Polls the ranks for state T. After each stop it also stops a bare process that sleeps as a held rank does, for
    comparison."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self._out, self._over = out, threading.Event()
        self.seen: list[tuple[int, float]] = []  # rank, CLOCK_MONOTONIC
        self.bare: list[float] = []  # milliseconds
        code = f"import time\nwhile True: time.sleep({POLL_S})"
        self._bare = subprocess.Popen([sys.executable, "-c", code])

    def end(self) -> None:
        self._over.set()
        self.join()
        self._bare.kill()
        self._bare.wait()

    def run(self) -> None:
        stopped: dict[int, bool] = {}
        while not self._over.wait(POLL_S):
            for rank, pid in self._ranks().items():
                before, stopped[rank] = stopped.get(rank, False), _state(pid) == "T"
                if stopped[rank] and not before:
                    self.seen.append((rank, time.monotonic()))
                    self._stop_bare()

    def _ranks(self) -> dict[int, int]:
        """The pids of the ranks, by the names of the agents' files; they are looked up once."""
        if not hasattr(self, "_pids"):
            names = [path.stem.split("-") for path in self._out.glob("*/events/rank*-a0-p*.jsonl")]
            if len(names) < 2:
                return {}
            self._pids = {int(rank[4:]): int(pid[1:]) for rank, _attempt, pid in names}
        return self._pids

    def _stop_bare(self) -> None:
        at = time.monotonic()
        os.kill(self._bare.pid, signal.SIGSTOP)
        while _state(self._bare.pid) != "T":
            time.sleep(POLL_S)
        self.bare.append((time.monotonic() - at) * 1e3)
        os.kill(self._bare.pid, signal.SIGCONT)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def from_outside(freezes: int) -> dict[str, list[float]]:
    """Times in milliseconds, by the name of the measurement."""
    first = 6
    steps = [first + 2 * number for number in range(freezes)]
    script = f"{{jobs}}/gpt_ddp.py --steps {steps[-1] + 10} --checkpoint-every 1000"
    command = f"torchrun --nproc-per-node 2 {script} --checkpoint-dir {{run}}/checkpoints"
    scenario = {
        "scenario": "latency",
        "job": {"command": command, "timeout": "5m"},
        "faults": [
            {"id": f"f{step}", "inject": "process.freeze", "target": {"rank": step // 2 % 2},
             "when": {"step": step, "phase": "forward"}, "for": "50ms"}
            for step in steps
        ],
        "assert": ["completed"],
        "twin": "none",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        file, out = Path(name, "latency.yaml"), Path(name, "out")
        file.write_text(json.dumps(scenario))  # JSON is YAML
        stops = Stops(out)
        stops.start()
        run = [sys.executable, "-m", "torchaos.harness", "run", str(file), "--out", str(out)]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        stops.end()
        assert out.exists(), done.stdout + done.stderr
        folder = next(out.iterdir())
        return _times(folder, stops, freezes, done.stdout)


def _times(folder: Path, stops: Stops, freezes: int, output: str) -> dict[str, list[float]]:
    lines = [line for path in (folder / "events").glob("*.jsonl") for line in path.read_bytes().split(b"\n")]
    at: dict[str, dict[str, dict[str, Any]]] = {"fault.held": {}, "fault.applied": {}}
    for event in (json.loads(line) for line in lines if line.startswith(b"{")):  # all other lines are packed steps
        if event["kind"] in at:
            at[event["kind"]].setdefault(event["data"]["fault"], event)
    held, applied = at["fault.held"], at["fault.applied"]
    assert len(applied) == freezes, f"{len(applied)} of {freezes} freezes\n{output[-3000:]}"
    signalled = [(applied[fault]["mono_s"] - held[fault]["mono_s"]) * 1e3 for fault in applied]
    seen = []
    for event in held.values():
        times = [when - event["mono_s"] for rank, when in stops.seen if rank == event["rank"]]
        seen += [min(time_s for time_s in times if time_s > 0) * 1e3] if any(time_s > 0 for time_s in times) else []
    return {
        "harness: held to signal sent": signalled,
        "harness: held to state T": [time_ms for time_ms in seen if time_ms < 1000],
        "bare: os.kill to state T": stops.bare,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--firings", type=int, default=300)
    parser.add_argument("--freezes", type=int, default=60, help="0: only the agent")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)  # the script with the agent in it
    given = parser.parse_args()
    if given.train:
        train(given.train, given.firings)
        return 0
    from intervals import percentile

    print(f"{'milliseconds':32}  {'times':>5}  {'p50':>8}  {'p90':>8}  {'p99':>8}  {'most':>8}", flush=True)
    for measured in (in_the_agent(given.firings), from_outside(given.freezes) if given.freezes else {}):
        for name, times in measured.items():
            numbers = (*(percentile(times, percent) for percent in (50, 90, 99)), max(times))
            print(f"{name:32}  {len(times):5}  " + "  ".join(f"{number:8.3f}" for number in numbers), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
