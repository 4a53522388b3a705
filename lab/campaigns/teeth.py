"""Runs each ready scenario as it is, and with the defects and changes that it must fail.

    python lab/campaigns/teeth.py [--only FAMILY/NAME ...] [--family FAMILY ...] [--kind as-is|teeth]
                                 [--missing PAGE] [--out DIR] [--minutes M] [--write PAGE ...] [--again] [--seeds N]

--missing leaves out what has its right result on the page, with --seeds for that seed. --again runs nothing: what was
not right is judged again by this version, if the scenario is still the same and the run is still there.
Each result is a line in DIR/results.jsonl. A run with the right result is not repeated: an interrupted call can be
continued. Exit code 1 if a scenario did not pass as it is, or was not failed by the assertion that the table names.
--seeds makes each run with the seeds 1 to N, of the job and of the scenario; --write then fills the mark `teeth-seeds`
(lab/results/seeds.md). A defect has one twin, or none if its assertion asks for none: the scenario as it is has all.
Otherwise --write fills the marks `teeth` (lab/results/teeth.md) and `teeth-summary` (docs/measured/right-verdicts.md).
What was not run again keeps its result of the first page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import marks
import teeth
from teeth import Bite, Tooth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="FAMILY/NAME")
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--kind", choices=("as-is", "teeth"))
    parser.add_argument("--missing", type=Path, metavar="PAGE", help="run only what has no right result on this page")
    parser.add_argument("--out", type=Path, default=Path("teeth"), help="results and run directories")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after that time")
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE", help="write the tables into these pages")
    parser.add_argument("--again", action="store_true", help="run nothing; judge again what was not right")
    parser.add_argument("--seeds", type=int, default=0, metavar="N", help="make each run with the seeds 1 to N")
    options = parser.parse_args()
    names = [
        name for name in teeth.names()
        if (not options.only or name in options.only) and (not options.family or name.split("/")[0] in options.family)
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    results, end_s = options.out / "results.jsonl", time.monotonic() + 60 * options.minutes
    if options.again:
        judge_again(results, names)
        end_s = 0.0
    of_page = on_page_of_seeds if options.seeds else on_page
    known = of_page(options.missing) if options.missing else []
    seeds = range(1, options.seeds + 1) if options.seeds else [0]
    for name, tooth, seed in due(names, options.kind, [*known, *read(results)], seeds):
        if time.monotonic() > end_s:
            break
        twins = [tooth.twins] if seed and tooth and tooth.twins else []
        bite = teeth.bite(name, tooth, options.out / "runs", twins, seed)
        with open(results, "a") as file:
            file.write(bite.to_json() + "\n")
        mark = "right" if bite.right else "  -  " if bite.verdict == "refused" else "WRONG"
        which = f"{bite.tooth or 'as it is'}{f', seed {seed}' if seed else ''}"
        print(f"{mark}  {name} {which}: {bite.verdict} ({bite.seconds:.0f} s)  {bite.reason}", flush=True)
        if bite.right:
            shutil.rmtree(Path(bite.folder).parents[1], ignore_errors=True)
    done = [bite for bite in read(results) if bite.scenario in names and bite.seed in seeds]
    if options.write:
        again = {(bite.scenario, bite.tooth, bite.seed) for bite in done}
        whole = [bite for bite in of_page(options.write[0]) if (bite.scenario, bite.tooth, bite.seed) not in again]
        whole += done
        if options.seeds:
            marks.write(options.write, {"teeth-seeds": over_seeds(whole)})
        else:
            marks.write(options.write, {"teeth": table(whole), "teeth-summary": summary(whole)})
    print(over_seeds(done) if options.seeds else summary(done))
    return 1 if any(not bite.right and bite.verdict != "refused" for bite in done) else 0


def judge_again(results: Path, names: Sequence[str]) -> None:
    for old in read(results):
        new = teeth.judged_again(old) if old.scenario in names and old.folder and not old.right else None
        if new:
            print(
                f"{old.scenario} {old.tooth or 'as it is'}: {old.verdict}, now {new.verdict}  {new.reason}", flush=True
            )
            with open(results, "a") as file:
                file.write(new.to_json() + "\n")


def due(
    names: Sequence[str], kind: str | None, done: Sequence[Bite], seeds: Sequence[int] = (0,)
) -> Iterator[tuple[str, Tooth | None, int]]:
    """Yields the runs that have no right result yet, by seed: each scenario as it is, then with its teeth."""
    right = {(bite.scenario, bite.tooth, bite.seed) for bite in done if bite.right}
    table = teeth.table()
    for seed, name in product(seeds, names):
        if kind != "teeth" and (name, "", seed) not in right:
            yield name, None, seed
        if kind != "as-is":
            yield from ((name, tooth, seed) for tooth in table[name] if (name, tooth.name, seed) not in right)


def read(path: Path) -> list[Bite]:
    """The last result of each run; an incomplete line is ignored."""
    found: dict[tuple[str, str, int], Bite] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            bite = Bite(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[bite.scenario, bite.tooth, bite.seed] = bite
    return list(found.values())


def on_page(page: Path) -> list[Bite]:
    """The results in the table of a page, as far as they are about scenarios and teeth of today."""
    teeth_of_today, found, name = teeth.table(), list[Bite](), ""
    for line in page.read_text().partition("|---|")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|") or len(cells) != 5:
            continue
        first, as_it_is, label, verdict, by = cells
        name = first.strip("`") or name
        own = teeth_of_today.get(name, [])
        if as_it_is and own:
            found.append(Bite(name, "", "", as_it_is, ""))
        for tooth in own:
            if tooth.name == label and verdict:
                found.append(Bite(name, label, tooth.fails, verdict, "", dict.fromkeys(by.split(", "), "failed")))
    return found


def summary(done: Sequence[Bite]) -> str:
    lines, table = [], teeth.table()
    for words, of_group, every in (
        ("as they are", False, len(table)),
        ("with a defect", True, sum(map(len, table.values()))),
    ):
        ran = {(b.scenario, b.tooth): b for b in done if bool(b.tooth) is of_group and b.verdict != "refused"}
        right = sum(bite.right for bite in ran.values())
        lines.append(f"{words}: {right} of {len(ran)} right; {max(0, every - len(ran))} have no verdict")
    own = {(name, tooth.name) for name, several in table.items() for tooth in several if tooth.of_its_own_fault}
    bites = {bite.scenario for bite in done if bite.right and (bite.scenario, bite.tooth) in own}
    passed = {bite.scenario for bite in done if bite.right and not bite.tooth}
    lines.append(
        f"failed for the fault of the scenario, neither replaced nor made stronger: {len(bites)} of {len(table)}"
    )
    lines.append(f"of these, passed as they are: {len(bites & passed)}")
    return "\n".join(lines)


def table(done: Sequence[Bite]) -> str:
    """A row for each tooth. A tooth that was not run, or not since it was changed, has no verdict."""
    lines = ["| scenario | as it is | what it must fail | verdict | by |", "|---|---|---|---|---|"]
    results = {(bite.scenario, bite.tooth): bite for bite in done}
    for name, own in sorted(teeth.table().items()):
        nothing = Bite(name, "", "", "", "")
        for place, tooth in enumerate(own):
            bite = results.get((name, tooth.name), nothing)
            by = ", ".join(case for case, verdict in bite.cases.items() if verdict == "failed")
            first = (f"`{name}`", results.get((name, ""), nothing).verdict) if not place else ("", "")
            lines.append(f"| {' | '.join((*first, tooth.name, bite.verdict, by))} |")
    return "\n".join([*summary(done).splitlines(), "", *lines])


AS_IT_IS = "as it is"


def over_seeds(done: Sequence[Bite]) -> str:
    """A row for each scenario as it is and with each tooth: the seeds that gave the right result, and those that did
    not, with their verdicts."""
    lines = ["| scenario | job | right | seeds | not right | last run |", "|---|---|---|---|---|---|"]
    for name, tooth in sorted({(bite.scenario, bite.tooth) for bite in done}):
        own = sorted((bite for bite in done if (bite.scenario, bite.tooth) == (name, tooth)), key=lambda b: b.seed)
        right = [str(bite.seed) for bite in own if bite.right]
        wrong = ", ".join(f"{bite.seed}: {bite.verdict}" for bite in own if not bite.right)
        cells = (f"`{name}`", tooth or AS_IT_IS, f"{len(right)} of {len(own)}", ", ".join(right), wrong)
        lines.append(f"| {' | '.join((*cells, max(bite.day for bite in own)))} |")
    return "\n".join(lines)


def on_page_of_seeds(page: Path) -> list[Bite]:
    """The results in the table that `over_seeds` wrote, as far as they are about scenarios and teeth of today."""
    teeth_of_today, found = teeth.table(), list[Bite]()
    lines = marks.between(page.read_text(), "teeth-seeds").splitlines()
    for line in (line for line in lines if line.startswith("| `")):
        first, job, _count, right, wrong, day = (cell.strip(" `") for cell in line[2:-2].split(" | "))
        fails = {tooth.name: tooth.fails for tooth in teeth_of_today.get(first, [])} | {AS_IT_IS: ""}
        if first not in teeth_of_today or job not in fails:
            continue
        tooth = "" if job == AS_IT_IS else job
        as_due = "failed" if tooth else "passed"
        verdicts = {int(seed): as_due for seed in right.split(", ") if seed}
        for seed, _, verdict in (one.partition(": ") for one in wrong.split(", ") if one):
            verdicts[int(seed)] = verdict
        for seed, verdict in sorted(verdicts.items()):
            cases = {fails[job]: "failed"} if tooth and verdict == as_due else {}
            found.append(Bite(first, tooth, fails[job], verdict, "", cases, seed=seed, day=day))
    return found


if __name__ == "__main__":
    sys.exit(main())
