"""Installs the hooks of a rank. No other module knows which hook patches which module."""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable

from .agent import Agent
from .startup import PostImport, Then


def install(agent: Agent) -> None:
    """Installs each hook as soon as torch and the module that the hook patches are imported."""
    imports = PostImport()
    installer = _Installer(agent, imports)
    imports.when("torch", agent.careful("steps")(installer.torch_is_there))
    imports.when("torch", lambda torch: agent.starts())
    imports.install()
    if "reads" in agent.live:
        agent.careful("reads")(_record_reads)(agent)
    if "imported" in agent.live:
        agent.careful("imported")(_note_imports)(agent)
    atexit.register(installer.process_ends)
    os.register_at_fork(after_in_child=agent.is_forked_child)


def _record_reads(agent: Agent) -> None:
    from .file_reads import FileReads

    FileReads(agent).install()


def _note_imports(agent: Agent) -> None:
    """In rank 0, writes the name of each module that is imported to the file agent/imported, one per line. An
    exploration imports them once, in the process from which it forks ranks."""
    agent.saw("imported")
    if agent.who.rank:
        return
    folder = os.path.join(os.path.dirname(agent.plan.events), "agent")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fd = os.open(os.path.join(folder, "imported"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "import" and agent.on:
            os.write(fd, f"{args[0]}\n".encode())

    sys.addaudithook(note)


class _Installer:
    def __init__(self, agent: Agent, imports: PostImport) -> None:
        self._agent, self._imports = agent, imports
        self._finish: Callable[[], Any] | None = None
        self._at_end: list[Callable[[], Any]] = []

    def torch_is_there(self, torch: ModuleType) -> None:
        from .batches.batch_loader import LoaderHook
        from .batches.batch_ring import BatchRing, TrainedBatches
        from .collectives.collective_hooks import GroupHook
        from .saving.checkpoint_hooks import CheckpointHook, Transfers
        from .saving.manifest_hooks import ManifestHook
        from .state.live_objects import watch_freezes
        from .state.state_check_sums import StateSums
        from .training.learning_rates import LearningRates
        from .training.step_events import Losses
        from .training.step_hooks import StepHooks

        agent, ring = self._agent, BatchRing()
        agent.started(str(torch.__version__))
        agent.faults.load()
        watch_freezes(torch.nn.Module, agent.careful("kept"))
        rates, trained = LearningRates(agent), TrainedBatches(ring)
        steps = StepHooks(agent, Losses(agent), rates, trained)
        self._finish = steps.finish
        self._when("torch.autograd", "steps", steps.patch_autograd)
        self._when("torch.optim.optimizer", "steps", steps.patch_optimizer)
        self._when("torch.amp.grad_scaler", "steps", steps.patch_scaler)
        self._when("torch.optim.lr_scheduler", "lr", rates.patch)
        self._when("torch.distributed", "process_group", GroupHook(agent).patch)
        if "state" in agent.live:
            from .state.state_check_sums import StateHook

            steps.watch_state(StateHook(agent))
        if "samples" in agent.live:
            self._samples(LoaderHook(agent, ring, trained), trained)
        if "checkpoints" in agent.live:
            digesting = ManifestHook(agent)
            self._at_end.append(digesting.ended)
            sums = StateSums(agent)
            self._when("torch", "kept", sums.patch)
            transfers = Transfers(agent, digesting, sums)
            transfers.renames.install()
            self._at_end.append(transfers.buffers.look)
            files = CheckpointHook(transfers)
            self._when("torch", "checkpoints", files.patch_torch)
            self._when("safetensors.torch", "checkpoints", files.patch_safetensors)
            for package in ("lightning.fabric", "lightning_fabric"):
                self._when(f"{package}.utilities.cloud_io", "checkpoints", files.patch_lightning)
            for streams in ("filesystem", "_fsspec_filesystem"):
                self._when(f"torch.distributed.checkpoint.{streams}", "manifests", digesting.patch_streams)
            self._distributed_checkpoints(transfers)
        if "collectives" in agent.live:
            self._collectives()
        self._when("torch._dynamo.trace_rules", "steps", _leave_alone)

    def _samples(self, loader: Any, trained: Any) -> None:
        from .batches.forward_hooks import ForwardHook

        forward = ForwardHook(self._agent, trained, loader.model_is_wrapped)
        loader.feeds = forward.leave_modules
        self._when("torch", "samples", forward.patch_modules)
        self._when("torch.utils.data.dataloader", "samples", loader.patch)
        self._when("torchdata.stateful_dataloader.stateful_dataloader", "samples", loader.patch_stateful)
        self._when("torch.nn.parallel.distributed", "samples", forward.patch_ddp)
        self._when("torch.distributed.fsdp.fully_sharded_data_parallel", "samples", forward.patch_fsdp)
        self._when("torch.distributed.pipelining.stage", "samples", forward.patch_pipelines)
        for fsdp2 in ("torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp"):  # 2.6 on; before
            self._when(f"{fsdp2}._fsdp_state", "samples", forward.patch_fsdp2)

    def _distributed_checkpoints(self, transfers: Any) -> None:
        def patch(name: str, method: str) -> None:
            def then(module: ModuleType) -> None:
                from .saving.checkpoint_hooks import DistributedCheckpointHook

                getattr(DistributedCheckpointHook(self._agent, transfers), method)(module)

            self._when(f"torch.distributed.checkpoint.{name}", "checkpoints", then)

        patch("state_dict_saver", "patch_saver")
        patch("state_dict_loader", "patch_loader")

    def _collectives(self) -> None:
        def then(module: ModuleType) -> None:
            from .collectives.collective_hooks import CollectiveHook, FunctionalHook

            if module.is_available():
                hook = CollectiveHook(self._agent)
                hook.install()
                FunctionalHook(hook).install()

        self._when("torch.distributed", "collectives", then)

    def _when(self, name: str, hook: str, then: Then) -> None:
        self._imports.when(name, self._agent.careful(hook)(then))

    def process_ends(self) -> None:
        if not self._agent.on or os.getpid() != self._agent.who.pid:
            return
        if self._finish is None:
            self._agent.started(None)
        else:
            self._finish()
        for end in self._at_end:
            end()
        self._agent.ended()


def _leave_alone(rules: ModuleType) -> None:
    """Makes torch.compile skip the agent's files. Otherwise it would inline the agent's optimizer hooks into a compiled
    step. Instead, it breaks the graph at these hooks and runs them uncompiled. It breaks the graph at every optimizer
    step anyway, so a job that sets fullgraph=True works as before. `rules`: the module torch._dynamo.trace_rules."""
    rules.SKIP_DIRS.extend(str(Path(__file__).parents[1] / room) for room in ("agent", "protocol"))
    rules._recompile_re()
