"""The rows of the museum: bugs in how released frameworks recover, each with an affected and a fixed version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import oracle
import yaml

HERE = Path(__file__).parent
TRAINERS = HERE / "trainers"
KEPT = HERE / "results.jsonl"  # results of earlier runs, in the order in which they came
Side = Literal["affected", "fixed"]
SIDES: tuple[Side, ...] = ("affected", "fixed")


@dataclass(frozen=True)
class Bug:
    """One file in rows/; its name is the name of the bug."""

    name: str
    project: str
    report: str  # address of the public issue or pull request
    about: str  # what goes wrong, in one sentence
    affected: Mapping[str, str]  # versions, by package
    fixed: Mapping[str, str]
    trainer: str  # a file in trainers/
    failed: str  # the assertion that must fail with the affected version
    says: str = ""  # a part of its reason
    dies: str = ""  # a part of the error with which plain code ends on the affected side
    beside: tuple[str, ...] = ()  # more packages, the same on both sides
    args: tuple[str, ...] = ()
    ranks: int = 1
    faults: tuple[Mapping[str, Any], ...] = ()  # empty: the last rank is killed in step 13
    still: Mapping[str, str] = field(default_factory=dict)  # other true failures of the fixed version: assertion, why
    bounds: Mapping[str, Any] = field(default_factory=dict)
    timeout: str = "300s"
    long: bool = False  # one of the fast rows that `make test-long` runs

    def packages(self, side: Side) -> list[list[str]]:
        """The arguments for pip: a list for each folder of packages of this side. The second folder is the same for
        both sides."""
        pins = self.affected if side == "affected" else self.fixed
        return [sorted(f"{name}=={version}" for name, version in pins.items()), sorted(self.beside)]

    @property
    def script(self) -> Path:
        return TRAINERS / self.trainer

    def job(self, side: Side, packages: str) -> oracle.Trainer:
        """The row as a trainer of the bench. `packages`: the folders of this side's packages, as in PYTHONPATH."""
        kill = {"inject": "process.kill", "target": {"rank": self.ranks - 1}, "when": {"step": 13, "phase": "backward"}}
        return oracle.Trainer(
            name=f"{self.name}-{side}", kind="broken" if side == "affected" else "healthy", script=str(self.script),
            args=self.args, failed=self.failed, says=self.says, faults=self.faults or (kill,), bounds=self.bounds,
            timeout=self.timeout, ranks=self.ranks, env={"PYTHONPATH": f"{packages}:{TRAINERS}"},
        )  # fmt: skip


def rows() -> list[Bug]:
    """All rows, sorted by name. Raises ValueError, with the file, if a row has an unknown key or lacks one."""
    found = []
    for path in sorted((HERE / "rows").glob("*.yaml")):
        row = yaml.load(path.read_text(), yaml.CSafeLoader)
        unknown = row.keys() - {field_.name for field_ in fields(Bug)}
        if unknown:
            raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        try:
            found.append(Bug(path.stem, **values))
        except TypeError as error:
            raise ValueError(f"{path}: {error}") from error
    return found
