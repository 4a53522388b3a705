"""Runs each scenario once per session; tests, fixtures and all workers of pytest-xdist share the run. The workers use a
folder with a lock and a result for each run. A live run takes one of the machine's slots, so that parallel tests don't
start more training jobs than the machine can handle. A file with a scenario is collected as tests, one for each of its
verdicts."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from torchaos.harness import registry
from torchaos.harness.host.processes import end_with
from torchaos.harness.interfaces import UsageError
from torchaos.harness.pytest_plugin import ENDINGS, RAN
from torchaos.harness.pytest_plugin.outcome import (
    Broken,
    Failed,
    Inconclusive,
    Run,
    Variation,
    failure_text,
    of_marker,
    of_options,
    shown,
)
from torchaos.harness.registry import suggest
from torchaos.harness.scenario.yaml_source import Source, read

_LOOK_S = 0.2  # seconds between two tries to get a slot
_ORDERLY_S = 120.0  # seconds that a run which is ended early may take for its rollback and the end of its job
_FROM_TESTS = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")
_SHARED = "torchaos_session"  # key in the input of an xdist worker
_RUNS = pytest.StashKey["Runs"]()


class Runs:
    """The runs of one session. `shared`: the folder of the session's locks and results."""

    def __init__(self, config: pytest.Config, shared: Path) -> None:
        self._command = config.getini("torchaos_command") or [sys.executable, "-m", "torchaos.harness"]
        self._out = Path(config.getoption("--torchaos-out") or config.rootpath / "torchaos-runs").absolute()
        self._live = config.getoption("--torchaos-live") or max(1, (os.cpu_count() or 1) // 4)
        self._consent = [word for name in config.getoption("--torchaos-consent") for word in ("--consent", name)]
        self._shared, self._known = shared, dict[str, Run]()

    def get(self, scenario: Path, variation: Variation, models: Sequence[str] = ()) -> Run:
        """The run of a scenario; with `models` of death, its exploration. It is started only if this session has not
        run the scenario yet."""
        words = ["explore"] if models else ["run", *self._consent]
        words += ["--seed", str(variation.seed)] if variation.seed is not None else []
        words += [word for text in variation.overrides for word in ("--set", text)]
        words += [word for model in models for word in ("--model", model)]
        key = hashlib.blake2b(json.dumps([str(scenario), words]).encode(), digest_size=12).hexdigest()
        if key not in self._known:
            self._known[key] = self._once(key, scenario, words)
        return self._known[key]

    def _once(self, key: str, scenario: Path, words: Sequence[str]) -> Run:
        with _locked(self._shared / f"{key}.lock"):
            kept = self._shared / f"{key}.json"
            if not kept.is_file():
                found = self._run(scenario, words)
                partial = kept.with_suffix(".partial")
                partial.write_text(json.dumps({**asdict(found), "scenario": str(found.scenario)}))
                partial.rename(kept)
            raw = json.loads(kept.read_text())
            return Run(**{**raw, "scenario": Path(raw["scenario"])})

    def _run(self, scenario: Path, words: Sequence[str]) -> Run:
        with _slot(self._live), tempfile.TemporaryDirectory(prefix="torchaos-pytest-") as folder:
            results = Path(folder, "results.json")
            where = ["--out", str(self._out), "--json", str(results)]
            command = [*self._command, words[0], str(scenario), *where, *words[1:]]
            env = {name: value for name, value in os.environ.items() if name not in _FROM_TESTS}
            with open(Path(folder, "output"), "w+b") as output:
                try:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env,
                        start_new_session=True, preexec_fn=partial(end_with, os.getpid(), signal.SIGINT),
                    )  # fmt: skip
                except OSError as error:
                    return Run(scenario, 3, f"error: {command[0]}: {error.strerror}; see torchaos_command", {})
                code = _outcome_of(process)
                output.seek(0)
                text = output.read().decode(errors="replace")
            return Run(scenario, code, text, _result(results))


def runs_of(config: pytest.Config) -> Runs:
    if _RUNS not in config.stash:
        given = getattr(config, "workerinput", {}).get(_SHARED)
        config.stash[_RUNS] = Runs(config, Path(given) if given else _session_folder(config))
    return config.stash[_RUNS]


def share(node: Any) -> None:
    """Gives a worker of pytest-xdist the session's folder. The controller calls it for each worker."""
    config = node.config
    if _SHARED not in config.stash.get(_GIVEN, {}):
        config.stash[_GIVEN] = {_SHARED: str(_session_folder(config))}
    node.workerinput[_SHARED] = config.stash[_GIVEN][_SHARED]


_GIVEN = pytest.StashKey[dict[str, str]]()


def run_of_test(request: pytest.FixtureRequest) -> Run:
    """The run for the `run` fixture. If the run failed or is inconclusive, so is the test, unless the marker has
    judge=False. Raises Broken if the marker can't be used."""
    request.node.stash[RAN] = True
    marker = request.node.get_closest_marker("torchaos")
    own = [one for one in request.node.own_markers if one.name == "torchaos"]
    words = [*marker.args, *(marker.kwargs[name] for name in ("scenario",) if name in marker.kwargs)] if marker else []
    if marker is None or len(words) != 1 or not isinstance(words[0], (str, Path)) or len(own) > 1:
        raise Broken('its run needs one @pytest.mark.torchaos("FILE.yaml") on the test')
    given = getattr(request, "param", None)
    variations = [given] if given else of_marker(marker.kwargs)
    if len(variations) > 1:
        raise Broken(f"its marker asks for {len(variations)} runs, and a test that gets its run "
                     "by getfixturevalue, or its marker by pytest.param, can have only one; give the test an argument "
                     "`run`, and the marker to the whole test")  # fmt: skip
    (variation,) = variations
    models = marker.kwargs.get("explore", ())
    found = runs_of(request.config).get(_scenario(str(words[0]), request), variation, models)
    request.node.user_properties += [("torchaos.verdict", found.verdict), *_properties(found)]
    if marker.kwargs.get("judge", True) and found.verdict != "passed":
        kind = {"failed": Failed, "inconclusive": Inconclusive}.get(found.verdict, Broken)
        raise kind(failure_text(found, found.reason, found.decisive))
    if not found.result:
        raise Broken(failure_text(found, found.reason))
    return found


def _scenario(name: str, request: pytest.FixtureRequest) -> Path:
    """The path of the scenario: relative to the test's file, or else relative to the root directory; or a ready
    scenario of this name."""
    places = [Path(request.node.path).parent / name, request.config.rootpath / name]
    found = next((place for place in places if place.is_file()), None)
    if found is None and not Path(name).suffix:
        try:
            found = registry.find_scenario(name)
        except UsageError as error:
            raise Broken(str(error)) from None
    if found is None or not found.is_file():
        where = " and no ".join(dict.fromkeys(map(str, places)))
        beside = {one.stem: one.name for place in places for one in place.parent.glob("*.y*ml")}
        near = suggest(Path(name).stem, beside)
        hint = f"did you mean {beside[near]}?" if near else "correct the path of the scenario in the marker"
        raise Broken(f"there is no {where}; {hint}")
    return found.resolve()


def _properties(run: Run) -> list[tuple[str, object]]:
    return [("torchaos.run_dir", str(run.folder)), *_recovery_parts(run)] if run.result else []


def _recovery_parts(run: Run) -> list[tuple[str, object]]:
    """How long each part of each recovery took (seconds), as far as it is known."""
    parts = ((f"recovery.{one.fault}.{part}", at) for one in run.recoveries for part, at in one.parts.items())
    return [(name, at) for name, at in parts if at is not None]


def _session_folder(config: pytest.Config) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="torchaos-session-"))
    config.stash.setdefault(ENDINGS, []).append(lambda: shutil.rmtree(folder, ignore_errors=True))
    return folder


def _result(path: Path) -> dict[str, Any]:
    """The result; empty if nothing was run, or if the run was not finished. A repeated scenario gets one case for the
    repetitions and one for the rollback, and the rest from the first result that did not pass."""
    try:
        raw = json.loads(path.read_text())
        if "result" in raw:  # of an exploration
            return dict(raw["result"])
        results = raw["results"]
        if len(results) == 1 and not raw.get("repeats"):
            return dict(results[0])
        return _repeated(results, raw["repeats"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return {}


def _repeated(results: Sequence[dict[str, Any]], told: dict[str, Any]) -> dict[str, Any]:
    counts = {name: told["rate"][name] for name in ("passed", "failed", "inconclusive")}
    case = {
        "name": "repetitions", "kind": "repetitions", "verdict": told["verdict"], "reason": told["reason"],
        "measured": counts, "bound": {"asked": told["asked"]}, "seconds": [],
    }  # fmt: skip
    rollbacks = [one for result in results for one in result["cases"] if one["kind"] == "rollback"]
    undone = sorted(rollbacks, key=lambda one: one["verdict"] == "passed")[:1]
    shown = next((result for result in results if result["verdict"] != "passed"), results[0])
    same = {name: told[name] for name in ("verdict", "reason", "exit_code")}
    return {**shown, **same, "cases": [case, *undone]}


def _outcome_of(process: subprocess.Popen[bytes]) -> int:
    """Waits for the process, and returns its exit code. If the wait is interrupted (Ctrl-C, a time-out of pytest), the
    run is also ended in order. If pytest is killed, the run gets the same signal from the kernel."""
    try:
        return process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_ORDERLY_S)
        except BaseException:  # a second interruption: no grace period, but still a rollback
            process.send_signal(signal.SIGINT)
            process.wait(_ORDERLY_S)
            raise
        raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _slot(count: int) -> Iterator[None]:
    """Holds one of the machine's slots for live runs, shared by all sessions of this user."""
    from platformdirs import user_state_path

    home = user_state_path("torchaos") / "slots"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        for number in range(count):
            with open(home / str(number), "w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield
                return
        time.sleep(_LOOK_S)


_FIRST = pytest.StashKey[dict[str, str]]()  # run directory: the test whose failure shows the story


class ScenarioFile(pytest.File):
    def collect(self) -> Iterator[pytest.Collector]:
        try:
            source = read(self.path)
        except UsageError as error:
            raise self.CollectError(str(error)) from None
        name = str(source.data.get("scenario", self.path.stem))
        for variation in of_options(self.config):
            full = f"{name}[{variation.name}]" if variation.name else name
            yield ScenarioNode.from_parent(self, name=full, source=source, variation=variation)


class ScenarioNode(pytest.Collector):
    """One variation of a scenario file, as a node in pytest's tree."""

    def __init__(self, *, source: Source, variation: Variation, **more: Any) -> None:
        super().__init__(**more)
        self.source, self.variation = source, variation

    def collect(self) -> Iterable[pytest.Item]:
        data = self.source.data
        if "repeat" in data or any(text.startswith("repeat") for text in self.variation.overrides):
            line = self._line("repeat")  # only all repetitions together decide
            yield CaseItem.from_parent(self, name="repetitions", kind="repetitions", place=0, line=line)
            yield CaseItem.from_parent(self, name="rollback", kind="rollback", place=0, line=line)
            return
        faults, asserts = data.get("faults"), data.get("assert")
        cases: list[tuple[str, str, int, int]] = []  # name, kind, number within its kind, line
        if faults:
            cases.append(("faults", "faults", 0, self._line("faults")))
        for number, one in enumerate(asserts if isinstance(asserts, list) else []):
            name = next(iter(one), "?") if isinstance(one, dict) else str(one)
            cases.append((str(name), "assertion", number, self._line("assert", number)))
        cases.append(("rollback", "rollback", 0, self._line("scenario")))
        names = [name for name, *_ in cases]
        for number, (name, kind, place, line) in enumerate(cases):
            again = names[:number].count(name)
            full = f"{name} ({again + 1})" if again else name
            yield CaseItem.from_parent(self, name=full, kind=kind, place=place, line=line)

    def run(self) -> Run:
        return runs_of(self.config).get(Path(self.path), self.variation)

    def _line(self, *keys: str | int) -> int:
        return self.source.place(keys).line


class CaseItem(pytest.Item):
    parent: ScenarioNode

    def __init__(self, *, kind: str, place: int, line: int, **more: Any) -> None:
        super().__init__(**more)
        self._kind, self._place, self._line = kind, place, line
        if self.config.pluginmanager.hasplugin("timeout"):
            self.add_marker(pytest.mark.timeout(0))  # pytest's time-out is off, because the scenario has its own

    def setup(self) -> None:
        """Runs the scenario if necessary. A run without evidence is an error of the test, not a failure."""
        run = self.parent.run()
        case = self._case(run)
        self.user_properties += [
            ("torchaos.verdict", case["verdict"] if case else "error"),
            *_case_properties(run, case),
        ]
        nothing = run.proves_nothing()
        if case is None:
            raise Broken(self._text(run, nothing or f"the run has no verdict on {self.name}: {run.reason}"))
        if case["verdict"] == "inconclusive":
            raise Inconclusive(self._text(run, case["reason"], case))
        if case["verdict"] == "error":
            raise Broken(self._text(run, case["reason"], case))
        if nothing and case["verdict"] == "passed" and self._kind != "rollback":
            kind = Inconclusive if run.verdict == "inconclusive" else Broken
            raise kind(f"the assertion holds, but the run proves nothing: {nothing}")

    def runtest(self) -> None:
        run = self.parent.run()
        case = self._case(run)
        if case is None or case["verdict"] != "passed":
            follows = f"(follows from {case['follows']}) " if case and case.get("follows") else ""
            raise Failed(self._text(run, follows + (case["reason"] if case else run.reason), case))

    def _text(self, run: Run, reason: str, case: Mapping[str, Any] | None = None) -> str:
        """The text of a failure. If several tests of a run fail, only the first shows the story."""
        key = str(run.result.get("run_dir") or f"{run.scenario} {self.parent.variation.name}")
        first = self.config.stash.setdefault(_FIRST, {}).setdefault(key, self.nodeid)
        if not run.result and first != self.nodeid:
            return f"nothing was run; {first} says why"
        return failure_text(run, reason, case, self._line, story=first == self.nodeid)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *more: Any, **options: Any) -> Any:
        if isinstance(excinfo.value, Failed):
            return shown(str(excinfo.value), self.path, self._line)
        return super().repr_failure(excinfo, *more, **options)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self._line - 1, f"{self.parent.name}: {self.name}"

    def _case(self, run: Run) -> Mapping[str, Any] | None:
        if self._kind == "repetitions" and run.result and run.cases[0]["kind"] != "repetitions":  # it was not repeated
            return {"kind": self._kind, "verdict": run.verdict, "reason": run.reason, "measured": {}, "bound": {}}
        own = [case for case in run.cases if case["kind"] == self._kind]
        return own[self._place] if self._place < len(own) else None


def _case_properties(run: Run, case: Mapping[str, Any] | None) -> Iterator[tuple[str, object]]:
    """The measured values with their bounds, by name, for --junitxml."""
    if case is None:
        return
    for name, value in case["measured"].items():
        if value is not None:
            yield f"measured.{name}", value
    yield from ((f"bound.{name}", value) for name, value in case["bound"].items())
    if case["kind"] == "faults":
        yield from _recovery_parts(run)
    yield "torchaos.run_dir", str(run.result["run_dir"])
    yield "torchaos.seed", run.result["seed"]
