"""What a user may write, and what is said of mistakes: from YAML to a typed `Scenario`."""

from torchaos.harness.scenario.loader import load

__all__ = ["load"]
