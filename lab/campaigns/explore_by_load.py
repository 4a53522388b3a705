"""Judges the states of an exploration without a resume: of each state, the newest checkpoint with a finished name is
checked as by `torchaos verify`, and loaded by torch.distributed.checkpoint. States whose files with finished names are
equal are judged once. Prints the number of states and the time:

    python lab/campaigns/explore_by_load.py EXPLORED [--model MODEL ...]

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
from torchaos.harness.checkpoints.formats.format import UNFINISHED
from torchaos.harness.checkpoints.verify import verify
from torchaos.harness.crash_explorer.folder_contents import Tree
from torchaos.harness.crash_explorer.operations import Recording
from torchaos.harness.crash_explorer.state_selection import MODELS, chosen


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
    kinds: dict[str, str] = {}  # by the digest of the files with finished names
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home:
        for state in choice.states:
            files = {path: content for path, content in state.tree.files.items() if is_finished(path)}
            digest = Tree(files).digest
            if digest not in kinds:
                folder = Path(home, "state")
                state.write_to(folder)
                kinds[digest] = judged(folder)
                shutil.rmtree(folder)
            counts[kinds[digest]] += 1
    seconds = time.monotonic() - began_s
    print(f"{len(kinds)} of them differ in files with finished names")
    for kind, count in counts.most_common():
        print(f"{count:>6} {kind}")
    print(f"{seconds:.0f} s, {found_s:.0f} s of it to find the states")
    return 0 if counts.keys() <= {"whole", "no checkpoint"} else 1


def is_finished(path: str) -> bool:
    """Whether no part of the path, which is relative to the checkpoint folder, is the name of something unfinished."""
    return not any(UNFINISHED.search(part) for part in path.split("/"))


def judged(folder: Path) -> str:
    files = Local()
    try:
        found = formats.find(files, str(folder))
        paths = [path for path in found if is_finished(str(Path(path).relative_to(folder)))]
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
