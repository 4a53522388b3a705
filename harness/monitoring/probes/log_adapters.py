"""Reads steps, losses and learning rates from the lines that training frameworks print.

For a job without the agent, nothing else is known about its steps; with the agent, the lines are an independent
witness. So a number is read only if it counts the whole training, and not the steps of an epoch (`Epoch: [0] [
10/1251]`, the bar of tqdm) or of an evaluation. Examples of each format are in tests/data/logs/steps.yaml. HF Trainer
prints no step, and has quotes around its values since 5.0. Lightning prints no losses; see job_log.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torchaos.harness.interfaces import UsageError

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity)"
_COUNT = (  # `1,000`, `1_000` and `10.0`, but not `10%` or `3 ms`
    r"(?P<step>\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.0+)?(?![\d%]|[.,_]\d|[A-Za-z]|\s*(?:%|(?:ms|s|sec|seconds)\b))"
)
_OTHER_LOSSES = "actor critic value policy unsupervised disc gen kl aux reg"
_LOSS = (
    "".join(f"(?<!(?i:{word} ))" for word in _OTHER_LOSSES.split())
    + r"(?<![\w/.-])(?:(?:train(?:ing)?|lm|total|avg|mean|reduced|smooth|ce|nll|cross[ _-]entropy)[ _/-])*"
    r"[Ll]oss(?:es)?\b(?:/train\b)?\s*[:=]?\s*(?:\[|\(|\"|tensor\()?(?P<loss>NUMBER)(?![\d/%]|,\d)"
)
# After `ce_loss=1 aux_loss=1`, the sum: `loss=2`.
_ONE_LOSS = r"(?<![\w/.-])(?<![A-Za-z)] )[Ll]oss(?:[:=]\s*|\s+)(?P<loss>NUMBER)(?![\d/%]|,\d)"
_RATE = r"(?<![\w/])(?:(?:train|optim)/)?(?i:lr|learning[ _-]rate)\b\s*[:=]?\s*\[?(?P<lr>NUMBER)"
_STEP = (
    r"(?<![\w/.-])(?:global[ _]|(?:train(?:ing)?|trainer)[ _/](?:global_)?|optim(?:izer)?[ _])?"
    r"(?:[Ss]teps?|num_updates)(?:\s*[:=#\[(]\s*\[?\s*|\s+\[?\s*)COUNT"
)
_ITERATION = r"(?<![\w/.-])(?:[Ii]ter(?:ation)?s?|ITER|[Uu]pdates?)(?:\s*[:=#\[(]\s*\[?\s*|\s+\[?\s*)COUNT"
_KEYS = r"""["']_?(?:(?:global|train|trainer)[_/])*(?:steps?|iter(?:ation)?|num_updates)"""
# Lines about an evaluation or an earlier step have a word before a count or a loss (`eval step 3`, `val loss`, `[valid]
# Epoch 1`), a field that says so, or both losses, as nanoGPT prints after an evaluation.
_EVALUATION = re.compile(
    r"(?i)(?<![a-z])(?:(?:eval(?:uat\w+)?|val|valid\w*|test(?:ing)?|infer\w*|benchmark|dev|held[ -]?out|hold-?out"
    r"|zero-?shot|since"
    r"|best|lowest|previous|(?:re)?load(?:ed|ing)|resum(?:ed|ing)|restor(?:ed|ing)|sav(?:ed|ing))"
    r"(?:[\s\](){}:|,._/\"'*=#~<>…-]|set|data|metrics?|results?|checkpoint|model|state"
    r"|at|after|from|in|of|on|for|to|\S*/\S*)*)"
    r"(?:global[ _])?(?:step|iter|epoch|loss|batch|update)"
)
_EVALUATES = re.compile(
    r"""(?i)\b(?:split|phase|mode|stage)["']?\s*[:=]\s*["']?(?:eval|val|test)|[\[(](?:eval|val|valid|validation|test)[\])]"""
    r"""|^\s*wandb: |\b(?:Namespace|\w*Config|\w*Args|\w*Arguments)\(|train[ _/]loss\W{1,3}[\d.]+\W+val"""
)
_PLACE = re.compile(r"(?<=:)(?!steps?:)([\w.<>]+):\d+(?= - |[\])]| \|)")  # in the code: `module:function:12 - `
_IN_AN_EPOCH = re.compile(r"(?i)(?<![a-z])epochs?(?![a-z])")
LIGHTNING, COMPOSER = "lightning", "composer"


@dataclass(frozen=True)
class LogStep:
    """The values in one line. `step`: the job's own count, as printed."""

    step: int | None
    loss: float | None
    lr: float | None


class Adapter(Protocol):
    @property
    def name(self) -> str:
        """The name of the format. Empty while the format is not known."""

    def read(self, line: str) -> LogStep | None:
        """The values in the line. None if the line is not about a step."""


@dataclass(frozen=True)
class LineAdapter:
    """Reads lines that match `line`. The groups step, loss and lr may be in this pattern or in the patterns `more`."""

    name: str
    line: re.Pattern[str]
    more: tuple[re.Pattern[str], ...] = ()
    in_words: bool = False  # `line` is so general that lines about an epoch or an evaluation must be excluded

    def read(self, line: str) -> LogStep | None:
        line = _PLACE.sub(r"\1", without_ansi(line))
        found = self.line.search(line)
        if found is None or (self.in_words and _is_no_training(line, found)):
            return None
        groups = found.groupdict()
        for pattern in self.more:
            if match := pattern.search(line):
                groups.update(match.groupdict())
        step = groups.get("step")
        return LogStep(None if step is None else _whole(step), _float(groups.get("loss")), _float(groups.get("lr")))


def _is_no_training(line: str, found: re.Match[str]) -> bool:
    """Whether the values are those of an evaluation, or the step counts the steps of an epoch, as in `Epoch 2, step
    10/100` or `epoch 1 iter 5`. A number after the word step and without `/` is taken to count on through the
    epochs."""
    groups = found.re.groupindex.keys() & {"step", "loss"}
    before = line[: max(found.end(group) for group in groups)]
    if _EVALUATION.search(before) or _EVALUATES.search(line):
        return True
    if "step" not in groups or not _IN_AN_EPOCH.search(line[: found.start("step")]):
        return False
    is_step = re.search(r"(?i)(?:step|num_updates)\W*$", line[: found.start("step")])
    return not is_step or re.match(r"\s*/\s*\d", line[found.end("step") :]) is not None


class HeadedAdapter:
    """Reads a heading with the step, and the loss from a line below it. Composer: `[batch=10/100]:`, and below it
    `Train loss/train/total: 2.3`. OLMo: `[step=10/100,epoch=0]`, and below it `train/CrossEntropyLoss=2.3`."""

    name = COMPOSER
    _HEADING = re.compile(r"(?:^|\s)\[(?:batch|step)=" + _COUNT + r"(?:/\d+)?(?:\]|,epoch)")
    _LOSS = re.compile(rf"(?:^|\s)(?:Train loss/train/total: |train/(?:CrossEntropyLoss|CE loss)=)(?P<loss>{_NUMBER})")

    def __init__(self) -> None:
        self._step: int | None = None

    def read(self, line: str) -> LogStep | None:
        line = without_ansi(line)
        if heading := self._HEADING.search(line):
            self._step = _whole(heading["step"])
        elif self._step is not None and (found := self._LOSS.search(line)):
            step, self._step = self._step, None
            return LogStep(step, _float(found["loss"]), None)
        return None


def _adapter(name: str, line: str, *more: str, in_words: bool = True) -> LineAdapter:
    named = {"NUMBER": _NUMBER, "COUNT": _COUNT}
    patterns = [re.compile(re.sub("NUMBER|COUNT", lambda word: named[word[0]], text)) for text in (line, *more)]
    return LineAdapter(name, patterns[0], tuple(patterns[1:]), in_words)


# In the order of preference: a format comes first if its lines have more values or are easier to recognise.
ADAPTERS: Mapping[str, LineAdapter] = {
    adapter.name: adapter
    for adapter in (
        _adapter("torchtitan", r"\bstep:\s*COUNT\s+loss:\s*(?P<loss>NUMBER)", r"\blr:\s*(?P<lr>NUMBER)"),
        _adapter(
            "nemo", r"\biteration \d+/\d+ \|.*?\bglobal_step: COUNT.*?\breduced_train_loss: (?P<loss>NUMBER)",
            r"\blr: (?P<lr>NUMBER)", in_words=False,
        ),
        _adapter(  # and BLOOM, GPT-NeoX, nanotron
            "megatron", r"\biteration:?\s+COUNT\s*/\s*\d+ \|",
            r"\b(?:lm[ _])?loss:\s*(?P<loss>NUMBER)", r"\b(?:learning rate|lr):\s*(?P<lr>NUMBER)",
        ),
        _adapter("nanogpt", r"\biter COUNT: loss (?P<loss>NUMBER), time "),
        _adapter("litgpt", r"\biter \d+ step COUNT \| loss train: (?P<loss>NUMBER)", in_words=False),
        _adapter(
            "verl", r"\bstep:COUNT - (?!val).*?\b(?:train|actor)/(?:pg_)?loss:(?P<loss>NUMBER)",
            r"\b(?:train|actor)/lr(?:\(\S+?\))?:(?P<lr>NUMBER)", in_words=False,
        ),
        _adapter(
            "fairseq", r"\btrain_inner\b.*?\bloss=(?P<loss>NUMBER),.*?\bnum_updates=COUNT", r"\blr=(?P<lr>NUMBER)",
            in_words=False,
        ),
        _adapter(
            "mmengine", r"\bIter(?:\(train\)| ?)\s*\[\s*COUNT/\d+\].*?(?<![\w.])loss: (?P<loss>NUMBER)",
            r"\b(?:base_)?lr: (?P<lr>NUMBER)", r"\blr: (?P<lr>NUMBER)",
        ),
        _adapter("detectron2", r"\biter: COUNT\s+(?:total_)?loss: (?P<loss>NUMBER)", r"\blr: (?P<lr>NUMBER)"),
        _adapter("torchft", r"(?:^|[\s:])\[COUNT\] loss = (?P<loss>NUMBER)"),
        _adapter(
            "diffusers", r"\b[Ss]teps:\s+\d+%\|.*?\|\s*COUNT/\d+ \[.*?\b(?:step_|av[gr]_)?loss=(?P<loss>NUMBER)",
            r"\blr=(?P<lr>NUMBER)",
        ),
        _adapter(
            "json", _KEYS.join((r"\{(?=.*?", r"""["']:\s*["']?COUNT)"""))
            + r"""(?=.*?["'](?:train[_/])?(?:lm_|total_)?loss["']:\s*["']?(?P<loss>NUMBER))""",
            r"""["'](?:train[_/])?(?:lr|learning_rate)["']:\s*["']?(?P<lr>NUMBER)""",
        ),
        _adapter("plain", rf"^(?=.*?{_STEP})(?=.*?{_LOSS})", r"\bglobal[_ ]step\s*[:= ]\s*COUNT", _ONE_LOSS, _RATE),
        _adapter("iterations", rf"^(?=.*?{_ITERATION})(?=.*?{_LOSS})", _ONE_LOSS, _RATE),
        _adapter(
            "hf", r"\{(?:[^{}]*, )?'loss': '?(?P<loss>NUMBER)'?[,}]", r"'learning_rate': '?(?P<lr>NUMBER)'?",
            r"'(?:global_)?step(?:/max_steps)?': '?COUNT",
        ),
        _adapter("deepspeed", r"\] step=COUNT, skipped=\d+, lr=\[(?P<lr>NUMBER)", in_words=False),
    )
}  # fmt: skip


class AutoAdapter:
    """Recognises the format. Changes to an earlier (preferred) format after one line of it, and to a later format after
    AGREED lines of it without a line of the present format in between."""

    AGREED = 3

    def __init__(self) -> None:
        self._known: tuple[Adapter, ...] = (HeadedAdapter(), *ADAPTERS.values())
        self._rank: int | None = None
        self._others = 0

    @property
    def name(self) -> str:
        return "" if self._rank is None else self._known[self._rank].name

    def read(self, line: str) -> LogStep | None:
        lower = line.lower()
        if not any(sign in lower for sign in ("loss", "[batch=", "[step=", "skipped=")):
            return None
        for rank, adapter in enumerate(self._known):
            if step := adapter.read(line):
                return step if self._is_kept(rank) else None
        return None

    def _is_kept(self, rank: int) -> bool:
        self._others = self._others + 1 if self._rank is not None and rank > self._rank else 0
        if self._rank is None or rank <= self._rank or self._others >= self.AGREED:
            self._rank, self._others = rank, 0
        return rank == self._rank


def adapter_for(wanted: str | Mapping[str, Any] | None) -> Adapter | None:
    """The adapter for `job.log` of a scenario. `wanted`: None (the format is recognised), a name, `{format: NAME}`, or
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
    if name == COMPOSER:
        return HeadedAdapter()
    if name not in ADAPTERS:
        known = ", ".join(sorted([*ADAPTERS, COMPOSER, LIGHTNING]))
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
        return int(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None


def _float(text: str | None) -> float | None:
    try:
        return None if text is None else float(text.replace(",", ""))
    except ValueError:
        return None
