"""The files in the wheel, and files that must not be in it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from torchaos.harness.host.native_libraries import compiler

from .conftest import PIP, REPOSITORY, run

FOLDERS = ("plugin", "harness", "injectors", "assertions", "scenarios")


@pytest.fixture(scope="session")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_the_wheel_holds_every_file_of_our_folders(names: set[str], checkout: Path) -> None:
    """A folder that setup.py does not find, or a kind of file from `package-data`, shows here."""
    files = [path for folder in FOLDERS for path in (checkout / folder).rglob("*") if path.is_file()]
    ours = {f"torchaos/{path.relative_to(checkout)}" for path in files if path.parent.name != "__pycache__"}
    held = {name for name in names if name.startswith("torchaos/")}
    assert ours - held == set(), "not in the wheel: add the suffix to package-data"
    built = {name for name in held if re.search(r"\.so(\.\d+)?$", name)}
    assert held - ours - built == set(), "in the wheel, but not in the repository (as gone.py of an older build)"


def test_the_wheel_holds_nothing_but_torchaos(names: set[str]) -> None:
    """Neither ci, lab nor tests, nor a top-level harness, lands in the user's site-packages."""
    tops = {name.partition("/")[0] for name in names}
    metadata = {top for top in tops if top.startswith("torchaos-") and top.endswith(".dist-info")}
    assert len(metadata) == 1
    assert tops - metadata == {"torchaos"}


def test_the_wheel_holds_what_is_no_module(names: set[str]) -> None:
    """Scenarios, the trainers that they run, and the agent's bootstrap are there, and torchaos stays a namespace."""
    assert "torchaos/harness/agent/bootstrap/sitecustomize.py" in names
    assert "torchaos/scenarios/process/kill-rank.yaml" in names
    assert "torchaos/scenarios/jobs/gpt_ddp.py" in names
    assert "torchaos/__init__.py" not in names, "a package of a third party could no longer add to torchaos"


def test_the_wheel_says_that_it_is_typed(names: set[str]) -> None:
    """Each package has its mark of PEP 561, since torchaos itself is a namespace."""
    assert {f"torchaos/{folder}/py.typed" for folder in FOLDERS} <= names


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_readme_of_an_index_has_absolute_links(metadata: Message, checkout: Path) -> None:
    """An index of packages shows the README without our files; each link leads to a file that is in the repository."""
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", str(metadata.get_payload()))
    ours = [link for link in links if "/torchaos/torchaos/" in link]
    assert [link for link in links if not link.startswith("https://")] == []
    assert len(ours) > 20
    assert [link for link in ours if not (checkout / link.partition("/main/")[2]).exists()] == []


def test_all_is_every_extra(metadata: Message) -> None:
    """`pip install 'torchaos[all]'` leaves none out, and each extra that a message names is there."""
    extras = set(metadata.get_all("Provides-Extra") or ())
    whole = next(line for line in metadata.get_all("Requires-Dist") or () if 'extra == "all"' in line)
    assert set(whole.partition("[")[2].partition("]")[0].split(",")) == extras - {"all"}
    texts = [path.read_text() for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py")]
    named = {name for text in texts for name in re.findall(r"torchaos\[([a-z-]+)\]", text)}
    assert "gpu" in named
    assert named <= extras


def test_the_changelog_knows_the_version(metadata: Message) -> None:
    """Its newest heading is the version of the package."""
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", text, re.MULTILINE)[0] == metadata["Version"]


def test_a_source_distribution_makes_the_same_wheel(checkout: Path, names: set[str], tmp_path: Path) -> None:
    """Nothing that the build reads is missing from it, neither C sources and headers nor the README."""
    build = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    source = tmp_path / run(sys.executable, "-c", build, tmp_path, cwd=checkout).splitlines()[-1]
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, source, cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        assert {name for name in archive.namelist() if not name.endswith("/")} == names


def test_the_wheel_carries_the_licence(names: set[str]) -> None:
    """The text of the licence goes where the code goes."""
    assert [name for name in names if name.endswith("LICENSE")]


@pytest.mark.slow
def test_a_wheel_needs_no_compiler(checkout: Path, tmp_path: Path) -> None:
    """Where the C parts can't be compiled the wheel is built all the same, with their sources alone."""
    source = shutil.copytree(checkout, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    broken = {**os.environ, "CC": "/bin/false"}
    command += ["-w", str(tmp_path), str(source)]
    done = subprocess.run(command, env=broken, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as archive:
        native = [name for name in archive.namelist() if "/native/nvtx/" in name]
    assert native == ["torchaos/injectors/native/nvtx/stall.c"]


LIBRARIES = """
from torchaos.harness.host.native_libraries import NCCL_NET, NVML, NVTX
print(*(library.path() for library in (NCCL_NET, NVML, NVTX)))
"""


@pytest.mark.skipif(compiler() is None, reason="needs a C compiler to make the wheel: install gcc or clang")
def test_the_libraries_of_a_wheel_need_no_compiler(from_wheel: Path, tmp_path: Path) -> None:
    """pip writes a library and its sources in any order, so their times do not say that the library is old."""
    env = {**os.environ, "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    paths = run(from_wheel, "-c", LIBRARIES, cwd=tmp_path, env=env).split()
    assert len(paths) == 3
    assert all("site-packages/torchaos/injectors/native/" in path for path in paths), paths
