"""The launchers that torchrun replaces in a command line: accelerate, deepspeed, composer, MPI's, and Python alone.
Their numbers and settings go to the `Launch`, as far as torchrun or the environment of the job has a place for them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from torchaos.harness.interfaces import UsageError
from torchaos.harness.running.scaffold.batch_script import first_program, is_python, options_before_script

_ACCELERATE_SWITCHES = (
    "multi_gpu", "cpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config", "no_python", "quiet",
    "q", "debug", "tpu", "use_xpu", "dynamo_use_dynamic", "dynamo_use_fullgraph", "same_network", "enable_cpu_affinity",
)  # fmt: skip
_ACCELERATE_ENV = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION", "gpu_ids": "CUDA_VISIBLE_DEVICES",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}  # fmt: skip
_ACCELERATE_OWN = (  # settings that are not needed in torchrun's line
    *_ACCELERATE_ENV, "num_processes", "num_machines", "multi_gpu", "machine_rank", "main_process_ip", "quiet", "q",
    "main_process_port", "rdzv_backend", "rdzv_conf", "config_file", "max_restarts", "same_network", "module", "cpu",
    "compute_environment", "distributed_type", "main_training_function", "use_cpu", "downcast_bf16", "debug",
    "deepspeed_multinode_launcher", "tpu_env", "tpu_use_cluster", "tpu_use_sudo", "enable_cpu_affinity",
)  # fmt: skip
_DEEPSPEED_SWITCHES = ("no_python", "no_local_rank", "force_multi", "bind_cores_to_rank", "elastic_training")
_LAUNCHERS = ("torchrun", "accelerate", "accelerate-launch", "deepspeed", "composer")


@dataclass
class Launch:
    """A command line on its way to torchrun's. `nodes`: 0 if the line gives no number. `per_node`: ranks on each node,
    if a launcher other than torchrun gives the number. `written`: files that the batch script itself writes, by
    name."""

    words: list[str]
    cwd: Path
    env: Mapping[str, str]  # the user's environment
    head: list[str] = field(default_factory=list)  # programs before the launcher, which are kept: `uv run`, `nice -n 5`
    launcher: str = "local"
    nodes: int = 0
    per_node: int | None = None
    gpus: int | None = None  # of each node, which Slurm gives
    tasks: int = 1  # of srun on each node
    folder: str = ""  # the folder in which the command runs, if a script changes it
    written: Mapping[str, str] = field(default_factory=dict)
    adds: dict[str, str] = field(default_factory=dict)  # variables to add to the environment of the job
    allocation: list[str] = field(default_factory=list)  # variables of salloc
    assumed: list[str] = field(default_factory=list)
    to_check: list[str] = field(default_factory=list)


def starts(word: str) -> bool:
    """Whether the word is a launcher of ranks, Python or a script of it."""
    return first_program([word]) in _LAUNCHERS or is_python(word) or word.endswith(".py")


def accelerate(launch: Launch) -> None:
    program = first_program(launch.words)
    begin = {"accelerate": 2, "accelerate-launch": 1}.get(program, 3)
    if program == "accelerate" and launch.words[1:2] != ["launch"]:
        raise UsageError(f"{shlex.join(launch.words)}: it starts no job; write accelerate launch")
    options, rest = options_before_script(launch.words[begin:], _ACCELERATE_SWITCHES)
    given = {**_settings(launch, options.get("config_file") or _default_settings(launch.env)), **options}
    nodes = number(given.get("num_machines")) or 1
    total = number(given.get("num_processes"))
    launch.nodes = launch.nodes or (nodes if nodes > 1 else 0)
    launch.per_node = max(1, total // nodes) if total else launch.per_node or launch.gpus or _ranks_for_all_gpus(launch)
    for option, variable in _ACCELERATE_ENV.items():
        if given.get(option, "all") not in ("all", "no", ""):
            launch.adds[variable] = given[option]
    if "cpu" in options or given.get("use_cpu", "").lower() == "true":
        launch.adds["ACCELERATE_USE_CPU"] = "true"
    left = [name for name in given if name not in _ACCELERATE_OWN and given[name] not in ("no", "false", "False")]
    left += [name for name in ("distributed_type",) if given.get(name) in ("FSDP", "DEEPSPEED", "MEGATRON_LM")]
    if left:
        launch.to_check.append(
            f"accelerate's {', '.join(sorted(left))} is not in torchrun's line; the script must set it itself, or a "
            "variable in job.env"
        )
    own = ["--max-restarts", given["max_restarts"]] if number(given.get("max_restarts")) is not None else []
    launch.words = ["torchrun", *own, *(["-m"] if "module" in options else []), *rest]


def _ranks_for_all_gpus(launch: Launch) -> int:
    """The number of ranks if the command does not give it: a launcher would start one on each GPU."""
    launch.to_check.append(f"{first_program(launch.words)} would start a rank on each GPU; the draft has 2 ranks")
    return 2


def _default_settings(env: Mapping[str, str]) -> str | None:
    """The file that `accelerate config` writes, if there is one."""
    cache = Path(env["HF_HOME"]) if "HF_HOME" in env else Path(env.get("HOME", "/nonexistent"), ".cache/huggingface")
    file = cache / "accelerate" / "default_config.yaml"
    return str(file) if file.is_file() else None


def _settings(launch: Launch, file: str | None) -> dict[str, str]:
    """The settings in accelerate's configuration file."""
    if not file:
        return {}
    try:
        found = yaml.safe_load((launch.cwd / file).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        launch.to_check.append(f"{file} could not be read, so the settings of accelerate in it are left out")
        return {}
    settings = found if isinstance(found, dict) else {}
    return {str(name): str(value) for name, value in settings.items() if value not in (None, {}, False)}


def deepspeed(launch: Launch) -> None:
    begin = 1 if first_program(launch.words) == "deepspeed" else 3
    options, rest = options_before_script(launch.words[begin:], _DEEPSPEED_SWITCHES)
    where = options.get("include") or options.get("i") or ""
    launch.nodes = launch.nodes or (len(where.split("@")) if "@" in where else 0)
    chosen = where.rpartition(":")[2] if ":" in where else ""
    if chosen:
        launch.adds["CUDA_VISIBLE_DEVICES"] = chosen
    slots = _slots(launch, options.get("hostfile") or options.get("H"))
    of_hosts = next(iter(slots.values()), None)
    asked = number(options.get("num_gpus")) or (len(chosen.split(",")) if chosen else launch.gpus or of_hosts)
    launch.per_node = asked or _ranks_for_all_gpus(launch)
    launch.nodes = launch.nodes or number(options.get("num_nodes")) or (len(slots) if len(slots) > 1 else 0)
    if "no_local_rank" not in options:
        launch.to_check.append("deepspeed gives the script --local_rank, and torchrun only the variable LOCAL_RANK")
    launch.words = ["torchrun", *(["-m"] if "module" in options else []), *rest]


def _slots(launch: Launch, file: str | None) -> dict[str, int]:
    """The hosts in deepspeed's hostfile, and how many ranks each gets: lines `host slots=8`."""
    if not file:
        return {}
    try:
        text = (launch.cwd / file).read_text()
    except (OSError, ValueError):
        launch.to_check.append(f"deepspeed's hostfile {file} could not be read, so that its numbers are left out")
        return {}
    return {host: int(count) for host, count in re.findall(r"^\s*([^#\s]\S*)\s+slots=(\d+)", text, re.M)}


def composer(launch: Launch) -> None:
    options, rest = options_before_script(launch.words[1:], ("verbose", "v"))
    launch.per_node = number(options.get("nproc") or options.get("n")) or launch.gpus
    launch.words = ["torchrun", *(["-m"] if "module" in options else []), *rest]


def mpirun(launch: Launch) -> None:
    at = next((n for n, word in enumerate(launch.words) if starts(word)), None)
    if at is None:
        raise UsageError(f"{launch.words[0]}: it starts no script of Python; write the command line with torchrun")
    if first_program(launch.words[at:]) in _LAUNCHERS:  # it starts one launcher on each node
        launch.words = launch.words[at:]
        return
    own = " ".join(launch.words[:at])
    count = re.search(r"(?<!\S)-{1,2}(?:np|n|c)[ =](\d+)", own)
    per_node = re.search(r"(?<!\S)-{1,2}(?:ppn|npernode|N)[ =](\d+)|\bppr:(\d+):node", own)
    hosts = re.search(r"(?<!\S)(?:-H|-hosts?|--hosts?)[ =](\S+)", own)
    launch.nodes = launch.nodes or (len({host.partition(":")[0] for host in hosts[1].split(",")}) if hosts else 0)
    if count and per_node:
        launch.nodes = max(1, int(count[1]) // int(per_node[1] or per_node[2]))
    launch.per_node = max(1, int(count[1]) // (launch.nodes or 1)) if count else launch.per_node
    launch.adds |= dict(re.findall(r"(?<!\S)-(?:x |g?env |-env[ =])(\w+)[ =](?!-)(\S+)", own))
    launch.to_check.append(
        f"{launch.words[0]} sets other variables than torchrun; the script must read RANK and WORLD_SIZE"
    )
    launch.words = launch.words[at:]


def python(launch: Launch) -> None:
    """A Python script without a launcher. torchrun replaces Python, unless Python runs torchrun."""
    rest = launch.words[1:] if is_python(launch.words[0]) else launch.words
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
    if rest[:1] == ["-m"] and rest[1:2] and rest[1].startswith("torch.distributed."):
        return
    if rest[:1] == ["-m"] or (rest and rest[0].endswith(".py")):
        launch.words = ["torchrun", *rest]
        launch.per_node = launch.per_node or launch.gpus or (launch.tasks if launch.tasks > 1 else 2)


def number(word: str | None) -> int | None:
    return int(word) if word and word.isdecimal() else None
