"""Kills the trainers of ckpt-chaos, which is on PyPI, by ckpt-chaos and by `torchaos explore`, one after the other:

    python lab/campaigns/beside_ckpt_chaos.py [--only hf_trainer lightning_trainer] [--minutes M] [--every N] --out DIR

ckpt-chaos kills one of two ranks at each event of the save of step 10, and starts the job twice for each. torchaos
records the same trainer with the same save, and resumes it from all states. Prints a row for each point of ckpt-chaos:
its verdict, and the outcomes of the states in which the same files are complete, torn, empty or missing. DIR gets the
folders of both, and what is done already is kept: an exploration that --minutes has ended goes on in the next call.
--every 5: only each fifth point of ckpt-chaos. ckpt-chaos and the trainer's library must be installed."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

RANKS = 2
ASSERTS = ["checkpoint_integrity", "loss_continuity", "sample_accounting", "state_restored", "no_lost_work"]
MEANS = {
    "won't start": "HARD_FAIL", "hangs": "HARD_FAIL", "silently wrong": "SILENT_DIVERGENCE", "lost work": "LOST_WORK",
    "resumed correctly": "PASS",
}  # fmt: skip

HF = """
import os, sys
from ckpt_chaos.targets import hf_trainer as target

out = sys.argv[1]
there = os.path.isdir(out) and any(name.startswith("checkpoint-") for name in os.listdir(out))
target.make_trainer(out, target.Hooks(stop_at=14)).train(resume_from_checkpoint=there or None)
"""
WITH_PATHS = "training_args.bin"  # the end of the names of files that hold the path of their folder
TEMPORARY = ".tmp"  # Lightning writes there first, and moves: on the other side, that is a rename on one disk too
LIGHTNING = """
import os, sys
os.makedirs(os.environ["TMPDIR"], exist_ok=True)
import lightning.pytorch as pl
from ckpt_chaos.targets import lightning_trainer as target

target.MAX_EPOCHS = 3
pl.seed_everything(0, workers=False)
target.make(sys.argv[1], target.Hooks()).fit(target.Lit(), target.loader(), ckpt_path="last")
"""


@dataclass(frozen=True)
class Trainer:
    job: str  # the same trainer as one command, which starts or resumes
    env: Mapping[str, str]
    renames: bool = False  # each file gets its final name by a rename, so it is complete


ALL = {
    "hf_trainer": Trainer(HF, {}),
    "lightning_trainer": Trainer(LIGHTNING, {"TMPDIR": f"{{run}}/out/{TEMPORARY}"}, renames=True),
}
Files = dict[str, str]  # complete, torn or empty, by path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=ALL, default=list(ALL))
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for name in options.only:
        out = options.out.absolute() / name
        out.mkdir(parents=True, exist_ok=True)
        points = by_ckpt_chaos(name, out, options.every)
        states = by_torchaos(name, ALL[name], out, options.minutes)
        compare(name, points, states)
    return 0


def by_ckpt_chaos(name: str, out: Path, every: int) -> dict[str, Any]:
    """The time, and for each point its verdict and the sizes of the files that the kill left."""
    told = out / "ckpt-chaos.json"
    if not told.exists():
        from ckpt_chaos import runner

        left: dict[str, dict[str, int]] = {}
        launch = runner._launch

        def noted(target: str, phase: str, folder: Path, *rest: Any, **more: Any) -> int:
            code = launch(target, phase, folder, *rest, **more)
            if phase == "train":
                left[folder.parent.name] = sizes(folder)
            return int(code)

        run_point = runner._run_point
        runner._launch = noted
        runner._run_point = lambda cfg, order, point: None if order % every else run_point(cfg, order, point)
        began_s = time.monotonic()
        rows = runner.run_matrix(out / "ckpt-chaos", jobs=1, ranks=RANKS, target=name)
        seconds = time.monotonic() - began_s
        folders = sorted((out / "ckpt-chaos").glob("pt_*"), key=lambda path: order_of(path / "result.json"))
        points = [
            {"point": row.label, "verdict": row.verdict, "raised": row.outcome.raised, "left": left[folder.name]}
            for row, folder in zip(rows, folders, strict=True)
        ]
        told.write_text(json.dumps({"seconds": seconds, "whole": left["dry"], "points": points}, indent=1))
    return dict(json.loads(told.read_text()))


def order_of(result: Path) -> int:
    return int(json.loads(result.read_text())["order"])


def sizes(folder: Path) -> dict[str, int]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def by_torchaos(name: str, trainer: Trainer, out: Path, minutes: float) -> dict[str, Any]:
    """The time, and for each state its outcome and the sizes of its files."""
    told = out / "torchaos.json"
    if not told.exists():
        (out / "job.py").write_text(trainer.job)
        torchrun = f"{sys.executable} -m torch.distributed.run --nproc-per-node {RANKS}"
        scenario = {
            "scenario": name.replace("_", "-"), "seed": 7,
            "job": {
                "command": f"{torchrun} {out / 'job.py'} {{run}}/out",
                "env": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "2", **trainer.env},
                "checkpoints": {"path": "{run}/out"}, "timeout": "10m",
            },
            "assert": ASSERTS,
        }  # fmt: skip
        (out / "scenario.yaml").write_text(yaml.safe_dump(scenario, sort_keys=False))
        argv = [sys.executable, "-m", "torchaos.harness", "explore", str(out / "scenario.yaml")]
        argv += ["--out", str(out / "explored"), "--minutes", str(minutes), "--json", str(out / "explored.json")]
        argv += [word for folder in (out / "explored").glob("*") for word in ("--resume", str(folder))]
        calls = out / "calls.json"
        seconds = json.loads(calls.read_text()) if calls.exists() else 0.0
        began_s = time.monotonic()
        with open(out / "torchaos.log", "w") as log:
            env = {**os.environ, "XDG_CACHE_HOME": str(out / "cache")}
            subprocess.run(argv, stdout=log, stderr=log, env=env, check=False)
        seconds += time.monotonic() - began_s
        calls.write_text(json.dumps(seconds))
        if not (out / "explored.json").exists():
            sys.exit(f"{name}: the exploration did not begin: {(out / 'torchaos.log').read_text().strip()}")
        found = json.loads((out / "explored.json").read_text())
        if len(found["outcomes"]) < found["states"]:
            sys.exit(f"{name}: {found['tried']} of {found['states']} states after {seconds:.0f} s: call it again")
        left = trees(Path(found["result"]["run_dir"]))
        whole = left.pop("whole")
        states = [
            {"state": one["state"], "kind": one["kind"], "reason": one["reason"], "left": left[one["state"]]}
            for one in found["outcomes"]
        ]
        told.write_text(
            json.dumps({"seconds": seconds, "of": found["states"], "whole": whole, "states": states}, indent=1)
        )
    return dict(json.loads(told.read_text()))


def trees(home: Path) -> dict[str, dict[str, int]]:
    """The sizes of the files of each state of an exploration, by name. `whole`: the largest size of each file."""
    from torchaos.harness.crash_explorer import state_selection
    from torchaos.harness.crash_explorer.crash_points import CrashPoints
    from torchaos.harness.crash_explorer.operations import Recording

    found: dict[str, dict[str, int]] = {}
    whole: dict[str, int] = {}
    for state in state_selection.process_death_states(CrashPoints(Recording.read(home / "recording"))):
        found[state.name] = {path: content.size for path, content in state.tree.files.items()}
        for path, size in found[state.name].items():
            whole[path] = max(size, whole.get(path, 0))
    return {**found, "whole": whole}


def in_words(left: Mapping[str, int], whole: Mapping[str, int], renames: bool) -> Files:
    """How much of each file is there. Files of later saves, which ckpt-chaos does not make, don't count. The length of
    some files depends on the folder's name: of these, the longest in the same folder is whole."""
    if renames:
        return {path: "complete" for path in left if not path.startswith(TEMPORARY)}
    own = {
        path: max(left[each] for each in left if each.endswith(WITH_PATHS))
        for path in left
        if path.endswith(WITH_PATHS)
    }
    whole = {**whole, **own}
    return {
        path: "empty" if not size else "complete" if size == whole.get(path, size) else "torn"
        for path, size in left.items()
        if not path.startswith(TEMPORARY)
    }


def compare(name: str, points: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    renames = ALL[name].renames
    there = [(one, in_words(one["left"], states["whole"], renames)) for one in states["states"]]
    agree = Counter[str]()
    for point in points["points"]:
        wanted = in_words(point["left"], points["whole"], renames)
        same = [one for one, files in there if files == wanted]
        kinds = Counter(one["kind"] for one in same)
        means = {MEANS.get(kind, kind) for kind in kinds}
        says = "among them" if point["verdict"] in means else "differs" if same else "no such state"
        says = "the same" if means == {point["verdict"]} else says
        agree[says] += 1
        ours = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "-"
        print(
            f"{name}: {point['point']}: {point['verdict']} ({point['raised'] or 'no error'}) | {ours} | {says}",
            flush=True,
        )
    runs, tried = len(points["points"]), len(states["states"])
    each, ours_s = points["seconds"] / runs, states["seconds"] / max(1, tried)
    print(
        f"{name}: {dict(agree)}; ckpt-chaos: {runs} runs in {points['seconds']:.0f} s, {each:.1f} s each; torchaos: "
        f"{tried} of {states['of']} states in {states['seconds']:.0f} s, {ours_s:.2f} s each: 1/{each / ours_s:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
