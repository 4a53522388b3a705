"""The C parts, which are optional: without a compiler all is installed but them. And the README, as an index shows it.
The rest is in pyproject.toml."""

from __future__ import annotations

import os
import re
import runpy
import shutil
from glob import glob
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

_PAGES = "https://github.com/torchaos/torchaos/blob/main/"
_PICTURES = "https://raw.githubusercontent.com/torchaos/torchaos/main/"


SIGN = runpy.run_path("harness/host/library_sources.py")["sign"]


def packages() -> list[str]:
    """Each folder with Python in it: harness/rollback is torchaos.harness.rollback (`package-dir` in
    pyproject.toml)."""
    tops = ("plugin", "harness", "injectors", "assertions", "scenarios")
    folders = {file.parent for top in tops for file in Path(top).rglob("*.py")}
    return sorted(".".join(("torchaos", *folder.parts)) for folder in folders)


def readme() -> str:
    """README.md with absolute links: an index of packages has none of our files."""
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:|#)", rf"\1{_PICTURES}", text)
    return re.sub(r"(?<!!)(\[[^\[\]]*\]\()(?![a-z]+:|#)", rf"\1{_PAGES}", text)


class OnlyWhatIsThere(build_py):
    """What an older build left in the same folder is removed. Modules that are gone would be installed again."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib, "torchaos"), ignore_errors=True)
        super().run()


class PlainLibraries(build_ext):
    """They are no Python modules: ranks and other processes load them by path, whatever their Python."""

    FILES: ClassVar[dict[str, str]] = {
        "torchaos_nvtx": "torchaos_nvtx.so", "libnvidia-ml": "libnvidia-ml.so.1",
        "libnccl-net-torchaos": "libnccl-net-torchaos.so",
    }  # fmt: skip

    def get_ext_filename(self, fullname: str) -> str:
        *folders, name = fullname.split(".")
        file = self.FILES.get(name)
        return os.path.join(*folders, file) if file else super().get_ext_filename(fullname)

    def build_extension(self, ext: Extension) -> None:
        super().build_extension(ext)
        SIGN(Path(self.get_ext_fullpath(ext.name)), Path(ext.sources[0]).parent)


class AnyPython(bdist_wheel):
    """A wheel with them is for one platform, and for every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        _python, _abi, platform = super().get_tag()
        return "py3", "none", platform


setup(
    packages=packages(),
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "torchaos.injectors.native.nvtx.torchaos_nvtx", ["injectors/native/nvtx/stall.c"], optional=True,
            extra_compile_args=["-fvisibility=hidden"],
        ),
        Extension(
            "torchaos.injectors.native.net.libnccl-net-torchaos", sorted(glob("injectors/native/net/*.c")),
            depends=sorted(glob("injectors/native/net/*.h")), optional=True, libraries=["pthread"],
            extra_compile_args=["-fvisibility=hidden"],
        ),
        Extension(
            "torchaos.injectors.native.nvml.libnvidia-ml",
            sorted(glob("injectors/native/nvml/*.c")), depends=sorted(glob("injectors/native/nvml/*.[hi]*")),
            optional=True, libraries=["dl", "pthread"],
            extra_compile_args=["-fvisibility=hidden"], extra_link_args=["-Wl,-soname,libnvidia-ml.so.1"],
        ),
    ],
    cmdclass={"build_py": OnlyWhatIsThere, "build_ext": PlainLibraries, "bdist_wheel": AnyPython},
)  # fmt: skip
