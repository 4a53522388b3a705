"""at_once.py FOLDER COMMAND...: writes FOLDER/ready-NODE, and becomes the command when the file FOLDER/go is there.

Before it makes that file, a test can make the next process ids of all nodes equal."""

import os
import sys
import time
from pathlib import Path

PATIENCE_S = 30.0  # if the test has lost interest

folder, command = Path(sys.argv[1]), sys.argv[2:]
folder.mkdir(parents=True, exist_ok=True)
(folder / f"ready-{os.environ['SLURM_NODEID']}").touch()
end = time.monotonic() + PATIENCE_S
while not (folder / "go").exists() and time.monotonic() < end:
    time.sleep(0.02)
os.execvp(command[0], command)
