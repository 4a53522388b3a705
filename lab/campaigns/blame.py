"""Tests whom `torchaos diagnose` names, in Flight Recorder dumps of a modelled job: hangs, and healthy moments.

    python lab/campaigns/blame.py [--hangs 400] [--healthy 400] [--seed 0] [--json FILE] [--keep FOLDER]

The jobs (blame_job.py) have 2 to 32 ranks in data, tensor and pipeline groups. A hang, of one rank or of two, is a host
that stops, a rank that is gone with its dump, a device that stops before or inside a collective, or a collective that
is left out, swapped, or of another operation or size. A healthy job is recorded at a random moment, its ranks at most
half a second apart. The dumps have the formats of several versions (all calls or only active calls, with or without
device times, pickles or JSON, ring buffers that wrapped), clocks that differ between hosts, and in half of the cases
one or two dumps are missing, empty or torn. Each case is judged twice: with the true times of its files, and as a copy
without them.

Exit code 1 if a rank is named in a healthy job whose files have their true times.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blame_job import CALLS, STALLS, Fault, Item, Job, Layout, program

EPOCH_S = 1_760_000_000.0
LAYOUTS = ((1, 2, 1), (1, 4, 1), (1, 8, 1), (2, 2, 1), (4, 2, 1), (2, 2, 2), (1, 4, 2), (2, 2, 4), (4, 2, 2), (1, 2, 4),
           (2, 4, 4), (1, 32, 1))  # fmt: skip
WATCHDOG_S = 0.1  # the period of torch's watchdog, which looks for calls that have ended


@dataclass
class Form:
    """The format in which the recorder of a job writes."""

    version: str = "2.9"
    as_json: bool = False
    only_active: bool = False
    times: bool = False  # TORCH_NCCL_ENABLE_TIMING: the start on the device is recorded
    backend: str = "nccl"
    ring: int = 2000
    timeout_s: float = 600.0
    status: bool = True
    name: str = "nccl_trace_rank_{}"
    skew_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def drawn(cls, draw: random.Random, layout: Layout) -> Form:
        hosts = defaultdict(lambda: draw.choice([0.0, draw.uniform(-0.02, 0.02), draw.uniform(-5, 5)]))
        return cls(
            draw.choice(["2.10", "2.9", "2.4", "2.1", "1.5"]), draw.random() < 0.2, draw.random() < 0.4,
            draw.random() < 0.3, "gloo" if layout.blocking else "nccl", draw.choice([40, 200, 2000]),
            draw.choice([10.0, 180.0, 600.0, 1800.0]), draw.random() < 0.8,
            draw.choice(["nccl_trace_rank_{}", "_dump_{}", "rank{}.pkl", "fr_{}"]),
            {rank: hosts[rank // 8] for rank in range(layout.world)},
        )  # fmt: skip


def dump(job: Job, rank: int, at_s: float, form: Form, draw: random.Random) -> dict[str, Any]:
    """The dump of a rank at a time."""
    groups = {name: ranks for name, ranks in job.layout.groups.items() if rank in ranks}
    ids = {name: number for number, name in enumerate(sorted(groups, key=int))}
    looked_s = at_s - draw.uniform(0.0, WATCHDOG_S)
    calls = [call for call in job.programs[rank] if call.is_call and call.called_s <= at_s]
    entries, messages, counted = [], Counter[str](), Counter[str]()
    for number, call in enumerate(calls):
        messages[call.group] += call.is_message
        counted[call.group] += not call.is_message
        entries.append(_entry(job, rank, call, number, at_s, looked_s, form, groups, ids, messages, counted))
    status = {}
    for name, number in ids.items():
        mine = [call for call in calls if call.group == name]
        over = [n for n, call in enumerate(mine, 1) if call.over_s <= looked_s]
        status[str(number)] = {
            "last_enqueued_collective": len(mine) or -1, "last_started_collective": -1,
            "last_completed_collective": max(over, default=-1),
        }  # fmt: skip
    entries = entries[-form.ring :]
    if form.only_active and form.backend == "nccl":
        entries = [entry for entry in entries if entry["state"] != "completed"]
    found = {
        "version": form.version, "entries": entries,
        "pg_config": {
            name: {"name": name, "desc": _described(name, job.layout), "ranks": str(list(ranks))}
            for name, ranks in groups.items()
        },
    }  # fmt: skip
    return {**found, "pg_status": status} if form.status and form.version != "1.5" else found


def _entry(
    job: Job, rank: int, call: Item, number: int, at_s: float, looked_s: float, form: Form,
    groups: Mapping[str, tuple[int, ...]], ids: Mapping[str, int], messages: Counter[str], counted: Counter[str],
) -> dict[str, Any]:  # fmt: skip
    members, over = groups[call.group], call.over_s <= at_s
    name = call.kind
    if call.is_message:
        me, peer = members.index(rank), members.index(call.peer)
        name = f"send {me}->{peer}" if call.kind == "send" else f"recv {me}<-{peer}"
    nccl = form.backend == "nccl"
    state = "completed" if over and nccl else "started" if form.times and nccl and call.ready_s <= at_s else "scheduled"
    stamp = int((EPOCH_S + call.called_s + form.skew_s[rank]) * 1e9)
    entry: dict[str, Any] = {
        "record_id": number, "pg_id": ids[call.group],
        "process_group": (call.group, _described(call.group, job.layout)),
        "collective_seq_id": counted[call.group], "p2p_seq_id": messages[call.group], "op_id": number,
        "profiling_name": f"{form.backend}:{'_' if name.endswith('_base') else ''}{name}", "time_created_ns": stamp,
        "input_sizes": [[call.size]], "output_sizes": [[call.size]], "input_dtypes": ["Float"],
        "output_dtypes": ["Float"], "state": state, "retired": call.over_s <= (looked_s if nccl else at_s),
        "time_discovered_started_ns": stamp if state == "started" else None,
        "time_discovered_completed_ns": stamp if state == "completed" else None,
        "timeout_ms": int(form.timeout_s * 1000), "is_p2p": call.is_message, "frames": [],
    }  # fmt: skip
    if not nccl:
        entry.update(input_sizes=[], output_sizes=[], input_dtypes=[], output_dtypes=[])
    if form.version in ("1.5", "2.1"):
        entry.pop("is_p2p" if form.version == "1.5" and not call.is_message else "frames")
        entry.pop("timeout_ms")
    if form.version == "1.5":
        entry["seq_id"] = entry.pop("collective_seq_id") + (messages[call.group] if call.is_message else 0)
    return entry


def _described(name: str, layout: Layout) -> str:
    return ("tensor", "data", "pipeline")[(int(name) - 1) // layout.world] if int(name) else "default_pg"


def write(folder: Path, job: Job, moments: Mapping[int, float], form: Form, gone: set[int], draw: random.Random,
          damage: int) -> set[int]:  # fmt: skip
    """Writes the dumps of all ranks, of which `damage` are spoilt. Returns the ranks whose dumps are spoilt."""
    spoilt = set(draw.sample(range(job.layout.world), damage))
    for rank, at_s in moments.items():
        how = draw.choice(["missing", "empty", "torn"]) if rank in spoilt else ""
        if rank in gone or how == "missing":
            continue
        found = dump(job, rank, at_s, form, draw)
        raw = json.dumps(found).encode() if form.as_json else pickle.dumps(found, 2)
        raw = b"" if how == "empty" else raw[: int(len(raw) * draw.uniform(0.1, 0.95))] if how == "torn" else raw
        path = folder / form.name.format(rank)
        path.write_bytes(raw)
        when = EPOCH_S + at_s + form.skew_s[rank]
        os.utime(path, (when, when))
    return spoilt


def make(draw: random.Random, hang: bool) -> tuple[Job, Layout]:
    """A job that hangs only because of its faults, or a job that goes on."""
    while True:
        layout = Layout(*draw.choice(LAYOUTS), blocking=draw.random() < 0.25, overlap=draw.random() < 0.5)
        steps, pace, uneven = draw.randint(5, 12), 10 ** draw.uniform(-3, -1), draw.choice([0.02, 0.1, 0.4])
        items = {rank: program(layout, rank, steps, pace, uneven, draw) for rank in range(layout.world)}
        faults: list[Fault] = []
        if hang:
            kind = draw.choice([*STALLS, *STALLS, *CALLS])
            for rank in draw.sample(range(layout.world), 1 if layout.world < 8 or draw.random() < 0.8 else 2):
                at = int(len(items[rank]) * draw.uniform(0.4, 0.7))
                faults.append(Fault(kind, rank, at))
        job = Job(layout, items, faults).run()
        if job.hangs == hang and all(fault.landed for fault in faults):
            return job, layout


def judge(folder: Path) -> tuple[set[int], set[int]]:
    from torchaos.harness.interfaces import UsageError
    from torchaos.harness.monitoring.diagnosis.blame import diagnose
    from torchaos.harness.monitoring.diagnosis.flight_recorder import read_folder

    try:
        found = diagnose(read_folder(folder))
    except UsageError:  # none of the dumps can be read
        return set(), set()
    json.dumps(found.to_json())
    return found.culprits, found.suspects


def verdict(culprits: set[int], truth: set[int]) -> str:
    if culprits == truth:
        return "exact" if truth else "nobody named"
    if not truth:
        return "blamed"
    if culprits > truth:
        return "more"
    return "nobody named" if not culprits else "a part" if culprits < truth else "wrong"


def one(number: int, seed: int, hang: bool, keep: Path | None) -> list[dict[str, Any]]:
    draw = random.Random(f"{seed} {hang} {number}")
    job, layout = make(draw, hang)
    form = Form.drawn(draw, layout)
    moments = job.moments
    if hang:
        at = moments[-1] + form.timeout_s
        apart = draw.choice([0.0, 0.1, 2.0])
    else:
        at, apart = draw.uniform(moments[len(moments) // 3], moments[-1]), draw.choice([0.0, 0.001, 0.05, 0.5])
    times = {rank: at + draw.uniform(0.0, apart) for rank in range(layout.world)}
    kind = job.faults[0].kind if hang else "a pause of rank 0" if job.pauses(at) else "at work"
    truth = {fault.rank for fault in job.faults}
    gone = {fault.rank for fault in job.faults if fault.kind == "gone"}
    damage = draw.choice([0, 0, 1, 2]) if layout.world > 2 else 0
    found = []
    folder = Path(tempfile.mkdtemp())
    try:
        spoilt = write(folder, job, times, form, gone, draw, damage)
        for copied in (False, True):
            if copied:
                for path in folder.iterdir():
                    os.utime(path)
            culprits, suspects = judge(folder)
            found.append({
                "number": number, "kind": kind, "copied": copied,
                "layout": (layout.tp, layout.dp, layout.pp), "blocking": layout.blocking, "apart_s": apart,
                "spoilt": sorted(spoilt), "truth": sorted(truth), "culprits": sorted(culprits),
                "suspects": sorted(suspects), "said": verdict(culprits, truth),
                "form": (form.version, form.only_active, form.times, form.ring),
            })  # fmt: skip
        if keep and any(o["said"] in ("blamed", "wrong", "more") for o in found):
            shutil.copytree(folder, keep / f"{'hang' if hang else 'healthy'}-{number}", dirs_exist_ok=True)
    finally:
        shutil.rmtree(folder)
    return found


SAID = ("exact", "a part", "nobody named", "more", "wrong", "blamed")


def table(found: list[dict[str, Any]]) -> str:
    rows = [f"{'':34}" + "".join(f"{said:>14}" for said in SAID)]
    kinds = [*STALLS, *CALLS, "all hangs", "at work", "a pause of rank 0"]
    for copied in (False, True):
        for whole in (True, False):
            rows.append(f"{'copied' if copied else 'true times'}, {'whole' if whole else 'some spoilt'}")
            for kind in kinds:
                some = [o for o in found if o["copied"] == copied and bool(o["spoilt"]) != whole
                        and (o["kind"] == kind or (kind == "all hangs" and o["truth"]))]  # fmt: skip
                counted = Counter(o["said"] for o in some)
                rows.append(f"  {kind:24} {len(some):6} " + "".join(f"{counted[said]:14}" for said in SAID))
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hangs", type=int, default=400)
    parser.add_argument("--healthy", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="where the sets go in which an innocent rank was named")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for hang, many in ((True, given.hangs), (False, given.healthy)):
        for number in range(many):
            found += one(number, given.seed, hang, given.keep)
    print(table(found))
    if given.json:
        given.json.write_text("\n".join(json.dumps(o) for o in found) + "\n")
    return int(any(o["said"] == "blamed" and not o["copied"] for o in found))


if __name__ == "__main__":
    sys.exit(main())
