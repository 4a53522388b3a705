"""Tells people the results in a few words: as Markdown for a pull request or a CI step, as annotations of GitHub
Actions, and as a message to an HTTP server (a chat, a pager, or a program).

The body of the message is JSON. Slack, Mattermost and Teams' workflows show its `text`; the other keys are for
programs."""

from __future__ import annotations

import html
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchaos.harness.host.disk import write_atomically
from torchaos.harness.record.plan import counted, seconds_in_words
from torchaos.harness.record.redaction import mask
from torchaos.harness.record.result import Case, Result, Verdict, verdicts_in_words
from torchaos.harness.reporting.terminal.console import why, without_words
from torchaos.harness.reporting.terminal.headline import failures_first, gauges
from torchaos.harness.reporting.terminal.text import name_in_words, on_one_line, shortened

_SIGNS = {Verdict.PASSED: "✅", Verdict.FAILED: "❌", Verdict.INCONCLUSIVE: "❔", Verdict.ERROR: "❗"}
_STATES = {"passed": "✅", "failed": "❌"}
_MOST_RUNS, _LONGEST = 20, 600  # runs that are shown in full; characters of a reason


def write(results: Sequence[Result], path: Path, happened: Mapping[str, Sequence[str]]) -> None:
    """Writes the file in one step. `happened`: the sentences of headline.py, by run directory. Raises OSError if it
    can't be written."""
    write_atomically(path, markdown(results, happened))


def annotation(result: Result, scenario: Path) -> str:
    """An annotation: a line of output that makes GitHub Actions show a run that did not pass beside its scenario file
    in a pull request. Ready scenarios have no file in the user's repository, so they get an annotation without a file.
    The form: https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions"""
    lead, failures, more, log = why(result)
    level = "warning" if result.verdict is Verdict.INCONCLUSIVE else "error"
    about = {"title": f"torchaos {result.scenario}: {result.verdict.value}"}
    if not scenario.is_absolute():
        about["file"] = str(scenario)
    head = ",".join(f"{name}={_in_command(text, ':,')}" for name, text in about.items())
    return f"::{level} {head}::{_in_command('. '.join(filter(None, [lead, *log[-1:], failures, more])))}"


def _in_command(text: str, more: str = "") -> str:
    plain = shortened(on_one_line(mask(text)), _LONGEST)
    return "".join(f"%{ord(letter):02X}" if letter in f"%{more}" else letter for letter in plain)


def markdown(results: Sequence[Result], happened: Mapping[str, Sequence[str]]) -> str:
    """The text: a table if there are several runs, then each run in full. Runs that did not pass come first."""
    lines = [*_table(results)] if len(results) > 1 else []
    order = sorted(results, key=lambda result: result.verdict is Verdict.PASSED)
    for result in order[:_MOST_RUNS]:
        lines += ["", *_run(result, happened.get(result.run_dir, ()))]
    if len(order) > _MOST_RUNS:
        lines += ["", f"{counted(len(order) - _MOST_RUNS, 'more run', 'is/are')} in the table only."]
    return "\n".join(lines).strip() + "\n"


def _table(results: Sequence[Result]) -> Iterator[str]:
    told = verdicts_in_words(result.verdict for result in results)
    yield f"## torchaos: {counted(len(results), 'run')}, {told}"
    yield ""
    yield "| | scenario | seed | recovery | steps done again | samples skipped / repeated |"
    yield "|---|---|---|---|---|---|"
    for result in results:
        cells = [f"{gauge.value} ({gauge.bound})" if gauge.bound else gauge.value for gauge in gauges(result)]
        cells = cells or [""] * 3
        sign = f"{_SIGNS[result.verdict]} {result.verdict.value}"
        yield f"| {' | '.join([sign, _safe(result.scenario), str(result.seed), *map(_safe, cells)])} |"


def _run(result: Result, happened: Sequence[str]) -> Iterator[str]:
    yield f"### {_SIGNS[result.verdict]} {_safe(result.scenario)}: {result.verdict.value}"
    yield ""
    for text in happened:
        yield _safe(text)
        yield ""
    told = why(result)
    told_more = (f"{_safe(text)}." for text in (told.failures, told.more) if text)
    yield " ".join([f"**Why: {_safe(told.lead)}.**", *told_more])
    yield from ("", "<pre>", *map(_safe, told.log), "</pre>") if told.log else ()
    found = gauges(result)
    if found:
        yield ""
        yield "| | measured | bound | |"
        yield "|---|---|---|---|"
        for gauge in found:
            cells = [_safe(gauge.name), _safe(gauge.value), _safe(gauge.bound), _STATES.get(gauge.state, "")]
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield from _cases([replace(case, reason=without_words(case.reason, result)) for case in result.cases])
    for advice in (text for recovery in result.recoveries for text in recovery.advice):
        yield f"- {_safe(advice)}"
    took = f"{seconds_in_words(result.duration_s)}, seed {result.seed}"
    again = mask(result.reproduce).replace("`", "'")
    yield f"{took}. {f'Again: `{on_one_line(again)}`' if again else ''}".strip()


def _cases(cases: Sequence[Case]) -> Iterator[str]:
    if not cases:
        return
    told = verdicts_in_words(case.verdict for case in cases)
    yield f"<details><summary>{len(cases)} cases: {told}</summary>"
    yield ""
    yield "| | case | why |"
    yield "|---|---|---|"
    for case in failures_first(cases):
        yield f"| {_SIGNS[case.verdict]} | {_safe(name_in_words(case.name))} | {_safe(case.full_reason)} |"
    yield ""
    yield "</details>"
    yield ""


def _safe(text: str) -> str:
    """The text on one line, with secrets masked and Markdown escaped: no markup, no border of a table's cell, and no
    notification of a user."""
    plain = html.escape(shortened(on_one_line(mask(text)), _LONGEST), quote=False)
    return re.sub(r"([\\`*\[\]|#~])", r"\\\1", plain).replace("@", "&#64;").replace("__", "\\_\\_")


_PATIENCE_S, _LONGEST_LINE, _MOST = 10.0, 500, 5


def post(url: str, kind: str, name: str, verdict: Verdict, why: Sequence[str], folder: str = "") -> str:
    """Sends the verdict. `kind`: gameday or gate. `why`: the reason, in sentences. Returns a text about what went
    wrong, empty if the server accepted the message. The text never has the address, which may be a secret."""
    told = [shortened(on_one_line(mask(text)), _LONGEST_LINE) for text in why]
    head = f"{_SIGNS[verdict]} torchaos {kind} {on_one_line(name)}: {verdict.value}"
    text = "\n".join([head, *(f"- {text}" for text in told[:_MOST])])
    body = {"text": text, "kind": kind, "name": name, "verdict": verdict.value, "why": told, "folder": folder}
    if not url.lower().startswith(("http://", "https://")):
        return "its address must begin with http:// or https://"
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"the server answered {error.code}"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {getattr(error, 'reason', None) or 'no answer'}"
