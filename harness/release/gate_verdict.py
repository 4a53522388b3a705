"""Judges the runs that count again under the gate's bounds, applies the waivers, and decides when a waiver itself
closes the gate. Pure.

The assertion is judged offline under each bound of the gate, and under the scenario's own, and must pass under all. So
the tightest bound decides, and a looser bound changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date

from torchaos.harness.analysis.verdict import records_of, verdict_of
from torchaos.harness.interfaces import ChaosError
from torchaos.harness.record.plan import Plan
from torchaos.harness.record.result import Case, ExitCode, Result, Verdict, worst
from torchaos.harness.release.gate_file import FAULTS, Layer, Loaded, Waiver, Wanted
from torchaos.harness.release.gate_runs import Found, Terms, counting, doubt
from torchaos.harness.release.repeats import Ask, Repeats, ask_of, judge_repeats

_WAIVED = ", waived"  # added to the name of a waived case, for reports that show only names


@dataclass(frozen=True)
class Waived:
    """A case after a waiver was applied. `said`: its verdict before the waiver."""

    case: Case
    said: Verdict


def apply(waiver: Waiver | None, variants: Sequence[Case], today: date) -> Waived:
    """Applies a waiver to one case. `variants`: its stored verdict, and its verdict under each set of bounds; the worst
    counts. A failure is waived only if the waiver is valid today and covers every verdict that is not *passed*."""
    red = [case for case in variants if case.verdict is not Verdict.PASSED]
    if not red:
        return Waived(variants[-1], Verdict.PASSED)
    worst = min(red, key=lambda one: _SEVERITY.index(one.verdict))
    if waiver is None:
        return Waived(worst, worst.verdict)
    if expired(waiver, today):
        told = f"{worst.reason} (its waiver {waiver.ticket} expired on {waiver.expires})"
        return Waived(_with(worst, worst.name, worst.verdict, told), worst.verdict)
    bare = [case for case in red if case.verdict.value not in waiver.covers]
    if bare:
        worst = min(bare, key=lambda one: _SEVERITY.index(one.verdict))
        told = f"{worst.reason} (waiver {waiver.ticket} covers only what {' or '.join(waiver.covers)})"
        return Waived(_with(worst, worst.name, worst.verdict, told), worst.verdict)
    told = f"{worst.verdict.value}, and waived until {waiver.expires} ({waiver.ticket}): {worst.reason}"
    return Waived(_with(worst, worst.name + _WAIVED, Verdict.PASSED, told), worst.verdict)


def state(waiver: Waiver, said: Sequence[Verdict], today: date) -> Case:
    """The case of the waiver itself. `said`: for each run that counts as evidence, the verdict of the waived assertion
    before the waiver."""
    name, about = f"{waiver.scenario}: {waiver.assertion}", f"{waiver.ticket}: {waiver.reason}"
    passes = bool(said) and all(verdict is Verdict.PASSED for verdict in said)
    if expired(waiver, today):
        again = "repair the job, or write a later day under `expires`"
        what = f"{waiver.assertion} passes: remove the waiver" if passes else again
        told = f"this waiver no longer counts, it expired on {waiver.expires}; {what} ({about})"
        return _case(name, Verdict.FAILED, told)
    if passes:
        return _case(name, Verdict.FAILED, f"{waiver.assertion} passes: remove the waiver ({about})")
    left = (waiver.expires - today).days
    holds = "today is its last day" if left == 0 else f"{left} {'day is' if left == 1 else 'days are'} left"
    needed = "" if said else "; no run shows whether it is still needed"
    return _case(name, Verdict.PASSED, f"{holds}, until {waiver.expires}{needed} ({about})")


def is_waived(case: Case) -> bool:
    return case.name.endswith(_WAIVED)


def expired(waiver: Waiver, today: date) -> bool:
    return today > waiver.expires


_SEVERITY = (Verdict.ERROR, Verdict.FAILED, Verdict.INCONCLUSIVE, Verdict.PASSED)


def _case(name: str, verdict: Verdict, reason: str) -> Case:
    return Case(name, "assertion", verdict, reason)


def _with(case: Case, name: str, verdict: Verdict, reason: str) -> Case:
    return Case(name, case.kind, verdict, reason, case.measured, case.bound, case.seconds)


WAIVERS = "waivers"  # the name of the group of waivers in reports


@dataclass(frozen=True)
class Judged:
    """A gate and its runs, judged. `results`: the results under the gate, grouped by scenario, and last those of the
    waivers. `repeats`: the scenarios that are judged by their rate. `missing`: the scenarios without a run that
    counts."""

    gate: str
    environment: str
    results: tuple[Result, ...]
    repeats: tuple[Repeats, ...]
    missing: tuple[Wanted, ...]
    exit_code: ExitCode


def judge_gate(loaded: Loaded, environment: str, runs: Sequence[Found], terms: Terms) -> Judged:
    today = terms.now.date()
    waived = loaded.gate.waivers_in(environment)
    said: dict[int, list[Verdict]] = {number: [] for number in range(len(waived))}
    results: list[Result] = []
    repeats: list[Repeats] = []
    missing: list[Wanted] = []
    codes: list[ExitCode] = []
    for wanted in loaded.wanted[environment]:
        found, why = counting(wanted, runs, terms)
        ask = ask_of(None if wanted.explored else wanted.scenario.repeat)
        cover = {waiver.assertion: waiver for waiver in waived if waiver.scenario == wanted.name}
        judged = [_judged(run, wanted, cover, terms) for run in found]
        for result, before in judged:
            if result.verdict in (Verdict.PASSED, Verdict.FAILED):
                for number, waiver in enumerate(waived):
                    if waiver.scenario == wanted.name and waiver.assertion in before:
                        said[number].append(before[waiver.assertion])
        own = [result for result, _ in judged]
        if len(own) < ask.times:
            missing.append(wanted)
            told = why or f"only {len(own)} of its {ask.times} repetitions have a run that counts; run it again"
            own.append(_without_run(wanted, told))
        together = _together(wanted, own, ask) if ask.of_rate and wanted not in missing else None
        codes += _codes(own, together)
        repeats += [together] if together else []
        results += own
    if waived:
        states = [state(waiver, said[number], today) for number, waiver in enumerate(waived)]
        results.append(_result(WAIVERS, "", 0, "", states))
        codes.append(ExitCode(results[-1].exit_code))
    return Judged(loaded.gate.gate, environment, tuple(results), tuple(repeats), tuple(missing), worst(codes))


def _together(wanted: Wanted, results: Sequence[Result], ask: Ask) -> Repeats:
    """Judges the repetitions of one scenario together. If more of them count than were requested, the number that may
    fail stays the same."""
    more = len(results) - ask.times
    ask = replace(ask, times=len(results), at_least=None if ask.at_least is None else ask.at_least + more)
    return judge_repeats(wanted.name, wanted.scenario.description, results, ask, "done",
                         run_dirs=[result.run_dir for result in results])  # fmt: skip


def _codes(results: Sequence[Result], together: Repeats | None) -> list[ExitCode]:
    """The exit codes. A run that can't be judged closes the gate by itself: it is no failed repetition."""
    alone = [result for result in results if together is None or result.verdict is Verdict.ERROR]
    return [*([ExitCode(together.exit_code)] if together else []), *(ExitCode(result.exit_code) for result in alone)]


def _without_run(wanted: Wanted, why: str) -> Result:
    case = Case("result", "assertion", Verdict.FAILED, why)
    return _result(wanted.name, wanted.scenario.description, wanted.scenario.seed, "", [case])


def _judged(
    run: Found, wanted: Wanted, cover: Mapping[str, Waiver], terms: Terms
) -> tuple[Result, Mapping[str, Verdict]]:
    """The result under the gate, and the verdict of each assertion before any waiver."""
    views = [run.result] if run.result else []
    extra = []
    try:
        views += [] if wanted.explored else judged_again(run, wanted.layers)
    except (ChaosError, OSError) as error:
        extra.append(Case("run", "faults", Verdict.ERROR, f"it can't be judged again: {error}"))
    if why := doubt(run, wanted, terms):
        extra.append(Case("run", "faults", Verdict.ERROR, why))
    variants: dict[str, list[Case]] = {}
    for view in views:
        for case in view.cases:
            variants.setdefault(case.name, []).append(case)
    names = {FAULTS, *wanted.asserts}
    applied = {
        name: apply(cover.get(name) if name in names else None, some, terms.now.date())
        for name, some in variants.items()
    }
    unsaid = [name for name in wanted.asserts if any(name not in _names(view) for view in views)]
    extra += [Case(name, "assertion", Verdict.ERROR, "the run's result has no such case") for name in unsaid]
    cases = [*extra, *_untold(views), *(one.case for name, one in applied.items() if name not in unsaid)]
    first = run.known_result
    result = _result(wanted.name, wanted.scenario.description, first.seed if first else wanted.scenario.seed,
                     str(run.folder.root), cases, views)  # fmt: skip
    if first:
        result = replace(
            result, started=first.started, duration_s=first.duration_s, faults=first.faults, versions=first.versions,
            recoveries=first.recoveries, steps=first.steps, attempts=first.attempts, twin=first.twin,
            reproduce=first.reproduce, notes=first.notes,
        )  # fmt: skip
    return result, {name: one.said for name, one in applied.items()}


def _names(view: Result) -> set[str]:
    return {case.name for case in view.cases}


def judged_again(run: Found, layers: Sequence[Layer]) -> list[Result]:
    """The results of judging the record under each set of bounds; without a set, under the run's own bounds. Raises
    ChaosError or OSError if the run can't be read."""
    record, twins = records_of(run.folder.check())
    plans = [_under(record.plan, layer) for layer in layers] or [record.plan]
    return [verdict_of(replace(record, plan=plan), twins, str(run.folder.root)) for plan in plans]


def _under(plan: Plan, layer: Layer) -> Plan:
    asserts = tuple(replace(one, params=layer.get(one.name, one.params)) for one in plan.asserts)
    return replace(plan, asserts=asserts)


def _untold(views: Sequence[Result]) -> list[Case]:
    """Cases for problems of a whole run that none of its cases shows: it was ended early, its journal is damaged, or a
    twin's rollback is incomplete. No waiver covers them."""
    found: dict[str, Case] = {}
    for view in views:
        by_case = any(case.verdict is view.verdict and case.name == view.decided_by for case in view.cases)
        undone = any(case.kind == "rollback" and case.verdict is not Verdict.PASSED for case in view.cases)
        as_told = view.exit_code == view.verdict.exit_code or undone
        if not as_told or not (by_case or view.verdict is Verdict.PASSED):
            told = f"{view.reason or 'no reason was given'} (exit code {view.exit_code})"
            found.setdefault(told, Case("run", "faults", view.verdict if as_told else Verdict.ERROR, told))
    return list(found.values())


def _result(
    scenario: str, description: str, seed: int, run_dir: str, cases: Sequence[Case], views: Sequence[Result] = ()
) -> Result:  # fmt: skip
    """The result from the cases. `views`: the results from which the cases were taken."""
    red = sorted((case for case in cases if case.verdict is not Verdict.PASSED), key=lambda case: _order(case, views))
    verdict = red[0].verdict if red else Verdict.PASSED
    waived = [case.name for case in cases if is_waived(case)]
    reason = f"{red[0].name}: {red[0].reason}" if red else "; ".join(waived) or "every assertion holds"
    code = verdict.exit_code
    if verdict is Verdict.ERROR:
        wrong = (ExitCode.USAGE, ExitCode.ROLLBACK, ExitCode.INTERNAL)
        errors = [code for view in views for code in ExitCode if code == view.exit_code and code in wrong]
        undone = any(case.kind == "rollback" for case in red)
        code = worst(errors or [ExitCode.ROLLBACK if undone else ExitCode.FAILED])
    return Result(scenario, description, seed, verdict, code, reason, run_dir, "", 0.0, cases=tuple(cases),
                  decided_by=red[0].name if red else "")  # fmt: skip


def _order(case: Case, views: Sequence[Result]) -> tuple[int, bool]:
    """The sort key of a case. As in the run's own verdict, a doubt about the faults comes before failures, unless a
    view of the run failed. Of equally bad cases, the case that decided a view comes first."""
    doubted = case.kind == "faults" and not any(view.verdict is Verdict.FAILED for view in views)
    places = (Verdict.ERROR, Verdict.INCONCLUSIVE if doubted else None, Verdict.FAILED, Verdict.INCONCLUSIVE)
    return places.index(case.verdict), all(case.name != view.decided_by for view in views)
