"""Makes the job from a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from torchaos.harness import registry
from torchaos.harness.host.native_libraries import nccl_net_environment, nvtx_environment
from torchaos.harness.interfaces import Handle, JobSpec, Launcher, RemoteLauncher
from torchaos.harness.monitoring.probes.job_log import JobLog
from torchaos.harness.monitoring.probes.log_adapters import LIGHTNING, adapter_for
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.plan import Plan, PlannedJob
from torchaos.harness.record.rundir import RunDir
from torchaos.harness.running.launchers.job import RunningJob, job_env
from torchaos.harness.running.launchers.local_job import AttachedJob, LocalJob, ProxiedLauncher
from torchaos.harness.running.launchers.remote_job import RemoteJob
from torchaos.harness.scenario.checks import made


def kind_of_job(launcher: str, attach: int | None) -> type[RunningJob]:
    """The class of a job. `attach`: the pid of a running torchrun. Only this function asks the launcher whether its
    nodes are other machines; all others ask the class."""
    if attach is not None:
        return AttachedJob
    return RemoteJob if registry.find("launchers", launcher).on_nodes else LocalJob


def job_for(
    plan: Plan, folder: RunDir, run_id: str, journal: Journal,
    record_undo: Callable[[Sequence[Handle], int], None] | None = None,
) -> RunningJob:  # fmt: skip
    """The job of the plan. It is not started yet. `record_undo`: writes to disk the undo of what a launcher is about to
    make. Raises UsageError if the log format or the launcher is unknown, or if there is no torchrun to attach to."""
    job = plan.job
    kind = kind_of_job(plan.launcher, job.attach_pid)
    watchdogs = [assertion.params["pattern"] for assertion in plan.asserts if assertion.params.get("pattern")]
    new_log = partial(JobLog, journal, adapter_for(plan.job.log), watchdogs)
    if job.attach_pid is not None:
        return AttachedJob(
            job.attach_pid, journal, log=_log_file(job, folder), new_log=new_log, metrics=_metrics(job, folder)
        )

    launcher: Launcher = made(registry.find("launchers", plan.launcher), job.settings)
    if job.endpoints:
        proxied = {
            fault.params["endpoint"] for fault in plan.faults
            if registry.find("injectors", fault.inject).hits == "endpoints"
        }  # fmt: skip
        launcher = ProxiedLauncher(launcher, job.endpoints, proxied, folder.root / "proxy")

    spec_for = partial(_spec, plan, folder, run_id)
    if kind is RemoteJob:
        return RemoteJob(
            spec_for, cast(RemoteLauncher, launcher), journal, folder.root, faults=plan.faults,
            resubmit_times=job.resubmit_times, resubmit_delay_s=job.resubmit_delay_s, record_undo=record_undo,
            new_log=new_log if job.attached else None,
        )  # fmt: skip

    return LocalJob(
        spec_for, launcher, journal, resubmit_times=job.resubmit_times, resubmit_delay_s=job.resubmit_delay_s,
        record_undo=record_undo, new_log=new_log, metrics=_metrics(job, folder),
    )  # fmt: skip


def check_cluster(plan: Plan, folder: RunDir) -> None:
    """Asks the cluster, before anything is made, whether it can run the job, and whether the user has the rights that
    the faults need. `folder`: the run directory, which has the plan. Raises UsageError if not, and ChaosError if the
    cluster does not answer."""
    if kind_of_job(plan.launcher, plan.job.attach_pid) is RemoteJob:
        launcher = registry.find("launchers", plan.launcher)
        made(launcher, plan.job.settings).resources(_spec(plan, folder, folder.root.name, 0))


def _spec(plan: Plan, folder: RunDir, run_id: str, submission: int) -> JobSpec:
    job = plan.job
    command = (submission and job.resubmit_command) or job.command
    argv = tuple(_filled(part, folder) for part in command)
    variables = {**job.env, **job.resubmit_env} if submission else job.env
    extra = {name: _filled(value, folder) for name, value in variables.items()}
    if "nvtx" in plan.needs:
        extra |= nvtx_environment(folder.pages.parent / "nvtx")
    if "nccl_net" in plan.needs:
        extra |= nccl_net_environment(folder.pages.parent / "nccl_net")
    env, own_env = (
        job_env(base, run_id=run_id, agent_plan=folder.agent_plan, extra=extra)
        for base in (os.environ, dict[str, str]())
    )
    checkpoints = Path(_filled(job.cwd, folder)) / _filled(job.checkpoints, folder) if job.checkpoints else None
    return JobSpec(
        argv, Path(_filled(job.cwd, folder)), env, folder.logs / f"job-{submission}.log", submission, job.nodes,
        own_env, checkpoints, job.replicas, job.world_size // job.replicas, job.busy_nodes, job.timeout_s,
        Path(_filled(job.checkpoints_local, folder)) if job.checkpoints_local else None,
    )  # fmt: skip


def _filled(text: str, folder: RunDir) -> str:
    return text.replace("{run}", str(folder.job))


def _log_file(job: PlannedJob, folder: RunDir) -> Path | None:
    """The file with the output of a job to which torchaos attaches. None for Lightning, where the path in the scenario
    is that of metrics.csv."""
    log = job.log or {}
    return Path(_filled(str(log["path"]), folder)) if log.get("path") and log.get("format") != LIGHTNING else None


def _metrics(job: PlannedJob, folder: RunDir) -> Path | None:
    """The path of Lightning's metrics.csv, which may not exist yet: the given path, or the working directory."""
    log = job.log or {}
    if log.get("format") != LIGHTNING:
        return None
    return Path(_filled(job.cwd, folder)) / _filled(str(log.get("path") or "lightning_logs"), folder)
