"""Loads the file of a release gate, with its scenarios. Its keys name the scenarios, the largest age of their runs, the
bounds in each environment, and the waivers. All mistakes are reported at once, each with its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from torchaos.harness import registry
from torchaos.harness.base_classes import Seconds
from torchaos.harness.interfaces import UsageError
from torchaos.harness.scenario.checks import Tell, check_parameters
from torchaos.harness.scenario.field_types import NAME, Strict
from torchaos.harness.scenario.grammar import Item, Items, Scenario
from torchaos.harness.scenario.loader import load as load_scenario
from torchaos.harness.scenario.loader import load_as
from torchaos.harness.scenario.yaml_source import Keys

Text = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=NAME)]


def _day(value: object) -> date:
    try:
        return date.fromisoformat(str(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a date; write it as 2026-12-31") from None


class Waiver(Strict):
    """An assertion of one scenario that may fail until a day. A waiver never covers an incomplete rollback or an
    error."""

    scenario: Text
    assertion: Annotated[str, Field(description="The assertion's name. `faults`: the job does not outlive its faults.")]
    reason: Annotated[Text, Field(description="Why the failure is accepted.")]
    ticket: Annotated[Text, Field(description="The ticket of the repair.")]
    expires: Annotated[date, BeforeValidator(_day), Field(description="The last day of the waiver (UTC).")]
    environments: Annotated[
        list[Name] | None, Field(min_length=1, description="The waiver is valid only in these environments.")
    ] = None
    covers: Annotated[
        list[Literal["failed", "inconclusive"]],
        Field(min_length=1, description="The verdicts that the waiver accepts."),
    ] = Field(default_factory=lambda: ["failed"])  # type: ignore[arg-type]


class Environment(Strict):
    bounds: Annotated[
        dict[str, Items],
        Field(description="By scenario, or by a pattern such as kill-*; written as under `assert`. The "
        "scenario's own bounds "
              "hold as well."),
    ] = Field(default_factory=dict)  # fmt: skip
    set: Annotated[
        list[str], Field(description="KEY=VALUE: how scenarios are run here, in the same words as for `run --set`.")
    ] = Field(default_factory=list)
    versions: Annotated[
        dict[Literal["torchaos", "torch", "python"], Text],
        Field(description="The versions that a run must have, as patterns such as 2.13.*."),
    ] = Field(default_factory=dict)
    max_age: Annotated[Seconds | None, Field(gt=0, description="Replaces the gate's max_age.")] = None


class Gate(Strict):
    """The runs that are required before a release."""

    gate: Annotated[Name, Field(description="Its name.")]
    description: str = ""
    scenarios: Annotated[
        list[Text],
        Field(min_length=1, description="Files, and folders of them, relative to this file; each must pass."),
    ]
    explored: Annotated[
        list[Text],
        Field(description="Files, and folders of them; each must be explored, by `torchaos explore`, and pass."),
    ] = Field(default_factory=list)
    max_age: Annotated[Seconds, Field(gt=0, description="A run that began longer ago does not count.")]
    environments: Annotated[dict[Name, Environment], Field(min_length=1)]
    waivers: list[Waiver] = Field(default_factory=list)

    def max_age_s(self, environment: str) -> float:
        own = self.environments[environment].max_age
        return self.max_age if own is None else own

    def waivers_in(self, environment: str) -> list[Waiver]:
        return [waiver for waiver in self.waivers if waiver.environments is None or environment in waiver.environments]


FAULTS = "faults"  # the case about the faults, which every run with faults has
Layer = Mapping[str, Mapping[str, Any]]  # parameters by assertion


@dataclass(frozen=True)
class Wanted:
    """A scenario that must have a run that counts. `layers`: sets of bounds; each set holds in addition to the
    scenario's own bounds. `explored`: an exploration is required instead of a run, and its verdict is not judged
    again."""

    path: Path
    text: bytes
    scenario: Scenario
    layers: tuple[Layer, ...]
    explored: bool = False

    @property
    def name(self) -> str:
        return self.scenario.scenario + (" (explored)" if self.explored else "")

    @property
    def asserts(self) -> list[str]:
        return [] if self.explored else [item.name for item in self.scenario.assert_]


@dataclass(frozen=True)
class Loaded:
    gate: Gate
    wanted: Mapping[str, tuple[Wanted, ...]]  # by environment


def load(path: Path) -> Loaded:
    """Loads a gate. Raises ScenarioError with a line for each mistake, including mistakes in the scenarios:
    `file:line:column: what is wrong; what to do`."""
    wanted: dict[str, tuple[Wanted, ...]] = {}

    def check(gate: Gate, tell: Tell) -> None:
        files, explored = (_files(gate, key, path, tell) for key in ("scenarios", "explored"))
        wrong = []
        for name, environment in gate.environments.items():
            try:
                found = _wanted(files, environment, ("environments", name), tell)
                more = _loaded(explored, environment, "explored", tell)
            except UsageError as error:  # of a scenario
                wrong.append(str(error))
                continue
            wanted[name] = (*found, *(Wanted(file, file.read_bytes(), one, (), True) for file, one in more))
        if wrong:
            raise UsageError("\n".join(wrong))
        _check_waivers(gate, [one for some in wanted.values() for one in some], tell)

    return Loaded(load_as(Gate, path, (), check), wanted)


def _files(gate: Gate, key: str, file: Path, tell: Tell) -> list[Path]:
    """The scenario files, in the gate's order, without the gate's own file."""
    found: list[Path] = []
    for number, text in enumerate(getattr(gate, key)):
        path = file.parent / text
        files = sorted(path.glob("*.yaml")) if path.is_dir() else [path] if path.is_file() else []
        files = [one for one in files if not one.samefile(file)]
        if not files:
            problem = "there is no *.yaml in it" if path.is_dir() else "there is no such file or folder"
            tell((key, number), f"{text}: {problem}; name the required scenarios, relative to this file")
        found += [one for one in files if one not in found]
    return found


def _loaded(files: Sequence[Path], environment: Environment, key: str, tell: Tell) -> list[tuple[Path, Scenario]]:
    """Loads the scenarios from these files. `key`: the key of the gate file that lists them, for messages."""
    scenarios, wrong = [], []
    for file in files:
        try:
            scenarios.append((file, load_scenario(file, environment.set)))
        except UsageError as error:
            wrong.append(str(error))
    if wrong:
        raise UsageError("\n".join(wrong))
    seen: dict[str, Path] = {}
    for file, one in scenarios:
        if one.scenario in seen:
            tell((key,), f"{seen[one.scenario]} and {file} are both called {one.scenario}; rename one of them")
        seen[one.scenario] = file
    return scenarios


def _wanted(files: Sequence[Path], environment: Environment, at: Keys, tell: Tell) -> tuple[Wanted, ...]:
    scenarios = _loaded(files, environment, "scenarios", tell)
    layers: dict[str, list[Layer]] = {one.scenario: [] for _, one in scenarios}
    for pattern, items in environment.bounds.items():
        for name, layer in _bounds(pattern, items, [one for _, one in scenarios], (*at, "bounds", pattern), tell):
            layers[name].append(layer)
    return tuple(Wanted(file, file.read_bytes(), one, tuple(layers[one.scenario])) for file, one in scenarios)


def _bounds(
    pattern: str, items: Sequence[Item], scenarios: Sequence[Scenario], at: Keys, tell: Tell
) -> list[tuple[str, Layer]]:  # fmt: skip
    """The bounds for each scenario whose name matches the pattern. If a bound lacks a parameter, it has the scenario's
    own value."""
    matched = [one for one in scenarios if fnmatchcase(one.scenario, pattern)]
    if scenarios and not matched:
        tell(at, f"no scenario is called {pattern!r}{_near(pattern, [one.scenario for one in scenarios])}", True)
    layers: dict[str, dict[str, Mapping[str, Any]]] = {}
    for number, item in enumerate(items):
        where: Keys = (*at, number)
        having = [(one, own) for one in matched for own in one.assert_ if own.name == item.name]
        if matched and not having:
            asserted = sorted({own.name for one in matched for own in one.assert_})
            tell(where, f"{item.name} is asserted by none of these scenarios{_near(item.name, asserted)}")
        if not item.params:
            tell(where, f"{item.name} has no bound here; write one, such as `- recovery_time: {{catch_up: 60s}}`")
        for scenario, own in having:
            found, given = registry.find("assertions", item.name), {**own.params, **item.params}
            layers.setdefault(scenario.scenario, {})[item.name] = check_parameters(
                found, given, (*where, item.name), tell
            )
    return list(layers.items())


def _check_waivers(gate: Gate, wanted: Sequence[Wanted], tell: Tell) -> None:
    asserts = {one.name: {*one.asserts, *([FAULTS] if one.scenario.faults else [])} for one in wanted}
    seen: set[tuple[str, str, str]] = set()
    for number, waiver in enumerate(gate.waivers):
        at: Keys = ("waivers", number)
        for where, environment in enumerate(waiver.environments or []):
            if environment not in gate.environments:
                near = _near(environment, gate.environments)
                tell((*at, "environments", where), f"there is no environment {environment!r}{near}")
        if waiver.scenario not in asserts:
            hint = _near(waiver.scenario, asserts)
            tell((*at, "scenario"), f"the gate has no scenario {waiver.scenario!r}{hint}; or remove the waiver")
        elif waiver.assertion not in asserts[waiver.scenario]:
            near = _near(waiver.assertion, asserts[waiver.scenario])
            told = f"{waiver.scenario} has no assertion {waiver.assertion!r}"
            tell((*at, "assertion"), f"{told}{near}; or remove the waiver")
        for environment in waiver.environments or gate.environments:
            if (key := (waiver.scenario, waiver.assertion, environment)) in seen:
                tell(at, f"{waiver.assertion} of {waiver.scenario} is waived already; join the two waivers")
                break
            seen.add(key)


def _near(name: str, known: Any) -> str:
    near = registry.suggest(name, known)
    return f"; did you mean {near!r}?" if near else f"; there are {', '.join(sorted(known)) or 'none'}"
