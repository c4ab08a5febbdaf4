"""Progress: a bar on a terminal, plain lines elsewhere, silence when asked."""

import io
import time

import pytest

from jax_hpc.progress import Progress, status


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_file_gets_a_line_now_and_then(clock: list[float]) -> None:
    stream = io.StringIO()
    with Progress("loading", 4_000_000_000, stream=stream) as bar:
        for _ in range(4):
            clock[0] += 3
            bar.advance(1_000_000_000)
    assert stream.getvalue() == (
        "loading: 50% of 4.00 GB in 6.0 s\nloading: 100% of 4.00 GB in 12.0 s\n"
    )


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with Progress("loading", 2_000_000, stream=stream) as bar:
        bar.advance(2_000_000)
    assert "loading" in stream.getvalue() and "2.0/2.0 MB" in stream.getvalue()


def test_nothing_is_shown_when_disabled() -> None:
    stream = Terminal()
    with Progress("loading", 1, enabled=False, stream=stream) as bar:
        bar.advance(1)
    with status("compiling", enabled=False, stream=stream):
        pass
    assert stream.getvalue() == ""


def test_no_closing_line_after_an_error() -> None:
    stream = io.StringIO()
    with pytest.raises(ValueError, match="bad"), Progress("loading", 1, stream=stream):
        raise ValueError("bad")
    with pytest.raises(ValueError, match="bad"), status("compiling", stream=stream):
        raise ValueError("bad")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_status_says_how_long_it_took(stream: io.StringIO) -> None:
    with status("compiling", stream=stream):
        pass
    assert stream.getvalue().endswith("compiling: 0.0 s\n")
