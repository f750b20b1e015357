"""Padded widths are so few that PyTorch compiles a program for each, and none exceeds the model's limit."""

from lockstep.model import compiling


def test_widths_are_few():
    widths = {compiling.few_widths(width, 40) for width in range(1, 41)}
    assert widths == {16, 32, 40}
    assert all(compiling.few_widths(width, 40) >= width for width in range(1, 41))


def test_the_longest_model_s_widths_are_all_compiled():
    widths = {compiling.few_widths(width, 512) for width in range(1, 513)}
    assert len(widths) <= compiling.MOST_PROGRAMS
