"""The table of commands, and the modules that the command line imports when it starts."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from torchaos.harness import cli as package
from torchaos.harness.cli import cli
from torchaos.harness.cli.commands import ALL

MODULES = sorted(path.stem for path in Path(package.__file__).parent.glob("*.py") if path.stem != "__init__")
PRINT = "import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules)))"


def test_the_table_lists_every_command() -> None:
    """Each command that a module adds is in the table, under the module that adds it."""
    for module in MODULES:
        import_module(f"{package.__name__}.{module}")
    found = {name: (command.callback.__module__ if command.callback else "") for name, command in cli.commands.items()}
    assert found == {name: f"{package.__name__}.{listed.module}" for name, listed in ALL.items()}


@pytest.mark.parametrize("name", ALL)
def test_a_summary_is_the_first_sentence_of_the_command_s_help(name: str) -> None:
    """`torchaos --help` and `torchaos COMMAND --help` say the same, and a summary fits a line of 80 columns."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert (command.help or "").startswith(ALL[name].summary)
    assert len(ALL[name].summary) <= 66


def test_the_first_page_describes_ten_commands() -> None:
    """Who reads it first needs no more; most others are named, those for launchers and editors only on the page of all
    commands. `--all` of a command stays its own."""
    first, whole = (CliRunner().invoke(cli, words).stdout for words in (["--help"], ["--help", "--all"]))
    assert CliRunner().invoke(cli, ["--all", "-h"]).stdout == whole
    assert [name for name in ALL if f"  {name} " in whole and ALL[name].summary in whole] == [*ALL]
    assert len([name for name in ALL if ALL[name].summary in first]) == 10
    assert not any(
        re.search(rf"\b{name}\b", first) for name in ("exec", "node", "events", "schema", "bisect", "shrink")
    )
    named = [name for name in ALL if re.search(rf"\b{name}\b", first)]
    assert len(named) == len(ALL) - 6
    assert CliRunner().invoke(cli, ["verify", "--all", "/nowhere/at/all"]).stdout == ""


@pytest.mark.parametrize("start", ["help", "completion"])
def test_help_and_completion_import_no_command(start: str) -> None:
    """Neither a command's module nor a large library is imported to list the commands: the start stays fast."""
    completion = {"_TORCHAOS_COMPLETE": "bash_complete", "COMP_WORDS": "torchaos re", "COMP_CWORD": "1"}
    main = "import sys; sys.argv = ['torchaos', '--help']; from torchaos.harness.cli import main; main()"
    if start == "completion":
        main = main.replace("main()", "cli(prog_name='torchaos')").replace("import main", "import cli")
    done = subprocess.run(
        [sys.executable, "-c", f"{PRINT}; {main}"],
        env=completion if start == "completion" else {}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    *shown, imported = done.stdout.splitlines()
    assert any("recover" in line for line in shown)
    heavy = {f"{package.__name__}.{listed.module}" for listed in ALL.values()} | {"numpy", "pydantic", "rich", "torch"}
    assert heavy & set(imported.split()) == set()


def test_validate_imports_only_what_reads_a_file(tmp_path: Path) -> None:
    """It runs at each commit: neither the engine nor what draws on a terminal is imported."""
    file = tmp_path / "kill.yaml"
    (tmp_path / "train.py").touch()
    file.write_text(
        "scenario: kill\njob: {command: torchrun --nproc-per-node 2 train.py}\nassert: [completed]\n"
        "faults: [{inject: process.kill, target: {rank: 1}, when: {step: 18}}]\n"
    )
    words = ["torchaos", "validate", str(file)]
    main = f"import sys; sys.argv = {words}; from torchaos.harness.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", f"{PRINT}; {main}"], capture_output=True, text=True, check=True)
    *shown, imported = done.stdout.splitlines()
    assert shown == [f"{file}: well-formed"]
    assert not {"rich", "torch", "psutil", "torchaos.harness.running.engine.stages"} & {*imported.split()}
