"""Prints which room of the harness imports which, and what is wrong: arrows up, and circles.

    python lab/import_graph.py [TREE] [--arrows]

TREE is a folder or a revision of git; without it, this checkout. A room is a package or a module directly in harness/.
An arrow goes from one room to another, and counts if the import is executed: at the top of a module, in a function, or
by a name in a string. Imports only for type checkers are counted separately. An arrow up is against the layers in
pyproject.toml.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

HARNESS = "torchaos.harness"
NAME = re.compile(r"torchaos\.harness(\.\w+)+(:\w+)?")
HOW = TOP, LAZY, STRING, TYPES = "at the top", "in a function", "by a string", "for types only"
Arrows = Mapping[tuple[str, str], Mapping[str, set[str]]]


def sources(tree: str) -> dict[str, str]:
    """The text of each Python file of the harness, and of pyproject.toml, by path in the repository."""
    if Path(tree).is_dir():
        found = [*Path(tree, "harness").rglob("*.py"), Path(tree, "pyproject.toml")]
        return {str(path.relative_to(tree)): path.read_text() for path in found}
    packed = subprocess.run(["git", "archive", tree, "harness", "pyproject.toml"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        files = [
            (member.name, archive.extractfile(member)) for member in archive if member.name.endswith((".py", ".toml"))
        ]
    return {name: file.read().decode() for name, file in files if file}


def imports(node: ast.AST, package: str, how: str = TOP) -> Iterator[tuple[str, str]]:
    """Yields the full names that the code below `node` imports, each with the way of the import."""
    for child in ast.iter_child_nodes(node):
        inner = how
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            inner = TYPES
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and how == TOP:
            inner = LAZY
        if isinstance(child, ast.Import):
            yield from ((alias.name, how) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
            module = ".".join([*above, *([child.module] if child.module else [])])
            yield from ((f"{module}.{alias.name}", how) for alias in child.names)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and NAME.fullmatch(child.value):
            yield child.value.replace(":", "."), STRING
        yield from imports(child, package, inner)


def arrows(files: Mapping[str, str]) -> Arrows:
    """The imports between rooms: for each pair of rooms, the way of the import and the files."""
    found: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path, text in files.items():
        if not path.endswith(".py") or path in ("harness/__init__.py", "harness/__main__.py"):
            continue
        package, room = ".".join(("torchaos", *Path(path).parent.parts)), Path(path).parts[1].removesuffix(".py")
        for name, how in imports(ast.parse(text), package):
            other = name.removeprefix(f"{HARNESS}.").partition(".")[0]
            if name.startswith(f"{HARNESS}.") and other != room:
                found[room, other][how].add(path)
    return found


def circles(pairs: set[tuple[str, str]]) -> list[set[str]]:
    """The sets of rooms in which each room can be reached from each other room."""
    reach = {room: {room} for pair in pairs for room in pair}
    for _ in reach:
        for above, below in pairs:
            reach[above] |= reach[below]
    together = {frozenset(below for below in reach[room] if room in reach[below]) for room in reach}
    return [set(rooms) for rooms in together if len(rooms) > 1]


def floors(pyproject: str) -> dict[str, int]:
    """The layer of each room, from 0 at the top; empty if the file lists none."""
    listed = re.search(r'containers = \["torchaos\.harness"\]\n.*?layers = \[\n(.*?)\n\]', pyproject, re.DOTALL)
    layers = listed[1].splitlines() if listed else []
    return {room: floor for floor, layer in enumerate(layers) for room in re.findall(r"\w+", layer)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", nargs="?", default=str(Path(__file__).resolve().parents[1]))
    parser.add_argument("--arrows", action="store_true", help="print each arrow, and the files that it comes from")
    options = parser.parse_args()
    files = sources(options.tree)
    found, floor = arrows(files), floors(files["pyproject.toml"])
    running = {pair for pair, hows in found.items() if set(hows) - {TYPES}}
    rooms = {Path(path).parts[1].removesuffix(".py") for path in files if path.startswith("harness/")}
    up = {(room, other) for room, other in running if floor and floor[room] >= floor[other]}
    rings = circles(running)
    print(f"rooms: {len(rooms - {'__init__', '__main__'})}")
    print(f"arrows: {len(running)}, and {len(found) - len(running)} for types only")
    print(f"arrows up: {len(up)}" if floor else "arrows up: unknown, for pyproject.toml lists no layers")
    print(f"circles: {len(rings)}", *(f"  of {len(ring)}: {', '.join(sorted(ring))}" for ring in rings), sep="\n")
    for pair, hows in sorted(found.items()) if options.arrows else ():
        print(f"{pair[0]} -> {pair[1]}{' (up)' if pair in up else ''}")
        print(*(f"  {how}: {', '.join(sorted(paths))}" for how, paths in hows.items()), sep="\n")


if __name__ == "__main__":
    main()
