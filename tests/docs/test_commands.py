"""Runs every command of README and docs here, or the table below says why it is not run, and what reads it instead."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from recorded import judged, recorded

from torchaos.harness import pytest_plugin
from torchaos.harness.cli import cli

from .conftest import PAGES, REPOSITORY, Block, Torchaos, blocks

# Why a command is not run here. Of those of torchaos the command line still reads each as it stands.
NOT_RUN = {
    "torchaos run": "a job for each; the tutorial's and the README's are run by test_tutorial.py and test_scenarios.py",
    "torchaos init": "reads and runs the reader's job; tests/cli has it",
    "torchaos gameday": "hours of jobs; --plan and --presets are run, a short one by tests/gameday",
    "torchaos explore": "many jobs; tests/e2e/test_explore.py runs it",
    "torchaos shrink": "many jobs; tests/minimize runs it",
    "torchaos bisect": "many jobs; tests/minimize runs its parts",
    "torchaos exec": "a node's job under a scheduler; tests/launchers runs it",
    "torchaos diagnose": "dumps of a hang, or a live job; tests/diagnosis has both",
    "torchaos compare": "takes recorded runs of two commits or nights; tests/reporting has those",
    "torchaos history": "takes runs that were kept; tests/reporting has those",
    "torchaos gate": "runs a job for each scenario, or takes what other jobs left; tests/release runs it",
    "make": "each sets the repository up anew; `make demo` runs the scenario that tests/e2e runs",
    "pytest": "a job for each; tests/pytest_plugin runs them with a stand-in for torchaos",
    "pip": "installs; tests/packaging installs the wheel",
    "srun": "there is no Slurm here",
    "sed": "a step of the tutorial, which test_tutorial.py runs",
    "torchrun": "a step of the tutorial, which test_tutorial.py runs",
    "python": "campaigns of hours; a sample of each is among the tests",
    "LD_LIBRARY_PATH": "a health agent of the reader's own",
}
FEW = ("gameday --plan", "gameday --presets")  # of a command that is not run, what is
RUN_NAME = re.compile(r"torchaos-(?:runs|days|explored)/[\w.-]+-\d+|RUN_DIR\b|\blatest\b")


def commands(block: Block) -> Iterator[str]:
    """A console shows output, too; a shell script is all commands."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    yield from (line for line in lines if line and not line.startswith("#"))


ALL = [(block.where, line) for language in ("console", "sh") for block in blocks(language) for line in commands(block)]


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]) and len(words) > 1 and not words[0].startswith("LD_"):
        words = words[1:]  # the environment of the command
    return words


def kind(line: str) -> str:
    words = words_of(line)
    return " ".join(words[:2]) if words[0] == "torchaos" else words[0].partition("=")[0]


def is_run(line: str) -> bool:
    return kind(line) not in NOT_RUN or any(
        words_of(line)[1] == name and option in words_of(line)[2:]
        for name, option in (one.split() for one in FEW) if kind(line) == f"torchaos {name}"
    )  # fmt: skip


def test_every_fence_says_what_it_is() -> None:
    """A fence without a language, or with one that no test reads, would be an example that nothing runs."""
    known = {"console", "sh", "yaml", "python", "toml", "ini", "text"}
    unknown = [block.where for block in blocks("") + blocks("bash") + blocks("shell")]
    assert unknown == []
    languages = {found for page in PAGES for found in re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE)}
    assert languages <= known


def test_the_table_has_nothing_that_is_gone() -> None:
    """Each reason why something is not run is for a command that stands somewhere."""
    shown = {kind(line) for _where, line in ALL}
    said = {name for name in NOT_RUN if name not in ("srun", "python", "torchaos exec")}  # in text and indented
    assert said - shown == set()


@pytest.mark.parametrize(("where", "line"), ALL, ids=[f"{where} {line}" for where, line in ALL])
def test_it_is_read(where: str, line: str) -> None:
    """A target of the Makefile, or a command with options that there are."""
    words = words_of(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:.*## ", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "pytest":
        source = Path(str(pytest_plugin.__file__)).parent
        known = "".join(path.read_text() for path in source.glob("*.py"))
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in known] == []
    elif words[0] == "torchaos" and not words[1].startswith("-"):
        command = cli.get_command(click.Context(cli), words[1])
        assert command is not None
        if "--help" not in words:
            words = ["recorded" if word == "latest" else word for word in words]
            command.make_context(words[1], words[2:])  # raises where an option is unknown
    else:
        assert kind(line) in NOT_RUN or words[0] == "torchaos"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader has beside these commands: the files of the guides, a recorded run, checkpoints."""
    folder = tmp_path_factory.mktemp("reader")
    judged(recorded(folder / "recorded"))
    docs = REPOSITORY / "docs"
    (folder / "train.py").touch()
    (folder / "kill-rank.yaml").write_text(blocks("yaml", [docs / "write-a-scenario.md"])[0].text)
    (folder / "night.yaml").write_text(blocks("yaml", [docs / "gamedays.md"])[0].text)
    shutil.copytree(REPOSITORY / "tests" / "checkpoints" / "samples" / "torchtitan", folder / "checkpoints")
    return folder


RUN = [(where, line) for where, line in ALL if words_of(line)[0] == "torchaos" and is_run(line)]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "line"), RUN, ids=[f"{where} {line}" for where, line in RUN])
def test_it_runs(torchaos: Torchaos, place: Path, tmp_path: Path, where: str, line: str) -> None:
    """Nothing that only looks is refused: it does its work, with a recorded run for the reader's."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    text = re.sub(r"\bPATH\b", "checkpoints", RUN_NAME.sub("recorded", line.partition(" #")[0]))
    done = torchaos(*words_of(text)[1:])
    allowed = (0, 1, 2)
    assert done.returncode in allowed, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout or kind(line) in ("torchaos report", "torchaos recover")


def test_python_and_settings_are_read() -> None:
    """Each example in Python compiles; what it imports from torchaos is there."""
    for block in blocks("python"):
        tree = ast.parse(block.text if not block.text.startswith(" ") else f"class _:\n{block.text}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torchaos"):
                module = __import__(str(node.module), fromlist=[alias.name for alias in node.names])
                assert all(hasattr(module, alias.name) for alias in node.names), block.where


def test_every_command_that_is_named_exists() -> None:
    """`torchaos NAME`, wherever a page, a docstring or a message speaks of it."""
    sources = [*PAGES, REPOSITORY / "CHANGELOG.md"]
    for name in ("harness", "injectors", "assertions", "ci", "lab"):
        sources += [path for path in (REPOSITORY / name).rglob("*") if path.suffix in (".py", ".md", ".yaml", ".html")]
    named = {(path.name, found) for path in sources for found in re.findall(r"`torchaos ([a-z]+)", path.read_text())}
    assert {one for one in named if one[1] not in cli.list_commands(click.Context(cli))} == set()
    assert len(named) > 20
