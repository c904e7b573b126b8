"""What a person sees of long work: how far it is, and how long it will still take."""

import io
import sys

import pytest
from rich.console import Console

from torch_dcl.progress import Bar, error_console


def test_the_time_left_is_what_was_expected_until_enough_is_done_to_tell():
    bar = Bar(Console(file=io.StringIO()), 3, "layers", expected=100.0)
    assert bar.left == pytest.approx(100, abs=1)
    bar._start -= 30
    assert bar.left == pytest.approx(70, abs=1)
    bar.expect(0.01)
    assert bar.left == pytest.approx(70, abs=1)
    bar.expect(0.5)
    assert bar.left == pytest.approx(30, abs=1)
    bar._start -= 100
    assert bar.left == 0


def test_what_is_expected_is_said_before_the_work_begins():
    out = io.StringIO()
    with Bar(Console(file=out, width=100), 3, "layers", expected=100.0):
        assert out.getvalue() == "0 of 3 layers · 0 s · about 1:40 min left\n"


def test_a_quiet_console_says_nothing(capsys):
    with Bar(error_console(quiet=True), 3, "layers", every=0, expected=100.0) as bar:
        bar.now("one")
        bar.note("a line")
        bar.advance()
    assert capsys.readouterr() == ("", "")


def test_a_stream_that_cannot_show_a_sign_shows_a_similar_one_or_a_question_mark(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    error_console().print("1 · 2 ü")
    assert raw.getvalue() == b"1 - 2 ?\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_before_it_is_known_how_much_there_is_to_do_nothing_is_counted(terminal):
    out = io.StringIO()
    with Bar(Console(file=out, width=100, force_terminal=terminal), 0, "networks", every=0) as bar:
        bar.now("reading data")
        if terminal:
            bar._live.refresh()
        before = out.getvalue()
        bar.begin_at(1, 9)
        bar.now("building networks")
        if terminal:
            bar._live.refresh()
    assert "reading data" in before
    assert "networks" not in before
    assert "1 of 9 networks" in out.getvalue()
