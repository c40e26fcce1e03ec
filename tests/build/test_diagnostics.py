"""Source lines printed with a compiler's errors."""

from __future__ import annotations

from flashgen.build.diagnostics import numbered_errors

SOURCE = "\n".join(f"line {number}" for number in range(1, 21))


def test_lines_around_each_error() -> None:
    text = numbered_errors(
        SOURCE, "k.cu(3): error: no\nk.cu(12): warning: hm\nk.cu(20): error: no\nk.cu(3): error: again"
    )
    lines = text.splitlines()
    assert [line for line in lines if line.startswith(">")] == [">    3 | line 3", ">   20 | line 20"]
    assert lines[0] == "     1 | line 1"
    assert "    ..." in lines
    assert len(lines) == 5 + 1 + 3


def test_only_the_first_errors_are_shown() -> None:
    log = "\n".join(f"k.cu({number}): error: no" for number in range(1, 21))
    assert numbered_errors(SOURCE, log).count(">") == 5


def test_a_log_without_lines_shows_none() -> None:
    assert numbered_errors(SOURCE, "ptxas fatal : out of memory") == ""
    assert numbered_errors(SOURCE, "k.cu(99): error: beyond the end") == ""
