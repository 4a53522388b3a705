"""Judges the states of an exploration without a resume: of each state, the newest checkpoint with a finished name is
checked as by `torchaos verify`, and loaded by torch.distributed.checkpoint. Prints the number of states and the time:

    python ci/campaigns/explore_by_load.py EXPLORED [--model MODEL ...]

EXPLORED is the directory of an exploration; a recorded run is enough. A load shows less than a resume: not which
checkpoint the job would take, nor what it would do after the load."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from torchaos.harness.checkpoints import formats
from torchaos.harness.checkpoints.files import Local
from torchaos.harness.checkpoints.formats.names import UNFINISHED
from torchaos.harness.checkpoints.verify import verify
from torchaos.harness.exploring.choice import MODELS, chosen
from torchaos.harness.exploring.operations import Recording


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("explored", type=Path)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=["process-death"])
    options = parser.parse_args()
    began_s = time.monotonic()
    recording = Recording.read(options.explored / "recording")
    choice = chosen(recording, options.model, {}, None, 0)
    found_s = time.monotonic() - began_s
    print(f"{len(recording.operations)} operations. {choice.in_words}", flush=True)
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home:
        for state in choice.states:
            folder = Path(home, "state")
            state.write_to(folder)
            kinds[judged(folder)] += 1
            shutil.rmtree(folder)
    seconds = time.monotonic() - began_s
    for kind, count in kinds.most_common():
        print(f"{count:>6} {kind}")
    print(f"{seconds:.0f} s, {found_s:.0f} s of it to find the states")
    return 0 if kinds.keys() <= {"whole", "no checkpoint"} else 1


def judged(folder: Path) -> str:
    files = Local()
    try:
        paths = [path for path in formats.find(files, str(folder)) if not UNFINISHED.search(Path(path).name)]
        if not paths:
            return "no checkpoint"
        newest = formats.in_order([formats.read(files, path) for path in paths])[-1].path
        checked = verify(files, newest, None)
        if checked.problems:
            return f"damaged: {checked.problems[0].kind.value}"
    finally:
        files.close()
    try:
        _load_state_dict_from_keys(checkpoint_id=newest)
    except Exception as error:
        return f"no load: {type(error).__name__}"
    return "whole"


if __name__ == "__main__":
    sys.exit(main())
