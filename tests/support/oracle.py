"""The bench of trainers in tests/oracle: the table, one run of a trainer, and whether the verdict was right."""

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

from torchaos.harness.contracts import ChaosError
from torchaos.harness.judging.verdict.verdict import judge
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.scenario.yaml_source import dumped

HOME = Path(__file__).parents[1] / "oracle"
TRAINERS = HOME / "trainers"
REPOSITORY = HOME.parents[1]
STEPS, SEEDS_OF = 24, 20  # so many runs of a healthy trainer share a seed, and so a twin
ASSERTIONS = (
    "recovery_time", "completed", "restarts", "loss_continuity", "lr_continuity", "sample_accounting",
    "checkpoint_integrity", "parameter_digest", "state_restored", "no_lost_work", "clean_exit",
)  # fmt: skip
# Those of the README's scenario, the smallest.
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
    passes: bool = False  # a noisy one of which even `passed` must be said
    faults: tuple[Mapping[str, Any], ...] = ()
    bounds: Mapping[str, Any] = field(default_factory=dict)  # of assertions, by name
    shrinks: bool = False  # the job is submitted again, with half as many ranks
    unseeded: bool = False  # it takes no --seed
    timeout: str = "90s"
    repeat: int = 1
    needs: str | None = None  # a package
    home: str | None = None  # of a script that is not ours: the environment variable that names its folder
    about: str = ""  # and its defect
    launch: tuple[str, ...] = ("torchrun", "--nproc-per-node", "{ranks}", "--max-restarts", "3")
    ranks: int = 2
    shell: str = ""  # a line for bash in which {job} stands for the command
    replicas: int = 1
    smallest: bool = False  # judged by the assertions of the README's scenario, not by all ten
    asserts: tuple[str, ...] = ASSERTIONS
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def lacks(self) -> str | None:
        """What has to be there for it, and is not."""
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
    """The rows of all files in table/, sorted by kind. Raises ValueError where a name stands twice."""
    parts = [yaml.safe_load(path.read_text()) for path in sorted((HOME / "table").glob("*.yaml"))]
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
    """One run of one trainer: what it is drawn from is its number alone."""

    trainer: str
    number: int
    seed: int
    rank: int
    step: int
    phase: str


def shot(trainer: Trainer, number: int) -> Shot:
    """Broken ones are always hit in the same place, the first run of any other too; the others are drawn."""
    if trainer.kind in ("broken", "unclear") or trainer.faults or not number:
        return Shot(trainer.name, number, 0, 1, 13, "backward")
    draw = random.Random(f"{trainer.name}/{number}")
    phase = draw.choice(("forward", "backward", "optimizer"))
    return Shot(trainer.name, number, number // SEEDS_OF, draw.randrange(trainer.ranks), draw.randrange(7, 23), phase)


def scenario(trainer: Trainer, one: Shot) -> dict[str, Any]:
    seed = [] if trainer.unseeded else ["--seed", str(one.seed)]
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
    if trainer.shrinks:  # as a scheduler that has only half of the GPUs left for the second submission
        ranks = f"n={trainer.ranks}; test -e {{run}}/shrunk && n={trainer.ranks // 2}; touch {{run}}/shrunk"
        line = f"{ranks}; exec torchrun --nproc-per-node $n --max-restarts 0 {' '.join(script)}"
        job |= {"command": ["bash", "-c", line], "world_size": trainer.ranks, "resubmit": {"times": 1}}
    target = {"rank": one.rank} if trainer.replicas == 1 else {"replica": one.rank, "rank": 0}
    kill = {"inject": "process.kill", "target": target, "when": {"step": one.step, "phase": one.phase}}
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
class Told:
    """What came of a run."""

    shot: Shot
    kind: Kind
    verdict: str  # passed, failed, inconclusive, error
    reason: str
    cases: Mapping[str, str] = field(default_factory=dict)  # verdicts
    reasons: Mapping[str, str] = field(default_factory=dict)  # of those that did not pass
    seconds: float = 0.0
    folder: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Told:
        raw = json.loads(line)
        return cls(**{**raw, "shot": Shot(**raw["shot"])})


def run(trainer: Trainer, one: Shot, out: Path, keep: bool = False, **more: Any) -> Told:
    """Run it as a user does, by the command line. The run directory is kept where the verdict is not the right one, or
    all are to be kept. `more` goes into the scenario."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"{trainer.name}-{one.number}"
    path, results = out / f"{name}.yaml", out / f"{name}.json"
    path.write_text(dumped({**scenario(trainer, one), **more}))
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torchaos.harness", "run", str(path), "--out", str(out / name), "--json", str(results)],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = round(time.monotonic() - begun, 1)
    if not results.exists():
        return Told(one, trainer.kind, "error", (done.stdout + done.stderr)[-2000:], seconds=seconds)
    result = json.loads(results.read_text())["results"][0]
    folder = Path(result["run_dir"])
    told = told_of(trainer, one, result, seconds)
    if is_right(trainer, told) and not keep:
        shutil.rmtree(out / name, ignore_errors=True)
        path.unlink()
        results.unlink()
        return told
    return replace(told, folder=str(folder))


def told_of(trainer: Trainer, one: Shot, result: Mapping[str, Any], seconds: float) -> Told:
    cases = {case["name"]: case["verdict"] for case in result["cases"]}
    reasons = {case["name"]: case["reason"] for case in result["cases"] if case["verdict"] != "passed"}
    return Told(one, trainer.kind, result["verdict"], result["reason"], cases, reasons, seconds)


def judged_again(told: Told) -> Told:
    """By the assertions as they are now, where the run directory was kept and is whole."""
    trainer = next((one for one in table() if one.name == told.shot.trainer), None)
    try:
        result = judge(RunDir(Path(told.folder)).check()) if told.folder and trainer else None
    except ChaosError as error:
        print(f"{told.folder}: not judged again: {error}")
        result = None
    if result is None or trainer is None:
        return told
    return replace(told_of(trainer, told.shot, result.to_json(), told.seconds), folder=told.folder)


def is_right(trainer: Trainer, told: Told) -> bool:
    if trainer.kind == "healthy" or trainer.passes:
        return told.verdict == "passed"
    if trainer.kind == "noisy":
        return told.verdict in ("passed", "inconclusive")
    if trainer.kind == "unclear":
        return told.verdict == "inconclusive" and trainer.says in told.reason
    if trainer.kind == "small":
        return told.verdict != "error"
    return told.verdict == "failed" and is_explained(trainer, told)


def wrong(trainer: Trainer, told: Sequence[Told]) -> list[Told]:
    """Those of a trainer's runs that got another verdict than they deserve. One that recovers by luck deserves to pass
    now and then, as long as it is found once."""
    bad = [one for one in told if not is_right(trainer, one)]
    by_luck = trainer.kind == "broken" and trainer.repeat > 1 and len(bad) < len(told)
    return [one for one in bad if not (by_luck and one.verdict == "passed")]


def is_explained(trainer: Trainer, told: Told) -> bool:
    """Whether the right assertion failed, with the right words."""
    return told.cases.get(trainer.failed) == "failed" and trainer.says in told.reasons[trainer.failed]


def read(path: Path) -> list[Told]:
    """What an earlier call has left; a line that was cut off is done again."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(Told.from_json(line))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def due(
    trainers: Sequence[Trainer], done: Sequence[Told], healthy: int, first: int = 0
) -> Iterator[tuple[Trainer, Shot]]:
    """What is still to be run: broken and noisy ones first, then `healthy` runs of the healthy ones in turns. `first`:
    where their numbers begin, and with them the seeds and faults, so that the assertions have never seen the like."""
    ran = {(one.shot.trainer, one.shot.number) for one in done if one.verdict != "error"}
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
