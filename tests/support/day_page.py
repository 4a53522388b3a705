"""The page of a game day with given outcomes."""

from __future__ import annotations

from pathlib import Path

from torchaos.harness.gameday import report
from torchaos.harness.gameday.day import Day
from torchaos.harness.gameday.day_grammar import Bounds, Risk
from torchaos.harness.gameday.fault_outcomes import Clock, FaultOutcome, Outcome
from torchaos.harness.gameday.fault_schedule import Drawn, Round
from torchaos.harness.gameday.score import RoundScore, cases_of, total

CLOCK = Clock(productive_s=60.0, lost_s=20.0, checkpoint_s=5.0, stalled_s=5.0, down_s=10.0)


def day_page(
    tmp_path: Path, *came: tuple[Outcome, str], planned: int = 0, cause: str = "a rank dies", markdown: bool = False,
    **bounds: object,
) -> str:  # fmt: skip
    """A page of one round with these outcomes; `planned`: so many more faults were drawn."""
    risk = Risk.model_validate({"inject": "process.kill", "target": {"rank": "any"}, "cause": cause})
    faults = [Drawn(f"f{n:03d}-process.kill", 30.0 * (n + 1), risk) for n in range(len(came) + planned)]
    day = Day(
        "night", 7, str(tmp_path), (), (), (Round(0, 0.0, 3600.0, tuple(faults)),), (("a fan", 3.0, "no such thing"),)
    )
    parts = {"first_step": 4.0, "caught_up": 6.0}
    outcomes = [FaultOutcome(f.id, "process.kill", *one, parts, 12) for f, one in zip(faults, came, strict=False)]
    run = tmp_path / "rounds" / "000" / "run" / "one"
    rounds = [RoundScore(0, "passed", "", 0, str(run), 2, CLOCK, tuple(outcomes))] if came else []
    score = total(rounds)
    cases = cases_of(score, Bounds.model_validate(bounds), rounds, planned=[one.id for one in faults])
    if markdown:
        return report.page(day, str(tmp_path), rounds, score, cases)
    return report.text(day, tmp_path, rounds, score, cases)
