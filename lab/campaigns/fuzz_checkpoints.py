"""Mutates checkpoint files and verifies each: there must always be a verdict or a clear error, never a crash, a hang or
executed code.

Seeds are small checkpoints of each format, hostile pickles and hostile headers. A mutation flips, inserts, removes,
repeats or replaces bytes, splices two files, or writes a large number at the place of a length. Batches run in worker
processes with limited memory, so that a crash or a memory bomb is noticed and its input is kept.

Usage: python lab/campaigns/fuzz_checkpoints.py [--files 20000] [--seed 1] [--keep DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path
from typing import Any

LIMIT_S = 20.0  # for each file
MEMORY = 2 << 30  # bytes of address space beyond the worker's size at its start
BATCH = 250
BIG = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0xFFFF,
    1 << 31,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 40,
    1 << 60,
    (1 << 63) - 1,
    (1 << 64) - 1,
)


class Trap:
    """The code in hostile pickles: when it is executed, it creates a folder."""

    def __init__(self, what: Any, *args: Any) -> None:
        self._reduced = what, args

    def __reduce__(self) -> Any:
        return self._reduced


def seeds(folder: Path, trap: Path) -> None:
    """Writes the seeds into `folder`, each in its own entry."""
    import torch
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict_saver import save

    warnings.simplefilter("ignore")
    state = {
        "model": {"w": torch.randn(5, 3), "h": torch.ones(4, dtype=torch.bfloat16), "v": torch.randn(3, 4).t()},
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]).state_dict(), "rng": tuple(range(30)),
        "step": 3, "path": Path("/a/b"), "args": argparse.Namespace(lr=0.1),
    }  # fmt: skip
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file({"w": torch.randn(5, 3), "i": torch.ones(4, dtype=torch.int64)}, folder / "plain.safetensors")
    save(state, checkpoint_id=folder / "step-1", no_dist=True)
    (folder / "checkpoint-7").mkdir()
    save_file({"w": torch.randn(5, 3)}, folder / "checkpoint-7" / "model-00001-of-00002.safetensors")
    save_file({"b": torch.randn(3)}, folder / "checkpoint-7" / "model-00002-of-00002.safetensors")
    index = '{"weight_map": {"w": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (folder / "checkpoint-7" / "model.safetensors.index.json").write_text(index)
    (folder / "checkpoint-7" / "trainer_state.json").write_text('{"global_step": 7, "log_history": []}')
    torch.save(state["optimizer"], folder / "checkpoint-7" / "optimizer.pt")
    for number, hostile in enumerate(hostiles(trap)):
        write_zip(folder / f"hostile-{number}.pt", hostile)
    for number, header in enumerate(HEADERS):
        (folder / f"header-{number}.safetensors").write_bytes(header)


def hostiles(trap: Path) -> list[bytes]:
    """Pickles that would execute code or use unlimited memory when they are loaded."""
    make = str(trap)
    deep = b"\x80\x02" + b"(" * 1000 + b"t" * 1000 + b"."
    laughs = (
        b"\x80\x02]q\x00"
        + b"".join(b"]q%c(%st.".replace(b"t.", b"e") % (n + 1, b"h%c" % n * 20) for n in range(60))
        + b"."
    )
    nested_key = b"\x80\x02}" + b")" + b"\x85" * 500_000 + b"K\x01s."
    encode = b"\x80\x02c_codecs\nencode\nq\x00X" + struct.pack("<I", 50_000) + b"a" * 50_000 + b"q\x01"
    return [
        *(pickle.dumps(Trap(what, *args), 2) for what, args in (
            (os.mkdir, (make,)), (os.system, (f"mkdir {make}",)), (eval, (f"__import__('os').mkdir('{make}')",)),
            (exec, (f"import os; os.mkdir('{make}')",)), (os.makedirs, (make,)),
        )),
        b"\x80\x02(S'" + f"mkdir {make}".encode() + b"'\nios\nsystem\n.",
        b"\x80\x02cos\nsystem\nX" + struct.pack("<I", 6 + len(make)) + f"mkdir {make}".encode() + b"\x85R.",
        deep, laughs, nested_key,
        encode + (b"h\x00h\x01X\x06\x00\x00\x00latin1\x86R") * 20_000 + b"t.",
        b"\x80\x04r\xff\xff\xff\x7f.", b"\x80\x02]r\xff\xff\xff\x7f.",
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.", b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N.",
        b"\x80\x02\x8b" + struct.pack("<I", 0x7FFFFFFF) + b"x.", b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQK\x00(\x8a\x07\xff\xff\xff\xff\xff\xff\x00t(K\x00tI00\n}tR.",
        b"\x80\x02]q\x00h\x00a.", b"\x80\x02\x82\x01.", b".", b"", b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".",
    ]  # fmt: skip


HEADERS = [
    struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", (1 << 64) - 1) + b"{}", struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 100_000) + b"[" * 100_000, struct.pack("<Q", 20_000) + b'{"a":' * 4000,
    struct.pack("<Q", 77) + b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,16]}}'.ljust(77),
    struct.pack("<Q", 77) + b'{"a":{"dtype":"F32","shape":[-1,-4],"data_offsets":[0,16]}}'.ljust(77) + bytes(16),
    struct.pack("<Q", 77) + b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,NaN]}}'.ljust(77) + bytes(16),
    struct.pack("<Q", 77) + b'{"__metadata__":[[[[]]]],"a":7}'.ljust(77), bytes(8), b"", b"\xff" * 64,
]  # fmt: skip


def write_zip(path: Path, text: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/data/0", bytes(16))


def mutate(data: bytes, other: bytes, draw: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(made) + 1)
        kind = draw.randrange(8)
        if kind == 0 and made:
            made[at % len(made)] ^= 1 << draw.randrange(8)
        elif kind == 1 and made:
            made[at % len(made)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
        elif kind == 2:
            made[at:at] = draw.randbytes(draw.randrange(1, 32))
        elif kind == 3:
            del made[at : at + draw.choice((1, 8, 64, 1024))]
        elif kind == 4:
            piece = made[at : at + draw.choice((4, 32, 256))]
            made[at:at] = piece * draw.choice((1, 8, 64))
        elif kind == 5:
            begin = draw.randrange(len(other) + 1)
            made[at : at + draw.choice((0, 16, 256))] = other[begin : begin + draw.choice((16, 256, 4096))]
        elif kind == 6:
            width = draw.choice((2, 4, 8))
            made[at : at + width] = (draw.choice(BIG) % (1 << 8 * width)).to_bytes(
                width, draw.choice(("little", "big"))
            )  # type: ignore[arg-type]
        else:
            del made[at:]
    return bytes(made)


def work(batch: int, count: int, seed: int, folder: Path, trap: Path, results: Any) -> None:
    """Verifies `count` mutants in this process. Before each it reports which mutant comes, so that a crash can be
    attributed."""
    from torchaos.harness.checkpoints.files import Local
    from torchaos.harness.checkpoints.verify import verify

    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    draw = random.Random(f"{seed} {batch}")
    listed = sorted(folder.iterdir())
    every = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            original = draw.choice(listed)
            copy = Path(name) / original.name
            (shutil.copytree if original.is_dir() else shutil.copyfile)(original, copy)
            inside = [copy] if copy.is_file() else [path for path in sorted(copy.rglob("*")) if path.is_file()]
            chosen = draw.choice(inside)
            data = chosen.read_bytes()
            small = data if len(data) < 300_000 else data[:300_000]
            chosen.write_bytes(data if number == 0 else mutate(small, draw.choice(every).read_bytes()[:65536], draw))
            results.put(("begun", batch, number, str(original.name), chosen.read_bytes()))
            begun, files = time.monotonic(), Local()
            try:
                found = verify(files, str(copy), workers=1)
                results.put(("done", found.code.name, time.monotonic() - begun, None))
            except Exception as error:
                results.put(("done", "RAISED", time.monotonic() - begun, f"{type(error).__name__}: {error}"))
            finally:
                files.close()
            (shutil.rmtree if copy.is_dir() else os.unlink)(copy)  # type: ignore[operator]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results.put(("peak", peak, trap.exists(), None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where to keep inputs that went wrong")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    counts: dict[str, int] = {}
    wrong: list[str] = []
    slowest = peak = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder, trap = Path(name) / "seeds", Path(name) / "trap"
        folder.mkdir()
        seeds(folder, trap)
        for batch in range(-(-given.files // BATCH)):
            results = context.SimpleQueue()
            count = min(BATCH, given.files - batch * BATCH)
            process = context.Process(target=work, args=(batch, count, given.seed, folder, trap, results))
            process.start()
            last, ended = None, False
            deadline = time.monotonic() + 60 + LIMIT_S
            while not ended and (process.is_alive() or not results.empty()):
                if results.empty():
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.005)
                    continue
                said = results.get()
                deadline = time.monotonic() + LIMIT_S
                if said[0] == "begun":
                    last = said
                elif said[0] == "done":
                    counts[said[1]] = counts.get(said[1], 0) + 1
                    slowest = max(slowest, said[2])
                    if said[1] == "RAISED":
                        wrong.append(_keep(given.keep, last, said[3]))
                else:
                    peak, ended = max(peak, said[1]), True
                    if said[2]:
                        wrong.append(_keep(given.keep, last, "code was run"))
                        trap.rmdir()
            if not ended:
                hangs = process.is_alive()
                process.kill()
                wrong.append(
                    _keep(given.keep, last, f"over {LIMIT_S:g} s" if hangs else f"exit code {process.exitcode}")
                )
            process.join()
    told = ", ".join(f"{count} {name.lower()}" for name, count in sorted(counts.items()))
    print(
        f"{sum(counts.values())} files: {told}; slowest {slowest:.2f} s; peak {peak / 2**20:.0f} MiB; "
        f"{len(wrong)} wrong"
    )
    for text in wrong[:20]:
        print(f"  {text}")
    return 1 if wrong or sum(counts.values()) < given.files else 0


def _keep(folder: Path | None, last: Any, why: str) -> str:
    if last is None:
        return why
    _, batch, number, original, data = last
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{batch}-{number}-{original}").write_bytes(data)
    return f"batch {batch}, file {number} ({original}, {len(data)} bytes): {why}"


if __name__ == "__main__":
    sys.exit(main())
