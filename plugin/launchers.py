"""Launchers: what starts a job."""

from torchaos.harness.interfaces import Capability, JobSpec, Launcher, LiveNode, Node, RankProcess
from torchaos.harness.rollback.handles import JobProcesses
from torchaos.harness.running.launchers.torchrun_line import elastic_env

__all__ = ["Capability", "JobProcesses", "JobSpec", "Launcher", "LiveNode", "Node", "RankProcess", "elastic_env"]
