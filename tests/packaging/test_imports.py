"""Imports that import-linter can't see: of modules that are loaded by path, and of names without torchaos."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchaos.harness import registry

REPOSITORY = Path(__file__).resolve().parents[2]
IN_RANKS = ("agent", "base_classes", "interfaces", "protocol")
OURS = ("torchaos.plugin", "torchaos.injectors", *(f"torchaos.harness.{room}" for room in IN_RANKS))
FOLDERS = ("plugin", "harness", "injectors", "assertions", "scenarios")
SOURCES = sorted(path for folder in (*FOLDERS, "tests") for path in (REPOSITORY / folder).rglob("*.py"))


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The modules that the import statements among `nodes` name; a relative import begins with its dots."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ([module] if node.module else [module + alias.name for alias in node.names])


def executed(nodes: Iterable[ast.AST], *, functions: bool) -> Iterator[ast.AST]:
    """All that runs below `nodes`: not what only type checkers read, and bodies of `functions` only if wanted."""
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith(("TYPE_CHECKING", "typing.TYPE_CHECKING")):
            yield from executed(node.orelse, functions=functions)
        elif functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from executed(ast.iter_child_nodes(node), functions=functions)


def tree(path: Path) -> list[ast.AST]:
    return [ast.parse(path.read_text())]


def modules(folder: str) -> list[Path]:
    return sorted((REPOSITORY / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_nothing_imports_our_folders_as_top_level_packages() -> None:
    """`import harness` works at the root of the repository and nowhere else, or finds the user's."""
    named = re.compile(rf"^\s*(?:import|from)\s.*(?<![.\w])(?:{'|'.join(FOLDERS)})\b", re.MULTILINE)
    perhaps = [path for path in SOURCES if named.search(path.read_text())]
    wrong = {
        relative(path): found
        for path in perhaps
        if (found := {name for name in imported(ast.walk(*tree(path))) if name.partition(".")[0] in FOLDERS})
    }
    assert wrong == {}


def test_pytest_at_the_root_did_not_import_them_either() -> None:
    """Collecting tests/ leaves no second copy of our modules under names without torchaos."""
    assert [name for name in sys.modules if name.partition(".")[0] in FOLDERS] == []


AGENT = [*modules("harness/agent"), *modules("harness/protocol")]


def test_the_agent_imports_nothing_of_ours_but_itself() -> None:
    """It runs under a private name in the job's Python, which may have no torchaos: it imports itself and the protocol,
    and the protocol only itself."""
    for path in AGENT:
        for name in imported(ast.walk(*tree(path))):
            assert not name.startswith("torchaos"), f"{relative(path)} imports {name}"
            up = len(name) - len(name.lstrip("."))
            if up:
                folder = path.parents[up - 1].relative_to(REPOSITORY / "harness")
                room = [*folder.parts, *name[up:].split(".")][0]
                assert room == "protocol" or room == path.relative_to(REPOSITORY / "harness").parts[0], (path, name)


def test_the_agent_loads_with_the_standard_library_alone() -> None:
    """On import it needs nothing installed, not even torch, which the job may import later or never."""
    for path in AGENT:
        for name in imported(executed(tree(path), functions=False)):
            found = name.startswith(".") or name.partition(".")[0] in sys.stdlib_module_names
            assert found, f"{relative(path)} imports {name}"


def in_ranks() -> list[Path]:
    """The modules of injectors that can be applied in a rank, and of what those share: not those whose classes all say
    that they are applied from outside."""
    outside = {
        module
        for module in {found.__module__ for found in registry.injectors().values()}
        if all("rank" not in found.where for found in registry.injectors().values() if found.__module__ == module)
    }
    shared = [REPOSITORY / "harness" / "base_classes.py", *modules("harness/interfaces")]
    face = [
        REPOSITORY / "plugin" / f"{name}.py" for name in ("__init__", "_outside", "evidence", "families/ranks", "undo")
    ]
    return [path for path in modules("injectors") if f"torchaos.injectors.{path.stem}" not in outside] + face + shared


def test_an_injector_loads_with_the_standard_library_and_the_agent() -> None:
    """The agent loads an injector's file by path in the job's Python, where nothing else need be installed: only what
    lies beside it."""
    for path in in_ranks():
        for name in imported(executed(tree(path), functions=False)):
            found = name.startswith(OURS) or name.partition(".")[0] in sys.stdlib_module_names
            assert found, f"{relative(path)} imports {name}"


EXTRAS = ("aiohttp", "docker", "isal", "mfusepy", "opentelemetry", "pynvml", "s3fs", "scipy", "toxiproxy")
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # an import of them fails
import torchaos.harness.cli.explore, torchaos.harness.cli.run, torchaos.harness.pytest_plugin
"""


def test_commands_start_without_the_packages_of_the_extras() -> None:
    """They are imported where they are used, so that a plain installation runs scenarios."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
