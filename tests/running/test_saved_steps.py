"""One checkpoint is all files of one save, and is called by the file that holds the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from torchaos.harness.protocol.wire import Kind
from torchaos.harness.record.checkpoint_names import name_of_all
from torchaos.harness.reporting.event_timeline import happened
from torchaos.harness.reporting.terminal.live import Progress
from torchaos.harness.running.scaffold.observed_run import seen_in


@pytest.mark.parametrize(("files", "name"), [
    (["step-6.rng0", "step-6.pt", "step-6.rng1"], "step-6.pt"),
    (["model-3.pt", "optim-3.pt"], "model-3.pt"),
    (["optim-3.pt", "sched-3.pt", "model-3.pt"], "model-3.pt"),
    (["checkpoint-6/model.safetensors", "checkpoint-6/optimizer.pt", "checkpoint-6/scheduler.pt",
      "checkpoint-6/rng_state_1.pth", "checkpoint-6/training_args.bin"], "checkpoint-6"),
    (["best.pt", "last.pt", "step-6.pt"], "step-6.pt"),
    (["last.pt", "best.pt"], "last.pt"),
    (["epoch=0-step=10.ckpt", "last.ckpt"], "epoch=0-step=10.ckpt"),
    (["latest", "step-6/weights"], "step-6"),
    (["global_step6/mp_rank_00_model_states.pt", "global_step6/zero_pp_rank_0_mp_rank_00_optim_states.pt"],
     "global_step6"),
    (["mix.0.rng", "mix.0.weights"], "mix.0.weights"),
    (["ckpt_12.pt.optimizer", "ckpt_12.pt"], "ckpt_12.pt"),
    (["rng.pt"], "rng.pt"),
])  # fmt: skip
def test_the_file_with_the_model_names_the_checkpoint(files: list[str], name: str) -> None:
    """Whatever the order in which the files were written."""
    for order in (files, files[::-1]):
        assert name_of_all([f"/job/ckpt/{file}" for file in order]) == name


def _with_sidecars(run: Any) -> Any:
    """The same run, whose ranks save the state of their generators beside each checkpoint, and load it."""
    events, more = [], 0
    for event in run.events:
        events.append(event)
        if event.kind in (Kind.SAVE_BEGIN, Kind.SAVE_END, Kind.LOAD_BEGIN, Kind.LOAD_END):
            more += 1
            data = {**event.data, "path": f"{event.data['path']}.rng{event.rank}"}
            data = {**data, "numbers": {}} if "numbers" in data else data
            events.append(replace(event, data=data, seq=event.seq + 100_000 + more, mono_s=event.mono_s + 1e-4))
    return replace(run, events=tuple(events))


def test_files_beside_a_checkpoint_are_no_checkpoints(trainer: Any) -> None:
    """init counts, explain and the live line name the checkpoint, and the resume goes on from it."""
    run = _with_sidecars(trainer(kills=[(18, 1)]).record())
    words = {seen.name: seen.words for seen in seen_in(run)}["checkpoints"]
    assert (words.startswith("6 saves, after steps 5, 10, 15, 20, 25 …"), words.endswith("to step-30")) == (True, True)
    told = [moment.text for moment in happened(run)]
    assert [text for text in told if "is saved" in text] == [
        f"the checkpoint of step {step} is saved: step-{step}" for step in range(5, 31, 5)
    ]
    assert any("goes on after step 15, from step-15:" in text for text in told)
    progress = Progress(lambda attempt: 0)
    for event in run.events:
        progress.note(event)
    assert progress.checkpoint == "step-30"
