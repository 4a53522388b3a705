"""Makes a script that shows a finding without torchaos: it runs the job with plain torchrun and uses kill.

`case_of` collects the facts from the record: the job, the kills with their moments, and the signs of the finding.
`script_of` puts them into script.py, which needs only the standard library of Python 3.9. summary.py runs in the job's
own Python."""

from __future__ import annotations

import posixpath
import pprint
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from torchaos.harness.analysis.checkpointing.checkpoint_contents import checkpoints_of
from torchaos.harness.analysis.checkpointing.checkpoint_diff import clashes
from torchaos.harness.analysis.comparison.agreement import differences, history_of, until
from torchaos.harness.analysis.ending import final_step
from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.interfaces import UsageError
from torchaos.harness.monitoring.probes.log_adapters import ADAPTERS
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.history.step_witnesses import log_lead
from torchaos.harness.record.plan import PlannedFault
from torchaos.harness.record.record import Record
from torchaos.harness.record.redaction import MASK
from torchaos.harness.record.result import Result, Verdict
from torchaos.harness.registry import injector_of

ALL_SIGNS = ("end", "losses", "checkpoint", "time")
_ONLY = "only torchaos can show it"


def case_of(run: Record, twins: Sequence[Record], result: Result, promise: str = "") -> dict[str, Any]:
    """The facts about the run that the script needs, as JSON. Raises UsageError, with the reason, if plain torchrun and
    kill can't show the finding."""
    plan, job = run.plan, run.plan.job
    if job.attached:
        raise UsageError(f"torchaos was attached to {job.attached}, so it is not known how that job is started")
    if job.nodes > 1:
        raise UsageError(f"the job ran on {job.nodes} nodes: {_ONLY}")
    if any(MASK in word for word in (*job.command, job.cwd)):
        raise UsageError(f"the job's command had a secret, which was not kept: {_ONLY}")
    if job.checkpoints_size:
        raise UsageError(f"its checkpoints were on a small file system that was made for the run: {_ONLY}")
    if job.resubmit_command or job.resubmit_env:
        raise UsageError(f"its next starts had another command or environment: {_ONLY}")
    if not plan.faults:
        raise UsageError("no fault was planned, so there is nothing to show")
    patterns = _patterns(run)
    lead = _lead(run) if patterns else 0
    kills = [_kill(run, fault, patterns) for fault in plan.faults]
    steps = [kill["step"] for kill in kills if kill["step"] is not None]
    if len(kills) > 1 and (len(steps) < len(kills) or steps != sorted(set(steps))):
        raise UsageError(f"its faults don't follow each other step by step, and a script can only see steps: {_ONLY}")
    passed = result.verdict is Verdict.PASSED
    found = ALL_SIGNS if passed else _signs(run, twins, result)
    signs = [sign for sign in found if patterns or sign not in ("losses", "time")]  # both need steps in the log
    if not signs:
        raise UsageError(
            f"the finding shows in no exit code, no loss in the log and no checkpoint ({result.reason}): {_ONLY}"
        )
    secrets = sorted(name for name, value in job.env.items() if MASK in value)
    return {
        "scenario": plan.scenario, "finding": "" if passed else result.reason, "promise": promise,
        "versions": ", ".join(f"{name} {value}" for name, value in result.versions.items() if value),
        "command": list(job.command), "cwd": job.cwd, "secrets": secrets,
        "env": {name: value for name, value in job.env.items() if name not in secrets},
        "python": str(run.artifacts.get("environment", {}).get("job_python", "python3")),
        "kills": kills, "log": patterns, "lead": lead, "checkpoints": job.checkpoints, "signs": signs,
        "controls": 2 if signs == ["checkpoint"] else 1, "bound_s": _bound(result),
        "timeout_s": job.timeout_s, "resubmit": [job.resubmit_times, job.resubmit_delay_s],
    }  # fmt: skip


def _kill(run: Record, fault: PlannedFault, patterns: Sequence[str]) -> dict[str, Any]:
    """The ranks to signal, the signals, and the moment: when the log has a line of `step` or, if there is no `step`,
    when `path` exists."""
    as_signals = injector_of(fault).signals(fault.duration_s)
    if as_signals is None:
        raise UsageError(f"fault {fault.id}: `kill` can't cause {fault.inject}: {_ONLY}")
    when, landed = fault.trigger, [landing for landing in landings(run) if landing.fault == fault.id]
    if not landed:
        raise UsageError(f"fault {fault.id}: it never landed, so there is nothing to show")
    if fault.times > 1 or (isinstance(when, Moment) and when.attempt is not None):
        raise UsageError(
            f"fault {fault.id}: it came within the recovery, at a moment that can't be seen from outside: {_ONLY}"
        )
    agents = not landed[0].ranks
    step = _logged_step(run, landed[0]) if patterns else None
    path = _checkpoint_path(run, landed[0]) if step is None else None
    if step is None and path is None:
        raise UsageError(
            f"fault {fault.id}: neither a line of the job's log nor a checkpoint shows when it came: {_ONLY}"
        )
    signals = [[after_s, int(number)] for after_s, number in as_signals]
    return {"ranks": None if agents else sorted(landed[0].ranks), "signals": signals, "step": step, "path": path}


def _patterns(run: Record) -> list[str]:
    """The regular expressions by which the run's log was read. Empty if they find no step."""
    names = {str(event.data["adapter"]) for event in run.of_kind(Kind.LOG_STEP) if event.data["step"] is not None}
    own = (run.plan.job.log or {}).get("regex")
    if (run.plan.job.log or {}).get("path") is not None or not names:
        return []
    if own:
        return [str(own)]
    known = ADAPTERS.get(min(names))
    return [one.pattern for one in (known.line, *known.more)] if known else []


def _logged(run: Record) -> list[tuple[float, int]]:
    return [(e.mono_s, int(e.data["step"])) for e in run.of_kind(Kind.LOG_STEP) if e.data["step"] is not None]


def _lead(run: Record) -> int:
    """How many steps the numbers in the log are ahead of those in the verdict. The script counts as the verdict
    does."""
    placed = run.history.executions.placed
    return log_lead(_logged(run), zip(placed.mono_s.tolist(), placed.global_step.tolist(), strict=True)) or 0


def _logged_step(run: Record, landing: Landing) -> int | None:
    """The last step in the log before the fault, counted as in the verdict. None if there is none."""
    done, lead = run.history.highest_step(before_s=landing.at_s), _lead(run)
    before = [step - lead for _, step in _logged(run) if done is not None and step - lead <= done]
    return max(before, default=None)


def _checkpoint_path(run: Record, landing: Landing) -> str | None:
    """The path, below `{run}`, of the checkpoint from which the job resumed after the fault. None if it is not
    known."""
    after = [attempt for attempt in run.history.attempts if attempt.number > landing.attempt and attempt.loaded]
    home = _home(run)
    if not after or home is None:
        return None
    path = posixpath.normpath(str(after[0].loaded))
    return posixpath.relpath(path, home) if path.startswith(home + "/") else None


def _home(run: Record) -> str | None:
    """The folder that `{run}` was in the recorded run. None if it is not known."""
    root, named = str((run.artifacts.get("inventory") or {}).get("root", "")), run.plan.job.checkpoints or ""
    found = re.fullmatch(re.escape(named).replace(re.escape("{run}"), "(?P<run>.+)"), root)
    return found["run"] if found and "run" in found.groupdict() else None


def _signs(run: Record, twins: Sequence[Record], result: Result) -> list[str]:
    """The kinds of signs in which the run differs from its twin."""
    history = history_of(run, twins)
    due = final_step(twins[0]) if twins else None
    short = due is not None and (history.last_step or 0) < due
    found = ["end"] if short or run.exit_code != 0 else []
    ours = until(history.by_step(), due)
    theirs = twins[0].history.by_step() if twins else {}
    if any(difference.what == "loss" for difference in differences(ours, theirs, 0.0)) or (
        not twins and _differs_when_redone(run)
    ):
        found.append("losses")
    if twins and clashes(checkpoints_of(run) or [], checkpoints_of(twins[0]) or [], _noisy(twins)):
        found.append("checkpoint")
    bound = _bound(result)
    late = [
        recovery
        for recovery in result.recoveries
        if bound is not None and (recovery.parts.get("caught_up") or bound + 1) > bound
    ]
    return [*found, "time"] if late else found


def _differs_when_redone(run: Record) -> bool:
    return any(old.loss_seen and new.loss_seen and old.losses != new.losses for old, new in run.history.redone())


def _noisy(twins: Sequence[Record]) -> set[str]:
    first = checkpoints_of(twins[0]) or []
    return {clash.name for other in twins[1:] for clash in clashes(checkpoints_of(other) or [], first)}


def _bound(result: Result) -> float | None:
    """The shortest time, in seconds, within which an assertion wants the job to have caught up. None if there is no
    bound."""
    bounds = [case.bound.get("catch_up") for case in result.cases]
    return min((float(bound) for bound in bounds if isinstance(bound, (int, float))), default=None)


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
    """The text of the script that shows a finding. `case`: the facts, as `case_of` returns them."""
    literal = pprint.pformat(dict(case), width=116, sort_dicts=False)
    body = _source("script").replace("CASE: dict[str, Any] = {}  #", f"CASE: dict[str, Any] = {literal}  #")
    body = body.replace('SUMMARY = ""  #', f"SUMMARY = r'''{_source('summary')}'''  #")
    body = re.sub(r'\A""".*?"""\n', "", body, flags=re.DOTALL)
    return _HEAD + re.sub(r"^from __future__ .*\n\n?", "", body, flags=re.MULTILINE)


def _source(name: str) -> str:
    return (files("torchaos.harness.reporting.repro") / f"{name}.py").read_text(encoding="utf-8")
