"""The finding of assertions that judge resumes, if the job was not restarted."""

from __future__ import annotations

from torchaos.harness.agent.wire import Kind
from torchaos.harness.contracts import Finding, inconclusive, passed
from torchaos.harness.record.record import Record


def not_restarted(run: Record, then: str) -> Finding:
    """Passed if the only attempt succeeded and no other attempt can have been missed. Otherwise inconclusive.

    `then`: the end of the sentence "the job was not restarted, …"."""
    if run.history.source != "agent" or sum(1 for _ in run.of_kind(Kind.JOB_STARTED)) > 1:
        return inconclusive("one attempt was seen, and without an agent it is not known whether there were others")
    code = run.exit_code
    if not run.ended_on_purpose and code != 0:
        how = "nobody saw how it ended" if code is None else f"ended with exit code {code}"
        return inconclusive(f"the job was not restarted, and {how}: there is no resume to judge")
    return passed(f"the job was not restarted, {then}", resumes=0)
