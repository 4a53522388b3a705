"""The only code that makes global steps: from the events of a run to attempts, global steps and the final history.
Pure.

Input: events, with the witnesses of the step from which each attempt resumed. Output: the steps of every attempt, each
with its global number."""

from torchaos.harness.record.history.attempts import Attempt, Process, Segment
from torchaos.harness.record.history.history import History, base_of
from torchaos.harness.record.history.saves_and_loads import Load, Save, saved_as
from torchaos.harness.record.history.step_evidence import Witness
from torchaos.harness.record.steps import Execution, Executions, StepTable

__all__ = [
    "Attempt", "Execution", "Executions", "History", "Load", "Process", "Save", "Segment", "StepTable", "Witness",
    "base_of", "saved_as",
]  # fmt: skip
