"""Prints the figures by which the building is compared: how large it is, and how much of it a reader must pass.

    .venv/bin/python lab/figures.py [TREE]

TREE is a checkout; without it, this one. It must be the one that is installed in this Python, because a recorded run
of it is judged, and the files are counted in which at least one function runs: all files for a kill, and those that
run for `loss_continuity` alone. Tests, the laboratory and the documentation are no product.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from inspect import CO_OPTIMIZED
from pathlib import Path
from typing import Any

PRODUCT = "plugin", "harness", "injectors", "assertions", "scenarios"
SHORT = 40  # lines; a module below it should have a reason
FACE = "torchaos.plugin"
KILL = "tests/data/runs/kill"


def modules(tree: Path) -> Iterator[Path]:
    """Every Python file of the product."""
    for folder in PRODUCT:
        yield from sorted((tree / folder).rglob("*.py"))


def lines(path: Path) -> int:
    """Lines of a text file, blank ones and comments too."""
    return len(path.read_text().splitlines())


def inner_imports(tree: Path) -> list[str]:
    """Imports by injectors and assertions of something that is not the public face, also those for types only."""
    found = []
    for path in (path for folder in PRODUCT[2:4] for path in (tree / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            found += [f"{path.relative_to(tree)}: {name}" for name in names if name.startswith("torchaos.harness")]
    return found


def files_that_run(tree: Path, work: Callable[[], Any]) -> set[str]:
    """The product's files of which at least one function runs during `work`."""
    seen: set[str] = set()
    roots = tuple(str(tree / folder) for folder in PRODUCT)

    def profile(frame: Any, event: str, _arg: Any) -> None:
        is_function = frame.f_code.co_flags & CO_OPTIMIZED  # and not the body of a module or a class that is imported
        if event == "call" and is_function and frame.f_code.co_filename.startswith(roots):
            seen.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def judged(tree: Path) -> tuple[set[str], set[str]]:
    """The files that run when a recorded kill is judged, and those that run for its `loss_continuity`."""
    from torchaos.harness import registry
    from torchaos.harness.analysis import verdict
    from torchaos.harness.record.rundir import RunDir

    folder = RunDir(tree / KILL)
    every = files_that_run(tree, lambda: verdict.judge(folder))
    run, twins = verdict.records_of(folder)
    assertion = registry.find("assertions", "loss_continuity")()
    return every, files_that_run(tree, lambda: assertion.judge(run, twins))


def figures(tree: Path) -> Iterator[tuple[str, object]]:
    """Each figure with its name."""
    product = list(modules(tree))
    harness = [path for path in product if path.is_relative_to(tree / "harness")]
    sizes = {path: lines(path) for path in product}
    named = Counter(path.stem for path in harness if path.stem != "__init__")
    yield "lines of the product", sum(sizes.values())
    yield "modules of the product", len(product)
    yield "modules of harness/", len(harness)
    yield "names of modules that occur twice there", sorted(name for name, times in named.items() if times > 1)
    yield (
        f"modules there of fewer than {SHORT} lines",
        sum(sizes[path] < SHORT for path in harness if path.stem != "__init__"),
    )
    yield "largest module", max((size, str(path.relative_to(tree))) for path, size in sizes.items())
    yield f"imports by injectors and assertions behind {FACE}", inner_imports(tree)
    every, alone = judged(tree)
    yield "files that run when a recorded kill is judged", len(every)
    yield "files that run for loss_continuity", len(alone)
    pages = [*(tree / "docs").rglob("*.md"), *tree.glob("*.md")]
    yield "words of the documentation", sum(len(page.read_text().split()) for page in pages)
    shown = subprocess.run(["git", "-C", tree, "ls-files", "tests"], capture_output=True, text=True, check=True)
    yield "lines of tests", sum(lines(tree / name) for name in shown.stdout.split() if name.endswith(".py"))


def installed() -> Path | None:
    """The checkout whose torchaos this Python imports; None if it has none."""
    found = find_spec("torchaos")
    harness = find_spec("torchaos.harness") if found else None
    return Path(harness.origin).resolve().parents[1] if harness and harness.origin else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, nargs="?", default=Path(__file__).parents[1])
    tree = parser.parse_args().tree.resolve()
    if (there := installed()) != tree:
        has = f"has the torchaos of {there}" if there else "has no torchaos"
        parser.error(
            f"{sys.executable} {has}, so no run can be judged: run `make setup` in {tree}, and then this with"
            f" {tree}/.venv/bin/python"
        )
    for name, value in figures(tree):
        print(f"{name:55} {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
