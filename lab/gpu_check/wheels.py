"""Makes the wheels that a machine with a GPU and without a network lacks: torchaos itself, and the packages that its
Python has not got, less than 20 MB in all.

    python lab/gpu_check/wheels.py [FOLDER] [--python 3.12] [--all]

FOLDER (build/wheels, which git ignores) is made anew. --python is the version of the machine with the GPU. The machine
is taken to have torch, NumPy, psutil, PyYAML, rich, click and Jinja2, as images for training have; with --all each
dependency of torchaos but these of torch is fetched. Needs pip's network, and gcc for the C libraries of torchaos."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
LACKING = ("pydantic", "junit-xml", "platformdirs", "xxhash", "isal", "py-spy")
USUAL = ("click", "jinja2", "numpy", "psutil", "pyyaml", "rich", "nvidia-ml-py")
MOST_MB = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=REPOSITORY / "build" / "wheels")
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    folder: Path = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)], check=True)
    platforms = [word for name in _platforms() for word in ("--platform", name)]
    wanted = [*LACKING, *(USUAL if options.all else ())]
    where = ["--dest", str(folder), "--only-binary", ":all:", "--python-version", options.python, *platforms]
    subprocess.run([*pip, "download", *where, *wanted], check=True)
    files = sorted(folder.iterdir())
    size_mb = sum(path.stat().st_size for path in files) / 1e6
    print(*(path.name for path in files), sep="\n")
    print(f"{len(files)} wheels, {size_mb:.1f} MB in {folder}")
    return int(size_mb > MOST_MB and not options.all)


def _platforms() -> list[str]:
    """The names of platforms that pip takes for a Linux with glibc 2.28 or later: it compares whole names."""
    return [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)] + ["manylinux2014_x86_64", "linux_x86_64"]


if __name__ == "__main__":
    sys.exit(main())
