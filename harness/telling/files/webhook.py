"""Reports the end of a long job of torchaos to an HTTP server: a chat, a pager, or a program. The body is JSON. Slack,
Mattermost and Teams' workflows show its `text`; the other keys are for programs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence

from torchaos.harness.record.result import Verdict
from torchaos.harness.record.secrecy import mask
from torchaos.harness.telling.terminal.text import on_one_line, shortened

_SIGNS = {Verdict.PASSED: "✅", Verdict.FAILED: "❌", Verdict.INCONCLUSIVE: "❔", Verdict.ERROR: "❗"}
_PATIENCE_S, _LONGEST, _MOST = 10.0, 500, 5


def post(url: str, kind: str, name: str, verdict: Verdict, why: Sequence[str], folder: str = "") -> str:
    """Sends the verdict. `kind`: gameday or gate; `why`: the reason in sentences. Returns the problem, or an empty text
    if the server accepted it. The problem never contains the address, which may be a secret."""
    told = [shortened(on_one_line(mask(text)), _LONGEST) for text in why]
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
