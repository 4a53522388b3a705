"""The plan of a run, made before anything is done: targets, moments, parameters, needs.

A Plan is data (JSON): `run` executes it, a dry run prints it, a replay reads it again. All random choices are already
made. Each fault has its own random stream, so removing a fault changes no other.

The functions `..._in_words` describe parts of a plan for messages and reports."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from torchaos.harness.host.disk import owner_only
from torchaos.harness.interfaces import Need, Target, Where
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.record.redaction import mask_env, mask_words

Shape = TypeVar("Shape")

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def read_as(shape: type[Shape], text: bytes | str) -> Shape:
    """Reads the dataclass from a JSON text. Raises ValueError, on one line, if the text is not JSON, or if a value is
    missing or has another type."""
    try:
        found: Shape = _adapter(shape).validate_json(text, strict=True)
        return found
    except ValidationError as error:
        raise ValueError(_in_words(error)) from None


def made_as(shape: type[Shape], raw: Mapping[str, Any]) -> Shape:
    """Makes the dataclass from JSON that was already parsed. Less strict than `read_as`: the number 1 may be given as
    the text "1". Raises ValueError if a value is missing or has another type."""
    try:
        found: Shape = _adapter(shape).validate_python(raw)
        return found
    except ValidationError as error:
        raise ValueError(_in_words(error)) from None


def _in_words(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


# The reason why a fault was missed if its trigger had not been reached when the run ended.
ENDED_BEFORE = "the run ended before its trigger was reached"


@dataclass(frozen=True)
class After:
    """A trigger that is seen from outside the ranks: a time after the launch, or after an event of another fault."""

    delay_s: float = 0.0
    fault: str | None = None  # None: after the job's launch
    state: str = "applied"  # applied, felt, recovered, rolled_back
    checkpoints: int = 0  # the trigger also waits until this many checkpoints have been saved since
    not_before_s: float = 0.0  # with `fault`: at least so many seconds after the launch
    lethal: bool = False  # the target of that fault dies of it, at once or later
    lasting: bool = False  # that fault is undone during the run; a recovery can only come after that


@dataclass(frozen=True)
class PlannedFault:
    id: str
    inject: str
    where: Where
    target: Target
    trigger: Moment | After
    params: Mapping[str, Any]
    source: str  # the injector's file
    injector: str  # the class in that file
    duration_s: float | None = None  # undone after this long; None: when the run ends
    times: int = 1


@dataclass(frozen=True)
class PlannedJob:
    command: tuple[str, ...]  # all placeholders but `{run}` are filled in
    cwd: str
    env: Mapping[str, str]  # the variables that the scenario adds
    world_size: int
    nodes: int
    timeout_s: float
    checkpoints: str | None = None
    checkpoints_size: int | None = None  # bytes of a file system that is made at that path
    checkpoints_local: str | None = None  # the folder below that path of which each node has its own
    endpoints: Mapping[str, str] = field(default_factory=dict)  # host:port by name
    log: Mapping[str, Any] | None = None
    resubmit_times: int = 0
    resubmit_delay_s: float = 0.0
    resubmit_command: tuple[str, ...] = ()  # of all submissions but the first, if it differs
    resubmit_env: Mapping[str, str] = field(default_factory=dict)  # added in all submissions but the first
    attach_pid: int | None = None
    replicas: int = 1  # each has its own torchrun, an equal share of the ranks, and counts as a node
    busy_nodes: int = 0  # how many nodes have ranks at first (the others are standby nodes); 0: all
    settings: Mapping[str, Any] = field(default_factory=dict)  # the parameters of the launcher
    runs_already: str = ""  # in words, if the launcher attaches to a job that runs already

    @property
    def attached(self) -> str:
        """The running job that torchaos attaches to, in words. Empty if torchaos starts the job."""
        return self.runs_already if self.attach_pid is None else f"pid {self.attach_pid}"

    @property
    def per_node(self) -> int:
        """The number of ranks on a node that has ranks."""
        return max(1, self.world_size // (self.busy_nodes or self.nodes))


@dataclass(frozen=True)
class Named:
    """An assertion or a condition by name, with its parameters."""

    name: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    scenario: str
    description: str
    seed: int
    job: PlannedJob
    faults: tuple[PlannedFault, ...]
    asserts: tuple[Named, ...]
    steady_state: tuple[Named, ...] = ()
    stop: tuple[Named, ...] = ()
    until: tuple[Named, ...] = ()  # when all of them hold, the run is ended on purpose
    launcher: str = "local"
    max_ranks: int | None = None
    max_nodes: int | None = None
    max_percent: float | None = None  # of the ranks
    max_duration_s: float | None = None  # of each fault
    never_ranks: tuple[int, ...] = ()
    never_nodes: tuple[int, ...] = ()
    consent: tuple[str, ...] = ()  # to faults that can harm the host, from the scenario and the command line
    twin: Mapping[str, Any] = field(default_factory=dict)  # {"runs": the most twins}; empty: no twin is wanted
    hooks: tuple[str, ...] = ()
    collect: tuple[Need, ...] = ()  # the data that the assertions need
    needs: tuple[str, ...] = ()  # capabilities
    version: int = 1

    # Parts of the plan forbid unknown keys too, because the keys tell one kind of trigger from the other. Python 3.10
    # can't evaluate a ClassVar without its type.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    def masked(self) -> Plan:
        """The plan without the secrets in the job's command and environment, to be shown and stored. The run itself
        uses the unmasked plan."""
        job = replace(self.job, command=mask_words(self.job.command), env=mask_env(self.job.env))
        return replace(self, job=job)

    def write(self, path: Path) -> None:
        """Writes the masked plan, readable only by its owner."""
        with open(path, "w", opener=owner_only) as file:
            file.write(self.masked().to_json() + "\n")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Reads a plan. Raises OSError if there is none, ValueError if it is damaged."""
        return read_as(cls, _without_old_keys(path.read_bytes()))


_OLD_SETTINGS = ("container", "hosts", "pods", "slurm")  # these had keys of their own in the job of an older plan


def _without_old_keys(text: bytes) -> bytes | str:
    """The JSON of a plan, with the settings of the launcher at their present place."""
    if not any(f'"{key}"'.encode() in text for key in _OLD_SETTINGS):
        return text
    try:
        plan = json.loads(text)
        job = plan["job"]
        if "settings" not in job:
            job["settings"] = {key: value for key in _OLD_SETTINGS if (value := job.pop(key, None))}
            if label := job["settings"].get("pods", {}).get("attach"):
                job["runs_already"] = f"the pods with the label {label}"
        return json.dumps(plan)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):  # it is no plan
        return text


def stream(seed: int, fault: str) -> random.Random:
    """The random stream of one fault. It depends only on the seed and the fault's id."""
    digest = hashlib.blake2b(f"{seed}/{fault}".encode(), digest_size=8).digest()
    return random.Random(int.from_bytes(digest, "big"))


def target_in_words(target: Target, endpoint: object = None, job: PlannedJob | None = None) -> str:
    """The target in words. `endpoint`: the parameter of that name, for a fault that hits an endpoint. `job`: with
    replicas, ranks are shown by replica."""
    if not target.ranks and not target.nodes:
        return f"endpoint {endpoint}" if endpoint else "files"
    if job and job.replicas > 1:
        size = job.world_size // job.replicas
        own = {replica: tuple(rank % size for rank in target.ranks if rank // size == replica)
               for replica in sorted({rank // size for rank in target.ranks})}  # fmt: skip
        return " and ".join(f"{_list('rank', ranks)} of replica {replica}" for replica, ranks in own.items())
    nodes = _list("node", target.nodes)
    return f"{nodes} ({_list('rank', target.ranks)})" if target.nodes else _list("rank", target.ranks)


def moment_in_words(when: Moment | After) -> str:
    if isinstance(when, Moment):
        parts = [
            f"step {when.step}" if when.step is not None else "",
            f"attempt {when.attempt}" if when.attempt is not None else "",
            _phase_in_words(when),
            f"the {when.nth}. time" if when.nth > 1 else "",
        ]
        return ", ".join(part for part in parts if part) or "the next phase"
    start = f"{when.fault} was {when.state.replace('_', ' ')}" if when.fault else "launch"
    if when.checkpoints:
        return f"{when.delay_s:g} s after checkpoint {when.checkpoints} since {start}"
    return f"{when.delay_s:g} s after {start}"


def _phase_in_words(when: Moment) -> str:
    filter_ = when.collectives
    if filter_ is None:
        return when.phase.value.replace("_", " ") if when.phase else ""
    parts = [
        filter_.operation or "collective",
        f"of group {filter_.group}" if filter_.group else "",
        f"of at least {filter_.min_bytes} bytes" if filter_.min_bytes is not None else "",
        f"of at most {filter_.max_bytes} bytes" if filter_.max_bytes is not None else "",
    ]
    return " ".join(part for part in parts if part)


def counted(count: int, noun: str, verbs: str = "") -> str:
    """`1 step`, `2 steps`. `verbs`: for one and for several, as `was/were`."""
    one, _, several = verbs.partition("/")
    words = (str(count), noun, one) if count == 1 else (str(count), f"{noun}s", several)
    return " ".join(word for word in words if word)


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 1`."""
    each = sorted(numbers)
    return f"{noun}{'s' * (len(each) > 1)} {', '.join(map(str, each))}"


def enumerated(names: Iterable[object]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


def last_words_in_words(lines: Sequence[str]) -> str:
    """The clause of a reason about the last lines of a job's log. Empty if there is no line."""
    return f"; its log ends with: {' | '.join(lines)}" if lines else ""


def seconds_in_words(seconds: float | None) -> str:
    """A duration as all reports show it: `43 ms`, `6.84 s`, `60 s`, `5.7 min`."""
    if seconds is None:
        return "not seen"
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms"
    return rounded(seconds) if seconds < 120 else f"{seconds / 60:.1f} min"


def rounded(seconds: float) -> str:
    """Seconds as reports show them: two decimals, or none for a whole number. The same for short and long times."""
    return f"{seconds:.2f}".removesuffix(".00") + " s"


def _list(word: str, numbers: tuple[int, ...]) -> str:
    return numbered(word, numbers) if numbers else f"no {word}"
