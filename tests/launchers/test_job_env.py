"""The job's environment: which variables are added, and which of the user's are kept."""

from __future__ import annotations

import os
from pathlib import Path

from torchaos.harness.running.launchers.job import BOOTSTRAP, job_env

PLAN = Path("/tmp/plan.json")


def test_the_agent_is_put_before_the_users_own_path() -> None:
    """The bootstrap folder comes first, once, and the user's folders stay in order."""
    base = {"PYTHONPATH": os.pathsep.join(["/a", str(BOOTSTRAP), "/b"])}
    env = job_env(base, run_id="r", agent_plan=PLAN, attempt_base=3)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(BOOTSTRAP), "/a", "/b"]
    assert (env["TORCHAOS_PLAN"], env["TORCHAOS_RUN_ID"], env["TORCHAOS_ATTEMPT_BASE"]) == (str(PLAN), "r", "3")


def test_what_the_user_set_stays() -> None:
    """Log level, event handler and buffering are set only where the user set nothing; the scenario's own wins."""
    env = job_env({"LOGLEVEL": "DEBUG", "X": "1"}, run_id="r", agent_plan=None, extra={"X": "2"})
    assert (env["LOGLEVEL"], env["PET_EVENT_LOG_HANDLER"], env["PYTHONUNBUFFERED"], env["X"]) == (
        "DEBUG", "console", "1", "2",
    )  # fmt: skip


def test_without_an_agent_nothing_is_loaded() -> None:
    """No plan, no change of PYTHONPATH; and what a run around this one left in the environment is taken out."""
    env = job_env({"TORCHAOS_PLAN": "/outer", "TORCHAOS_ARMED": "1"}, run_id="r", agent_plan=None)
    assert not {"TORCHAOS_PLAN", "TORCHAOS_ARMED", "PYTHONPATH"} & env.keys()


def test_the_given_environment_is_not_changed() -> None:
    """The result is a copy."""
    base = {"A": "1"}
    job_env(base, run_id="r", agent_plan=PLAN)
    assert base == {"A": "1"}
