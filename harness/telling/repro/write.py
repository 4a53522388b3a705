"""Joins the parts in script/ to one file, and fills in the facts of the case."""

from __future__ import annotations

import pprint
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

_HEAD = '''#!/usr/bin/env python3
"""Shows a finding about a training job with plain torchrun and kill: no torchaos, and nothing of it in the job.

It runs the job once as a control and three times with the kill: it waits for a line of the job's log (or for a
checkpoint to appear), signals the process of the rank, which is a descendant of the torchrun that it started, waits for
the end, and compares with the control. Standard library only; Linux, Python 3.9 or later; the job's Python has torch.

Exit code 0: reproduced in every run; 1: in none; 2: that can't be told, and why.
"""

from __future__ import annotations
'''


def script_of(case: Mapping[str, Any]) -> str:
    """The text of the script that shows a finding. `case`: the facts, as case.py returns them."""
    literal = pprint.pformat(dict(case), width=116, sort_dicts=False)
    running = _part("running").replace("CASE: dict[str, Any] = {}  #", f"CASE: dict[str, Any] = {literal}  #")
    showing = _part("showing").replace('SUMMARY = ""  #', f"SUMMARY = r'''{_source('summary')}'''  #")
    return f"{_HEAD}{running}\n\n{showing}"


def _part(name: str) -> str:
    """The part without the module docstring, and without imports of other parts."""
    text = re.sub(r'\A""".*?"""\n', "", _source(name), flags=re.DOTALL)
    text = re.sub(r"^from __future__ .*\n\n?", "", text, flags=re.MULTILINE)
    return re.sub(r"^from torchaos\..*\n\n?", "", text, flags=re.MULTILINE)


def _source(name: str) -> str:
    return (files("torchaos.harness.telling.repro.script") / f"{name}.py").read_text(encoding="utf-8")
