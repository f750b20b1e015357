"""Tables in a terminal."""

from lockstep.terminal import print_table


def test_a_text_of_several_lines_stays_in_one(capsys):
    print_table(["text", "prediction"], [["first\nsecond\r\n\tthird\n", "a"], ["\x1b[31mred", "b"]])
    *_, several, red, _ = capsys.readouterr().out.splitlines()
    assert several == "│ first second   third │ a          │"
    assert "[31mred" in red
    assert "\x1b" not in red
