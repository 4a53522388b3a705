"""Tests random bit flips in the reference job: which are found, by which witness, after how many steps, and with which
verdict.

    python lab/campaigns/sdc.py [--flips 300] [--seed 0] [--folder FOLDER] [--by anybody|job]

Each flip has a random site, bit, element, step and rank. The trainings run in one long-lived job (see sdc_job.py). Then
`sdc_detected` judges each of them against the training without a flip, as it judges a run. Exit code 1 if a training
passes although a checkpoint holds corrupted state, or if the two trainings without a flip differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torchaos.assertions.sdc_detected import SdcDetected
from torchaos.harness.analysis.findings.corruption import seen_by_others, seen_by_twin
from torchaos.harness.interfaces import Outcome
from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.record import Record

SITES = ("gradient", "reduced_gradient", "parameter", "activation", "moment")
PLAN = Plan("sdc", "", 0, PlannedJob(("torchrun",), "/", {}, 2, 1, 60.0, "/saved"), (), ())
Told = Mapping[str, Any]


def draw(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "site": rng.choice(SITES), "bit": rng.randrange(32), "place": round(rng.random(), 6),
            "step": rng.randint(2, 12), "rank": rng.randrange(2),
        }
        for _ in range(count)
    ]  # fmt: skip


def record(ranks: Sequence[Told]) -> Record:
    """A training as the record of a run, with the events that the agent and torchelastic would have written."""
    found: list[Event] = []

    def emit(kind: Kind, at: float, data: Told, rank: int, attempt: int, step: int | None = None) -> None:
        found.append(Event(kind, f"rank{rank}-a{attempt}", len(found), 0.0, at, rank, attempt, step, data))

    for told in ranks:
        rank = told["rank"]
        first = min(mark["at"] for mark in (*told["steps"], *told["stops"])) - 1.0
        starts = [(0, first)] + [(stop["attempt"] + 1, stop["at"] + 2e-3) for stop in told["stops"]]
        base = {0: 0}
        for stop in told["stops"]:
            saved = [s["step"] for s in told["saves"] if s["at"] < stop["at"]]
            base[stop["attempt"] + 1] = saved[-1] if saved else 0
            pid = 100 * stop["attempt"] + rank
            emit(
                Kind.RANK_EXITED,
                stop["at"] + 1e-3,
                {"pid": pid, "start_ticks": 0, "exit_code": 1},
                rank,
                stop["attempt"],
            )
        for attempt, at in starts:
            up = {"pid": 100 * attempt + rank, "start_ticks": 0, "local_rank": rank, "world_size": 2, "node": 0}
            emit(Kind.RANK_UP, at, up, rank, attempt)
            if base[attempt]:
                loaded = {
                    "path": f"/saved/step-{base[attempt]}",
                    "format": "x",
                    "ok": True,
                    "numbers": {"step": base[attempt]},
                }
                emit(Kind.LOAD_END, at + 1e-4, loaded, rank, attempt, 0)
        for step in told["steps"]:
            empty = {"samples": None, "indices": None, "lr": [], "opt_step": None, "sched_step": None, "phases": {}}
            data = {
                **empty,
                "skipped": False,
                "losses": step["losses"],
                "parameters": step["parameters"],
                "norm": step["norm"],
            }
            emit(Kind.STEP, step["at"], data, rank, step["attempt"], step["step"] - base[step["attempt"]])
        for save in told["saves"]:
            path = {"path": f"/saved/step-{save['step']}", "format": "x"}
            local = save["step"] - base[save["attempt"]]
            emit(Kind.SAVE_BEGIN, save["at"], path, rank, save["attempt"], local)
            emit(Kind.SAVE_END, save["at"], {**path, "ok": True, "blocked_s": 0.0}, rank, save["attempt"], local)
        for event in told["told"]:
            attempt = sum(stop["at"] < event["at"] for stop in told["stops"])
            kind = Kind.APPLYING if event["kind"] == "applying" else Kind(event["kind"])
            hit = {"fault": "flip", "phase": None, "global_step": None, "pid": rank}
            emit(kind, event["at"], hit if kind is Kind.APPLYING else event, rank, attempt)
    kept = {
        save["step"]: save["tensors"] for save in ranks[0]["saves"]
    }  # rank 0 writes; a step saved again replaces the first
    checkpoints = [
        {"path": f"step-{step}", "format": "x", "complete": True, "loadable": True, "step": step, "tensors": tensors}
        for step, tensors in kept.items()
    ]
    artifacts = {"inventory": {"root": "/saved", "checkpoints": checkpoints}}
    return Record(PLAN, tuple(sorted(found, key=lambda event: event.mono_s)), artifacts)


def bad_checkpoints(ranks: Sequence[Told], clean: Sequence[Told]) -> bool:
    """The truth, from the tensors: whether any save of any rank, kept or not, differs from the same save of the clean
    training."""
    for told, other in zip(ranks, clean, strict=True):
        theirs = {save["step"]: save["tensors"] for save in other["saves"]}
        if any(save["tensors"] != theirs[save["step"]] for save in told["saves"]):
            return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the trainings are kept; judged again where they are there")
    parser.add_argument("--by", choices=("anybody", "job"), default="anybody")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="torchaos-sdc-"))
    if not (folder / "trials-1.jsonl").exists():
        (folder / "events").mkdir(parents=True, exist_ok=True)
        (folder / "flips.json").write_text(json.dumps(draw(options.flips, options.seed)))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        env = {**os.environ, "SDC_FOLDER": str(folder), "OMP_NUM_THREADS": "1"}
        subprocess.run([*torchrun, str(Path(__file__).with_name("sdc_job.py"))], env=env, check=True)
    files = [(folder / f"trials-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    trials = [[json.loads(line) for line in both] for both in zip(*files, strict=True)]
    return judge(trials, options.by)


def judge(trials: Sequence[Sequence[Told]], by: str) -> int:
    clean, again, *flipped = trials
    if bad_checkpoints(again, clean):
        print("two trainings without a flip differ: nothing here means anything")
        return 1
    twin, verdicts, wrong = record(clean), Counter[str](), 0
    by_site: dict[str, Counter[str]] = defaultdict(Counter)
    found_by, took, saved_bad = Counter[str](), defaultdict[str, list[int]](list), 0
    for ranks in flipped:
        run, flip = record(ranks), ranks[0]["flip"]
        bad = bad_checkpoints(ranks, clean)
        felt = seen_by_others(run, "flip") or seen_by_twin(run, [twin], "flip")
        finding = SdcDetected(by=by).judge(run, [twin])  # type: ignore[arg-type]
        outcome = finding.outcome.value if felt else Outcome.INCONCLUSIVE.value
        verdicts[outcome] += 1
        by_site[flip["site"]][outcome] += 1
        saved_bad += bad
        who = finding.measured.get("found_by")
        found_by[str(who or "nobody") if felt else "not felt"] += 1
        if who and felt:
            took[who].append(finding.measured["after_steps"])
        if bad and outcome == "passed":
            wrong += 1
            print(f"PASSED WITH A BAD CHECKPOINT: {flip}: {finding.reason}")
    total = len(flipped)
    print(f"{total} flips: " + ", ".join(f"{verdicts[name]} {name}" for name in ("passed", "failed", "inconclusive")))
    print(f"a checkpoint held bad state in {saved_bad}; of those {wrong} were passed")
    print(f"rate of inconclusive: {100 * verdicts['inconclusive'] / total:.1f} %")
    for who, count in found_by.most_common():
        after = f", after {median(took[who]):g} steps (median; at most {max(took[who])})" if took[who] else ""
        print(f"  {who:10} {count:4}{after}")
    for site in SITES:
        counts = by_site[site]
        told = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "inconclusive"))
        print(f"  {site:17} {sum(counts.values()):4}: {told}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
