"""What a screen shows: nothing is silent, lines fit, time so far is not shown as time left, a pipe gets plain lines."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.cells import cell_len
from rich.console import Console
from terminals import in_terminal, lines_of
from train_fakes import FakeClock

from headstart.sigterm import interruptible
from headstart.train.tracking.screen import Note, Screen, count_text, duration


def piped() -> tuple[Screen, FakeClock, io.StringIO]:
    out, clock = io.StringIO(), FakeClock()
    return Screen(True, Console(file=out, width=80, highlight=False, markup=False), clock), clock, out


def pass_time(screen: Screen, clock: FakeClock, seconds: int) -> None:
    """The thread of a screen looks once a second."""
    for _ in range(seconds):
        clock.now += 1
        screen.beat()


def test_a_silent_phase_says_what_it_does_and_since_when() -> None:
    screen, clock, out = piped()
    with screen.phase("loading target x"):
        pass_time(screen, clock, 12)
    with screen.phase("saving", said=False):
        pass_time(screen, clock, 4)
    assert out.getvalue().splitlines() == [
        "loading target x …", "loading target x: 5 s so far", "loading target x: 10 s so far", "saving: 3 s so far",
    ]  # fmt: skip


def test_what_is_said_breaks_the_silence_and_the_innermost_phase_is_named() -> None:
    screen, clock, out = piped()
    with screen.phase("headstart run", said=False, drawn=False), screen.phase("eval", said=False):
        pass_time(screen, clock, 4)
        screen.say("a message")
        pass_time(screen, clock, 4)
        assert out.getvalue() == "a message\n"
        pass_time(screen, clock, 1)
        assert out.getvalue().splitlines()[-1] == "eval: 9 s so far"
        with screen.hold():  # somebody reads a question
            pass_time(screen, clock, 30)
    pass_time(screen, clock, 30)
    assert len(out.getvalue().splitlines()) == 2


def test_answers_of_a_batch_that_come_in_one_moment_tell_no_pace() -> None:
    """8 answers within 10 ms after 9 s are not 800 answers/s. Two batches tell: 8 answers in 10 s."""
    screen, clock, _ = piped()
    with screen.bar("distill", "answers", 24) as bar:
        clock.now += 9
        for done in range(1, 9):
            clock.now += 0.00125
            bar.update(done)
        assert bar.rate() is None and bar.left() is None
        assert bar.line(clock.now) == "distill: 8 of 24 answers"
        clock.now += 10
        bar.update(16)
        assert bar.rate() == pytest.approx(15 / 10, rel=0.01)  # the first count begins the pace


def test_the_time_left_comes_from_the_pace_and_is_not_the_time_so_far() -> None:
    """30 s so far, 2,970 s left."""
    screen, clock, out = piped()
    with screen.bar("train", "steps", 300) as bar:
        for step in range(1, 4):
            clock.now += 10
            bar.update(step)
            screen.tell(bar)
        assert bar.left() == pytest.approx(2970) and bar.rate() == pytest.approx(0.1)
        # a first step that compiles for a minute is not part of the pace
    with screen.bar("train", "steps", 100) as bar:
        clock.now += 60
        bar.update(1)
        for step in range(2, 12):
            clock.now += 1
            bar.update(step)
        assert bar.left() == pytest.approx(89)
    with screen.bar("train", "s", 600) as bar:
        bar.update(75)
        assert (bar.left(), bar.rate()) == (525, None)
        bar.update(600)
        assert bar.left() is None
    assert out.getvalue().splitlines() == [
        "train: 1 of 300 steps",
        "train: 2 of 300 steps, 0.1 steps/s, 0:49:40 left",
        "train: 3 of 300 steps, 0.1 steps/s, 0:49:30 left",
    ]


def test_a_run_that_continues_takes_its_pace_from_its_own_steps() -> None:
    screen, clock, _ = piped()
    with screen.bar("train", "steps", 1000) as bar:
        for step in range(900, 911):
            clock.now += 2
            bar.update(step)
        assert bar.left() == pytest.approx(180)


def test_a_pipe_gets_a_line_every_five_seconds_without_control_characters() -> None:
    screen, clock, out = piped()
    with screen.bar("features", "tokens", 0) as bar:
        for done in range(0, 3001, 10):
            clock.now += 0.1
            bar.update(done, 3000)
            screen.tell(bar)
    lines = out.getvalue().splitlines()
    assert len(lines) == 7  # 30 s: at once, every 5 s, and the end
    assert lines[0] == "features: 0 of 3,000 tokens" and lines[-1] == "features: 3,000 of 3,000 tokens, 100 tokens/s"
    assert lines[1] == "features: 510 of 3,000 tokens, 100 tokens/s, 25 s left"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", out.getvalue())


def test_a_count_that_stands_still_says_for_how_long() -> None:
    screen, clock, out = piped()
    with screen.bar("train", "steps", 300) as bar:
        bar.first = "the first one compiles kernels:"
        pass_time(screen, clock, 5)
        bar.update(1)
        screen.tell(bar)
        pass_time(screen, clock, 12)
    assert out.getvalue().splitlines() == [
        "train: 0 of 300 steps, the first one compiles kernels: 5 s", "train: 1 of 300 steps, this one for 5 s",
        "train: 1 of 300 steps, this one for 10 s",
    ]  # fmt: skip


def test_a_bar_that_stands_still_moves_on_a_terminal() -> None:
    """Nothing else of it changes while an answer or a pack takes long."""
    screen, clock, _ = piped()
    out = io.StringIO()
    terminal = Console(file=out, width=80, force_terminal=True, color_system=None)
    with screen.bar("features (train)", "tokens", 168_329) as bar:
        bar.update(981)
        clock.now += 4
        terminal.print(*bar.rows(clock.now))
        clock.now += 8
        terminal.print(*bar.rows(clock.now))
        bar.update(98_765)
        clock.now += 3600
        terminal.print(*bar.rows(clock.now))
    first, second, third = out.getvalue().splitlines()
    assert "this one" not in first and second.endswith("981 of 168.3k tokens  this one for 12 s")
    assert third.rstrip().endswith("left") and "this one for 1:00:00" in third
    assert all(cell_len(line.rstrip()) <= 80 for line in (first, second, third))


def test_a_note_loses_whole_parts_where_the_line_is_full() -> None:
    out = io.StringIO()
    Console(file=out, width=50).print(Note("step 118  loss 14.52  accepted length 1.35  183 tokens/s  lr 1.7e-05"))
    assert out.getvalue() == "step 118  loss 14.52  accepted length 1.35\n"


def test_numbers_are_short() -> None:
    assert [count_text(n) for n in (0, 9_999, 99_999, 123_456, 45_678_900, 2.5e9)] == [
        "0", "9,999", "99,999", "123.5k", "45.7M", "2.5G",
    ]  # fmt: skip
    assert [duration(s) for s in (0, 59.4, 59.6, 75, 3661)] == ["0 s", "59 s", "0:01:00", "0:01:15", "1:01:01"]


def show_everything() -> None:
    screen = Screen()
    with screen.phase("headstart run", said=False, drawn=False):
        with screen.phase("loading target " + "some/place/" * 9 + "x"):
            time.sleep(0.5)
        with screen.bar("features of the training samples", "tokens") as bar:
            for done in range(0, 60_000_000, 6_000_000):
                bar.update(done, 54_000_000)
                screen.tell(bar)
                time.sleep(0.1)
        note = "loss 12.3456  accepted length 1.23  12,345 tokens/s  MFU 31%  coverage 99%  lr 1e-05"
        with screen.bar("train", "steps", 12_345) as bar:
            for step in range(40):
                bar.update(step, note=note)
                time.sleep(0.05)
            with screen.phase("validating", said=False):
                time.sleep(0.5)
            screen.say("a message of more than eighty columns " * 4)
            screen.say("a command of more than eighty columns " * 4, whole=True)


def test_every_screen_fits_80_columns() -> None:
    written, code = in_terminal(show_everything)
    assert code == 0
    lines = lines_of(written)
    command = [line for line in lines if "a command" in line]
    assert len(command) == 1  # it can be copied
    assert [line for line in lines if cell_len(line) > 80 and line not in command] == []
    moving = [line for line in lines if "train ━" in line or "train ╸" in line]
    assert moving and any(re.search(r"of 12,345 steps  (0:\d\d:\d\d|\d+ s) left$", line) for line in moving)
    assert any("validating: 0 s so far" in line for line in lines)
    assert any("…" in line and "features of the traini" in line and "M of 54.0M tokens" in line for line in lines)
    assert any(line.startswith("features of the training samples: 54.0M of 54.0M tokens") for line in lines)
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h")  # the cursor is back


def clean_up_for_long() -> None:
    screen = Screen()
    with screen.phase("headstart eval", said=False), interruptible(screen.ask):
        try:
            screen.say("begun")
            time.sleep(60)
        finally:
            time.sleep(2)
            screen.say("cleaned up")


def test_ctrl_c_in_a_terminal_says_at_once_what_happens() -> None:
    began = time.monotonic()
    written, code = in_terminal(clean_up_for_long, stop_after=["begun"])
    assert code == 130 and 2 < time.monotonic() - began < 40
    said = [line for line in lines_of(written) if line.startswith(("begun", "stopping", "cleaned"))]
    assert said == ["begun", "stopping: what is finished is kept; Ctrl-C again to stop now", "cleaned up"]


def test_a_screen_that_shows_nothing_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(show=False)
    with screen.phase("x"), screen.bar("y", "z", 3) as bar:
        bar.update(3)
        screen.tell(bar)
        screen.ask("asked")
        screen.say("said")
    assert capsys.readouterr() == ("", "")
