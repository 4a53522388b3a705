"""Tests each damage in each format: what the format's own loader does, and what `torchaos verify` reports.

python lab/campaigns/damage_matrix.py [--seeds 10] [--formats dcp,...] [--state FILE]
                                     [--out lab/results/checkpoint-damage.md]
                                     [--write docs/measured/damaged-checkpoints.md]

Each format's checkpoints are saved under the agent, which writes the manifest. Then, for each damage and seed, an
injector damages the newest checkpoint, the loader loads it, `verify` checks it with and without the manifest, and the
injector's undo restores it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import marks

from torchaos.harness import registry
from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.verify import Manifests, verify
from torchaos.harness.fault_drivers.site import OutsideSite
from torchaos.harness.interfaces import ChaosError, Target, UsageError
from torchaos.harness.protocol.agent_plan import AgentPlan
from torchaos.harness.protocol.wire import ENV_PLAN, Event, Kind
from torchaos.harness.record.result import ExitCode

HERE = Path(__file__).parent
BOOTSTRAP = HERE.parents[1] / "harness" / "agent" / "bootstrap"
LABELS = {
    "dcp": "DCP", "dcp-safetensors": "DCP, safetensors", "torch": "torch.save", "torch-legacy": "torch.save, legacy",
    "safetensors": "safetensors", "sharded": "safetensors + index", "hf-trainer": "HF Trainer",
    "lightning": "Lightning", "accelerate": "Accelerate", "deepspeed": "DeepSpeed's layout",
}  # fmt: skip
DAMAGES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("one bit in a tensor", "checkpoint.flip_bits", {}),
    ("one bit in metadata", "checkpoint.flip_bits", {"place": "metadata"}),
    ("512 bytes zero", "checkpoint.zero_block", {"bytes": 512}),
    ("one NaN", "checkpoint.nan", {}),
    ("one NaN, CRC fits", "checkpoint.nan", {"fix_crc": True}),
    ("cut off", "checkpoint.truncate", {}),
    ("torn write", "checkpoint.torn_write", {}),
    ("file of tensors deleted", "checkpoint.delete", {"what": "shard"}),
    ("metadata deleted", "checkpoint.delete", {"what": "metadata"}),
    ("partial folder", "checkpoint.partial", {}),
    ("stale file", "checkpoint.stale_shard", {}),
    ("another rank's file", "checkpoint.foreign_shard", {}),
    ("tracker empty", "checkpoint.tracker", {"how": "empty"}),
    ("tracker stale", "checkpoint.tracker", {"how": "stale"}),
)


@dataclass
class Cell:
    """The results of all seeds of one damage in one format."""

    trials: int = 0
    loader: Counter[str] = field(default_factory=Counter)
    plain: Counter[str] = field(default_factory=Counter)  # verify without a manifest
    known: Counter[str] = field(default_factory=Counter)  # verify with a manifest
    why_not: str = ""


class Loader:
    """The format's own loader, in a process that is started again if it dies."""

    def __init__(self, form: str, root: Path) -> None:
        self._argv = [sys.executable, str(HERE / "damage_formats.py"), "load", form, str(root)]
        self._process: subprocess.Popen[str] | None = None

    def __call__(self) -> dict[str, str]:
        if self._process is None:
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            self._process = subprocess.Popen(self._argv, text=True, stdin=pipe, stdout=pipe, stderr=nothing)
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write("load\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code, self._process = self._process.wait(), None
            return {"raised": f"the process ends with {code}"}
        answer: dict[str, str] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process and self._process.stdin:
            self._process.stdin.close()
            self._process.wait()


def save(form: str, root: Path, run: Path) -> Manifests | None:
    """Saves the checkpoints of a format in a process with the agent. Returns the manifests; None if the agent saw none
    of the saves."""
    (run / "agent").mkdir(parents=True)
    (run / "events").mkdir()
    AgentPlan("matrix", str(run / "events"), ("checkpoints", "manifests")).write(run / "agent" / "plan.json")
    identity = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "matrix"}
    env = {**os.environ, **identity, ENV_PLAN: str(run / "agent" / "plan.json"), "PYTHONPATH": str(BOOTSTRAP)}
    argv = [sys.executable, str(HERE / "damage_formats.py"), "save", form, str(root)]
    env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return Manifests.load(run)
    except UsageError:
        return None


@contextmanager
def damaged(name: str, params: Mapping[str, Any], seed: int, root: Path, undo: Path) -> Iterator[None]:
    """Damages the newest checkpoint for the duration of the block. Raises ChaosError if this damage is not possible,
    and SystemExit if it could not be undone."""
    injector = registry.find("injectors", name)(**params).plan(Target(()), random.Random(seed))

    def emit(kind: Kind, data: Mapping[str, Any]) -> Event:
        return Event(kind, "matrix", 0, 0.0, 0.0, data=data)

    site = OutsideSite("damage", (), emit, checkpoints=root, undo_copies=undo)
    handles = injector.changes(site)
    injector.apply(site)
    try:
        yield
    finally:
        for handle in reversed(handles):
            handle.undo()
        if not all(handle.is_undone() for handle in handles):
            raise SystemExit(f"{name} with seed {seed} could not be put back in {root}")


def said(root: Path, newest: str, manifests: Manifests | None) -> str:
    """What `verify` reports about the newest checkpoint and the tracker files beside it, in a word."""
    files = Local()
    try:
        lost = any(tracker.target is None for tracker in formats.trackers(files, str(root)))
        code = ExitCode.FAILED if lost else verify(files, newest, manifests).code
    except OSError:
        code = ExitCode.FAILED
    finally:
        files.close()
    return {ExitCode.PASSED: "missed", ExitCode.INCONCLUSIVE: "can't tell"}.get(code, "found")


def measure(form: str, seeds: int, work: Path) -> list[Cell]:
    root, undo = work / form / "checkpoints", work / form / "undo"
    manifests = save(form, root, work / form / "run")
    undo.mkdir()
    files = Local()
    newest = formats.in_order([formats.read(files, path) for path in formats.find(files, str(root))])[-1].path
    files.close()
    if said(root, newest, manifests) == "found":
        raise SystemExit(f"{form}: verify finds damage in the intact checkpoint")
    load = Loader(form, root)
    intact = load()
    if "loaded" not in intact or load() != intact:
        raise SystemExit(f"{form}: the intact checkpoint does not load, or not alike each time: {intact}")
    cells = []
    for label, name, params in DAMAGES:
        cell = Cell()
        cells.append(cell)
        for seed in range(seeds):
            try:
                with damaged(name, params, seed, root, undo):
                    cell.trials += 1
                    cell.loader[_outcome(load(), intact)] += 1
                    cell.plain[said(root, newest, None)] += 1
                    cell.known[said(root, newest, manifests) if manifests else "no manifest"] += 1
            except ChaosError as error:
                cell.why_not = str(error)
                break
        print(f"{form:16} {label:24} {dict(cell.loader)} {dict(cell.plain)} {dict(cell.known)}", flush=True)
    load.close()
    return cells


def _outcome(answer: Mapping[str, str], intact: Mapping[str, str]) -> str:
    if "raised" in answer:
        return "refuses"
    return "loads it right" if answer == intact else "loads wrong values"


def page(table: Mapping[str, list[Cell]], seeds: int) -> str:
    names = ("torch", "safetensors", "transformers", "lightning", "accelerate")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    parts = [
        HEAD.format(seeds=seeds, versions=versions),
        "## What the loader does\n", _table(table, lambda cell: _words(cell.loader, cell)),
        "\n## What `torchaos verify` says without a manifest\n", _table(table, lambda cell: _words(cell.plain, cell)),
        "\n## What it says with a manifest\n", _table(table, lambda cell: _words(cell.known, cell)), _missed(table),
    ]  # fmt: skip
    return "\n".join(parts)


def _table(table: Mapping[str, list[Cell]], words: Any) -> str:
    head = "| | " + " | ".join(LABELS[form] for form in table) + " |"
    rows = [
        f"| {label} | " + " | ".join(words(cells[number]) for cells in table.values()) + " |"
        for number, (label, _name, _params) in enumerate(DAMAGES)
    ]
    return "\n".join([head, "|---|" + "---|" * len(table), *rows]) + "\n"


def _words(counts: Counter[str], cell: Cell) -> str:
    if not cell.trials:
        return "·"
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{what} {count}" for what, count in counts.most_common())


def summary(table: Mapping[str, list[Cell]]) -> str:
    """One table of all: W for a loader that loads wrong values, R for one that refuses, and what `verify` found."""
    letters = {"loads wrong values": "W", "refuses": "R", "loads it right": "ok"}
    head = ["", *(LABELS[form] for form in table), "`verify`", "with a manifest"]
    rows = [head, ["---"] * len(head)]
    for number, (label, _name, _params) in enumerate(DAMAGES):
        cells = [cells[number] for cells in table.values()]
        row = [" ".join(letters[what] for what, _count in cell.loader.most_common()) or "·" for cell in cells]
        trials = sum(cell.trials for cell in cells)
        found = (sum(cell.plain["found"] for cell in cells), sum(cell.known["found"] for cell in cells))
        rows.append([label, *row, *(f"{count} of {trials}" for count in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _missed(table: Mapping[str, list[Cell]]) -> str:
    """Sentences with the totals, and with the damages that are missed even with a manifest."""
    trials = sum(cell.trials for cells in table.values() for cell in cells)
    wrong = sum(cell.loader["loads wrong values"] for cells in table.values() for cell in cells)
    plain = sum(cell.plain["found"] for cells in table.values() for cell in cells)
    known = sum(cell.known["found"] for cells in table.values() for cell in cells)
    left = [
        f"- {label}: {', '.join(names)}"
        for number, (label, _name, _params) in enumerate(DAMAGES)
        if (names := [LABELS[form] for form, cells in table.items() if cells[number].known["missed"]])
    ]
    listed = "\n".join(left) or "Nothing."
    return (
        f"\n## Totals\n\n{trials} damages. The loaders loaded wrong values from {wrong} of them. `verify` found "
        f"{plain} without a manifest, and {known} with a manifest. With a manifest it misses:\n\n{listed}\n\n"
        "A stale tracker names a checkpoint that is whole, so `verify` has no damage to find. `checkpoint_integrity` "
        "finds it: the job went back further than it had to. A file that only Python's `open` wrote, such as an index "
        "of safetensors, is in no manifest.\n"
    )


HEAD = """# Damage by format: what loaders do, and what `verify` finds

Written by `python lab/campaigns/damage_matrix.py --seeds {seeds} --out lab/results/checkpoint-damage.md`. Versions:
{versions}. Each cell is {seeds} random damages of the newest checkpoint, made by the injectors `checkpoint.*`.

- *Loads wrong values*: the loader returned without an error, and a value was not the saved value, or was missing.
- *Loads it right*: the loader does not need the damaged bytes.
- *·*: the format has nothing that can be damaged in this way.

The column of DeepSpeed's layout has the names and sizes of DeepSpeed's own files, written and read by `torch`. Files
that Megatron and TorchTitan wrote themselves are damaged in `tests/injectors/test_samples.py`.
"""


def _plain(value: Any) -> Any:
    return Counter(value) if isinstance(value, dict) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write all tables, as a page")
    parser.add_argument("--write", type=Path, nargs="+", metavar="PAGE", help="write their summary into these pages")
    parser.add_argument("--state", type=Path, help="what was measured is kept there, and not measured again")
    parser.add_argument("--formats", default=",".join(LABELS))
    args = parser.parse_args()
    raw = json.loads(args.state.read_text()) if args.state and args.state.exists() else {}
    table = {form: [Cell(*map(_plain, cell.values())) for cell in cells] for form, cells in raw.items()}
    for form in args.formats.split(","):
        if form not in table:
            with tempfile.TemporaryDirectory() as work:
                table[form] = measure(form, args.seeds, Path(work))
        if args.state:
            args.state.write_text(json.dumps({form: [vars(cell) for cell in cells] for form, cells in table.items()}))
    text = page(table, args.seeds)
    if args.write:
        marks.write(args.write, {"damage": summary(table)})
    if args.out:
        args.out.write_text(text)
    elif not args.write:
        print(text)


if __name__ == "__main__":
    main()
