"""Makes the images of the test's pods from busybox alone: `images.py BUSYBOX IMAGES.tar`."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

IMAGES = {
    "local/pause:1": ["/bin/sh", "-c", "while :; do sleep 1000 & wait; done"],
    "local/tiny:1": ["/bin/sh"],
}


def main(busybox: Path, target: Path) -> None:
    layer = _layer(busybox.read_bytes())
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    manifest = []
    with tarfile.open(target, "w") as images:
        _add(images, "layer.tar", layer)
        for name, command in IMAGES.items():
            about = {
                "architecture": "amd64", "os": "linux", "history": [],
                "config": {"Cmd": command, "Env": ["PATH=/bin:/usr/bin:/usr/sbin"]},
                "rootfs": {"type": "layers", "diff_ids": [digest]},
            }  # fmt: skip
            config = json.dumps(about).encode()
            file = f"{hashlib.sha256(config).hexdigest()}.json"
            _add(images, file, config)
            manifest.append({"Config": file, "RepoTags": [f"docker.io/{name}"], "Layers": ["layer.tar"]})
        _add(images, "manifest.json", json.dumps(manifest).encode())


def _layer(busybox: bytes) -> bytes:
    """A root file system with busybox under the names that the tests use, and with empty folders."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w") as layer:
        _add(layer, "bin/busybox", busybox)
        for name in ("sh", "sleep", "ps", "cat", "echo", "kill", "env"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            layer.addfile(link)
        for name in ("tmp", "etc", "root", "var", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            layer.addfile(folder)
    return found.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o755
    archive.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
