"""Options that several commands have mean the same in all of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from recorded import judged, recorded

from torchaos.harness.cli import cli
from torchaos.harness.cli.commands import ALL
from torchaos.harness.interfaces import UsageError

RUN_JOBS = {"run", "init", "explore", "gameday", "gate", "shrink", "bisect"}


def options_of(name: str) -> dict[str, click.Option]:
    command = cli.get_command(click.Context(cli), name)
    assert command
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    return {word: one for one in options for word in one.opts}


@pytest.mark.parametrize("name", ALL)
def test_an_option_means_the_same_everywhere(name: str) -> None:
    """Its values, its short name and its text; -o is --output, which names a file, and --out names a folder. A command
    that gives verdicts writes JUnit and a summary. All but exec accept -q; those that run jobs describe it."""
    found = options_of(name)
    if "--json" in found:
        assert found["--json"].flag_value == "-"
    if "--junit" in found:
        assert "--summary" in found
    assert ("--quiet" in found) == (name in RUN_JOBS)
    if name != "exec":  # its words are those of another command
        with pytest.raises(click.UsageError, match=r"No such option.*--nothing"):
            CliRunner().invoke(cli, [name, "-q", "--nothing"], standalone_mode=False, catch_exceptions=False)
    assert found.get("-o") is found.get("--output")
    if "--output" in found:
        assert found["--output"].metavar == "FILE"
    if "--out" in found:
        assert "folder" in (found["--out"].help or "").lower()


def test_the_rule_is_written_once() -> None:
    """docs/reference.md has a row for each of these options, with the commands that have it; each command's own help
    says the same words."""
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    rows = dict(re.findall(r"^\| `(-[^`]*)` \| .* \| (.*) \|$", page, re.MULTILINE))
    assert rows.keys() == {
        "--json [FILE.json]",
        "-q",
        "-v",
        "-o FILE",
        "--out FOLDER",
        "--junit FILE",
        "--summary FILE",
    }
    shown = {name: options_of(name) for name in ALL}
    for row, commands in rows.items():
        option = row.split()[0]
        having = {name for name in ALL if option in shown[name]}
        assert {*re.findall(r"[a-z]+", commands.replace("all but exec; it has an effect in", ""))} == having, option
        if option not in ("-o", "--out"):  # they say what is written there
            assert len({shown[name][option].help for name in having}) == 1


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = recorded(tmp_path / "kill")
    judged(folder)
    return folder.root


def test_json_is_all_of_the_output(run_dir: Path, tmp_path: Path) -> None:
    """Without a file, standard output has the JSON and nothing else; the text goes to standard error. With a file, the
    text is where it always is. The exit code is the same."""
    text = CliRunner().invoke(cli, ["judge", str(run_dir)])
    alone = CliRunner().invoke(cli, ["judge", str(run_dir), "--json"])
    file = tmp_path / "all.json"
    beside = CliRunner().invoke(cli, ["judge", str(run_dir), "--json", str(file)])
    assert json.loads(alone.stdout) == json.loads(file.read_text())
    assert (alone.stderr, beside.stdout) == (text.stdout, text.stdout)
    assert text.exit_code == alone.exit_code == beside.exit_code
    assert json.loads(alone.stdout)["results"][0]["exit_code"] == text.exit_code


LOOKING = {
    "validate": ["kill.yaml"], "plan": ["kill.yaml"], "explain": ["RUN"], "judge": ["RUN"], "compare": ["RUN", "RUN"],
    "history": ["--out", "RUNS"], "diagnose": ["dumps"], "verify": ["dumps"], "doctor": [], "list": ["assertions"],
    "status": [], "gate": ["gate.yaml", "RUNS"], "gameday": ["day.yaml", "--plan"],
}  # fmt: skip
DAY = "gameday: d\nduration: 1h\narrivals: {every: 10m}\nfaults: [{inject: process.kill, target: {rank: any}}]\n"
GATE = "gate: g\nscenarios: [kill.yaml]\nmax_age: 99999d\nenvironments: {ci: {}}\n"


def test_every_command_with_json_is_tried() -> None:
    """All but those that start jobs."""
    assert {name for name in ALL if "--json" in options_of(name)} == {*LOOKING, "run", "explore"}


@pytest.mark.parametrize("command", LOOKING)
def test_json_is_one_document(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:  # fmt: skip
    """Before the other words or after them, it is all of the output; in a file, it is beside the text; -q changes
    neither; the exit code is the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    text = "scenario: kill\njob: {command: torchrun --nproc-per-node 2 train.py}\nassert: [completed]\n"
    job = "job: {command: torchrun --nproc-per-node 2 train.py, world_size: 2}\n"
    files = {"kill.yaml": text, "day.yaml": DAY + job, "gate.yaml": GATE, "train.py": "", "dumps/x.txt": ""}
    for name, one in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(one)
    if command == "diagnose":
        shutil.copytree(Path(__file__).parents[1] / "diagnosis/data/lock_gil_1st", "dumps", dirs_exist_ok=True)
    words = [{"RUN": str(run_dir), "RUNS": str(run_dir.parent)}.get(word, word) for word in LOOKING[command]]

    def call(*given: str) -> Result:
        return CliRunner().invoke(cli, [command, *given], catch_exceptions=False)

    plain, last, first = call(*words), call(*words, "--json"), call("--json", *words)
    beside, quiet = call(*words, "--json", "all.json"), call(*words, "-q")
    assert [one.exit_code for one in (last, first, beside, quiet)] == [plain.exit_code] * 4
    found = [json.loads(text) for text in (last.stdout, first.stdout, Path("all.json").read_text())]
    assert len({str(type(one)) for one in found}) == 1
    assert beside.stdout.split() == plain.stdout.split() == quiet.stdout.split() != []


@pytest.mark.parametrize("command", ["explain", "plan"])
def test_json_of_several_is_a_list(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Two objects, one after the other, would be no JSON."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    file = tmp_path / "kill.yaml"
    file.write_text("scenario: kill\njob: {command: torchrun --nproc-per-node 2 train.py}\nassert: [completed]\n")
    word = str(run_dir if command == "explain" else file)
    one, two = (CliRunner().invoke(cli, [command, *words, "--json"]).stdout for words in ([word], [word, word]))
    assert json.loads(two) == [json.loads(one)] * 2


@pytest.mark.parametrize("command", ["judge", "run", "explore", "gate", "validate", "verify"])
def test_json_never_writes_over_what_is_meant_to_be_read(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Neither a file of torchaos nor a folder; a word that does not end in .json is none of --json's."""
    monkeypatch.chdir(tmp_path)
    file = Path("kill.json")
    file.write_text('{"scenario": "kill", "job": {"command": "torchrun"}, "assert": ["completed"]}')
    before = file.read_bytes()
    for words in (["--json", str(file)], [f"--json={run_dir}"]):
        with pytest.raises(UsageError, match="it would be written over; to print the JSON, write --json as the last"):
            CliRunner().invoke(cli, [command, *words, str(file)], catch_exceptions=False)
    assert file.read_bytes() == before


def test_a_summary_of_what_is_judged_again(run_dir: Path, tmp_path: Path) -> None:
    """As after the run."""
    CliRunner().invoke(cli, ["judge", str(run_dir), "--summary", str(tmp_path / "again.md")])
    CliRunner().invoke(cli, ["report", str(run_dir), "--summary", str(tmp_path / "report.md")])
    assert (tmp_path / "again.md").read_text() == (tmp_path / "report.md").read_text() != ""


def test_an_option_without_effect_is_refused() -> None:
    """Calls are timed only while the kernel is watched."""
    with pytest.raises(UsageError, match="give --kernel SECONDS too"):
        CliRunner().invoke(cli, ["diagnose", "--pid", "1", "--function", "libc:write"], catch_exceptions=False)
