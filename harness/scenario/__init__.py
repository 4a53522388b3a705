"""What a user may write, and what is said of mistakes: from YAML to a typed `Scenario`.

Text comes in; a typed scenario goes out, or every mistake at once, each with its line and what to do. Nothing is drawn,
checked on the machine, or started here."""

from torchaos.harness.scenario.loader import load

__all__ = ["load"]
