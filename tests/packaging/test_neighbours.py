"""torchaos beside a project that has packages called harness, scenarios, assertions, injectors and tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import run

pytestmark = pytest.mark.slow

NAMES = ("harness", "injectors", "assertions", "scenarios", "tests")
THEIR_TEST = """
import importlib
import pytest

@pytest.mark.parametrize("name", {names})
def test_theirs(name):
    assert importlib.import_module(name).OWNER == "them"

@pytest.mark.parametrize("name", ["harness.interfaces", "injectors.process_death", "assertions", "scenarios"])
def test_ours(name):
    module = importlib.import_module("torchaos." + name)
    assert not hasattr(module, "OWNER")
    assert not module.__file__.startswith({project!r}), module.__file__
"""


@pytest.fixture(params=["from_wheel", "editable"])
def python(request: pytest.FixtureRequest) -> Path:
    value = request.getfixturevalue(request.param)
    assert isinstance(value, Path)
    return value


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'them'\n")
    text = THEIR_TEST.format(names=NAMES, project=str(tmp_path))
    (tmp_path / "tests/test_neighbours.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def clean(**more: str) -> dict[str, str]:
    """The environment without what the running tests put on the module path."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | more


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_both_are_importable_under_their_pytest(python: Path, project: Path, mode: str) -> None:
    """With any import mode of their pytest, theirs are theirs and ours are ours."""
    printed = run(python, "-m", "pytest", "-q", f"--import-mode={mode}", cwd=project, env=clean())
    assert "9 passed" in printed


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_the_order_of_imports_does_not_matter(python: Path, project: Path, first: str) -> None:
    """Whichever is imported first, the other is found too."""
    theirs, ours = "import harness, injectors, assertions, scenarios", "import torchaos.harness, torchaos.injectors"
    lines = [theirs, ours] if first == "theirs" else [ours, theirs]
    check = "assert harness.OWNER == 'them' and not hasattr(torchaos.harness, 'OWNER')"
    run(python, "-c", "\n".join([*lines, check]), cwd=project, env=clean())


def test_the_command_runs_in_their_project(python: Path, project: Path) -> None:
    """`torchaos list injectors` finds our injectors, although the folder holds others of these names."""
    printed = run(python.with_name("torchaos"), "list", "injectors", cwd=project, env=clean(PYTHONPATH=str(project)))
    assert "process.kill" in printed


def test_the_agent_s_path_entry_shadows_nothing(python: Path, project: Path) -> None:
    """With the bootstrap folder first on PYTHONPATH, as in a job, their packages are still theirs."""
    find = "import torchaos.harness.agent as a; print(a.__path__[0])"
    bootstrap = Path(run(python, "-c", find, cwd=project, env=clean()).strip()) / "bootstrap"
    assert sorted(p.name for p in bootstrap.iterdir() if p.name != "__pycache__") == ["sitecustomize.py"]
    check = "import harness, tests; assert harness.OWNER == tests.OWNER == 'them'"
    run(python, "-c", check, cwd=project, env=clean(PYTHONPATH=str(bootstrap)))
