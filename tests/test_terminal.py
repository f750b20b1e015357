"""Tables in a terminal."""

from rich.console import Console

from lockstep import terminal
from lockstep.terminal import print_table


def test_a_text_of_several_lines_stays_in_one(capsys):
    print_table(["text", "prediction"], [["first\nsecond\r\n\tthird\n", "a"], ["\x1b[31mred", "b"]])
    *_, several, red, _ = capsys.readouterr().out.splitlines()
    assert several == "│ first second   third │ a          │"
    assert "[31mred" in red
    assert "\x1b" not in red


def test_a_narrow_terminal_goes_without_columns_rather_than_fold_figures(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(force_terminal=True, width=30, color_system=None))
    print_table(["row", "a long heading", "why"], [["ddp", "1.2e-07", "because"]], ("a long heading",))
    shown = capsys.readouterr().out
    assert "a long heading" not in shown
    assert "because" in shown
