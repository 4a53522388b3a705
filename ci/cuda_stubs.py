"""Lets a CUDA build of torch run on the CPU without its CUDA libraries.

Package indexes keep only CUDA builds of most torch releases. Their libraries (cuDNN, cuBLAS, NCCL, ...) have gigabytes.
A job on the CPU never calls them, but the loader requires them. This script makes a small shared library in place of
each missing library, with the right SONAME and all symbols that torch's own libraries need from it. Each function
returns "no CUDA device" (100), as the real libraries do on a machine without a GPU. torch itself is not changed.

Usage: python3 ci/cuda_stubs.py SITE_PACKAGES/torch/lib. Needs gcc and readelf (Debian: gcc, which brings binutils).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CUDA = re.compile(r"(__cu|cu|nv|nccl)")
PLAIN = ""  # the version name of a symbol that has none
# Loaded only when a CUDA kernel is compiled at run time; it needs the driver, which is in no wheel.
LAZY = {"libcaffe2_nvrtc.so"}


def readelf(option: str, library: Path) -> list[list[str]]:
    """The words of each line that `readelf -W OPTION` prints."""
    done = subprocess.run(["readelf", "-W", option, library], check=True, capture_output=True, text=True)
    return [line.split() for line in done.stdout.splitlines()]


def needed(library: Path) -> set[str]:
    """The SONAMEs of the libraries that `library` needs."""
    return {words[-1].strip("[]") for words in readelf("--dynamic", library) if "(NEEDED)" in words}


def symbols(library: Path) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """The symbols that `library` needs from others (name -> version, type), and the symbols that it defines."""
    wanted: dict[str, tuple[str, str]] = {}
    defined: set[str] = set()
    for words in readelf("--dyn-syms", library):
        if len(words) < 8 or not words[0].endswith(":"):
            continue
        name, _, version = words[7].replace("@@", "@").partition("@")
        if words[6] != "UND":
            defined.add(name)
        elif words[4] == "GLOBAL":
            wanted[name] = (version or PLAIN, words[3])
    return wanted, defined


def source(names: dict[str, str]) -> str:
    """The C text of one stand-in library: `names` is symbol -> ELF type."""
    lines = []
    for name, kind in sorted(names.items()):
        if kind == "OBJECT":
            lines.append(f"char {name}[256];")
        elif name.endswith(("String", "ErrorName")):  # these return texts, which torch puts into its messages
            lines.append(f'const char *{name}(void) {{ return "a CUDA library that stands in for the real one"; }}')
        else:
            lines.append(f"int {name}(void) {{ return 100; }}")
    return "\n".join(lines) + "\n"


def build(folder: Path, soname: str, versions: dict[str, dict[str, str]]) -> None:
    """Compiles the library `soname` into `folder`; `versions` is version -> symbol -> ELF type."""
    text = source({name: kind for names in versions.values() for name, kind in names.items()})
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", "-w", "-x", "c", "-", f"-Wl,-soname,{soname}"]
    script = folder / f".{soname}.map"
    nodes = [f"{v} {{ global: {'; '.join(names)}; }};" for v, names in versions.items() if v != PLAIN]
    if nodes:  # symbols that the script does not name are exported without a version
        script.write_text("\n".join(nodes))
        command.append(f"-Wl,--version-script={script}")
    subprocess.run([*command, "-o", folder / soname], input=text, text=True, check=True)
    script.unlink(missing_ok=True)


def main(folder: Path) -> int:
    libraries = [path for path in sorted(folder.glob("*.so*")) if path.name not in LAZY]
    wanted: dict[str, tuple[str, str]] = {}
    defined: set[str] = set()
    sonames: set[str] = set()
    for library in libraries:
        asks, has = symbols(library)
        wanted |= asks
        defined |= has
        sonames |= needed(library)
    missing = sorted(name for name in sonames if CUDA.match(name.removeprefix("lib")) and not (folder / name).exists())
    stubs: dict[str, dict[str, dict[str, str]]] = {name: defaultdict(dict) for name in missing}
    for symbol, (version, kind) in wanted.items():
        if symbol in defined or not CUDA.match(symbol):
            continue
        # A CUDA library names its version after its SONAME, or (NVSHMEM) after itself. A symbol without a version may
        # be in any of them: they are all in one scope.
        owner = next(name for name in missing if version.lower() in name.lower())
        stubs[owner][version][symbol] = kind
    for soname, versions in stubs.items():
        build(folder, soname, versions)
    print(f"{folder}: {len(stubs)} CUDA libraries stood in for")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
