"""States with damage: after the death, and before the job is started again, a `checkpoint.*` fault hits the files. So a
job may find its newest checkpoint half-written, and the one before it damaged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchaos.harness.contracts import ChaosError, UsageError
from torchaos.harness.exploring.choice import Choice
from torchaos.harness.exploring.states.state import State
from torchaos.harness.exploring.tree import Tree
from torchaos.harness.mechanics.checkpoints.damage import CheckpointFault, carry_out, decide
from torchaos.harness.mechanics.checkpoints.edits import Mode
from torchaos.harness.record.plan import Plan, PlannedFault
from torchaos.harness.registry import injector_of


def faults_of(plan: Plan) -> tuple[PlannedFault, ...]:
    """The faults of the scenario that can hit a state. Raises UsageError if there are none."""
    found = tuple(fault for fault in plan.faults if isinstance(injector_of(fault), CheckpointFault))
    if not found:
        raise UsageError(f"{plan.scenario}: it has no fault checkpoint.*, with which --damage could hit each state")
    return found


def with_damage(choice: Choice, faults: Sequence[PlannedFault], root: Path) -> Choice:
    """The choice, and each of its states again with each of the faults. `root`: the job's checkpoint folder, in which
    the states are made to be damaged; it is removed in the end. A state without a complete checkpoint can't be hit."""
    more = [found for state in choice.states for fault in faults for found in _hit(state, fault, root)]
    shutil.rmtree(root, ignore_errors=True)
    names = ", ".join(fault.inject for fault in faults)
    words = f"{choice.in_words}. With {names}, there are {len(more)} more"
    return Choice((*choice.states, *more), choice.there_are + len(more), words)


def _hit(state: State, fault: PlannedFault, root: Path) -> Iterator[State]:
    injector = injector_of(fault)
    assert isinstance(injector, CheckpointFault)
    said: list[Mapping[str, Any]] = []
    shutil.rmtree(root, ignore_errors=True)
    state.blobs.make_tree(state.tree, root)  # no hard links: the files are changed in place
    try:
        decided = decide(injector, root)
    except ChaosError:
        return
    if any(isinstance(edit, Mode) for _checkpoint, edit in decided.edits):
        raise UsageError(f"{fault.id}: {fault.inject} changes permissions, which a state does not have; leave it out")
    carry_out(decided, fault.id, said.append)
    files = dict(state.tree.files)
    for path in {edit.path for _checkpoint, edit in decided.edits}:
        name = path.relative_to(root).as_posix()
        files.pop(name, None)
        if path.exists():
            files[name] = state.blobs.take_file(path)
    tree = Tree(files, state.tree.folders, state.tree.links)
    yield replace(
        state, name=f"{state.name}-{fault.id}", model=f"{state.model}, {fault.inject}", tree=tree, damage=tuple(said)
    )
