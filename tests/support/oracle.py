"""The bench of trainers in tests/oracle: the table, a run of a trainer, and whether its verdict was right."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from torchaos.harness.analysis.verdict import judge
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.scenario.yaml_source import dumped

HOME = Path(__file__).parents[1] / "oracle"
TRAINERS = HOME / "trainers"
REPOSITORY = HOME.parents[1]
STEPS, SEEDS_OF = 24, 20  # steps of a run; runs of a healthy trainer that share a seed, and so a twin
ASSERTIONS = (
    "recovery_time", "completed", "restarts", "loss_continuity", "lr_continuity", "sample_accounting",
    "checkpoint_integrity", "parameter_digest", "state_restored", "no_lost_work", "clean_exit",
)  # fmt: skip
# The assertions of the README's scenario, the smallest one.
SMALLEST = ("recovery_time", "loss_continuity", "sample_accounting", "state_restored", "no_lost_work", "completed")
Kind = Literal["broken", "healthy", "noisy", "unclear", "small"]


@dataclass(frozen=True)
class Trainer:
    """One row of the table."""

    name: str
    kind: Kind
    script: str = ""
    args: tuple[str, ...] = ()
    dir: str = "--dir"  # the option that takes the folder of the checkpoints
    failed: str = ""  # the assertion that must fail
    says: str = ""  # a part of its reason
    passes: bool = False  # a noisy trainer that must pass
    faults: tuple[Mapping[str, Any], ...] = ()
    bounds: Mapping[str, Any] = field(default_factory=dict)  # bounds of assertions, by the name of the assertion
    shrinks: bool = False  # the job is submitted again, with half as many ranks
    unseeded: bool = False  # it takes no --seed
    timeout: str = "4m"
    repeat: int = 1
    needs: str | None = None  # a package that must be installed
    home: str | None = None  # environment variable with the folder of a script from elsewhere
    about: str = ""  # the trainer's defect
    launch: tuple[str, ...] = ("torchrun", "--nproc-per-node", "{ranks}", "--max-restarts", "3")
    ranks: int = 2
    shell: str = ""  # a line for bash; {job} becomes the command
    replicas: int = 1
    smallest: bool = False  # judged by the assertions of the README's scenario, not by all
    asserts: tuple[str, ...] = ASSERTIONS
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def lacks(self) -> str | None:
        """What is missing on this machine to run it, or None."""
        if self.needs is not None and find_spec(self.needs) is None:
            return f"the package {self.needs} is not installed"
        if self.home is not None and not os.environ.get(self.home):
            return f"the environment variable {self.home} does not name the folder of {self.script}"
        return None

    @property
    def path(self) -> str:
        if self.home is not None:
            return str((Path(os.environ[self.home]) / self.script).resolve())
        folders = {"broken": "broken/", "noisy": "noisy/", "unclear": "unclear/"}
        folder = folders.get(self.kind, "" if self.name == "base" else "healthy/")
        script = self.script or f"{folder}{self.name}.py"
        return script if script.startswith("{") else str((TRAINERS / script).resolve())


def table() -> list[Trainer]:
    """The rows of all files in table/, sorted by kind. Raises ValueError if two rows have the same name."""
    parts = [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted((HOME / "table").glob("*.yaml"))]
    rows = [
        Trainer(name=name, kind=kind, **{key: _frozen(value) for key, value in row.items()})
        for kind in get_args(Kind)
        for part in parts
        for name, row in part.get(kind, {}).items()
    ]
    twice = [name for name, times in Counter(row.name for row in rows).items() if times > 1]
    if twice:
        raise ValueError(f"two rows are called {twice[0]}")
    return [replace(row, asserts=SMALLEST) if row.smallest else row for row in rows]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True)
class Shot:
    """Where one run of a trainer is hit. Drawn from the trainer's name and the run's number alone."""

    trainer: str
    number: int
    seed: int
    rank: int
    step: int
    phase: str


def shot(trainer: Trainer, number: int) -> Shot:
    """The first run of each trainer, and every run of a broken one, is hit in the same place. All others are drawn."""
    if trainer.kind in ("broken", "unclear") or trainer.faults or not number:
        return Shot(trainer.name, number, 0, 1, 13, "backward")
    draw = random.Random(f"{trainer.name}/{number}")
    phase = draw.choice(("forward", "backward", "optimizer"))
    return Shot(trainer.name, number, number // SEEDS_OF, draw.randrange(trainer.ranks), draw.randrange(7, 23), phase)


def scenario(trainer: Trainer, hit: Shot) -> dict[str, Any]:
    seed = [] if trainer.unseeded else ["--seed", str(hit.seed)]
    script = [trainer.path, *trainer.args, trainer.dir, "{run}/out", *seed]
    launch = (
        word.replace("{trainers}", str(TRAINERS)).replace("{ranks}", str(trainer.ranks)) for word in trainer.launch
    )
    command = [*launch, *script]
    job: dict[str, Any] = {
        "command": ["bash", "-c", trainer.shell.replace("{job}", " ".join(command))] if trainer.shell else command,
        "cwd": str(TRAINERS),
        "env": {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TRAINERS),
            "HF_HUB_OFFLINE": "1", **trainer.env,
        },
        "checkpoints": {"path": "{run}/out"},
        "timeout": trainer.timeout,
    }  # fmt: skip
    if trainer.launch[0] != "torchrun" or trainer.shell:
        job |= {"world_size": trainer.ranks, "replicas": trainer.replicas}
    if trainer.shrinks:  # like a scheduler that has only half of the GPUs for the second submission
        ranks = f"n={trainer.ranks}; test -e {{run}}/shrunk && n={trainer.ranks // 2}; touch {{run}}/shrunk"
        line = f"{ranks}; exec torchrun --nproc-per-node $n --max-restarts 0 {' '.join(script)}"
        job |= {"command": ["bash", "-c", line], "world_size": trainer.ranks, "resubmit": {"times": 1}}
    target = {"rank": hit.rank} if trainer.replicas == 1 else {"replica": hit.rank, "rank": 0}
    kill = {"inject": "process.kill", "target": target, "when": {"step": hit.step, "phase": hit.phase}}
    faults = [dict(fault) for fault in trainer.faults] or [kill]
    kills = sum(fault["inject"] == "process.kill" for fault in faults)
    bounds = {"restarts": {"max": kills}, **trainer.bounds}
    return {
        "scenario": trainer.name.replace("_", "-"),
        "job": job,
        "faults": faults,
        "assert": [{name: bounds[name]} if name in bounds else name for name in trainer.asserts],
    }


def _filled(word: str, places: Mapping[str, str]) -> str:
    for place, value in places.items():
        word = word.replace(place, value)
    return word


@dataclass(frozen=True)
class BenchRun:
    """One run of the bench, and its result."""

    shot: Shot
    kind: Kind
    verdict: str  # passed, failed, inconclusive, error
    reason: str
    cases: Mapping[str, str] = field(default_factory=dict)  # verdicts, by case
    reasons: Mapping[str, str] = field(default_factory=dict)  # reasons of the cases that did not pass, by case
    seconds: float = 0.0
    folder: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> BenchRun:
        raw = json.loads(line)
        return cls(**{**raw, "shot": Shot(**raw["shot"])})


def run(trainer: Trainer, hit: Shot, out: Path, keep: bool = False, **more: Any) -> BenchRun:
    """Run the trainer by the command line, as a user does. The run directory is kept with `keep`, and if the verdict is
    wrong. `more`: further keys of the scenario."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"{trainer.name}-{hit.number}"
    path, results = out / f"{name}.yaml", out / f"{name}.json"
    path.write_text(dumped({**scenario(trainer, hit), **more}))
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torchaos.harness", "run", str(path), "--out", str(out / name), "--json", str(results)],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = round(time.monotonic() - begun, 1)
    if not results.exists():
        return BenchRun(hit, trainer.kind, "error", (done.stdout + done.stderr)[-2000:], seconds=seconds)
    result = json.loads(results.read_text())["results"][0]
    folder = Path(result["run_dir"])
    ran = bench_run(trainer, hit, result, seconds)
    if is_right(trainer, ran) and not keep:
        shutil.rmtree(out / name, ignore_errors=True)
        path.unlink()
        results.unlink()
        return ran
    return replace(ran, folder=str(folder))


def bench_run(trainer: Trainer, hit: Shot, result: Mapping[str, Any], seconds: float) -> BenchRun:
    cases = {case["name"]: case["verdict"] for case in result["cases"]}
    reasons = {case["name"]: case["reason"] for case in result["cases"] if case["verdict"] != "passed"}
    return BenchRun(hit, trainer.kind, result["verdict"], result["reason"], cases, reasons, seconds)


def judged_again(old: BenchRun) -> BenchRun:
    """The run, judged again by the current assertions, if its run directory was kept and is complete."""
    trainer = next((row for row in table() if row.name == old.shot.trainer), None)
    try:
        result = judge(RunDir(Path(old.folder)).check()) if old.folder and trainer else None
    except ChaosError as error:
        print(f"{old.folder}: not judged again: {error}")
        result = None
    if result is None or trainer is None:
        return old
    return replace(bench_run(trainer, old.shot, result.to_json(), old.seconds), folder=old.folder)


def is_right(trainer: Trainer, ran: BenchRun) -> bool:
    if trainer.kind == "healthy" or trainer.passes:
        return ran.verdict == "passed"
    if trainer.kind == "noisy":
        return ran.verdict in ("passed", "inconclusive")
    if trainer.kind == "unclear":
        return ran.verdict == "inconclusive" and trainer.says in ran.reason
    if trainer.kind == "small":
        return ran.verdict != "error"
    return ran.verdict == "failed" and is_explained(trainer, ran)


def wrong(trainer: Trainer, runs: Sequence[BenchRun]) -> list[BenchRun]:
    """The runs of a trainer with a wrong verdict. A broken trainer that sometimes recovers by luck may pass, if at
    least one of its runs failed."""
    bad = [each for each in runs if not is_right(trainer, each)]
    by_luck = trainer.kind == "broken" and trainer.repeat > 1 and len(bad) < len(runs)
    return [each for each in bad if not (by_luck and each.verdict == "passed")]


def is_explained(trainer: Trainer, ran: BenchRun) -> bool:
    """Whether the expected assertion failed, for the expected reason."""
    return ran.cases.get(trainer.failed) == "failed" and trainer.says in ran.reasons[trainer.failed]


def read(path: Path) -> list[BenchRun]:
    """The runs that an earlier call has written. An incomplete line is ignored, so that run is repeated."""
    runs = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            runs.append(BenchRun.from_json(line))
        except (ValueError, KeyError, TypeError):
            continue
    return runs


def due(
    trainers: Sequence[Trainer], done: Sequence[BenchRun], healthy: int, first: int = 0
) -> Iterator[tuple[Trainer, Shot]]:
    """The runs that are still to be done: broken and noisy trainers first, then `healthy` runs of the healthy ones in
    turns. `first`: the number of the first healthy run. New numbers mean new seeds and faults."""
    ran = {(old.shot.trainer, old.shot.number) for old in done if old.verdict != "error"}
    for trainer in trainers:
        if trainer.kind != "healthy":
            yield from ((trainer, shot(trainer, n)) for n in range(trainer.repeat) if (trainer.name, n) not in ran)
    sound = [trainer for trainer in trainers if trainer.kind == "healthy"]
    for number in range(healthy):
        if not sound:
            return
        trainer, turn = sound[number % len(sound)], number // len(sound)
        if (not trainer.faults or not turn) and (trainer.name, first + turn) not in ran:
            yield trainer, shot(trainer, first + turn)
