"""The keys of a scenario's job, with their types. The keys that belong to one launcher are in the launcher's file."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from torchaos.harness.base_classes import Seconds
from torchaos.harness.scenario.values import NAME, Bytes, Count, Strict


class Checkpoints(Strict):
    """The job's checkpoints, which torchaos reads, judges and damages."""

    path: Annotated[str, Field(min_length=1, description="The folder below which the job keeps its checkpoints.")]
    size: Annotated[
        Bytes | None,
        Field(
            ge=1,
            description="Mounts a file system in memory, of this size, as the folder; the folder must be below {run}.",
        ),
    ] = None
    local: Annotated[
        str | None,
        Field(
            description="A folder below path of which each node has its own, in memory: the node's local disk. What is "
            "in it is gone with the node. For launcher: netns.",
        ),
    ] = None

    @model_validator(mode="after")
    def _below_the_path(self) -> Checkpoints:
        if self.local is not None and (
            not self.local.startswith(f"{self.path.rstrip('/')}/")
            or not self.local.startswith("{run}/")
            or {".", ".."} & set(self.local.split("/"))
        ):
            raise ValueError(f"local: each node has a folder of its own below path; write {self.path}/local")
        return self

    @model_validator(mode="after")
    def _inside_the_run(self) -> Checkpoints:
        parts = self.path.rstrip("/").split("/")
        if self.size is not None and (parts[0] != "{run}" or len(parts) < 2 or {"", ".", ".."} & set(parts)):
            raise ValueError(
                f"torchaos mounts nothing outside the run's own folder; write path: {{run}}/..., not {self.path}"
            )
        return self


class Resubmit(Strict):
    """Starts the command again after a failure, as a scheduler does with torchrun."""

    times: Annotated[Count, Field(description="How often the command is started again when it exits with an error.")]
    delay: Annotated[Seconds, Field(description="The time between the exit and the next start.")] = 0.0
    command: Annotated[
        str | list[str] | None,
        Field(description="Another command line for the next starts: another version, precision or number of ranks."),
    ] = None
    env: Annotated[dict[str, str], Field(description="Variables to add to the environment of the next starts.")] = (
        Field(default_factory=dict)
    )


class Log(Strict):
    """How steps and losses are read from the job's output. It is needed if the agent can't see the steps."""

    format: Annotated[str | None, Field(description="A known format, such as torchtitan, megatron or hf.")] = None
    regex: Annotated[
        str | None, Field(description="Your own regular expression, with the named groups step, loss and lr.")
    ] = None
    path: Annotated[str | None, Field(description="The log file, if the job does not print to its output.")] = None


def _address(text: str) -> str:
    if not re.fullmatch(r"[^\s:/]+:\d{1,5}", text):
        raise ValueError(f"{text!r} is not an address; write host:port, such as 127.0.0.1:9000")
    return text


class Job(Strict):
    """The training run under test."""

    command: Annotated[
        str | list[str],
        Field(description="The torchrun command line, as you would type it. {run}: the run's own folder; {jobs}: the "
              "jobs that come with torchaos; {here}: the folder of this file; {python}: torchaos's own Python."),
    ]  # fmt: skip
    cwd: Annotated[str, Field(description="The working directory, relative to this file.")] = "."
    env: Annotated[
        dict[str, str], Field(description="Variables to add to the environment; values are text, as they are written.")
    ] = Field(default_factory=dict)
    checkpoints: Annotated[Checkpoints | None, Field(description="Where the checkpoints are.")] = None
    endpoints: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], Annotated[str, AfterValidator(_address)]],
        Field(description="Addresses that the job uses: host:port by name. {endpoint.NAME} in command and env becomes "
              "the address, or the address of a proxy if a fault hits the endpoint. rendezvous: where the nodes meet."),
    ] = Field(default_factory=dict)  # fmt: skip
    timeout: Annotated[Seconds, Field(description="The run is ended after this time.")] = 600.0
    world_size: Annotated[Count | None, Field(description="The number of ranks, if the command does not show it.")] = (
        None
    )
    nodes: Annotated[Count | None, Field(description="The number of nodes, if the command does not show it.")] = None
    replicas: Annotated[
        Count, Field(description="How many times the command is started side by side, as for torchft's replica groups.")
    ] = 1
    log: Annotated[Log | None, Field(description="How to read steps and losses from the job's log.")] = None
    resubmit: Annotated[
        Resubmit | None, Field(description="Start the command again when it fails; without it, it is started once.")
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """The keys of all launchers, see `plugin_parameters.with_settings`, with their values."""
        return {name: getattr(self, name) for name in type(self).model_fields if name not in Job.model_fields}
