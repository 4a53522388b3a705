"""Journals with packed lines, made of journals in JSON."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from torchaos.harness.protocol import packed_lines


def pack(path: Path) -> int:
    """Replaces the steps in a file by packed lines. Returns their number."""
    lines, done = [], 0
    for line in path.read_bytes().splitlines(keepends=True):
        event = json.loads(line)
        if event["kind"] == "step":
            packer = packed_lines.Packer(event["source"], event["rank"], event["attempt"])
            data = dict(event["data"])
            data["samples"] = None if data["samples"] is None else bytes.fromhex("".join(data["samples"]))
            names = ("seq", "wall_s", "mono_s", "step")
            try:
                line = packer.line(*(event[name] for name in names), **data)
                done += 1
            except (struct.error, ValueError, TypeError):
                pass
        lines.append(line)
    path.write_bytes(b"".join(lines))
    return done
