"""What other repositories use of this one by its address: the action for GitHub, and the hook for pre-commit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from torchaos.harness.cli import cli

from .conftest import REPOSITORY, run

ACTION = REPOSITORY / "action.yml"
STEPS = {step["name"]: step for step in yaml.safe_load(ACTION.read_text())["runs"]["steps"]}
TOOLS = Path(sys.executable).parent


@pytest.mark.needs("check-jsonschema", "shellcheck")
def test_the_action_fits_its_schema(tmp_path: Path) -> None:
    """The published schema of GitHub's actions, which check-jsonschema holds; without `using` it is refused. ShellCheck
    finds nothing in its scripts."""
    check: list[str | Path] = [TOOLS / "check-jsonschema", "--builtin-schema", "vendor.github-actions"]
    run(*check, ACTION, cwd=tmp_path)
    (tmp_path / "action.yml").write_text(ACTION.read_text().replace("  using: composite\n", ""))
    assert subprocess.run([*check, tmp_path / "action.yml"], capture_output=True, check=False).returncode == 1
    for step in STEPS.values():
        if "run" in step:
            done = subprocess.run(
                [TOOLS / "shellcheck", "--shell", "bash", "-"], input=step["run"], capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("code", "policy", "ends"), [(0, "fail", 0), (1, "warn", 1), (2, "fail", 2), (2, "warn", 0)])
def test_the_action_ends_as_its_runs(tmp_path: Path, code: int, policy: str, ends: int) -> None:
    """Its script, with a stand-in for torchaos: the words that torchaos gets are those of its command line, the step
    has the exit code, and only an inconclusive run may be let through."""
    stub = tmp_path / "my python"
    stub.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/words\nexit {code}\n')
    stub.chmod(0o755)
    outputs, summary = tmp_path / "outputs", tmp_path / "summary.md"
    env = {
        **os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "GITHUB_OUTPUT": str(outputs),
        "GITHUB_STEP_SUMMARY": str(summary), "INCONCLUSIVE": policy, "JOB": "chaos/my job.yaml",
        "PYTHON": str(stub), "SCENARIOS": "process/kill-rank\nchaos/*.yaml\n", "OPTIONS": "--set job.timeout=2m",
    }  # fmt: skip
    assert set(STEPS["Run"]["env"]) <= set(env)
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS["Run"]["run"]]
    assert subprocess.run(shell, env=env, cwd=tmp_path, check=False).returncode == ends
    words = (tmp_path / "words").read_text().splitlines()
    assert words == [
        "-m", "torchaos.harness", "run", "process/kill-rank", "chaos/*.yaml", "--set", "job.timeout=2m", "--job",
        "chaos/my job.yaml", "--junit", "torchaos.xml", "--summary", str(summary),
    ]  # fmt: skip
    assert outputs.read_text() == f"exit-code={code}\n"
    command = cli.get_command(click.Context(cli), words[2])
    assert command is not None
    assert not set(re.findall(r"--[a-z]+", " ".join(words))) - {name for one in command.params for name in one.opts}


def test_the_action_works_in_a_folder_and_with_the_python_that_are_named(tmp_path: Path) -> None:
    """A repository may keep its job in a folder, and its packages in a virtual environment: every step uses both, and
    the files that are kept are those of that folder."""
    for name in ("Install", "Run"):
        assert STEPS[name]["working-directory"] == "${{ inputs.working-directory }}"
        assert STEPS[name]["env"]["PYTHON"] == "${{ inputs.python }}"
    kept = [line.removeprefix("!") for line in STEPS["Keep"]["with"]["path"].split("\n") if line]
    assert all(line.startswith("${{ inputs.working-directory }}/torchaos") for line in kept)
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    stub.chmod(0o755)
    env = {**os.environ, "PYTHON": str(stub), "GITHUB_ACTION_PATH": "/the action"}
    subprocess.run(["bash", "-eo", "pipefail", "-c", STEPS["Install"]["run"]], env=env, check=True)
    words = (tmp_path / "words").read_text().splitlines()
    assert (words[:3], words[-1]) == (["-m", "pip", "install"], "/the action")


def test_the_hook_is_a_command_of_ours() -> None:
    """pre-commit installs this repository and calls the entry with the files that were changed."""
    (hook,) = yaml.safe_load((REPOSITORY / ".pre-commit-hooks.yaml").read_text())
    program, name = shlex.split(hook["entry"])
    assert (program, hook["language"]) == ("torchaos", "python")
    assert cli.get_command(click.Context(cli), name) is not None
    assert re.search(hook["files"], "chaos/scenarios/kill-rank.yaml")
    assert not re.search(hook["files"], "train/config.yaml")
