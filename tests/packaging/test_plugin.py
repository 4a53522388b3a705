"""torchaos.plugin: everything that a plug-in imports, outside and in a rank."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torchaos.plugin as face
from torchaos.harness import registry
from torchaos.harness.interfaces import Evidence, Outcome
from torchaos.plugin.testing import records_in

from .conftest import REPOSITORY, run

IN_RANKS = [found.__module__ for found in registry.injectors().values() if "rank" in found.where]
# As in a rank: the agent is a package of its own, and no installed package is there (-S), torchaos included.
LOAD = """
import importlib, os, sys, types
harness, *sources = sys.argv[1:]
sys.modules["_ours"] = types.ModuleType("_ours")
sys.modules["_ours"].__path__ = [harness]
import _ours.protocol.wire, _ours.agent.injection.rank_site
for source in sources:
    if os.fork():
        assert os.wait()[1] == 0, source
        continue
    with _ours.agent.injection.rank_site._our_names(source.rpartition("/")[0]):
        found = importlib.import_module("torchaos.injectors." + source.rpartition("/")[2].removesuffix(".py"))
        deep = [name for name in sys.modules if name.startswith("torchaos.harness.")]
    assert {name.split(".")[2] for name in deep} <= {"agent", "base_classes", "interfaces", "protocol"}, deep
    assert not [name for name in sys.modules if name.startswith("torchaos")]
    break
"""

MINE = """
from __future__ import annotations
from torchaos.plugin import Evidence, Fault, History, Probe, Record
from torchaos.plugin.evidence import died

class Looks(Probe):
    def sample(self, emit) -> None: ...

class Mine(Fault):
    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, -9)

try:
    Mine().felt(None, "it")
except RuntimeError as error:
    assert "torchaos.plugin.evidence.died can't be used in a rank" in str(error), error
else:
    raise AssertionError("it should have said so")
try:
    class Table(History): ...
except RuntimeError as error:
    assert "torchaos.plugin.History can't be used in a rank" in str(error), error
else:
    raise AssertionError("it should have said so")
"""


PARTS = [face, *(importlib.import_module(one.name) for one in pkgutil.walk_packages(face.__path__, "torchaos.plugin."))]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_each_name_is_there(part: ModuleType) -> None:
    """Whatever it promises can be imported; the few names that every plug-in may need are at the top."""
    assert [name for name in getattr(part, "__all__", ()) if not hasattr(part, name)] == []
    assert len(face.__all__) < 40


def test_it_is_what_the_harness_uses() -> None:
    """A class from there is the harness's own, not a copy."""
    assert face.Evidence is Evidence


def test_each_injector_loads_in_a_rank() -> None:
    """With the standard library and the agent alone; nothing else of the harness is loaded, and no name stays."""
    sources = sorted({REPOSITORY / "injectors" / f"{name.rpartition('.')[2]}.py" for name in IN_RANKS})
    assert len(sources) > 10
    run(sys.executable, "-I", "-S", "-c", LOAD, REPOSITORY / "harness", *sources, cwd=REPOSITORY)


def test_what_is_not_there_in_a_rank_says_so(tmp_path: Path) -> None:
    """A name of the harness can be imported and be named in annotations there; its use is an error that names it, also
    as a base class."""
    source = tmp_path / "mine.py"
    source.write_text(MINE)
    run(sys.executable, "-I", "-S", "-c", LOAD, REPOSITORY / "harness", source, cwd=REPOSITORY)


def test_a_recorded_run_is_a_test_of_a_plug_in() -> None:
    """A run directory gives what `felt` and `judge` get: of the run, and of a twin in which nothing was hit."""
    run, twins = records_in(REPOSITORY / "tests/data/runs/kill")
    (fault,) = run.plan.faults
    injector = registry.injector_of(fault)
    assert injector.felt(run, fault.id)
    assert twins
    assert not injector.felt(twins[0], fault.id)
    assert registry.find("assertions", "loss_continuity")().judge(run, twins).outcome is Outcome.PASSED
