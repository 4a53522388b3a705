"""The fenced blocks of README.md and docs/, and a folder in which the examples are installed."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from warm import torchaos as command

REPOSITORY = Path(__file__).parents[2]
PAGES = tuple(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md"))
PAGES += tuple(sorted((REPOSITORY / "docs").rglob("*.md")))
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block. `name` of a file is what its first line says: `# straggler/faults.py`."""

    page: Path
    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        first = self.text.partition("\n")[0]
        return first.removeprefix("# ") if re.fullmatch(r"# [\w/.-]+\.\w+", first) else ""

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(REPOSITORY)}:{self.line}"


def blocks(language: str, pages: Sequence[Path] = PAGES) -> list[Block]:
    found = []
    for page in pages:
        text = page.read_text()
        for match in _FENCED.finditer(text):
            if match[1] == language:
                found.append(Block(page, language, match[2], text.count("\n", 0, match.start()) + 1))
    return found


class Torchaos(Protocol):
    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages of the guides, laid out as an installer leaves them."""
    folder = tmp_path_factory.mktemp("site-packages")
    for page in PAGES:
        files = {block.name: block.text for block in blocks("python", [page]) if block.name}
        for name, text in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
            (folder / name).parent.joinpath("__init__.py").touch()
        for block in blocks("toml", [page]):
            if block.name == "pyproject.toml":
                _install(block, folder)
    return folder


def _install(block: Block, folder: Path) -> None:
    """From the pyproject.toml of a guide to the metadata of an installed distribution; its TOML is INI as well."""
    project = configparser.ConfigParser(delimiters=("=",))
    project.optionxform = str  # type: ignore[assignment, method-assign]
    project.read_string(block.text)
    name, version = (project["project"][key].strip('"') for key in ("name", "version"))
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    sections = []
    for section in project.sections():
        if section.startswith("project.entry-points."):
            lines = [f"{key.strip(chr(34))} = {value.strip(chr(34))}" for key, value in project[section].items()]
            sections.append("\n".join([f"[{section.split('.', 2)[2].strip(chr(34))}]", *lines]))
    (info / "entry_points.txt").write_text("\n\n".join(sections) + "\n")


@pytest.fixture
def torchaos(tmp_path: Path, plugins: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line, in an empty folder, with the packages of the guides installed beside it."""
    path = os.pathsep.join([str(plugins), *filter(None, [os.environ.get("PYTHONPATH")])])
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    env = {"PYTHONPATH": path, "PATH": programs, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return command(*arguments, cwd=tmp_path, env=env)

    return run
