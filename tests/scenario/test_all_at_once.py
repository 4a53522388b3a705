"""One reading of a file tells all mistakes in it, those of types and those of sense, and nothing that is not one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from malformed import CASES, GOOD, Case

from torchaos.harness.cli import cli
from torchaos.harness.interfaces import UsageError

MANY = """\
scenario: Kill Rank
sed: 7
job:
  command: torchrun --nproc-per-node 2 nothere.py --d {run}/x
  timeout: 5
  checkpoints: {pth: "{run}/c"}
faults:
  - inject: process.kil
    target: {rank: one}
    when: {step: 25, phase: backwards}
  - inject: process.kill
    id: b
    target: {rank: 5}
    when: {after: zz}
  - inject: process.kill
    target: {node: 3}
    when: {stp: 3}
  - inject: process.kill
    id: d
    when: {step: {between: [3, 2]}}
assert:
  - recovery_time: {catchup: 60s}
  - loss_continuty
launcher: locl
"""
PLACES = ["1:11", "2:1", "4:12", "5:12", "6:17", "8:13", "9:20", "10:29", "13:13", "14:19", "16:13", "17:12", "18:5",
          "20:18", "22:21", "23:5", "24:11"]  # fmt: skip


def said(*words: object) -> Sequence[str]:
    """The lines of the error of a call that is refused."""
    with pytest.raises(UsageError) as caught:
        CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    return str(caught.value).splitlines()


def test_validate_tells_all_in_one_go(tmp_path: Path) -> None:
    """Seventeen mistakes, among them a script and targets that the job does not have: each once, at its place."""
    path = tmp_path / "many.yaml"
    path.write_text(MANY)
    lines = said("validate", path)
    assert [line.split(": ")[0].removeprefix(f"{path}:") for line in lines] == PLACES


# Each in a file that can be read as YAML: else nothing more can be said.
READABLE = [case for case in CASES if case.old and not re.match("a NUL|nested|endless|a tab|not closed|a colon|a Python"
            "|a merge|a key|an unknown anchor|a seed over|a lone brace|a description that", case.name)]  # fmt: skip


@pytest.mark.parametrize("case", READABLE, ids=[case.name for case in READABLE])
def test_another_mistake_hides_none(case: Case, tmp_path: Path) -> None:
    """A file with one mistake, and then with two more, of types: it has these mistakes and no others."""
    path = tmp_path / "two.yaml"
    text = GOOD.replace(case.old, case.new, 1)
    path.write_text(text)
    alone = said("validate", path)
    path.write_text(text + "tags: {a: 1}\nlimits: {never: {rank: [0]}}\n")
    lines = said("validate", path)
    more = [line for line in lines if "tags is a list" in line or "unknown key 'rank'" in line]
    assert sorted(lines) == sorted([*alone, *more])
    assert len(more) == 2


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("{rank: 2}", "there is no rank 2; the job has 2"),
        ("{ranks: [0, 9]}", "there is no rank 9"),
        ("{node: 1}", "there is no node 1; the job has 1"),
        ("{local_rank: 2}", "there is no local rank 2"),
        ("{count: 3}", "it needs 3 ranks; the job has 2"),
        ("{replica: 1}", "there is no replica 1"),
    ],
)
def test_validate_knows_the_size_of_the_job(target: str, says: str, tmp_path: Path) -> None:
    """Where the command shows it, as `plan` says it. If the machine decides, as with `gpu`, nothing is said."""
    path = tmp_path / "size.yaml"
    path.write_text(GOOD.replace("{rank: 1}", target))
    (line,) = said("validate", path)
    assert line.startswith(f"{path}:10:13: process.kill: {says}")
    (line,) = said("plan", path)
    assert says in line
    path.write_text(GOOD.replace("{rank: 1}", target).replace("--nproc-per-node 2", "--nproc-per-node gpu"))
    if "node:" not in target and "replica" not in target:
        assert CliRunner().invoke(cli, ["validate", str(path)]).exit_code == 0


FILES = {
    "scenario.yaml": GOOD,
    "gate.yaml": "gate: g\nscenarios: [scenario.yaml]\nmax_age: 1d\nenvironments: {ci: {}}\n",
    "unnamed-gate.yaml": "scenarios: [scenario.yaml]\nmax_age: 1d\nenvironments: {ci: {}}\n",
    "day.yaml": GOOD[GOOD.index("job:") : GOOD.index("faults:")].replace("{run}/checkpoints", "{day}/checkpoints")
    + "gameday: d\nduration: 1h\narrivals: {every: 10m}\nfaults: [{inject: process.kill}]\n",
    "pod.yaml": "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n",
    "ci.yml": "name: ci\non: [push]\njobs: {a: {runs-on: x}}\n",
    "junit.xml": '<?xml version="1.0"?>\n<testsuites><testsuite name="kill"/></testsuites>\n',
    "list.yaml": "- a\n",
    "results.json": '{"schema": 1, "results": []}',
    "empty.yaml": "",
    "binary.yaml": "\x7fELF\0\0\0\0",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["run", "plan", "explore", "gate", "gameday", "validate", "explain", "judge",
                                     "report", "events", "repro", "shrink"])  # fmt: skip
def test_a_file_of_another_kind_is_one_sentence(command: str, name: str, tmp_path: Path) -> None:
    """It says what the file is, or is not, and what to do."""
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    own = {"run": "scenario.yaml", "plan": "scenario.yaml", "explore": "scenario.yaml", "gate": "gate.yaml",
           "gameday": "day.yaml"}  # fmt: skip
    meant = [*own.values()] if command == "validate" else [own.get(command)]
    if name in meant or (name == "unnamed-gate.yaml" and command in ("gate", "validate")):
        return
    (line,) = said(command, tmp_path / name)
    assert line.startswith(f"{tmp_path / name}:")
    assert re.search(r"this is|is empty", line), line
    kind = {"scenario.yaml": "a scenario", "gate.yaml": "a gate", "day.yaml": "a game day"}.get(name)
    if kind and command in own:
        assert f"this is {kind}; use `torchaos " in line


def test_a_missing_folder_is_told_as_such(tmp_path: Path) -> None:
    """Not the script in it, and not the command."""
    path = tmp_path / "a.yaml"
    path.write_text("scenario: a\njob: {command: torchrun train.py, cwd: ../nothere}\nassert: [completed]\n")
    assert any(f"{tmp_path.parent / 'nothere'}: there is no such folder; correct job.cwd" in line
               for line in said("validate", path))  # fmt: skip
