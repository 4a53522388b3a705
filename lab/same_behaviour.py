"""Shows that a change moved code and changed nothing: records what the program prints, and compares two records.

    python lab/same_behaviour.py record TREE OUT     # what the checkout TREE prints
    python lab/same_behaviour.py compare BEFORE AFTER
    python lab/same_behaviour.py functions TREE TREE [--names MAP]

A record has every page of `--help`, all schemas, the plan of each ready scenario with a fixed seed, and for each run
in TREE/tests (tests/data/runs and the corpus of the fuzzer) the results of `judge` and the story of `explain`.
`functions` compares the functions of two checkouts by their syntax trees, without docstrings and names of modules; MAP
has lines `OLD NEW`, for names that were changed on purpose. Each difference is printed. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PRODUCT = ("plugin", "harness", "injectors", "assertions", "scenarios")
# Runs each command in a process that is forked after the imports.
CHILD = """
import json, os, sys, traceback
from pathlib import Path
from importlib import import_module
from torchaos.harness.cli import commands, main
for listed in commands.ALL.values():
    import_module(f"torchaos.harness.cli.{listed.module}")
import numpy, torchaos.harness.running.planner, torchaos.harness.checkpoints.formats
sys.path.insert(0, os.getcwd())
for line in sys.stdin:
    words, out = json.loads(line)
    pid = os.fork()
    if not pid:
        where = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(where, 1), os.dup2(where, 2)
        sys.argv = ["torchaos", *words]
        code = 0
        try:
            main()
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
            code = "traceback"
        sys.stdout.flush(), sys.stderr.flush()
        os.write(1, f"\\nexit code {code}\\n".encode())
        os._exit(0)
    os.waitpid(pid, 0)
"""


def commands(tree: Path, home: Path) -> Iterator[tuple[str, list[str]]]:
    """The name in the record, and the words of the command line."""
    yield "help", ["--help", "--all"]
    table = (tree / "harness" / "cli" / "commands.py").read_text()
    for name in re.findall(r'^ +"(\w+)": Listed\(', table, re.MULTILINE):
        yield f"help-{name}", [name, "--help"]
    yield "list", ["list"]
    yield "schema", ["schema"]
    for kind in ("gameday", "gate"):
        yield f"schema-{kind}", ["schema", kind]
    for file in sorted((tree / "scenarios").rglob("*.yaml")):
        if "jobs" not in file.parts:
            name = str(file.relative_to(tree / "scenarios").with_suffix(""))
            yield f"plan-{name.replace('/', '-')}", ["plan", "--json", "--seed", "7", name]
    for run in runs(tree):
        name = str(run.relative_to(tree / "tests")).replace("/", "-")
        for verb in ("judge", "explain"):
            copy = home / verb / name
            shutil.copytree(run, copy)
            yield f"{verb}-{name}", [verb, str(copy), "--json"]


def runs(tree: Path) -> list[Path]:
    found = (path.parent for path in sorted((tree / "tests").rglob("plan.json")))
    return [run for run in found if not {"twins", "agent"} & set(run.relative_to(tree).parts[-3:])]


def record(tree: Path, out: Path) -> None:
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="same-") as folder:
        home = Path(folder)
        links = home / "links" / "torchaos"
        links.mkdir(parents=True)
        for name in PRODUCT:
            (links / name).symlink_to(tree / name)
        env = dict(os.environ, PYTHONPATH=str(links.parent), HOME=str(home), COLUMNS="100", PYTHONHASHSEED="0")
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        asked = [json.dumps([words, str((out / name).with_suffix(".txt"))]) for name, words in commands(tree, home)]
        subprocess.run([sys.executable, "-c", CHILD], input="\n".join(asked), text=True, env=env, cwd=home, check=True)
        for file in out.iterdir():
            text = file.read_text(errors="replace").replace(str(tree), "TREE").replace(str(home), "HOME")
            file.write_text(
                re.sub(r"HOME/links/torchaos", "TREE", re.sub(r"\b[0-9a-f]{40}(-dirty)?\b", "COMMIT", text))
            )
        for run in (home / "judge").iterdir():
            if (run / "result.json").is_file():
                shutil.copy(run / "result.json", out / f"result-{run.name}.json")
    print(f"{len(list(out.iterdir()))} files in {out}")


class Plain(ast.NodeTransformer):
    """Removes what a move may change: docstrings, imports, and the object of `module.name`."""

    def __init__(self, modules: set[str], names: dict[str, str]) -> None:
        self.modules, self.names = modules, names

    def visit_Import(self, node: ast.Import) -> None:
        return None

    visit_ImportFrom = visit_Import  # type: ignore[assignment]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = self.names.get(node.attr, node.attr)
        if isinstance(node.value, ast.Name) and node.value.id in self.modules:
            return ast.Name(node.attr, node.ctx)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and "torchaos.harness." in node.value:
            node.value = "torchaos.harness"
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def modules_of(tree: Path) -> set[str]:
    """The names that a module of the product may have where it is used."""
    files = [path for name in PRODUCT for path in (tree / name).rglob("*.py") if "native" not in path.parts]
    found = {path.stem for path in files} | {path.parent.name for path in files}
    return found.union(*(re.findall(r"import \w+ as (\w+)", path.read_text()) for path in files))


def functions(tree: Path, modules: set[str], names: dict[str, str]) -> dict[str, int]:
    """How often each function occurs, by its name and the digest of its syntax tree."""
    files = [path for name in PRODUCT for path in (tree / name).rglob("*.py") if "native" not in path.parts]
    found: Counter[str] = Counter()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                plain = Plain(modules, names).visit(node)
                plain.name = names.get(plain.name, plain.name)
                dump = ast.dump(ast.Module(plain.body + plain.decorator_list + [plain.args], []))
                found[f"{plain.name} {hashlib.sha256(dump.encode()).hexdigest()[:12]}"] += 1
    return dict(found)


def compare(before: Path, after: Path) -> int:
    one, two = ({file.name for file in folder.iterdir()} for folder in (before, after))
    wrong = 0
    for name in sorted(one | two):
        texts = [(folder / name).read_text() if (folder / name).is_file() else "" for folder in (before, after)]
        if texts[0] != texts[1]:
            wrong += 1
            pairs = [(a, b) for a, b in zip(*(text.split("\n") for text in texts), strict=False) if a != b][:3]
            print(f"differs: {name}", *(f"\n  - {a[:200]}\n  + {b[:200]}" for a, b in pairs))
    print(f"{len(one | two)} outputs, {wrong} differ")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("record", "compare", "functions"))
    parser.add_argument("folders", nargs=2, type=Path)
    parser.add_argument("--names", type=Path)
    asked = parser.parse_args()
    if asked.what == "record":
        record(asked.folders[0].resolve(), asked.folders[1].resolve())
        return
    wrong = compare(*asked.folders) if asked.what == "compare" else 0
    if asked.what == "functions":  # of two trees
        pairs = [line.split()[:2] for line in asked.names.read_text().splitlines()] if asked.names else []
        names, modules = {new: old for old, new in pairs}, set.union(*map(modules_of, asked.folders))
        one, two = (Counter(functions(tree, modules, names)) for tree in asked.folders)
        for each in sorted((one - two) + (two - one)):
            print("-" if one[each] > two[each] else "+", each)
        wrong += sum(((one - two) + (two - one)).values())
        print(f"{sum(one.values())} functions before, {sum(two.values())} after, {sum((one & two).values())} in both")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
