"""Kills the harness, its reaper and the job at every point of a run, and counts what is left behind: it must be
nothing.

    python lab/campaigns/deaths.py [--count N] [--real N] [--seed S] [--jobs N] [--only FAMILY] [--minutes M]

--count deaths are in runs with a stand-in job: a small script that gives its ranks torchelastic's environment, drives
the agent through a training loop, and imports no torch. --real deaths are in runs of real torchrun jobs. If the machine
allows it, each run has its own pid, mount and network namespaces, so that no process, mount, device, rule or file in
/dev/shm can be overlooked. Exit code 1 if anything was left.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from dying import campaign
from dying.families import FAMILIES, Family
from dying.scene import Aftermath, Death

from torchaos.harness import registry
from torchaos.harness.running import capabilities

Done = list[tuple[Death, Aftermath]]


def main() -> int:
    options, begun = parsed(), time.monotonic()
    campaign.compile_all()
    print(f"namespaces of their own: {'yes' if campaign.alone() else 'no; processes are told by a mark'}", flush=True)
    done: Done = []
    with open(options.table or os.devnull, "w", buffering=1) as table:
        on_told = partial(tell, table, begun)
        if options.count:
            done += stage(options, options.count, False, options.jobs, on_told)
        if options.real:
            done += stage(options, options.real, True, max(1, options.jobs // 2), on_told)
    leaks = sum(bool(told.leaks) for _death, told in done)
    died = sum(told.died for _death, told in done)
    print(f"\nhandles that were restored: {', '.join(sorted(handles(done)))}")
    seconds = time.monotonic() - begun
    print(f"{died} deaths, {len(done) - died} runs that went to their end, {leaks} leaks; {seconds:.0f} s")
    return 1 if leaks else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1400, help="deaths with stand-ins")
    parser.add_argument("--real", type=int, default=100, help="deaths with real torchrun jobs")
    parser.add_argument("--seed", type=int, default=0, help="which of all possible deaths")
    parser.add_argument("--jobs", type=int, default=4, help="how many stand-ins at a time; of real jobs, half as many")
    parser.add_argument("--keep", type=Path, default=Path("leaks"), help="where what a leaking run left is copied to")
    parser.add_argument("--table", type=Path, help="write each death and what came of it here, a JSON object a line")
    parser.add_argument("--only", action="append", default=[], metavar="FAMILY", help="leave out the others")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no death after so long")
    options = parser.parse_args()
    if strange := [name for name in options.only if name not in FAMILIES]:
        parser.error(f"there is no family {', '.join(strange)}; there are: {', '.join(FAMILIES)}")
    options.end_s = time.monotonic() + 60 * options.minutes
    return options


def stage(options: argparse.Namespace, count: int, real: bool, jobs: int, on_told: campaign.OnDeath) -> Done:
    families = []
    for family in FAMILIES.values():
        if family.real is real and family.name in (options.only or FAMILIES):
            if lacks := missing(family):
                print(f"left out: {family.name}, since this machine lacks {', '.join(lacks)}", flush=True)
            else:
                families.append(family.name)
    traced = campaign.play([Death(name, ()) for name in families], jobs, options.keep, on_told)
    ways = [way for death, told in traced for way in campaign.strata(death.family, campaign.points_of(told.trace))]
    deaths = campaign.choose(ways, count, random.Random(options.seed))
    possible = sum(len(pool) for _name, pool in ways)
    journal = {each for name, pool in ways if name == "journal" for each in pool}
    among = f"{len(journal & set(deaths))} of {len(journal)} of the harness at journal points"
    kind = "real torchrun jobs" if real else "stand-ins"
    print(f"{kind}: {len(deaths)} of {possible} possible deaths, among them {among}", flush=True)
    done = traced + campaign.play(deaths, jobs, options.keep, on_told, options.end_s)
    if done:
        show(done)
    return done


def missing(family: Family) -> list[str]:
    """The capabilities that the faults of a family need and this machine lacks."""
    known = registry.injectors()
    # An injector of the tests is not in the registry.
    found = [known[fault["inject"]] for fault in family.faults if fault["inject"] in known]
    needs = sorted({name for injector in found for name in injector.needs})
    return [name for name in needs if not capabilities.check(name).present]


def tell(table: TextIO, begun: float, death: Death, told: Aftermath) -> None:
    table.write(json.dumps({**asdict(death), **asdict(told)}) + "\n")
    for leak in told.leaks:
        print(f"LEAK after {time.monotonic() - begun:.0f} s: {death}: {leak}", flush=True)


def handles(done: Done) -> set[str]:
    """The kinds of handles that reapers undid."""
    lines = (line.split() for _death, told in done for line in told.trace)
    return {words[3] for words in lines if words[:3] == ["reaper", "after", "restore"]}


def show(done: Done) -> None:
    kinds = sorted({death.kind for death, told in done if told.died and death.at}, key=lambda kind: (len(kind), kind))
    names = list(dict.fromkeys(death.family for death, _told in done))
    width = max(map(len, names))
    print(f"\n{'who died':<{width}}  " + "  ".join(kinds) + "  not reached  leaks")
    for name in [*names, "all"]:
        mine = [(death, told) for death, told in done if name in (death.family, "all")]
        by_kind = Counter(death.kind for death, told in mine if told.died)
        missed = sum(not told.died and bool(death.at) for death, told in mine)
        leaks = sum(bool(told.leaks) for _death, told in mine)
        cells = "  ".join(f"{by_kind[kind]:>{len(kind)}}" for kind in kinds)
        print(f"{name:<{width}}  {cells}  {missed:>11}  {leaks:>5}")


if __name__ == "__main__":
    sys.exit(main())
