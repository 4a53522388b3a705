"""Damages all inputs of the harness and the agent, and checks that nothing bad happens: no traceback, no hang, no harm
outside the run directory.

    python lab/campaigns/fuzz.py [--inputs N] [--seed S] [--jobs N] [--only TARGET] [--found FOLDER]

If the machine allows it, the work is done in separate namespaces. An input that did something bad is written to
--found. Put it into tests/fuzz/corpus/TARGET/: each run of the tests tries it again. Exit code 1 if there was such an
input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from dying.campaign import NAMESPACES, alone

PART = 2000  # inputs of one seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", default=[], metavar="TARGET")
    parser.add_argument("--found", type=Path, default=Path("found"), help="where inputs go that did something bad")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # one of the processes that do the work: TARGET/SEED/NUMBER
    options = parser.parse_args()
    if options.part:
        return work(options)
    known = names()
    if strange := [name for name in options.only if name not in known]:
        parser.error(f"there is no target {', '.join(strange)}; there are: {', '.join(known)}")
    begun = time.monotonic()
    sums = hand_out(options)
    bad = sum(sum(found.values()) for _count, found in sums.values())
    print(f"\n{'target':<16} {'inputs':>8} {'bad':>5}")
    for name, (count, found) in sums.items():
        print(f"{name:<16} {count:>8} {sum(found.values()):>5}")
        for what, times in found.most_common(40):
            print(f"{'':<16} {times:>8} times: {what}")
    total = sum(count for count, _found in sums.values())
    print(f"\n{total} inputs, {bad} of them bad; {time.monotonic() - begun:.0f} s")
    return 1 if bad else 0


def names() -> list[str]:
    from mutating.targets import TARGETS

    return [target.name for target in TARGETS]


def hand_out(options: argparse.Namespace) -> dict[str, tuple[int, Counter[str]]]:
    from mutating.targets import TARGETS

    chosen = [target for target in TARGETS if target.name in (options.only or [target.name])]
    whole = sum(target.share for target in chosen)
    shares = {target.name: round(options.inputs * target.share / whole) for target in chosen}
    parts = [f"{name}/{options.seed + at}/{min(PART, count - at)}" for name, count in shares.items()
             for at in range(0, count, PART)]  # fmt: skip
    sums: dict[str, tuple[int, Counter[str]]] = {target.name: (0, Counter()) for target in chosen}
    running: list[tuple[str, subprocess.Popen[str]]] = []
    prefix = NAMESPACES if alone() else ()
    arguments = ["--found", str(options.found)]
    while parts or running:
        while parts and len(running) < options.jobs:
            command = [*prefix, sys.executable, __file__, "--part", parts.pop(0), *arguments]
            running.append((command[len(prefix) + 3], subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
        part, process = running.pop(0)
        output, name = process.communicate()[0], part.split("/")[0]
        count, found = sums[name]
        lines = output.splitlines()
        done = (
            json.loads(lines[-1])
            if lines and lines[-1].startswith("{")
            else {"inputs": 0, "bad": {f"{part} ended with exit code {process.returncode}": 1}}
        )
        sums[name] = (count + done["inputs"], found + Counter(done["bad"]))
    return sums


def work(options: argparse.Namespace) -> int:
    name, seed, number = options.part.split("/")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        trial = Trial(name, Path(folder).resolve(), options.found)
        draw = random.Random(f"{name}/{seed}")
        for raw in trial.target.bases() if int(seed) % PART == 0 else ():
            trial.one(raw)
        for _ in range(int(number)):
            trial.one(trial.target.draw(draw))
        trial.tell()
    return 0


class Trial:
    def __init__(self, name: str, folder: Path, found: Path) -> None:
        from mutating.guard import Guard
        from mutating.targets import TARGETS

        self.guard, self.found = Guard(), found / name
        self.target = next(kind for kind in TARGETS if kind.name == name)(folder, self.guard)
        self.inputs, self.bad = 0, Counter[str]()

    def one(self, raw: bytes) -> None:
        from mutating.guard import Hung

        self.inputs += 1
        try:
            problems = [f"harm: {what}" for what in self.target.try_one(raw)]
        except (Exception, Hung) as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno} ({where.line})"
            problems = [f"{at}: {str(error)[:100]!r}"]
        if problems:
            what = problems[0][:110] if problems[0].startswith("harm") else problems[0].rsplit(": ", 1)[0]
            self.bad[what] += 1
            if self.bad[what] <= 3:
                self.found.mkdir(parents=True, exist_ok=True)
                (self.found / hashlib.sha256(raw).hexdigest()[:12]).write_bytes(raw)

    def tell(self) -> None:
        print(json.dumps({"inputs": self.inputs, "bad": self.bad}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
