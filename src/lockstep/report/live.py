"""What a run looks like while it goes on: a live view in a terminal, one plain line per step elsewhere."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lockstep import types

_WARMUP_LINE_S = 5.0
_TREND = 40  # values in a sparkline
_BARS = "▁▂▃▄▅▆▇█"
_TIMES = ("rollout", "learn", "reward", "sync", "eval", "save", "wait")


def compact(value: float) -> str:
    """Six characters or so: 0.412, 5.2k, 1.2e-05, nan."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if size >= 1e6:
        return f"{value / 1e6:.1f}M"
    if size >= 1e3:
        return f"{value / 1e3:.1f}k"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.1e}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%" if math.isfinite(value) else str(value)


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def one_line(text: str) -> str:
    """Without what would move the cursor or change colours: a model may say anything."""
    return "".join(char for char in " ".join(text.split()) if char.isprintable())


def in_lines(fields: Iterable[str], width: int) -> str:
    """Fields two spaces apart, on as many lines as it takes, none of them cut in two."""
    first, *rest = fields
    lines = [first]
    for text in rest:
        if len(lines[-1]) + 2 + len(text) > width:
            lines.append("")
        lines[-1] += f"  {text}"
    return "\n".join(lines)


def sparkline(values: list[float]) -> str:
    """Lowest to highest; a blank where a value is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    return "".join(_bar((v - low) / span if span else 0.0) if math.isfinite(v) else " " for v in values)


def _bar(share: float) -> str:
    return _BARS[min(int(share * len(_BARS)), len(_BARS) - 1)]


# What is shown and how: (metric, label, text of a value)
_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward/mean", "reward", compact),
    ("eval/accuracy", "accuracy", percent),
    ("rollout/length", "length", compact),
    ("policy/entropy", "entropy", compact),
    ("mismatch/k3", "mismatch k3", compact),
    ("mismatch/f2", "mismatch F(2)", percent),
    ("perf/rollout_tokens_per_s", "rollout tok/s", compact),
    ("perf/train_tokens_per_s", "learner tok/s", compact),
    ("rollout/lag_mean", "lag", compact),
    ("warmup/loss", "warm-up loss", compact),
)


@dataclass(slots=True)
class Phase:
    """What the run does now: `step` of `total` (0: unknown), having begun at `first`; steps, if no unit says else."""

    name: str = "starting"
    total: int = 0
    first: int = 0
    step: int = 0
    unit: str = ""  # "s"
    since: float = field(default_factory=time.monotonic)

    def eta(self) -> float | None:
        """Seconds the phase will still take at its mean pace so far."""
        done = self.step - self.first
        if done <= 0 or not self.total:
            return None
        return max(self.total - self.step, 0) * (time.monotonic() - self.since) / done

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name} {self.step}/{self.total}{unit}" if self.total else f"{self.name} {self.step}{unit}"


class LiveView:
    """A Recorder for the eyes. Enter it around the run; leaving it, also by an exception, restores the terminal.

    `phase` says what the run does now and how many steps that takes; every `log` moves its progress. One that counts
    something else is moved by `reached` alone.
    """

    def __init__(self, name: str, plain: bool = False, console: Console | None = None) -> None:
        self._console = console or Console()
        self._name = name
        self._phase = Phase()
        self._start = time.monotonic()
        self._trends: dict[str, deque[float]] = {}
        self._times: Mapping[str, float] = {}
        self._printed = 0.0
        self._events: deque[str] = deque(maxlen=4)
        self._answer: tuple[int, types.Group] | None = None
        # Twice a second keeps the clock moving; more would cost the run cores it needs.
        fancy = self._console.is_terminal and not plain
        self._live = Live(console=self._console, refresh_per_second=2, get_renderable=self.render) if fancy else None

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str, total: int, done: int = 0, unit: str = "", about: str = "") -> None:
        """`done` of `total` steps, or of `unit`s, are behind it already: a resumed run starts in the middle.

        `about` says what it is where the name alone does not.
        """
        self._phase = Phase(name, total, first=done, step=done, unit=unit)
        if not self._live:
            length = f"{total - done} {unit or 'steps'}"
            self._print(f"{name}: {', '.join(filter(None, (about, length)))}" if total else name)

    def reached(self, count: int) -> None:
        """So many of the phase's `unit`s are behind it."""
        self._phase.step = count
        if not self._live and time.monotonic() - self._printed >= _WARMUP_LINE_S:
            self._print(str(self._phase))
            self._printed = time.monotonic()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._phase.unit:
            self._phase.step = step
        for name, value in metrics.items():
            self._trends.setdefault(name, deque(maxlen=_TREND)).append(float(value))
        times = {part: metrics[f"time/{part}"] for part in _TIMES if f"time/{part}" in metrics}
        self._times = times if "time/total" in metrics else {**self._times, **times}  # what follows a step adds to it
        if not self._live and self._worth_a_line(metrics):
            self._print(self._plain_line(metrics))
            self._printed = time.monotonic()

    def samples(self, step: int, group: types.Group) -> None:
        if group.trajectories:  # a prompt that left no room for an answer has none to show
            self._answer = (step, group)

    def event(self, step: int, kind: str, text: str) -> None:
        line = one_line(f"step {step} {kind}: {text}")
        self._events.append(line)
        if not self._live:
            self._print(line)

    # -- plain

    def _worth_a_line(self, metrics: Mapping[str, float]) -> bool:
        """Steps and evaluations always; the many small updates of a warm-up every few seconds."""
        if not any(name in metrics for name, _, _ in _ROWS):
            return False
        warming_up = all(name.startswith("warmup/") for name in metrics)
        recent = time.monotonic() - self._printed < _WARMUP_LINE_S
        return not (warming_up and recent) or self._phase.step == self._phase.total

    def _print(self, line: str) -> None:
        # Nobody may read any more, as after `| tee` was ended: no reason to end a run, though rich takes it for one.
        with suppress(OSError, SystemExit):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _plain_line(self, metrics: Mapping[str, float]) -> str:
        shown = [f"{label} {text(metrics[name])}" for name, label, text in _ROWS if name in metrics]
        eta = self._phase.eta()
        fields = [str(self._phase), *shown, *([f"eta {clock(eta)}"] if eta else [])]
        return in_lines(fields, self._console.width) if self._console.is_terminal else "  ".join(fields)

    # -- live; `render` runs in the display's thread, so it reads copies of what `log` appends to

    def render(self) -> RenderableType:
        parts: list[RenderableType] = [self._progress(), self._table()]
        parts += [self._time_split()] if self._times else []
        parts += [self._last_answer(*self._answer)] if self._answer else []
        parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in tuple(self._events)]
        title = f"[bold]Lockstep[/bold] {escape(self._name)}"
        return Panel(Group(*parts), title=title, title_align="left", border_style="blue", padding=(0, 1))

    def _progress(self) -> RenderableType:
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        phase, eta = self._phase, self._phase.eta()
        left = f"eta {clock(eta)}" if eta is not None else ""
        bar = ProgressBar(total=phase.total or None, completed=phase.step, pulse=not phase.total)
        row.add_row(Text(str(phase), style="bold"), bar, f"{clock(time.monotonic() - self._start)}  {left}")
        return row

    def _table(self) -> RenderableType:
        """Two metrics a line in a wide terminal, one in a narrow one."""
        columns = 2 if self._console.width >= 84 else 1
        cells = [self._cells(*row) for row in _ROWS if self._shown(row[0])]
        table = Table.grid(padding=(0, 2))
        for start in range(0, len(cells), columns):
            table.add_row(*(cell for metric in cells[start : start + columns] for cell in metric))
        return table

    def _shown(self, name: str) -> bool:
        """The warm-up's loss only until there is a reward to look at."""
        return name in self._trends and not (name.startswith("warmup/") and "reward/mean" in self._trends)

    def _cells(self, name: str, label: str, text: Callable[[float], str]) -> tuple[Text, Text, Text]:
        trend = list(self._trends[name])
        room = 24 if self._console.width >= 110 else 14
        return (
            Text(label, style="dim"),
            Text(text(trend[-1]), style="bold"),
            Text(sparkline(trend[-room:]), style="cyan"),
        )

    def _time_split(self) -> Text:
        whole = sum(self._times.values()) or 1.0
        shares = [(part, seconds / whole) for part, seconds in self._times.items()]
        shown = "  ".join(f"{part} {share:.0%}" for part, share in shares if share >= 0.005)
        return Text(f"time of the last step  {shown}", style="dim", no_wrap=True, overflow="ellipsis")

    def _last_answer(self, step: int, group: types.Group) -> Text:
        best = max(group.trajectories, key=lambda t: -math.inf if t.verdict.value is None else t.verdict.value)
        reward = "failed" if best.verdict.value is None else compact(best.verdict.value)
        asked, said = one_line(group.sample.messages[-1].content), one_line(best.text)
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"step {step}  {asked} ", style="dim").append(f"→ {said} ").append(f"[{reward}]", style="green")
        return line
