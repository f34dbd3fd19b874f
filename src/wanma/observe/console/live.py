"""Live display: a progress bar and the run's numbers, redrawn in place; messages scroll above it."""

from __future__ import annotations

import threading
import time
from typing import Self, TextIO, cast

from rich.console import Console as Terminal
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.observe.console.console import LEVEL_PREFIXES, Console, as_message
from wanma.observe.console.progress import checkpoint_text, finish_text, sparkline, validation_text
from wanma.observe.units import duration_text

LEVEL_STYLES = {"info": "", "warning": "yellow", "error": "bold red"}
SPARKLINE_WIDTH = 28


class LiveConsole(Console):
    """Live display, redrawn until closed; closing restores the terminal and keeps the last picture."""

    def __init__(self, run: RunDirectory, steps: int, stream: TextIO) -> None:
        super().__init__(run, steps, stream)
        self._opened_at = time.monotonic()
        self._lock = threading.Lock()  # events arrive in one thread and are drawn in another
        self._terminal = Terminal(file=cast(TextIO, self.stream), highlight=False)
        self._live = Live(console=self._terminal, get_renderable=self._draw)

    def __enter__(self) -> Self:
        self._print_dimmed(f"run directory: {self.run.path}")
        self._live.start()
        return self

    def write(self, event: Event) -> None:
        with self._lock:
            self.progress.update(event)
        if (message := as_message(event)) is not None:
            self.print_message(message)

    def print_message(self, event: Event) -> None:
        level = event.get("level", "info")
        text = LEVEL_PREFIXES.get(level, "") + str(event["text"])
        self._terminal.print(Text(text, LEVEL_STYLES.get(level, "")))

    def print_line(self, text: str) -> None:
        self._terminal.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        self._live.stop()
        if self.run.report.exists():
            self._print_dimmed(f"report: {self.run.report}")

    def _print_dimmed(self, line: str) -> None:
        self._terminal.print(Text(line, "dim"), soft_wrap=True)

    def _draw(self) -> RenderableType:
        with self._lock:
            if self.progress.is_rank_0_remote:
                return Text("progress is shown on the node of rank 0", "dim")
            return Group(self._bar(), self._metrics_line(), self._last_events_line())

    def _bar(self) -> Table:
        progress = self.progress
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True)
        bar = ProgressBar(progress.steps, progress.step, complete_style="cyan", finished_style="green")
        steps = f"step {progress.step:,}/{progress.steps:,}  {self._status_text()}"
        table.add_row(Text(self.run.name, "bold"), bar, Text(steps))
        return table

    def _status_text(self) -> str:
        progress = self.progress
        if progress.finish_event is not None:
            return finish_text(progress.finish_event)
        if progress.last_step_event is None:
            return f"starting, {duration_text(time.monotonic() - self._opened_at)}"
        if progress.step >= progress.steps:
            return "finishing"
        return f"ETA {duration_text(progress.remaining_seconds())}"

    def _metrics_line(self) -> Text:
        words = self.progress.metric_texts()
        if not words:
            return Text("waiting for the first step", "dim")
        curve = sparkline(self.progress.losses.points, SPARKLINE_WIDTH)
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{words[0]} ", "bold")
        text.append(f"{curve}   ", "cyan")
        text.append("   ".join(words[1:]))
        return text

    def _last_events_line(self) -> Text:
        validation, checkpoint = self.progress.validation_event, self.progress.checkpoint_event
        parts = [validation_text(validation)] if validation is not None else []
        parts += [checkpoint_text(checkpoint)] if checkpoint is not None else []
        return Text("   ".join(parts), "dim", no_wrap=True, overflow="ellipsis")
