"""The templates that users copy: they are well-formed, torchaos accepts their commands, and their scripts run. The
parts of CI systems that they call (runners, plugins, schedulers) are not tested."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from torchaos.harness.cli import cli

from .conftest import LEFT_OUT, PIP, REPOSITORY, run

TEMPLATES = REPOSITORY / "ci" / "templates"
GITHUB, GITLAB, JENKINS = (TEMPLATES / name for name in ("github-actions.yml", "gitlab-ci.yml", "Jenkinsfile"))
SLURM, KUBERNETES, CONTAINER = (
    TEMPLATES / name for name in ("slurm-gameday.sbatch", "kubernetes-cronjob.yaml", "Containerfile")
)
GATE = TEMPLATES / "release-gate"
TOOLS = Path(sys.executable).parent


def read(path: Path) -> Any:
    """GitHub's key `on` is a boolean in YAML 1.1, which PyYAML reads; no key of ours is one."""
    return yaml.safe_load(path.read_text().replace("\non:", '\n"on":'))


def scripts() -> Iterator[tuple[str, str]]:
    """Each shell script in a template, with its place."""
    for name, job in read(GITHUB)["jobs"].items():
        for number, step in enumerate(job["steps"]):
            if "run" in step:
                yield f"{GITHUB.name}:{name}:{number}", step["run"]
    for name, job in read(GITLAB).items():
        for part in ("before_script", "script"):
            if isinstance(job, dict) and part in job:
                yield f"{GITLAB.name}:{name}:{part}", "\n".join(job[part])
    for number, text in enumerate(re.findall(r"'''(.*?)'''|\bsh '([^']+)'", JENKINS.read_text(), re.DOTALL)):
        yield f"{JENKINS.name}:{number}", "".join(text)
    yield SLURM.name, SLURM.read_text()
    for container in read(KUBERNETES)["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]:
        yield KUBERNETES.name, shlex.join(container["command"])
    *_, (_, command) = instructions()
    yield CONTAINER.name, shlex.join(json.loads(command))


def instructions() -> list[tuple[str, str]]:
    """Those of the container file, each with its text; lines that go on are one, and comments are none."""
    lines = [line for line in CONTAINER.read_text().splitlines() if line and not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", "")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole.splitlines())]


SCRIPTS = dict(scripts())
_END = {"&", "&&", "||", "|", ";", ">", ">>", ")"}


def commands(script: str) -> Iterator[list[str]]:
    """The words of each call of torchaos."""
    for line in script.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words = list(lexer)
        for at, word in enumerate(words):
            if Path(word).name == "torchaos" and (at == 0 or words[at - 1] in {*_END, "("}):
                rest = words[at + 1 :]
                yield rest[: next((end for end, one in enumerate(rest) if one in _END), len(rest))]


def test_every_template_calls_torchaos() -> None:
    """What the next test reads is there: a call of the gate, of run and of gameday among them."""
    found = {words[0] for script in SCRIPTS.values() for words in commands(script)}
    assert found == {"doctor", "run", "gate", "recover", "gameday"}


@pytest.mark.parametrize("place", SCRIPTS)
def test_torchaos_takes_its_commands(place: str) -> None:
    """Each `torchaos ...` in a template is a command with options that there are."""
    for words in commands(SCRIPTS[place]):
        command = cli.get_command(click.Context(cli), words[0])
        assert command is not None, words
        command.make_context(words[0], words[1:])  # raises where an option is unknown, or a value does not fit


@pytest.mark.needs("shellcheck")
@pytest.mark.parametrize("place", SCRIPTS)
def test_scripts_are_sound(place: str) -> None:
    """ShellCheck finds nothing in any script; what it is told of is what the CI system does before it."""
    script = SCRIPTS[place]
    head = "" if script.startswith("#!") else "#!/bin/bash\n"
    shown = re.sub(r"\$\{\{.*?\}\}", "value", head + script)
    done = subprocess.run([TOOLS / "shellcheck", "-"], input=shown, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.needs("check-jsonschema")
@pytest.mark.parametrize(("path", "options"), [
    (GITHUB, ["--builtin-schema", "vendor.github-workflows"]),
    (GITLAB, ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
])  # fmt: skip
def test_pipelines_fit_their_schema(path: Path, options: list[str], tmp_path: Path) -> None:
    """The schema of the CI system, which check-jsonschema holds; a misspelt key is refused by it."""
    run(TOOLS / "check-jsonschema", *options, path, cwd=tmp_path)
    broken = tmp_path / path.name
    broken.write_text(
        path.read_text().replace("\n    runs-on:", "\n    runs-at:").replace("\n  script:", "\n  skript:")
    )
    done = subprocess.run([TOOLS / "check-jsonschema", *options, broken], capture_output=True, check=False)
    assert done.returncode == 1


def test_the_cron_job_fits_kubernetes() -> None:
    """Every field is one that the API of Kubernetes has, with its type."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    kubernetes_validate.validate(read(KUBERNETES), "1.31", strict=True)
    broken = read(KUBERNETES)
    broken["spec"]["jobTemplate"]["spec"]["backOffLimit"] = 0
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_the_jenkinsfile_is_groovy() -> None:
    """It parses; with a brace less it does not. Whether Jenkins knows its steps is not checked."""
    tree_sitter, tree_sitter_groovy = map(pytest.importorskip, ("tree_sitter", "tree_sitter_groovy"))

    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_groovy.language()))
    text = JENKINS.read_bytes()
    assert not parser.parse(text).root_node.has_error
    assert parser.parse(text.replace(b"}", b"", 1)).root_node.has_error


@pytest.mark.needs("hadolint")
def test_the_container_file_is_sound(tmp_path: Path) -> None:
    """Hadolint finds nothing in it but what it says itself why."""
    run(TOOLS / "hadolint", CONTAINER, cwd=tmp_path)


def test_the_container_gets_what_it_copies() -> None:
    """Each path that is copied is there, and is let into the build; nothing else is."""
    let_in = {line[1:] for line in (TEMPLATES / "Containerfile.dockerignore").read_text().split() if line[0] == "!"}
    copied = [rest.split() for word, rest in instructions() if word == "COPY" and not rest.startswith("--from")]
    sources = {source for words in copied for source in words[:-1]}
    assert sources == let_in
    assert all((REPOSITORY / source).exists() for source in sources)


class Stub:
    """Programs that stand in for those of a cluster: each call is a line of `calls`."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.calls = folder / "bin", folder / "calls"
        self.bin.mkdir()

    def program(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.calls}\n{script}\n')
        path.chmod(0o755)

    def start(self, script: Path, **env: str) -> subprocess.Popen[str]:
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return subprocess.Popen(
            ["bash", script], env={**os.environ, "PATH": path, **env}, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip


@pytest.mark.parametrize("code", [0, 1, 2, 4])
def test_a_night_ends_as_its_game_day(tmp_path: Path, code: int) -> None:
    """The batch script ends with the exit code of the game day, once the next night is in the queue."""
    stub = Stub(tmp_path)
    stub.program("sbatch", "")
    stub.program("torchaos", f'[ "$1" = recover ] && exit 0; exit {code}')
    process = stub.start(SLURM, TORCHAOS_HOME=str(tmp_path / "home"), TORCHAOS_STATE=str(tmp_path / "state"))
    said, _ = process.communicate(timeout=300)
    assert process.returncode == code, said
    queued, recovered, day = stub.calls.read_text().splitlines()
    assert re.match(r"sbatch --begin=\d{4}-\d\d-\d\dT22:00 .*slurm-gameday.sbatch", queued)
    assert (recovered, day) == (
        "torchaos recover",
        f"torchaos gameday {tmp_path}/home/night.yaml --out {tmp_path}/home/days",
    )


def test_a_night_that_is_cut_short_is_waited_for(tmp_path: Path) -> None:
    """Slurm's signal goes on to the game day, and the script ends when that has, with its code, not at once."""
    stub, up = Stub(tmp_path), tmp_path / "up"
    os.mkfifo(up)
    work = "sleep 60 & work=$!; trap 'kill $work; sleep 0.3; echo taken back; exit 2' TERM"
    stub.program("torchaos", f'[ "$1" = recover ] && exit 0; {work}; echo > {up}; wait; exit 0')
    env = {"TORCHAOS_HOME": str(tmp_path / "home"), "TORCHAOS_STATE": str(tmp_path / "state"), "TORCHAOS_ONCE": "1"}
    process = stub.start(SLURM, **env)
    up.read_text()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 2, said
    assert "taken back" in said


def test_a_node_that_is_not_as_it_was_gets_no_game_day(tmp_path: Path) -> None:
    """Where `torchaos recover` can't take everything back, the night ends with exit code 4 before anything starts."""
    stub = Stub(tmp_path)
    stub.program("torchaos", "exit 4")
    process = stub.start(SLURM, TORCHAOS_HOME=str(tmp_path / "home"), TORCHAOS_ONCE="1")
    process.communicate(timeout=300)
    assert process.returncode == 4
    assert stub.calls.read_text() == "torchaos recover\n"


@pytest.mark.job
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_github_jobs_run(tmp_path: Path) -> None:
    """The steps of both jobs, as they stand, in a repository with the example: three scenarios run, each on a checkout
    of its own, and the gate opens on their artifacts; with one artifact less it closes."""
    repository = tmp_path / "repository"
    shutil.copytree(GATE, repository / "chaos")
    git = ["git", "-c", "user.name=ci", "-c", "user.email=ci@localhost"]
    run("git", "init", "-q", cwd=repository)
    run("git", "add", ".", cwd=repository)
    run(*git, "commit", "-q", "-m", "The release", cwd=repository)
    jobs = read(GITHUB)["jobs"]
    env = {
        **os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "GITHUB_SHA": run("git", "rev-parse", "HEAD", cwd=repository).strip(),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
    }  # fmt: skip
    artifacts = tmp_path / "gate" / "artifacts"
    for name in jobs["scenario"]["strategy"]["matrix"]["scenario"]:
        checkout = tmp_path / name
        run("git", "clone", "-q", repository, checkout, cwd=tmp_path)
        _steps(jobs["scenario"], checkout, {**env, "SCENARIO": name})
        left_out = shutil.ignore_patterns("job")
        shutil.copytree(checkout / "torchaos-runs", artifacts / f"run-{name}" / "torchaos-runs", ignore=left_out)
    shutil.copytree(repository / "chaos", tmp_path / "gate" / "chaos")
    _steps(jobs["gate"], tmp_path / "gate", env)
    assert "OPEN" in (tmp_path / "summary").read_text()
    shutil.rmtree(artifacts / f"run-{name}")
    with pytest.raises(AssertionError, match="there is no run of it"):
        _steps(jobs["gate"], tmp_path / "gate", env)


def _steps(job: dict[str, Any], cwd: Path, env: dict[str, str]) -> None:
    """Those with a script, but for the installation, in the shell that GitHub runs them in."""
    for step in job["steps"]:
        if "run" in step and step.get("name") != "Install":
            pipefail = ["-o", "pipefail"] if step.get("shell") == "bash" else []
            run("bash", "--noprofile", "--norc", "-e", *pipefail, "-c", step["run"], cwd=cwd, env=env)


@pytest.mark.long
def test_the_container_holds_all_of_torchaos(wheel: Path, tmp_path: Path) -> None:
    """The first stage, carried out here: from just what is copied, its last command makes the same wheel."""
    source = tmp_path / "src"
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            *names, to = rest.split()
            for name in names:
                target = source / to / ("" if (REPOSITORY / name).is_dir() else Path(name).name)
                target.parent.mkdir(parents=True, exist_ok=True)
                if (REPOSITORY / name).is_dir():
                    shutil.copytree(REPOSITORY / name, target, ignore=LEFT_OUT)
                else:
                    shutil.copy(REPOSITORY / name, target)
    command = next(rest for word, rest in instructions() if word == "RUN" and rest.startswith("pip wheel"))
    words = [word.replace("/wheel", str(tmp_path / "wheel")) for word in shlex.split(command)[1:]]
    run(*PIP, *words, "--no-build-isolation", cwd=source)
    (made,) = (tmp_path / "wheel").glob("*.whl")
    found, wanted = (sorted(zipfile.ZipFile(path).namelist()) for path in (made, wheel))
    assert found == wanted


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_container_can_be_installed(wheel: Path, tmp_path: Path) -> None:
    """The last command of the second stage, carried out in a fresh environment with a package index, less torch: the
    versions that are pinned can be had together, and torchaos starts."""
    probe = subprocess.run([*PIP, "download", "--no-deps", "-d", tmp_path, "click"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("needs a package index")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    (tmp_path / "tmp" / "wheel").mkdir(parents=True)
    shutil.copy(wheel, tmp_path / "tmp" / "wheel")
    shutil.copy(REPOSITORY / "ci" / "constraints.txt", tmp_path / "tmp")
    command = [rest for word, rest in instructions() if word == "RUN"][-1].replace("/tmp/", f"{tmp_path}/tmp/")
    env = {"PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}", "TORCH": "", "HOME": str(tmp_path)}
    run("sh", "-ec", command, cwd=tmp_path, env={**os.environ, **env})
    assert "gate" in run(tmp_path / "venv" / "bin" / "torchaos", "--help", cwd=tmp_path)
