"""Why something could not be seen, in words: an assertion without eyes says so, by the name of what was blind."""

from __future__ import annotations

from torchaos.harness.agent.wire import Kind
from torchaos.harness.record import Record

_NEVER = {
    "loss": "the backward hook never fired (a job that calls the autograd engine itself, as Megatron does, evades it)",
    "samples": "no batch that the loop received could be seen",
    "steps": "no optimizer step was seen, and no line of the log tells of one",
}


def why_unseen(record: Record, what: str) -> str:
    """`what`: loss, samples or steps."""
    failed = [event for event in record.of_kind(Kind.AGENT_FAILED) if _concerns(str(event.data["hook"]), what)]
    if failed:
        return f"the agent's hook {failed[0].data['hook']} failed: {failed[0].data['error']}"
    if record.history.source == "log":
        return f"there was no agent in the job, and its log does not tell of {what}"
    if not any(record.of_kind(Kind.AGENT_STARTED)) and record.history.source == "none":
        return "there was no agent in the job, and its log does not tell of steps"
    return _NEVER[what]


def why_unplaced(record: Record, attempts: tuple[int, ...]) -> str:
    """What to say when the steps of an attempt have no place in the global count."""
    return (
        f"nobody can say which global steps attempt {attempts[0]} made: no checkpoint load was seen in it, no "
        "optimizer or scheduler counter, and its samples and losses are like nothing before"
    )


def _concerns(hook: str, what: str) -> bool:
    words = {"loss": ("loss", "backward"), "samples": ("sample", "data"), "steps": ("step", "optimizer", "import")}
    return any(word in hook.lower() for word in words[what])
