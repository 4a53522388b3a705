"""Kills the parts of runs on a real Slurm cluster, and counts what is left on any node: it must be nothing.

    python ci/campaigns/cluster_deaths.py [--count N] [--seed S] [--jobs N] [--minutes M] [--table FILE]

The cluster has four nodes, which are namespaces of this machine, and the job is a stand-in for torchrun. These die:
torchaos on the head node, its reaper, both; the agent of a node, its reaper, both; each at a point of its own journal
or undo log; the pipes to the agents, the job's step, and Slurm's controller. The ranks get equal pids on their nodes,
so each run also shows that the evidence is of the right node. Exit code 1 if anything was left, or was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from clusters.runs import FROZEN, KILL
from clusters.slurm import Slurm, SlurmRun, cluster, missing
from dying.campaign import points_of
from dying.scene import At

from torchaos.harness.agent.wire import Kind

MORTAL = Path(__file__).parents[2] / "tests" / "support" / "clusters" / "mortal"
WHERE = {"head": "head run", "n2": "n2 exec"}
WHO = (("harness",), ("reaper",), ("harness", "reaper"))
OTHERS = ("srun", "step", "slurmctld")
FAULTS = (KILL, {**FROZEN, "when": {"step": 30, "phase": "backward"}, "for": "300ms"})
FIRST_PID = 20_000


class MortalRun(SlurmRun):
    """A run whose processes are started as modules, by which `mortal` knows them."""

    def begin(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torchaos.harness", "run", str(self.file), "--out", "runs"]
        started: subprocess.Popen[str] = self.cluster.popen("env", *self.env, *command)
        return started


@dataclass(frozen=True)
class Death:
    """`where`: a node, with a point in `at`; or what is killed from outside, as soon as a rank has begun its steps."""

    where: str
    at: tuple[At, ...] = ()

    @property
    def who(self) -> str:
        return f"{self.where}: {'+'.join(name for _, _, who in self.at for name in who)}" if self.at else self.where


@dataclass(frozen=True)
class Outcome:
    death: Death
    died: bool
    wrong: str
    seconds: float  # from the end of torchaos, or of the run, until nothing was left
    trace: Sequence[str]


def main() -> int:
    options, begun = parsed(), time.monotonic()
    if lacks := missing():
        print(lacks)
        return 3
    with cluster() as slurm:
        whole = [play(slurm, number, Death(where)) for number, where in enumerate(WHERE)]
        points = [(one.death.where, point) for one in whole for point in points_of(one.trace)]
        possible = [Death(where, ((*point, who),)) for where, point in points for who in WHO]
        chosen = list(choose(possible, options.count, random.Random(options.seed)))
        print(f"{len(chosen)} of {len(possible)} possible deaths at points, and of {', '.join(OTHERS)}", flush=True)
        end_s = begun + 60 * options.minutes
        with ThreadPoolExecutor(options.jobs) as pool, open(options.table or os.devnull, "w", buffering=1) as table:
            played = pool.map(partial(unless_late, slurm, end_s, table), enumerate(chosen, 2))
            done = whole + [one for one in played if one]
    bad = [one for one in done if one.wrong]
    for who, count in sorted(Counter(one.death.who for one in done if one.died).items()):
        worst = max(one.seconds for one in done if one.died and one.death.who == who)
        print(f"{who:<20} {count:>4} deaths; nothing was left after {worst:.1f} s at the latest")
    died, seconds = sum(one.died for one in done), time.monotonic() - begun
    print(f"{died} deaths in {len(done)} runs, {len(bad)} bad; {seconds:.0f} s")
    for one in bad:
        print(f"BAD {one.death}: {one.wrong}")
    return 1 if bad else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="deaths")
    parser.add_argument("--seed", type=int, default=0, help="which of all possible deaths")
    parser.add_argument("--jobs", type=int, default=3, help="how many runs at a time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no death after so long")
    parser.add_argument("--table", type=Path, help="write what came of each death here, a JSON object a line")
    return parser.parse_args()


def choose(possible: Sequence[Death], count: int, draw: random.Random) -> Iterator[Death]:
    """As many deaths of each kind as of every other."""
    kinds: dict[str, list[Death]] = {name: [Death(name)] for name in OTHERS}
    for death in possible:
        kinds.setdefault(death.who, []).append(death)
    for number in range(count):
        yield draw.choice(kinds[sorted(kinds)[number % len(kinds)]])


def unless_late(slurm: Slurm, end_s: float, table: TextIO, numbered: tuple[int, Death]) -> Outcome | None:
    if time.monotonic() > end_s:
        return None
    number, death = numbered
    try:
        one = play(slurm, number, death)
    except Exception as error:
        one = Outcome(death, True, f"{type(error).__name__}: {error}", 0.0, ())
    told = {"who": death.who, "at": death.at, "died": one.died, "wrong": one.wrong, "seconds": round(one.seconds, 1)}
    table.write(json.dumps(told) + "\n")
    return one


def play(slurm: Slurm, number: int, death: Death) -> Outcome:
    """A run in which the death happens. Raises AssertionError if something is left too long."""
    name = f"death{number:04}x"
    trace = slurm.shared / f"{name}.trace"
    for node in ("n1", "n2"):
        slurm.as_root(node, "sh", "-c", f"echo {FIRST_PID + 300 * (number % 100)} >/proc/sys/kernel/ns_last_pid")
    env = [f"PYTHONPATH={MORTAL}", f"DYING_WHERE={WHERE.get(death.where, 'nowhere -')}",
           f"DYING_AT={json.dumps({'trace': str(trace), 'at': death.at})}"]  # fmt: skip
    run = MortalRun(slurm, name, *FAULTS, env=env, steps=100)
    if death.where in OTHERS:
        run.seen(Kind.STEP)
        _strike(slurm, run, death.where)
    run.process.wait(timeout=400)
    ended = time.monotonic()
    said = trace.read_text().splitlines() if trace.exists() else []
    died = death.where in OTHERS or any(line.startswith("died ") for line in said)
    if run.process.returncode in (-9, 137):
        code, told = slurm.as_user("torchaos", "recover")
        assert code == 0, told
    run.is_clean()
    return Outcome(death, died, _wrong(run), time.monotonic() - ended, said)


def _strike(slurm: Slurm, run: SlurmRun, who: str) -> None:
    if who == "srun":
        run.kill(("srun", "node --join", run.name), node="head")
    elif who == "slurmctld":
        run.kill(("slurmctld",), node="head")
        slurm.as_root("head", "sh", "-c", "exec slurmctld -L /var/log/slurmctld.log >/dev/null 2>&1 </dev/null")
    else:
        lines = slurm.as_root("head", "squeue", "--noheader", "--steps", "--format=%i %j").splitlines()
        for step in [line.split()[0] for line in lines if run.name in line]:
            slurm.as_user("scancel", "--signal=KILL", step)


def _wrong(run: SlurmRun) -> str:
    """What is wrong in the record: a death of a rank that proves the fault on the wrong node, or a bad exit code."""
    if run.process.returncode not in (0, 1, 2, 4, 5, -9, 137):
        return f"exit code {run.process.returncode}"
    folders = list((run.cluster.shared / "runs").glob(f"{run.name}-s0-*"))
    if not folders or not run.folder.result.exists():
        return ""
    if run.result.exit_code == 4:
        return f"rollback: {run.result.reason}"
    proved = {event.source for proof in run.evidence() for event in proof}
    return f"evidence of {', '.join(sorted(proved))}" if proved - {"node1"} else ""


if __name__ == "__main__":
    sys.exit(main())
