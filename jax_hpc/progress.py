"""Progress of long work: a bar on a terminal where rich is installed, else a few plain lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self, TextIO

_SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts bytes up to `total` and shows them on `stream` (stderr by default).

    Used as a context manager; `advance` may be called as often as one likes.
    """

    def __init__(
        self, label: str, total: int, *, enabled: bool = True, stream: TextIO | None = None
    ):
        self.label, self.total, self.done = label, total, 0
        self._enabled = enabled
        self._stream = sys.stderr if stream is None else stream
        self._shown = -1
        self._bar: Any = None
        self._task: Any = None
        self._start = self._last = time.monotonic()

    def __enter__(self) -> Self:
        self._start = self._last = time.monotonic()
        if self._enabled and self._stream.isatty():
            self._bar = _rich_bar(self._stream)
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(self.label, total=self.total)
        return self

    def advance(self, count: int) -> None:
        """Adds `count` bytes."""
        self.done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif self._enabled and now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            self._line(now)

    def __exit__(self, kind: object, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._enabled and kind is None and self._shown != self.done:
            self._line(time.monotonic())

    def _line(self, now: float) -> None:
        self._shown = self.done
        seconds = now - self._start
        percent = 100 * self.done // self.total if self.total else 100
        print(
            f"{self.label}: {percent}% of {_size(self.total)} in {seconds:.1f} s",
            file=self._stream,
            flush=True,
        )


@contextmanager
def status(label: str, *, enabled: bool = True, stream: TextIO | None = None) -> Iterator[None]:
    """Says that something of unknown length is going on, and how long it took."""
    shown = sys.stderr if stream is None else stream
    spinner = _rich_spinner(label, shown) if enabled and shown.isatty() else None
    start = time.monotonic()
    with nullcontext() if spinner is None else spinner:
        yield
    if enabled:
        print(f"{label}: {time.monotonic() - start:.1f} s", file=shown, flush=True)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


def _rich_bar(stream: TextIO) -> Any:
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(file=stream),
    )


def _rich_spinner(label: str, stream: TextIO) -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream).status(label)
