"""The environment of the job. The user's command and working directory are not changed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torchaos.harness import agent
from torchaos.harness.agent.wire import (
    ENV_ARMED,
    ENV_ATTEMPT_BASE,
    ENV_NODE,
    ENV_PLAN,
    ENV_REPLICA,
    ENV_ROUND,
    ENV_RUN_ID,
)  # fmt: skip

BOOTSTRAP = Path(agent.__path__[0]).resolve() / "bootstrap"

# A variable that the user sets is kept. Attempts and pids are read from the event log and from the restart lines
# (INFO).
_UNLESS_SET = {"PET_EVENT_LOG_HANDLER": "console", "LOGLEVEL": "INFO", "PYTHONUNBUFFERED": "1"}


def job_env(
    base_env: Mapping[str, str], *, run_id: str, agent_plan: Path | None, attempt_base: int = 0,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:  # fmt: skip
    """The job's environment. `extra`: the variables of the scenario. Without `agent_plan`, no agent is added, and
    PYTHONPATH is not changed."""
    env = {**base_env, **(extra or {})}
    for name in (ENV_PLAN, ENV_ARMED, ENV_NODE, ENV_REPLICA, ENV_ROUND):  # set by a run that contains this run
        env.pop(name, None)
    for name, value in _UNLESS_SET.items():
        env.setdefault(name, value)
    env[ENV_RUN_ID], env[ENV_ATTEMPT_BASE] = run_id, str(attempt_base)
    if agent_plan is not None:
        env[ENV_PLAN] = str(agent_plan)
        earlier = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(BOOTSTRAP)]
        env["PYTHONPATH"] = os.pathsep.join([str(BOOTSTRAP), *earlier])
    return env
