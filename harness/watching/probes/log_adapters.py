"""Reads steps, losses and learning rates from the lines that training frameworks print.

For a job without the agent, nothing else is known about its steps; with the agent, they are an independent witness.
Formats:

- TorchTitan: `step:  1  loss:  8.0403  grad_norm:  1.3470  memory: ...  tps: ...`
- Megatron-LM: ` iteration       10/    5000 | ... | learning rate: 2.5E-07 | ... | lm loss: 1.053084E+01 | ...`
- HF Trainer: `{'loss': '4.039', ..., 'learning_rate': '1.333e-05', 'epoch': '1.406'}`; quoted since 5.0; it has no step
- nanoGPT: `iter 100: loss 2.4612, time 26.54ms, mfu 3.10%`
- plain: any line with `step 12 ... loss 3.4`
- Lightning prints no losses; see metrics_file.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchaos.harness.contracts import UsageError

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf)"
LIGHTNING = "lightning"


@dataclass(frozen=True)
class LogStep:
    """The values in one line. `step` is the job's own count, as printed."""

    step: int | None
    loss: float | None
    lr: float | None


class Adapter(Protocol):
    @property
    def name(self) -> str:
        """The name of the format. Empty while the format is not known yet."""

    def read(self, line: str) -> LogStep | None:
        """The values in the line. None if the line is not about a step."""


@dataclass(frozen=True)
class LineAdapter:
    """Reads lines that match `line`. The groups step, loss and lr may be in this pattern or in the patterns `more`."""

    name: str
    line: re.Pattern[str]
    more: tuple[re.Pattern[str], ...] = ()

    def read(self, line: str) -> LogStep | None:
        line = without_ansi(line)
        found = self.line.search(line)
        if found is None:
            return None
        groups = found.groupdict()
        for pattern in self.more:
            if match := pattern.search(line, found.start()):
                groups.update(match.groupdict())
        step = groups.get("step")
        return LogStep(None if step is None else _whole(step), _float(groups.get("loss")), _float(groups.get("lr")))


def _adapter(name: str, line: str, *more: str) -> LineAdapter:
    patterns = [re.compile(text.replace("NUMBER", _NUMBER)) for text in (line, *more)]
    return LineAdapter(name, patterns[0], tuple(patterns[1:]))


ADAPTERS: Mapping[str, LineAdapter] = {
    adapter.name: adapter
    for adapter in (
        _adapter("torchtitan", r"\bstep:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>NUMBER)", r"\blr:\s*(?P<lr>NUMBER)"),
        _adapter(
            "megatron", r"\biteration\s+(?P<step>\d+)/\s*\d+ \|",
            r"\blm loss:\s*(?P<loss>NUMBER)", r"\blearning rate:\s*(?P<lr>NUMBER)",
        ),
        _adapter("hf", r"\{'loss': '?(?P<loss>NUMBER)'?[,}]", r"'learning_rate': '?(?P<lr>NUMBER)'?"),
        _adapter("nanogpt", r"\biter (?P<step>\d+): loss (?P<loss>NUMBER), time "),
        _adapter(
            "plain", r"\b[Ss]tep\s*[ :=]\s*(?P<step>\d+)\b.*?\bloss\s*[ :=]\s*(?P<loss>NUMBER)",
            r"\b(?:lr|learning[ _]rate)\s*[ :=]\s*(?P<lr>NUMBER)",
        ),
    )
}  # fmt: skip


class AutoAdapter:
    """Recognizes the format: the first format that matches a line is kept for the rest of the job."""

    def __init__(self) -> None:
        self._found: LineAdapter | None = None

    @property
    def name(self) -> str:
        return self._found.name if self._found else ""

    def read(self, line: str) -> LogStep | None:
        if self._found:
            return self._found.read(line)
        for adapter in ADAPTERS.values():
            if step := adapter.read(line):
                self._found = adapter
                return step
        return None


def adapter_for(wanted: str | Mapping[str, Any] | None) -> Adapter | None:
    """The adapter for `job.log` of a scenario. `wanted`: None to recognize the format, a name, `{format: NAME}`, or
    `{regex: ...}` with the named groups step, loss and lr.

    Returns None for Lightning, which writes a file and no lines. Raises UsageError for an unknown format or a bad
    regular expression."""
    if wanted is None:
        return AutoAdapter()
    if isinstance(wanted, Mapping) and wanted.get("regex") is not None:
        return _own(str(wanted["regex"]))
    name = wanted if isinstance(wanted, str) else wanted.get("format")
    if name is None:
        return AutoAdapter()
    if name == LIGHTNING:
        return None
    if name not in ADAPTERS:
        known = ", ".join(sorted([*ADAPTERS, LIGHTNING]))
        raise UsageError(f"job.log: {name!r} is no log format; use {known}, or a regex of your own")
    return ADAPTERS[name]


def _own(text: str) -> LineAdapter:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UsageError(f"job.log.regex: {text!r} is no regular expression: {error}") from error
    if not {"step", "loss"} & pattern.groupindex.keys():
        raise UsageError(
            f"job.log.regex: {text!r} needs a named group: (?P<step>...) or (?P<loss>...), and lr if you like"
        )
    return LineAdapter("regex", pattern)


def without_ansi(line: str) -> str:
    return _ANSI.sub("", line) if "\x1b" in line else line


def _whole(text: str) -> int | None:
    try:
        return int(text.replace(",", ""))
    except ValueError:
        return None


def _float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None
