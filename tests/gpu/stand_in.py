"""The source of a stand-in for the driver's library, generated from the same table of symbols."""

from __future__ import annotations

from torchaos.harness.host.native_libraries import NVML

_ROWS = [
    line.split("\t") for line in (NVML.sources / "symbols.tsv").read_text().splitlines() if not line.startswith("#")
]
NAMES = [row[0] for row in _ROWS]
SERVED = {row[0]: row[2] for row in _ROWS}
ARGUMENTS = 8  # six in registers, and two on the stack

_HEAD = """
struct call { long symbol, argument[8]; };
static struct call calls[16];
static long count;
const struct call *calls_made(long *how_many) { *how_many = count; count = 0; return calls; }
static long note(long symbol, long a, long b, long c, long d, long e, long f, long g, long h)
{
    if (count < 16)
        calls[count++] = (struct call){symbol, {a, b, c, d, e, f, g, h}};
    return 1000 + symbol;
}
"""
SOURCE = _HEAD + "".join(
    f"long {name}(long a, long b, long c, long d, long e, long f, long g, long h)"
    f"{{ return note({number}, a, b, c, d, e, f, g, h); }}\n"
    for number, name in enumerate(NAMES)
)
