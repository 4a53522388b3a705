"""What each rank did in each step, as columns: numpy arrays with a row for each step of a rank. Pure. A long run has
millions of steps, and nearly all of them are like the twin's. So a step becomes an object, an Execution, only when code
asks for it."""

from torchaos.harness.record.steps.columns import Columns
from torchaos.harness.record.steps.execution import Execution
from torchaos.harness.record.steps.executions import Both, Executions, StepTable

__all__ = ["Both", "Columns", "Execution", "Executions", "StepTable"]
