"""Releases and folders of packages by pip itself, from a folder of small wheels in place of the package index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from torchaos.harness.interfaces import UsageError
from torchaos.harness.minimize.package_bisect import NotInstallable, Packages

pytestmark = pytest.mark.slow  # pip


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        required = "".join(f"Requires-Dist: {need}\n" for need in needs)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    index = tmp_path / "index"
    index.mkdir()
    wheel(index, "torchaos_a", "1.9", "torchaos_b<2")
    wheel(index, "torchaos_a", "1.10", "torchaos_b>=2")
    wheel(index, "torchaos_a", "2.0", "torchaos_b>=3")
    wheel(index, "torchaos_a", "3.0", "torch<1")
    wheel(index, "torchaos_b", "1.0")
    wheel(index, "torchaos_b", "2.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Packages()


def imported(path: str, name: str) -> str:
    code = f"import {name}; print({name}.VERSION)"
    return subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_releases_are_in_order(packages: Packages) -> None:
    """Of versions, not of texts; a package that is not there is an error."""
    assert packages.releases("torchaos_a") == ["1.9", "1.10", "2.0", "3.0"]
    with pytest.raises(UsageError, match="torchaos_c: pip finds no release of it: ERROR: No matching distribution"):
        packages.releases("torchaos_c")


def test_a_release_comes_with_what_it_needs(packages: Packages) -> None:
    """In the version that it needs, in one folder, which a later call finds."""
    path = packages.path_with({"torchaos_a": "1.10"})
    assert (imported(path, "torchaos_a"), imported(path, "torchaos_b")) == ("1.10", "2.0")
    made = Path(path).stat().st_mtime_ns
    assert packages.path_with({"torchaos_a": "1.10"}) == path
    assert Path(path).stat().st_mtime_ns == made


def test_two_calls_may_make_one_folder(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second to end takes the folder of the first, and leaves nothing behind."""
    pip = Packages._pip

    def meanwhile(self: Packages, *words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(Packages, "_pip", pip)
        first = packages.folder(["torchaos_b==1.0"])
        assert first.exists()
        return pip(self, *words)

    monkeypatch.setattr(Packages, "_pip", meanwhile)
    folder = packages.folder(["torchaos_b==1.0"])
    assert imported(str(folder), "torchaos_b") == "1.0"
    assert list(folder.parent.iterdir()) == [folder]


def test_what_the_job_has_is_not_installed(packages: Packages, tmp_path: Path) -> None:
    """Its own PYTHONPATH counts, and stays behind the releases."""
    own = packages.folder(["torchaos_b==1.0"])
    job = Packages(path=str(own))
    assert job.needed({"torchaos_a": "1.9"}) == ["torchaos_a==1.9"]
    assert job.path_with({"torchaos_a": "1.9"}).split(":")[1:] == [str(own)]
    assert job.path_with({"torchaos_b": "1.0"}) == str(own)


@pytest.mark.parametrize(
    ("version", "words"), [("2.0", "satisfies the requirement torchaos.b>=3"), ("3.0", "torch==.* conflicting")]
)
def test_what_can_not_be_had(packages: Packages, version: str, words: str) -> None:
    """A need that no release meets, and another torch than the job's: pip's own reason is given."""
    with pytest.raises(NotInstallable, match=words):
        packages.path_with({"torchaos_a": version})
