"""The one notion of step: from the events of a run to attempts, global steps and the history that counts. Pure."""

from torchaos.harness.history.attempts import Attempt, Process
from torchaos.harness.history.believing import Witness
from torchaos.harness.history.checkpoints import Load, Save, saved_as
from torchaos.harness.history.executions import Execution
from torchaos.harness.history.history import History, base_of
from torchaos.harness.history.segments import Segment

__all__ = ["Attempt", "Execution", "History", "Load", "Process", "Save", "Segment", "Witness", "base_of", "saved_as"]
