"""The teeth of the ready scenarios: defects and changes that each scenario must fail (tests/teeth/table.yaml)."""

from __future__ import annotations

import datetime
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[2]
SCENARIOS, HOME = REPOSITORY / "scenarios", REPOSITORY / "tests" / "teeth"
DEFECTIVE = HOME / "defective.py"
_OF_THE_WATCHER = (
    "hears_nothing", "is_jumpy", "comes_back_to_the_sick_gpu", "does_not_predict", "stays_with_a_sick_gpu",
    "evicts_its_neighbour", "forgives_every_death", "blames_those_that_lost_a_peer",
)  # fmt: skip
# Assertions that compare a run with itself alone.
_ALONE = ("health_reaction", "no_lost_work", "restart_tier", "state_restored")
_SCRIPTS = tuple(sorted(path.name for path in (SCENARIOS / "jobs").glob("gpt_*.py")))


@dataclass(frozen=True)
class Tooth:
    """One reason why a scenario must fail: a defect of the job, or changes to the scenario."""

    scenario: str  # family/name
    fails: str  # the assertion that must fail
    defect: str = ""  # a function of defective.py
    set: Mapping[str, Any] = field(default_factory=dict)  # as --set

    @property
    def name(self) -> str:
        """The defect, and all that is changed in the scenario: the fault may be another one. Of the job only its size
        is given, which can't be read from a command with a defect."""
        changes = [f"{key}={_as_json(value)}" for key, value in self.set.items() if key != "job.world_size"]
        return " ".join([self.defect, *changes]).strip()

    @property
    def of_its_own_fault(self) -> bool:
        """Whether the scenario's fault is as it is, and not another or a stronger one."""
        return not any(key.startswith("faults") for key in self.set)

    @property
    def twins(self) -> str:
        """The twins that its assertion needs, as --set. One is enough: further ones only show whether a job is
        repeatable, which the scenario as it is has shown. Empty if the scenario itself says how many."""
        if "\ntwin:" in (SCENARIOS / f"{self.scenario}.yaml").read_text():
            return ""
        return "twin=none" if self.fails in _ALONE else "twin={runs: 1}"


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def names() -> list[str]:
    """All ready scenarios but game days, as family/name."""
    found = (path.relative_to(SCENARIOS).with_suffix("").as_posix() for path in SCENARIOS.glob("*/*.yaml"))
    return sorted(name for name in found if not name.startswith("gamedays/"))


def table() -> dict[str, list[Tooth]]:
    rows = yaml.load((HOME / "table.yaml").read_text(), yaml.CSafeLoader)
    return {name: [Tooth(name, **tooth) for tooth in teeth] for name, teeth in rows.items()}


def with_defect(text: str, defect: str) -> str:
    """The scenario's text with a job that has the defect. Defects of the GPU watcher go into health_agent.py."""
    scripts = ("health_agent.py",) if defect in _OF_THE_WATCHER else _SCRIPTS
    found = [f"{{jobs}}/{script}" for script in scripts if f"{{jobs}}/{script}" in text]
    if not found:
        raise ValueError(f"no job that could have the defect {defect} is in this scenario")
    for script in found:
        place = f"{shlex.quote(str(DEFECTIVE))} {defect} {script}"
        if f'- "{script}"' in text:  # a command that is a list
            place = f'{DEFECTIVE}"\n    - {defect}\n    - "{script}'
        text = text.replace(script, place)
    return text


def with_seed(text: str, seed: int) -> str:
    """The scenario's text with this seed for its job."""
    for script in (f"{{jobs}}/{name}" for name in _SCRIPTS):
        text = text.replace(f'- "{script}"', f'- "{script}"\n    - --seed\n    - "{seed}"')  # a command that is a list
        text = text.replace(f"{script} ", f"{script} --seed {seed} ").replace(
            f"{script}\n", f"{script} --seed {seed}\n"
        )
    return text


@dataclass(frozen=True)
class Bite:
    """The result of a scenario with a tooth or, if `tooth` is empty, without."""

    scenario: str
    tooth: str  # empty: without a tooth
    fails: str
    verdict: str  # passed, failed, inconclusive, error; or refused: this machine can't carry it out
    reason: str
    cases: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    folder: str = ""
    seed: int = 0  # of the job and of the scenario
    day: str = ""  # of the run

    @property
    def right(self) -> bool:
        if self.tooth:
            return self.verdict == "failed" and self.cases.get(self.fails) == "failed"
        return self.verdict == "passed"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def bite(name: str, tooth: Tooth | None, out: Path, changed: Sequence[str] = (), seed: int = 0) -> Bite:
    """Run a ready scenario by the command line, as it is or with a tooth. `changed`: what --set gets, besides. `seed`:
    0 is that of the scenario and the job as they are."""
    label = re.sub(r"[^\w.-]+", "-", f"{name}-{tooth.name}" if tooth else name)[:100]
    label += f"-seed-{seed}" if seed else ""
    folder = out / label
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = _text(name, seed)
    path, results = folder / "scenario.yaml", folder / "results.json"
    path.write_text(with_defect(text, tooth.defect) if tooth and tooth.defect else text)
    changes = tooth.set.items() if tooth else ()
    words = [*(f"{key}={_as_json(value)}" for key, value in changes), *changed]
    sets = [part for word in words for part in ("--set", word)]
    consent = [part for word in yaml.safe_load(text).get("consent", ()) for part in ("--consent", word)]
    seeds = ["--seed", str(seed)] if seed else []
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torchaos.harness", "run", str(path), *sets, *consent, *seeds,
         "--out", str(folder / "runs"), "--json", str(results)],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    seconds = round(time.monotonic() - begun, 1)
    if results.exists() and (found := _read(results)):
        return _bite(name, tooth, found, seconds, seed)
    output = (done.stdout + done.stderr).strip()[-1000:]
    verdict = "refused" if done.returncode == 3 else "error"
    return Bite(
        name, tooth.name if tooth else "", tooth.fails if tooth else "", verdict, output, {}, seconds, "", seed,
        _today(),
    )  # fmt: skip


def judged_again(bite: Bite) -> Bite | None:
    """The result of the same run by this version. None if the run is not there any more, or was one of another
    scenario. Raises CalledProcessError if it can't be judged."""
    tooth = next((tooth for tooth in table()[bite.scenario] if tooth.name == bite.tooth), None)
    folder = Path(bite.folder).resolve()
    ran, results = folder.parents[1] / "scenario.yaml", folder.parents[1] / "results.json"
    text = _text(bite.scenario, bite.seed)
    if not folder.exists() or ran.read_text() != (with_defect(text, tooth.defect) if tooth and tooth.defect else text):
        return None
    results.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "torchaos.harness", "judge", str(folder), "--json", str(results)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not results.exists():
        raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
    return _bite(bite.scenario, tooth, _read(results), bite.seconds, bite.seed)


def _text(name: str, seed: int) -> str:
    text = (SCENARIOS / f"{name}.yaml").read_text()
    return with_seed(text, seed) if seed else text


def _read(results: Path) -> list[dict[str, Any]]:
    return list(json.loads(results.read_text())["results"])


def _bite(name: str, tooth: Tooth | None, found: Sequence[Mapping[str, Any]], seconds: float, seed: int) -> Bite:
    cases = {case["name"]: case["verdict"] for case in found[0]["cases"]}
    return Bite(
        name, tooth.name if tooth else "", tooth.fails if tooth else "", found[0]["verdict"], found[0]["reason"], cases,
        seconds, found[0]["run_dir"], seed, _today(),
    )  # fmt: skip


def _today() -> str:
    return str(datetime.date.today())
