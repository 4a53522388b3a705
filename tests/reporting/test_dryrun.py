from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from paper import Paper
from rich.console import Console

from torchaos.harness.base_classes import Fault
from torchaos.harness.interfaces import Target
from torchaos.harness.protocol.agent_plan import Moment
from torchaos.harness.protocol.wire import Phase
from torchaos.harness.record.plan import After, Named, Plan, PlannedFault, PlannedJob
from torchaos.harness.reporting.terminal import console as show

PLAN = Plan(
    scenario="kill-during-recovery",
    description="A second rank dies while the job comes back from the first.",
    seed=7,
    job=PlannedJob(
        ("torchrun", "--nproc-per-node", "2", "train.py"), "/home/ada", {"HF_TOKEN": "hf_abc", "OMP_NUM_THREADS": "1"},
        2, 1, 300.0, "{run}/checkpoints", resubmit_times=1, resubmit_delay_s=1.0,
    ),
    faults=(
        PlannedFault("first", "process.kill", "rank", Target((1,)), Moment(1, 25, Phase.BACKWARD), {}, "", "Kill"),
        PlannedFault("second", "process.freeze", "node", Target((0,)), Moment(0, 30, None), {}, "", "Freeze", 3.0),
        PlannedFault(
            "third", "no.such", "node", Target((0, 1), (0,)), After(2.0, "first", "recovered"), {"grace": 10.0}, "", "",
            times=2,
        ),
    ),
    asserts=(Named("recovery_time", {"catch_up": 60.0}), Named("completed", {})),
    stop=(Named("silence", {"longer_than": 60.0}),),
    max_ranks=1,
    twin={"runs": 3},
    hooks=("steps", "loss"),
    needs=("agent", "pidfd"),
)  # fmt: skip


def test_a_plan_looks_like_this(paper: type[Paper], golden: Callable[[str, str], None]) -> None:
    """A dry run says what would be done, to whom, when and with which undo, and shows no secret."""
    file = paper()
    show.plan(PLAN, Console(file=file, width=80))
    assert "hf_abc" not in file.getvalue()
    golden("plan-80", file.getvalue())


def test_the_catalogue_lists_parameters(paper: type[Paper]) -> None:
    """Each thing that a scenario can name is listed with its first sentence, its parameters' defaults, and of a fault
    whether its effect is real."""

    @dataclass(frozen=True)
    class Slow(Fault):
        """Makes it slow.

        Not shown.
        """

        name: ClassVar[str] = "slow"
        by: float
        until: float | None = None
        times: int = 3

    file = paper()
    show.catalogue({"injectors": {"slow": Slow}, "launchers": {}}, Console(file=file, width=80))
    assert file.getvalue().split() == [
        "Injectors",
        "slow",
        "Makes",
        "it",
        "slow.",
        "by",
        "(required),",
        "until,",
        "times",
        "=",
        "3",
        "effect:",
        "real",
        "Launchers",
    ]
