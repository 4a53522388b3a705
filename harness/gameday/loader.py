"""Loads the file of a game day. All mistakes are reported at once, each with its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from torchaos.harness.gameday.grammar import GameDay
from torchaos.harness.gameday.rounds import as_scenario
from torchaos.harness.scenario.checks import check
from torchaos.harness.scenario.grammar import Scenario
from torchaos.harness.scenario.loader import load_as
from torchaos.harness.scenario.parameters import Tell

_ANYWHERE = Path("/")  # any path: the checks read no folder


def _nothing(day: GameDay, tell: Tell) -> None: ...


def load(
    path: Path, overrides: Sequence[str] = (), also: Callable[[GameDay, Tell], None] = _nothing
) -> GameDay:  # fmt: skip
    """Loads the file of a game day. `also`: reports further mistakes. Raises ScenarioError with a line per mistake:
    `file:line:column: what; what to do`."""

    def checked(day: GameDay, tell: Tell) -> None:
        also(day, tell)
        try:
            scenario = Scenario.model_validate(as_scenario(day, _ANYWHERE, _ANYWHERE))
        except ValidationError as error:
            tell((), f"no scenario can be made of it: {error.errors()[0]['msg']}")
            return
        check(scenario, tell)

    return load_as(GameDay, path, overrides, checked)
