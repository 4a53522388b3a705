"""Scenarios as tests. In a project without scenarios, the plugin costs almost nothing: it imports only pytest, and
opens only files that are named on the command line or by the setting `torchaos_scenarios`. torchaos's command line runs
in a separate process, and the plugin turns its results into pytest's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torchaos.harness.pytest_plugin.outcome import Run

_SCENARIO = re.compile(rb"""(?:^|\r)(?:\xef\xbb\xbf)?["']?scenario["']?\s*:""", re.MULTILINE)
_IN_BRACES = re.compile(
    rb"""(?:\xef\xbb\xbf)?(?:\s|---|[#%].*\n)*\{"""
)  # in JSON, or in YAML that is written like JSON
_MOST_BYTES = 1 << 20  # of a scenario file
_MARKER = (
    "torchaos(scenario, *, seeds=(), ranks=(), phases=(), steps=(), each={}, set=(), judge=True, explore=()): the "
    "`run` fixture runs this scenario, once for each combination: a file, relative to the test's file or else to the "
    "root directory, or the name of a ready scenario; with judge=False the test checks the verdict itself; with "
    "explore=[MODEL, ...] the scenario is explored, as by `torchaos explore`"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchaos", "scenarios of torchaos")
    add = group.addoption
    add(
        "--torchaos-scenarios",
        action="append",
        metavar="GLOB",
        default=[],
        help="Collect scenario files that match, relative to the root directory. A file that is named is "
        "always collected.",
    )
    add("--torchaos-seeds", metavar="N,N", default="", help="Run each scenario file with each of these seeds.")
    add(
        "--torchaos-each",
        action="append",
        metavar="KEY=V,V",
        default=[],
        help="Run each scenario file with each of these values: rank=0,1; phase=forward,backward; step=10,20; or any "
        "key of a scalar that `torchaos run --set` takes. Several options give all combinations.",
    )
    add("--torchaos-set", action="append", metavar="KEY=VALUE", default=[], help="Passed to `torchaos run --set`.")
    add("--torchaos-consent", action="append", metavar="WHAT", default=[], help="Passed to `torchaos run --consent`.")
    add(
        "--torchaos-out",
        metavar="DIR",
        default=None,
        help="The folder for run directories. Default: torchaos-runs in the root directory.",
    )
    add(
        "--torchaos-live",
        type=int,
        metavar="N",
        default=None,
        help="How many scenarios may run at the same time on this machine, over all workers of pytest-xdist. "
        "Default: one for each four processors.",
    )
    parser.addini("torchaos_scenarios", type="args", default=[], help="As --torchaos-scenarios.")
    parser.addini("torchaos_command", type="args", default=[],
                  help="The command of torchaos, if it is not in pytest's own environment.")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Raises pytest.UsageError for an option that can't be used: pytest prints only its message."""
    config.addinivalue_line("markers", _MARKER)
    live = config.getoption("--torchaos-live")
    if live is not None and live < 1:
        raise pytest.UsageError(f"--torchaos-live {live}: at least one scenario must be allowed to run")
    if config.getoption("--torchaos-seeds") or config.getoption("--torchaos-each"):
        from torchaos.harness.pytest_plugin.outcome import of_options

        of_options(config)
    _matching(config)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix not in (".yaml", ".yml", ".json") or not _is_wanted(file_path, parent.config):
        return None
    if not _is_scenario(file_path):
        return None
    from torchaos.harness.pytest_plugin.session_runs import ScenarioFile

    found: pytest.Collector = ScenarioFile.from_parent(parent, path=file_path)
    return found


def _is_scenario(path: Path) -> bool:
    """Whether the file has the top-level key of a scenario. True also for a scenario with mistakes, and for a file that
    can't be read, which its collection tells."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES)
    except OSError:
        return True
    if not _IN_BRACES.match(text):
        return bool(_SCENARIO.search(text))
    from torchaos.harness.interfaces import UsageError
    from torchaos.harness.scenario.yaml_source import read

    try:
        return "scenario" in read(path).data
    except UsageError:
        return b"scenario" in text


_MATCHING = pytest.StashKey[frozenset[Path]]()


def _is_wanted(path: Path, config: pytest.Config) -> bool:
    named = (Path(config.invocation_params.dir, str(arg).partition("::")[0]) for arg in config.args)
    if any(path_given.name == path.name and path_given.resolve() == path.resolve() for path_given in named):
        return True
    of_a_run = (
        path.name == "scenario.yaml" and path.with_name("plan.json").exists()
    )  # the copy of a scenario in its run directory
    return not of_a_run and path in _matching(config)


def _matching(config: pytest.Config) -> frozenset[Path]:
    """The files that match the patterns, relative to the root directory."""
    if _MATCHING not in config.stash:
        globs = [*config.getoption("--torchaos-scenarios"), *config.getini("torchaos_scenarios")]
        try:
            found = {glob: list(config.rootpath.glob(glob)) for glob in globs}
        except (NotImplementedError, ValueError) as error:
            problem = f"{', '.join(globs)}: a pattern of scenarios is relative to {config.rootpath}: {error}"
            raise pytest.UsageError(problem) from None
        if none := [glob for glob, paths in found.items() if not paths]:
            raise pytest.UsageError(f"{', '.join(none)}: no scenario matches this pattern in {config.rootpath}")
        config.stash[_MATCHING] = frozenset(path for paths in found.values() for path in paths)
    return config.stash[_MATCHING]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("torchaos")
    name = next((name for name in ("torchaos_run", "run") if name in metafunc.fixturenames), None)
    if marker is not None and name:
        from torchaos.harness.pytest_plugin.outcome import Broken, of_marker

        try:
            found = of_marker(marker.kwargs)
        except Broken:  # the test says so when it is set up; here it would be an error of the whole file
            return
        if len(found) > 1:
            metafunc.parametrize(name, found, indirect=True, ids=[one.name for one in found])


RAN = pytest.StashKey[bool]()  # in a test: its fixture has asked for the run


def pytest_runtest_setup(item: pytest.Item) -> None:
    names = getattr(item, "fixturenames", ())
    if "request" not in names:  # a fixture or a test that has it may ask for the run later
        _check_runs(item, asks=not {"torchaos_run", "run"}.isdisjoint(names))


@pytest.hookimpl(trylast=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _check_runs(item, asks=item.stash.get(RAN, False))


def _check_runs(item: pytest.Item, asks: bool) -> None:
    """A marked test that never asks for its run would pass although nothing was run. Raises Broken for it."""
    if asks or not isinstance(item, pytest.Function) or item.get_closest_marker("torchaos") is None:
        return
    from torchaos.harness.pytest_plugin.outcome import Broken

    raise Broken(
        "its marker torchaos runs nothing, because the test does not use the fixture torchaos_run; "
        'give it an argument `torchaos_run` (or `run`), or @pytest.mark.usefixtures("torchaos_run"), or take the '
        "marker away"
    )


@pytest.fixture
def torchaos_run(request: pytest.FixtureRequest) -> Run:
    """The run of the scenario in the test's `torchaos` marker. Tests with the same marker share it."""
    from torchaos.harness.pytest_plugin.session_runs import run_of_test

    return run_of_test(request)


run = torchaos_run  # the short name, which a project may use for a fixture of its own


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome: Any = yield
    raised = call.excinfo and call.excinfo.value
    if hasattr(raised, "is_failure") and isinstance(item, pytest.Function):
        from torchaos.harness.pytest_plugin.outcome import shown

        path, line, _name = item.location
        outcome.get_result().longrepr = shown(str(raised), item.config.rootpath / path, (line or 0) + 1)
    if getattr(raised, "is_inconclusive", False):
        outcome.get_result().torchaos = "inconclusive"
    if getattr(raised, "is_failure", False):  # also if the `run` fixture raised it: pytest calls that an error
        outcome.get_result().when = "call"


def pytest_report_teststatus(report: Any) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Reports inconclusive as a status of its own, because such a run proves nothing about the job."""
    if getattr(report, "torchaos", "") == "inconclusive":
        return "inconclusive", "I", ("INCONCLUSIVE", {"yellow": True})
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.stats.get("inconclusive", [])
    if reports:
        terminalreporter.write_sep("=", "INCONCLUSIVE", yellow=True)
        for report in reports:
            terminalreporter.write_sep("_", f"{report.nodeid} proves nothing", yellow=True)
            terminalreporter.write_line(report.longreprtext)
        terminalreporter.write_sep("-", "inconclusive in short", yellow=True)
        for report in reports:
            first = str(report.longrepr).partition("\n")[0]  # longreprtext begins with the worker of pytest-xdist
            terminalreporter.write_line(f"INCONCLUSIVE {report.nodeid} - {first}", yellow=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """With pytest-xdist, makes all workers share the runs of the session."""
    from torchaos.harness.pytest_plugin.session_runs import share

    share(node)


ENDINGS = pytest.StashKey[list[Callable[[], None]]]()  # pytest calls it when the session is over


def pytest_unconfigure(config: pytest.Config) -> None:
    for end in config.stash.get(ENDINGS, []):
        end()
