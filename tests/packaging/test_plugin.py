"""torchaos.plugin: everything that a plug-in imports, outside and in a rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import torchaos.plugin as face
from torchaos.harness import registry
from torchaos.harness.interfaces import Evidence

from .conftest import REPOSITORY, run

IN_RANKS = [found.__module__ for found in registry.injectors().values() if "rank" in found.where]
# As in a rank: the agent is a package of its own, and no installed package is there (-S), torchaos included.
LOAD = """
import importlib.util, sys
folder, source = sys.argv[1:]
spec = importlib.util.spec_from_file_location("_agent", folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules["_agent"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["_agent"])
import _agent.wire, _agent.rank_faults
with _agent.rank_faults._our_names(source.rpartition("/")[0]):
    import importlib
    found = importlib.import_module("torchaos.injectors." + source.rpartition("/")[2].removesuffix(".py"))
    deep = [name for name in sys.modules if name.startswith("torchaos.harness.")]
assert all(name.startswith("torchaos.harness.agent") for name in deep), deep
assert not [name for name in sys.modules if name.startswith("torchaos")]
"""

MINE = """
from __future__ import annotations
from torchaos.plugin import Evidence, Fault, Probe, Record, died

class Looks(Probe):
    def sample(self, emit) -> None: ...

class Mine(Fault):
    def felt(self, record: Record, fault: str) -> Evidence | None:
        return died(record, fault, -9)

try:
    Mine().felt(None, "it")
except RuntimeError as error:
    assert "died of torchaos.plugin can't be used in a rank" in str(error), error
else:
    raise AssertionError("it should have said so")
"""


@pytest.mark.parametrize("name", face.__all__)
def test_each_name_is_there(name: str) -> None:
    """Whatever it promises can be imported, and is listed."""
    assert getattr(face, name) is not None
    assert name in dir(face)


def test_it_is_what_the_harness_uses() -> None:
    """A class from there is the harness's own, not a copy; no other name is to be had."""
    assert face.Evidence is Evidence
    with pytest.raises(AttributeError, match="'no_such_thing'"):
        _ = face.no_such_thing  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", sorted({name.rpartition(".")[2] for name in IN_RANKS}))
def test_an_injector_loads_in_a_rank(module: str) -> None:
    """With the standard library and the agent alone; nothing else of the harness is loaded, and no name stays."""
    source = REPOSITORY / "injectors" / f"{module}.py"
    run(sys.executable, "-I", "-S", "-c", LOAD, REPOSITORY / "harness" / "agent", source, cwd=REPOSITORY)


def test_what_is_not_there_in_a_rank_says_so(tmp_path: Path) -> None:
    """A name of the harness can be imported, be built on and be named in annotations there; its use is an error that
    names it."""
    source = tmp_path / "mine.py"
    source.write_text(MINE)
    run(sys.executable, "-I", "-S", "-c", LOAD, REPOSITORY / "harness" / "agent", source, cwd=REPOSITORY)
