"""What may be written of the job, with its types."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from torchaos.harness.agent.quantities import Seconds
from torchaos.harness.scenario.sizes import Bytes
from torchaos.harness.scenario.strict import NAME, Count, Strict


class Checkpoints(Strict):
    """Where the job keeps its checkpoints: what is read, judged and damaged."""

    path: Annotated[str, Field(min_length=1, description="Folder under which the job keeps its checkpoints.")]
    size: Annotated[
        Bytes | None, Field(ge=1, description="It is a file system of its own, in memory, of this size; needs {run}/.")
    ] = None

    @model_validator(mode="after")
    def _inside_the_run(self) -> Checkpoints:
        parts = self.path.rstrip("/").split("/")
        if self.size is not None and (parts[0] != "{run}" or len(parts) < 2 or {"", ".", ".."} & set(parts)):
            raise ValueError(
                f"nothing is mounted outside the run's own folder; write path: {{run}}/..., not {self.path}"
            )
        return self


class Resubmit(Strict):
    """The command is started again, as a scheduler in front of torchrun does."""

    times: Annotated[Count, Field(description="How often the command is started again when it exits with an error.")]
    delay: Annotated[Seconds, Field(description="How long after the exit.")] = 0.0


class Log(Strict):
    """How steps and losses are read from the job's output where no agent can see them."""

    format: Annotated[str | None, Field(description="A known format, such as torchtitan, megatron or hf.")] = None
    regex: Annotated[str | None, Field(description="Your own, with the named groups step, loss and lr.")] = None
    path: Annotated[str | None, Field(description="The file, where it is not the job's output.")] = None


class Container(Strict):
    """What each node is made from, where the launcher makes containers."""

    image: Annotated[
        str, Field(description="An image that the engine has; host: this machine's own programs and Python, read-only.")
    ] = "host"
    mounts: Annotated[
        list[Annotated[str, Field(pattern=r"^[^:]+:/[^:]*(:ro)?$")]],
        Field(description="Folders of this machine, SOURCE:TARGET or SOURCE:TARGET:ro. The run's own folder, the "
              "working directory and the checkpoints are there without it."),
    ] = Field(default_factory=list)  # fmt: skip


def _address(text: str) -> str:
    if not re.fullmatch(r"[^\s:/]+:\d{1,5}", text):
        raise ValueError(f"{text!r} is no address; write host:port, such as 127.0.0.1:9000")
    return text


class Job(Strict):
    """The training run under test."""

    command: Annotated[
        str | list[str],
        Field(description="The torchrun command line, as you would type it. {run}: the run's own folder; {jobs}: the "
              "jobs that come with torchaos; {here}: the folder of this file; {python}: the interpreter of torchaos."),
    ]  # fmt: skip
    cwd: Annotated[str, Field(description="Working directory; relative to this file.")] = "."
    env: Annotated[dict[str, str], Field(description="Added to the environment; values are text.")] = Field(
        default_factory=dict
    )
    checkpoints: Annotated[Checkpoints | None, Field(description="Where its checkpoints are.")] = None
    endpoints: Annotated[
        dict[Annotated[str, Field(pattern=NAME)], Annotated[str, AfterValidator(_address)]],
        Field(description="What the job reaches by an address, host:port by name; {endpoint.NAME} in command and env "
              "is that address, or of the proxy that a fault puts before it. rendezvous: where the nodes meet."),
    ] = Field(default_factory=dict)  # fmt: skip
    timeout: Annotated[Seconds, Field(description="The run is ended after this long.")] = 600.0
    world_size: Annotated[Count | None, Field(description="How many ranks, where the command does not say it.")] = None
    nodes: Annotated[Count | None, Field(description="How many nodes, where the command does not say it.")] = None
    replicas: Annotated[
        Count, Field(description="The command is started so many times side by side, as torchft's replica groups are.")
    ] = 1
    container: Annotated[Container | None, Field(description="For launcher: docker.")] = None
    log: Annotated[Log | None, Field(description="Where steps and losses are printed, and how.")] = None
    resubmit: Annotated[Resubmit | None, Field(description="Without it a command that has ended stays ended.")] = None
