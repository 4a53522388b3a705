"""A stand-in for dcgmi, for machines without DCGM: `test --inject` and `dmon`, for three GPUs.

Arguments and rows are as in its manual; the values are in the file $DCGMI_VALUES."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

GPUS = range(3)


def put_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "bin" / "dcgmi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, __file__])} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("DCGMI_VALUES", str(folder / "values.json"))


def main(values: Path) -> int:
    known = json.loads(values.read_text()) if values.exists() else {}
    parser = argparse.ArgumentParser(prog="dcgmi")
    commands = parser.add_subparsers(dest="command", required=True)
    test, dmon = commands.add_parser("test"), commands.add_parser("dmon")
    test.add_argument("--inject", action="store_true", required=True)
    test.add_argument("--gpuid", type=int, required=True)
    test.add_argument("-f", "--field", required=True)
    test.add_argument("-v", "--value", required=True)
    dmon.add_argument("-e", "--field-id", required=True)
    dmon.add_argument("-i", "--entity-id", type=int)
    dmon.add_argument("-c", "--count", type=int, required=True)
    options = parser.parse_args()
    if options.command == "test":
        if options.gpuid not in GPUS:
            print("no such GPU")
            return 1
        values.write_text(json.dumps({**known, f"{options.gpuid}.{options.field}": options.value}))
        return 0
    print("#Entity   XIDER\nID")
    for gpu in GPUS if options.entity_id is None else [options.entity_id]:
        print(f"GPU {gpu}     {known.get(f'{gpu}.{options.field_id}', 'N/A')}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(os.environ["DCGMI_VALUES"])))
