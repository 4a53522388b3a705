"""What is known of a run, for assertions and conditions."""

from torchaos.harness.analysis.hit_targets import Landing, landings
from torchaos.harness.analysis.replica_verdict import as_one, each, each_hit
from torchaos.harness.record.history import Attempt, Execution, Save
from torchaos.harness.running.conditions.commands import last_answer
from torchaos.harness.scenario.values import Regex

__all__ = ["Attempt", "Execution", "Landing", "Regex", "Save", "as_one", "each", "each_hit", "landings", "last_answer"]
