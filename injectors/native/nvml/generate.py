"""Makes symbols.inc, which the C sources include, from symbols.tsv; `page` makes a page of the reference, from
symbols.tsv and consumers.tsv. `generate.py add NVML.H|PYNVML.PY|LIBRARY...` first adds a row to symbols.tsv for each
function that only a newer header, nvidia-ml-py or library has. The overlay then forwards it. The overlay does not
export a function without a row, and a program that looks for it concludes that the driver is too old."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVED = {
    "overlay": "the driver's answer, changed by the orders; without a driver, the answer of a simulated GPU",
    "simulate": "the driver's answer; without a driver, the answer of a simulated GPU",
    "forward": "the driver's answer; without a driver, NVML_ERROR_NOT_SUPPORTED",
}
CONSUMERS = ("pynvml", "nvrx", "k8s", "dcgm", "nccl")
TITLES = ("nvidia-ml-py", "NVRx", "k8s device plugin", "DCGM", "NCCL")


@dataclass(frozen=True)
class Symbol:
    name: str
    takes: str  # what the first argument is: "device" or "other"
    served: str  # a key of SERVED


def read() -> list[Symbol]:
    """Reads the table of NVML functions (symbols.tsv). Raises ValueError for a malformed row."""
    found = [Symbol(*line.split("\t")) for line in _lines("symbols.tsv")]
    for one in found:
        if one.takes not in ("device", "other") or one.served not in SERVED:
            raise ValueError(f"symbols.tsv: {one}")
    return found


def include(symbols: list[Symbol]) -> str:
    head = "/* Made by generate.py from symbols.tsv. S(number, name, first argument, how it is served) */\n"
    return head + "".join(f"S({n}, {s.name}, {s.takes}, {s.served})\n" for n, s in enumerate(symbols))


def page(symbols: list[Symbol]) -> str:
    callers: dict[str, set[str]] = {}
    for line in _lines("consumers.tsv"):
        consumer, name = line.split("\t")
        callers.setdefault(name, set()).add(consumer)
    by_name = {symbol.name: symbol for symbol in symbols}
    counts = {served: sum(symbol.served == served for symbol in symbols) for served in SERVED}
    rows = []
    for name in sorted(callers):
        marks = " | ".join("x" if one in callers[name] else "" for one in CONSUMERS)
        rows.append(f"| `{name}` | {by_name[name].served if name in by_name else 'not exported'} | {marks} |")
    return "\n".join([
        "# What the NVML overlay does with each function", "",
        "This page lists every NVML function that known programs call, and what the overlay does with it. It is for",
        "engineers who want to know whether their own program sees what an order says; [GPU faults](../gpu.md)",
        "explains the overlay and its orders. The calls were read from the programs' public sources:",
        "nvidia-ml-py 13.615.71, NVIDIA Resiliency Extension (`shared_utils/health_check.py`), the Kubernetes device",
        "plugin (its health check and device discovery, through go-nvml), DCGM (all of it), NCCL (`nvmlwrap.cc`).", "",
        "| served as | functions | meaning |", "|---|---|---|",
        *(f"| {served} | {counts[served]} | {meaning} |" for served, meaning in SERVED.items()), "",
        "An order `gpuN.lost` or `gpuN.error` affects every function that takes a device, forwarded functions too.", "",
        f"| function | served as | {' | '.join(TITLES)} |", "|---|---|" + "---|" * len(TITLES), *rows, "",
    ])  # fmt: skip


def add(source: Path, symbols: list[Symbol]) -> list[Symbol]:
    """The table `symbols` with one more row for each function that only `source` has. `source`: a header, a Python
    module or a library, whose functions are listed with nm(1)."""
    known = {symbol.name for symbol in symbols}
    if source.suffix == ".h":
        found = {
            name: "device" if "nvmlDevice_t " in first else "other"
            for name, first in re.findall(r"DECLDIR\s+\*?\s*(nvml\w+)\s*\(([^,)]*)", source.read_text())
        }
    elif source.suffix == ".py":
        names = re.findall(r"""_nvmlGetFunctionPointer\(\s*['"](nvml\w+)""", source.read_text())
        found = {name: _guess(name) for name in names}
    else:
        done = subprocess.run(["nm", "-D", "--defined-only", source], capture_output=True, text=True, check=True)
        found = {name: _guess(name) for name in re.findall(r" T (nvml\w+)", done.stdout)}
    new = [Symbol(name, takes, "forward") for name, takes in found.items() if name not in known]
    return sorted([*symbols, *new], key=lambda one: one.name)


def _guess(name: str) -> str:
    return "device" if name.startswith("nvmlDevice") else "other"


def _lines(name: str) -> list[str]:
    path = HERE / name
    return [line for line in path.read_text().splitlines() if line and line[0] != "#"] if path.exists() else []


def main(arguments: list[str]) -> None:
    symbols = read()
    if arguments[:1] == ["add"]:
        for source in arguments[1:]:
            symbols = add(Path(source), symbols)
        head = [line for line in (HERE / "symbols.tsv").read_text().splitlines() if line.startswith("#")]
        rows = ["\t".join((symbol.name, symbol.takes, symbol.served)) for symbol in symbols]
        (HERE / "symbols.tsv").write_text("\n".join([*head, *rows]) + "\n")
    (HERE / "symbols.inc").write_text(include(symbols))


if __name__ == "__main__":
    main(sys.argv[1:])
