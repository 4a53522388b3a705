"""Shows a run while it is in progress: on a terminal a bar for each rank, elsewhere a line for each notable event.

Only the history makes global steps, so a function (`base_of`) gives the base of each attempt: the number that is added
to its local steps. A separate thread prints, so that a slow or stopped terminal delays nothing else."""

from __future__ import annotations

import math
import os
import posixpath
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from queue import Empty, SimpleQueue

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from torchaos.harness.protocol.wire import Event, Kind
from torchaos.harness.record.checkpoint_names import may_be_whole, name_of_all
from torchaos.harness.record.events.journal import Journal
from torchaos.harness.record.history import base_of
from torchaos.harness.record.plan import Plan
from torchaos.harness.reporting.terminal.narrator import Line, Narrator
from torchaos.harness.reporting.terminal.text import Pen

_KEPT = 8  # the newest losses of a rank that are kept, because it may be ahead of the others
_ASK_AT = (1, 3)  # steps after which `base_of` is asked: one step may be too few to align samples


@dataclass
class RankView:
    rank: int
    attempt: int
    local_step: int
    losses: dict[int, float] = field(default_factory=dict)  # of the newest steps, by local step

    @property
    def loss(self) -> float | None:
        return next(reversed(self.losses.values()), None)


class Progress:
    def __init__(self, base_of: Callable[[int], int | None]) -> None:
        self._base_of = base_of
        self._bases: dict[int, int | None] = {}
        self._asked: set[tuple[int, int]] = set()
        self.ranks: dict[int, RankView] = {}
        self.highest = 0
        self.checkpoint = ""  # the newest that was saved, without names of temporary files
        self._saved: list[str] = []  # the files that were saved last
        self._saved_at: tuple[int | None, int | None] = (None, None)  # their attempt and step

    def note(self, event: Event) -> bool:
        """Records the event. Returns whether it shows progress of a rank."""
        if event.kind is Kind.SAVE_END and event.data["ok"]:
            self._note_save(event)
        if event.kind is Kind.RENAMED:
            self._note_rename(*(posixpath.normpath(str(event.data[name])) for name in ("path", "to")))
        if event.kind is Kind.LOSS and event.rank in self.ranks:
            self._note_loss(self.ranks[event.rank], event)
        if event.kind is not Kind.STEP or event.rank is None or event.step is None:
            return False
        before = self.ranks.get(event.rank)
        same = before is not None and before.attempt == (event.attempt or 0)
        view = RankView(event.rank, event.attempt or 0, event.step, before.losses if before and same else {})
        self.ranks[event.rank] = view
        self._note_loss(view, event)
        self._ask(view)
        self.highest = max(self.highest, self.step_of(view) or 0)
        return True

    def _note_save(self, event: Event) -> None:
        path = posixpath.normpath(str(event.data["path"]))
        self._saved = [*(self._saved if (event.attempt, event.step) == self._saved_at else []), path]
        self._saved_at = event.attempt, event.step
        self._name_checkpoint()

    def _note_rename(self, old: str, new: str) -> None:
        inside = [path for path in self._saved if path == old or path.startswith(f"{old}/")]
        if inside:
            self._saved = [new + path[len(old) :] if path in inside else path for path in self._saved]
            self._name_checkpoint()

    def _name_checkpoint(self) -> None:
        whole = [path for path in self._saved if may_be_whole(path)]
        self.checkpoint = name_of_all(whole) if whole else self.checkpoint

    def step_of(self, view: RankView) -> int | None:
        """The global step that a rank has finished. None if it is not known."""
        base = self._bases.get(view.attempt)
        return None if base is None else base + view.local_step

    def where(self, view: RankView) -> str:
        step = self.step_of(view)
        return f"step {step}" if step is not None else f"step {view.local_step} of this attempt"

    def in_words(self) -> str:
        """The progress of all ranks of the newest attempt, in one line."""
        newest = max((view.attempt for view in self.ranks.values()), default=0)
        views = [view for view in self.ranks.values() if view.attempt == newest]
        slowest = min(views, key=lambda view: view.local_step)
        ahead = max(view.local_step for view in views) - slowest.local_step
        parts = [
            self.where(slowest),
            f"rank {slowest.rank} is {ahead} behind" if ahead > 1 else "",
            f"attempt {newest}",
            _loss(views, slowest.local_step),
            f"last checkpoint {self.checkpoint}" if self.checkpoint else "",
        ]
        return ", ".join(part for part in parts if part)

    def _ask(self, view: RankView) -> None:
        at = (view.attempt, view.local_step)
        if view.local_step in _ASK_AT and self._bases.get(view.attempt) is None and at not in self._asked:
            self._asked.add(at)
            self._bases[view.attempt] = self._base_of(view.attempt)

    def _note_loss(self, view: RankView, event: Event) -> None:
        losses = [loss for loss in event.data["losses"] or () if isinstance(loss, (int, float))]
        if losses:
            view.losses[view.local_step] = float(losses[-1]) if math.isfinite(losses[-1]) else math.nan
            while len(view.losses) > _KEPT:
                view.losses.pop(next(iter(view.losses)))


def _loss(views: Sequence[RankView], step: int) -> str:
    """The loss of the lowest rank that has losses, because the ranks have different losses. `step`: the local step;
    None: the newest of that rank."""
    view = min((view for view in views if view.losses), key=lambda view: view.rank, default=None)
    if view is None:
        return ""
    whose = f" on rank {view.rank}" if view.rank else ""
    return f"loss {view.losses.get(step, view.loss):.4g}{whose}"


STEPS_EVERY_S = 5.0  # seconds between two lines about the steps, at least
SILENCE_S = 30.0  # seconds without an event after which a line is printed
TOGETHER_S = 0.05  # events of this time are shown together
LEAVE_S = 2.0  # seconds that the end of a run waits for a slow terminal
_EVENTS_MAX = 50_000  # the most events with which the base of an attempt is computed; with more, it takes too long
_RANKS_MAX = 16  # the most rows for ranks


class Live:
    """A context manager around a run. `steps`: the number of steps of the job, if a twin shows it; otherwise None."""

    def __init__(self, journal: Journal, plan: Plan, console: Console, steps: int | None = None) -> None:
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._open = False
        self._journal = journal
        plain = not console.is_terminal or bool(os.environ.get("CI"))
        known = Progress(self._base)
        self._view = _Lines(plan, console, known) if plain else _Bars(plan, console, known, steps)
        self._thread = threading.Thread(target=self._show, name="live report", daemon=True)

    def __enter__(self) -> Live:
        self._open = True
        self._journal.listen(self._hear)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._queue.put(None)
        self._thread.join(LEAVE_S)

    def _hear(self, event: Event) -> None:
        if self._open:
            self._queue.put(event)

    def _show(self) -> None:
        try:
            with self._view as view:
                while True:
                    try:
                        event = self._queue.get(timeout=SILENCE_S)
                    except Empty:
                        view.silence()
                        continue
                    if event is None:
                        return
                    view.show(event)
                    if self._open and self._queue.empty():
                        time.sleep(TOGETHER_S)
        except (Exception, SystemExit):  # rich raises SystemExit for a closed pipe; the run continues without a display
            self._open = False

    def _base(self, attempt: int) -> int | None:
        events = self._journal.snapshot()
        return base_of(events, attempt)[0] if len(events) <= _EVENTS_MAX else None


class _Lines:
    """Output to anything but a terminal: lines such as ` 12.03 s the job runs as pid 4711`."""

    def __init__(self, plan: Plan, console: Console, known: Progress) -> None:
        self._pen, self._plan, self._known = Pen(console), plan, known
        self._narrator = Narrator(plan)
        self._began: float | None = None
        self._spoke_s = 0.0  # time of the last line about steps
        self._news = False

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: Event) -> None:
        if self._began is None:
            self._begin(event)
        got_on = self._known.note(event)
        self._news |= got_on
        line = self._narrator.tell(event)
        due = got_on and event.mono_s - self._spoke_s >= STEPS_EVERY_S
        if due or (self._news and event.kind is Kind.JOB_EXITED):
            self._steps(event.mono_s)
        if line:
            self._line(event.mono_s, line)

    def silence(self) -> None:
        if self._began is not None:
            self._line(time.monotonic(), Line(f"nothing has happened for {SILENCE_S:.0f} s", "dim"))

    def _begin(self, event: Event) -> None:
        self._began = self._spoke_s = event.mono_s
        at = datetime.fromtimestamp(event.wall_s, timezone.utc)
        self._line(event.mono_s, Line(f"{title(self._plan)}, {at:%Y-%m-%d %H:%M:%S} UTC", "bold"))

    def _steps(self, mono_s: float) -> None:
        self._spoke_s, self._news = mono_s, False
        self._line(mono_s, Line(self._known.in_words(), "dim"))

    def _line(self, mono_s: float, line: Line) -> None:
        since = f"{mono_s - (self._began or mono_s):7.2f} s"
        self._pen.row([(Text(since, "dim"), 10)], self._pen.text(line.text, line.style), indent=0)


class _Bars(_Lines):
    """Output to a terminal: the lines of _Lines, above a progress bar for each rank."""

    def __init__(self, plan: Plan, console: Console, known: Progress, steps: int | None) -> None:
        super().__init__(plan, console, known)
        self._steps_wanted = steps
        self._rows: dict[int, bars.TaskID] = {}
        self._bars = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(
                24, style="bright_black", complete_style="cyan", finished_style="cyan", pulse_style="bright_black"
            ),
            bars.TextColumn("{task.fields[told]}", markup=False),
            console=console,
            transient=True,
        )
        self._stage = self._bars.add_task("prepare", total=None, told="")

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, event: Event) -> None:
        if self._began is None:
            self._begin(event)
        if self._known.note(event) and event.rank in self._known.ranks:
            self._row(self._known.ranks[event.rank])
        if event.kind is Kind.STAGE:
            self._bars.update(self._stage, description=str(event.data["stage"]))
        if line := self._narrator.tell(event):
            self._line(event.mono_s, line)

    def silence(self) -> None:
        return None

    def _row(self, view: RankView) -> None:
        if view.rank not in self._rows:
            if len(self._rows) == _RANKS_MAX:
                return
            self._rows[view.rank] = self._bars.add_task(f"rank {view.rank}", total=None, told="")
        at = self._known.step_of(view)
        loss = f", loss {view.loss:.4g}" if view.loss is not None else ""
        self._bars.update(
            self._rows[view.rank],
            total=max(self._steps_wanted or 0, self._known.highest, 1),
            completed=view.local_step if at is None else at,
            told=f"{self._known.where(view)}, attempt {view.attempt}{loss}",
        )


def title(plan: Plan) -> str:
    return (
        f"{plan.scenario}, seed {plan.seed}" if plan.faults or plan.asserts else f"{plan.scenario}: its fault-free twin"
    )
