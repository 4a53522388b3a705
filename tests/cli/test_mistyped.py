"""Words that are mistyped, options of things that are not there: one clear error each, with exit code 3."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from recorded import recorded

from torchaos.harness import cli as package

SCENARIO = """\
scenario: kill
job: {command: torchrun --nproc-per-node 2 train.py}
faults: [{inject: process.kill, target: {rank: 1}, when: {step: 18}}]
assert: [completed]
"""
CASES = {
    "validte kill.yaml": "there is no command 'validte'; did you mean 'validate'? see `torchaos --help`",
    "xyz": "there is no command 'xyz'; see `torchaos --help`",
    "run --sed 1 kill.yaml": "there is no option '--sed'; did you mean '--seed' or '--set'?",
    "run --jnit x kill.yaml": "there is no option '--jnit'; did you mean '--json' or '--junit' or '--quiet'? see",
    "explain nosuch": "nosuch: No such file or directory; give a run directory, or latest",
    "plan kill.yaml --seed -1": "'--seed': -1 must be at least 0",
    "plan kill.yaml --seed x": "'--seed': 'x' is not a number",
    "explore kill.yaml --states 0": "'--states': 0 must be at least 1",
    "explore kill.yaml --minutes 0": "'--minutes': 0.0 must be more than 0",
    "run kill.yaml --rate 2": "'--rate': 2.0 must be between 0 and 1",
    "plan EMPTY": "a name is empty; give a file",
    "plan kill.yaml --set faults.0.target.rank=7": "there is no rank 7; the job has 2, counted from 0",
    "validate kill.yaml --set faults.0.target.rank=7": "there is no rank 7; the job has 2, counted from 0",
    "plan kill.yaml --set faults.7.target.rank=1": "the scenario has no place for it",
    "plan kill.yaml --set faults.0.when.step=-3": "step is at least 1, not -3",
    "plan kill.yaml --set seed=-1": "seed is at least 0, not -1",
    "plan kill.yaml --set faults.0.inject=acme.melt": "list injectors` shows, or install the plug-in that has it for /",
    "plan kill.yaml --set assert.0=acme_quiet": "list assertions` shows, or install the plug-in that has it for /",
    "validate kill.yaml --set launcher=slurm --set job.command=srun": "launcher: slurm itself starts the command",
    "report RUN --ranks 9": "--ranks: there is no rank 9; the job has 2, counted from 0",
    "report RUN --ranks 3-1": "'3-1' has a range without ranks",
}  # fmt: skip


@pytest.mark.parametrize("words", CASES)
def test_one_clear_error(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that names what is wrong and, where it can, what was meant."""
    monkeypatch.chdir(tmp_path)
    Path("kill.yaml").write_text(SCENARIO)
    Path("train.py").touch()
    special = {"EMPTY": "", "RUN": str(recorded(tmp_path / "run").root) if "RUN" in words else ""}
    monkeypatch.setattr(sys, "argv", ["torchaos", *(special.get(word, word) for word in words.split(" "))])
    monkeypatch.setattr("atexit.register", lambda _: None)
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        package.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert CASES[words] in line
    assert ended.value.code == 3
