"""`pip install torchaos`, without the extra `gpu`: a scenario that needs it says so before anything is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
HIDES = """
import sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name == "pynvml":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hides())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "pynvml" else find(name, package)
"""
SAYS = "this machine lacks pynvml (samples of the GPUs, and the health agent of the ready GPU scenarios); pip install 'torchaos[gpu]'"


@pytest.fixture
def plain(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that does not have nvidia-ml-py."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDES)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**env, "PYTHONPATH": str(tmp_path / "site"), "COLUMNS": "400", "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.mark.parametrize("words", [["-m", "torchaos.harness", "run"], ["-m", "pytest", "-q"]], ids=["run", "pytest"])
def test_it_names_the_extra_and_starts_nothing(plain: dict[str, str], tmp_path: Path, words: list[str]) -> None:
    """On the command line, and as a test of a project."""
    scenario = yaml.safe_load((REPOSITORY / "scenarios/gpu/xid-79.yaml").read_text())
    scenario["job"]["command"] = "{python} {here}/health_agent.py torchrun --nproc-per-node 2 train.py"
    project = tmp_path / "project"
    project.mkdir()
    (project / "xid-79.yaml").write_text(yaml.safe_dump(scenario))
    started = project / "started"
    (project / "health_agent.py").write_text(f"open({str(started)!r}, 'w')")
    command = [sys.executable, *words, "xid-79.yaml"]
    done = subprocess.run(command, cwd=project, env=plain, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode not in (0, 5), done.stdout + done.stderr
    assert SAYS in " ".join((done.stdout + done.stderr).split()), done.stdout + done.stderr
    assert not started.exists()
    assert "Traceback" not in done.stderr


def test_the_jobs_own_python_counts(tmp_path: Path) -> None:
    """The agent runs in another environment than torchaos: what is missing there is named with its Python."""
    from torchaos.harness.interfaces import UsageError
    from torchaos.harness.running.planner import make_plan
    from torchaos.harness.scenario.loader import load

    plans = []
    for name, packages in (("bare", []), ("equipped", [["nvidia-ml-py", "13.0", ""]])):
        python = tmp_path / name / "python"
        python.parent.mkdir()
        python.write_text(f"#!/bin/sh\necho '{json.dumps(packages)}'\n")
        python.chmod(0o755)
        scenario = yaml.safe_load((REPOSITORY / "scenarios/gpu/xid-79.yaml").read_text())
        scenario["job"]["command"] = f"{python} health_agent.py torchrun --nproc-per-node 2 train.py"
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(scenario))
        plans.append(partial(make_plan, load(path), path, seed=0))
    with pytest.raises(
        UsageError, match=r"bare.yaml:30:12: .*/python lacks nvidia-ml-py, by which the health agent asks"
    ):
        plans[0]()
    assert "pynvml" not in plans[1]().needs
