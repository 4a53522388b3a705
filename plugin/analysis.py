"""Functions and classes with which assertions and conditions examine a run. Those that return a `Finding` are the
checks of torchaos's own assertions, and take the same bounds."""

from torchaos.harness.analysis.checkpointing.save_schedule import standstill
from torchaos.harness.analysis.ending import last_step_of
from torchaos.harness.analysis.findings.checkpoints import Checkpoints
from torchaos.harness.analysis.findings.completion import completion, leftovers
from torchaos.harness.analysis.findings.corruption import (
    Corruption,
    checkpointed_s,
    drained_s,
    is_of_gpu,
    noticed_s,
    used_again,
)
from torchaos.harness.analysis.findings.hang_reaction import Blame, HangReaction
from torchaos.harness.analysis.findings.recoveries import Recoveries, Slowness, longest_stall
from torchaos.harness.analysis.findings.restarts import (
    TIERS,
    TIERS_IN_WORDS,
    Restart,
    Tier,
    evictions,
    gave_up,
    offenders,
    restarts_in_words,
    restarts_of,
    tier_name,
    tier_of,
    worst_tier,
)
from torchaos.harness.analysis.findings.resumed_state import restored_state
from torchaos.harness.analysis.findings.resumes import Resumes, beside_replicas
from torchaos.harness.analysis.findings.samples import are_taken_over, samples, samples_of_absent
from torchaos.harness.analysis.findings.twin_differences import Parameters, across_replicas, losses, rates
from torchaos.harness.analysis.hit_targets import Gpu, Landing, gpus_of, landings
from torchaos.harness.analysis.missing_data import no_rank_found, why_unplaced, why_unseen
from torchaos.harness.analysis.recovery_times import why_moot
from torchaos.harness.analysis.replica_verdict import (
    SCALE_UNJUDGED,
    absent_replicas,
    as_one,
    as_one_job,
    each,
    each_hit,
    lacking,
    without_steps,
)
from torchaos.harness.record.events.merged import last_answer
from torchaos.harness.record.history import Attempt, Execution, Save
from torchaos.harness.scenario.field_types import Regex

__all__ = [
    "Attempt", "Blame", "Checkpoints", "Corruption", "Execution", "Gpu", "HangReaction", "Landing", "Parameters",
    "Recoveries", "Regex", "Restart", "Resumes", "SCALE_UNJUDGED", "Save", "Slowness", "TIERS", "TIERS_IN_WORDS",
    "Tier", "absent_replicas", "across_replicas", "are_taken_over", "as_one", "as_one_job", "beside_replicas",
    "checkpointed_s", "completion", "drained_s", "each", "each_hit", "evictions", "gave_up", "gpus_of", "is_of_gpu",
    "lacking", "landings", "last_answer", "last_step_of", "leftovers", "longest_stall", "losses", "no_rank_found",
    "noticed_s", "offenders", "rates", "restarts_in_words", "restarts_of", "restored_state", "samples",
    "samples_of_absent", "standstill", "tier_name", "tier_of", "used_again", "why_moot", "why_unplaced", "why_unseen",
    "without_steps", "worst_tier",
]  # fmt: skip
