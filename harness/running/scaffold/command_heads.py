"""The programs that may stand before a training script in a command line, and their options."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

SHORT = {  # of srun and sbatch (their man pages)
    "-N": "nodes", "-n": "ntasks", "-p": "partition", "-A": "account", "-q": "qos", "-t": "time", "-J": "job-name",
    "-o": "output", "-e": "error", "-i": "input", "-c": "cpus-per-task", "-C": "constraint", "-w": "nodelist",
    "-x": "exclude", "-G": "gpus", "-D": "chdir", "-a": "array", "-d": "dependency", "-m": "distribution",
}  # fmt: skip
_SWITCHES = (  # of srun and sbatch; all other options have a value
    "exclusive", "label", "unbuffered", "overlap", "exact", "kill-on-bad-exit", "requeue", "no-requeue", "no-kill",
    "overcommit", "oversubscribe", "pty", "verbose", "quiet", "wait-all-nodes", "container-writable", "parsable",
    "no-container-mount-home", "container-mount-home", "container-remap-root", "no-container-entrypoint", "hold",
    "wait",
)  # fmt: skip
_SHORT_SWITCHES = ("-l", "-u", "-K", "-O", "-s", "-v", "-Q", "-W", "-H", "-k", "-X")
_RANKS = ("torchrun", "accelerate", "deepspeed")
_PYTHON = re.compile(r"(.*/)?python(\d(\.\d+)?)?")


def first_program(words: Sequence[str]) -> str:
    return words[0].rpartition("/")[2] if words else ""


def is_python(word: str) -> bool:
    return bool(_PYTHON.fullmatch(word))


def is_start(words: Sequence[str]) -> int:
    """How surely a line starts the job: 3: it has a launcher of ranks; 2: it is a step of Slurm; 1: it runs a script of
    Python; 0: it does not start it."""
    text = " ".join(words)
    runs = re.search(r"\S\.py\b|(?<!\S)-m +(?!pip|venv|ensurepip)[\w.]+|\.sh\b", text)
    if re.search(r"(^|[\s/'\"])(torchrun|deepspeed)\s|torch\.distributed\.(run|launch)\b|accelerate\s+launch", text):
        return 3 if first_program(words) not in ("echo", "which", "printf") else 0
    if first_program(words) in ("srun", "mpirun", "mpiexec", "prun"):
        return 2 if runs or re.search(r"container-image|apptainer|singularity|enroot", text) else 0
    known = is_python(words[0]) or first_program(words) in ("apptainer", "singularity", "enroot", "docker", "podman")
    return 1 if known and runs else 0


def slurm_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options of srun or sbatch by their long names, and the words after them."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not name.startswith("--"):
            name, value, equals = word[:2], word[2:], word[2:]
            if name in _SHORT_SWITCHES:
                continue
            value = value.removeprefix("=")
        long = SHORT.get(name, name.lstrip("-"))
        if not equals and long not in _SWITCHES and rest:
            value = rest.pop(0)
        found[long] = value
    return found, rest


def options_before_script(words: Sequence[str], switches: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """The options of a launcher by their names with `_`, and the words from the script on. `switches`: its options
    without a value."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in ("m", "module"):
            return {**found, "module": ""}, rest
        if not equals and name not in switches and rest:
            value = rest.pop(0)
        found[name] = value
    return found, rest


def with_option(words: Sequence[str], begin: int, end: int, name: str, value: str) -> list[str]:
    """The words with the option `--name value` in the part from `begin` to `end`: in the place of each spelling of it,
    or at the beginning."""
    found, replaced, at = list(words[:begin]), False, begin
    while at < end:
        option, equals, _ = words[at].partition("=")
        if option.startswith("--") and option[2:].replace("_", "-") == name:
            at += 1 if equals else 2
            found += [] if replaced else [f"--{name}", value]
            replaced = True
        else:
            found.append(words[at])
            at += 1
    whole = [*found, *words[end:]]
    return whole if replaced else [*words[:begin], f"--{name}", value, *words[begin:]]


def without_options(
    words: Sequence[str], begin: int, end: int, names: Mapping[str, bool]
) -> tuple[list[str], list[str]]:
    """The words without these options (with `-`) in the part from `begin` to `end`, and what was left out. `names`:
    whether each has a value."""
    found, dropped, at = list(words[:begin]), [], begin
    while at < end:
        option, equals, _ = words[at].partition("=")
        name = option[2:].replace("_", "-") if option.startswith("--") else ""
        if name in names:
            count = 2 if names[name] and not equals else 1
            dropped.append(" ".join(words[at : at + count]))
            at += count
        else:
            found.append(words[at])
            at += 1
    return [*found, *words[end:]], dropped
