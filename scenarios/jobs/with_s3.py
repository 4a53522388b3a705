"""An S3 store for a demo: python with_s3.py HOST:PORT FOLDER COMMAND... serves FOLDER by rclone, and then runs COMMAND
in its place.

rclone is the program of https://rclone.org. The store's keys are in the command's environment, by their usual names."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

KEY, SECRET = "torchaos-key", "torchaos-secret"
START_S = 30.0


def main(address: str, folder: Path, command: list[str]) -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    program = shutil.which("rclone")
    if program is None:
        sys.exit("with_s3.py: there is no rclone on the PATH: see https://rclone.org/install")
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)  # a bucket
    argv = [program, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", address, str(folder)]
    with open(folder.with_suffix(".log"), "ab") as log:
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    host, _, port = address.rpartition(":")
    end = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host, int(port)), 1.0).close()
            break
        except OSError as error:
            if server.poll() is not None or time.monotonic() > end:
                sys.exit(f"with_s3.py: rclone does not serve {address}: {error}; see {folder.with_suffix('.log')}")
            time.sleep(0.05)
    env = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
    os.execvpe(command[0], command, env)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
