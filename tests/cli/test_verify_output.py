"""What `flashgen verify` prints: a table for narrow terminals, lines about progress, and the smaller sweep."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

import flashgen.language as fg
from flashgen import verify
from flashgen.cli import pace, verify_rows
from flashgen.cli.app import app
from flashgen.cli.options import SpecOptions
from flashgen.cli.verify import cases_of_spec, expected_time
from flashgen.reference import Verdict
from flashgen.verify import Case, Result, Shape
from flashgen.verify.sweeps import sweep_cases
from flashgen.verify.variants import DTYPES, HEAD_DIMS

LONG = fg.AttentionSpec(192, "bfloat16", mask=fg.document("a_long_name_of_ids") & fg.causal() & fg.sliding_window(1000))
CASES = [Case(spec, Shape(113, 203)) for spec in (fg.AttentionSpec(64), LONG, fg.AttentionSpec(64, mask=fg.causal()))]


def results(cases: list[Case]) -> Iterator[Result]:
    """Yields two runs of each case. The second run of the last case fails in two ways."""
    for case in cases:
        for run in range(2):
            failed = case is cases[-1] and run == 1
            problem = "not deterministic: " + ", ".join(f"d_{name}" for name in "abcdefghijklmnop") if failed else None
            yield Result(case, "emulator, " + "thread", 1.0, {"d_slopes": Verdict(0.05, 0.1, 1e-7, True)}, problem)


def imitate_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Makes stdout look like a terminal."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    sweep = verify_rows.Sweep(CASES, 2)
    for result in results(CASES):
        sweep.add(result)
    sweep.end()
    return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


def test_the_table_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    imitate_terminal(monkeypatch, 80)
    lines = shown(capsys)
    assert max(map(len, lines)) <= 80
    heading, full, name, numbers, failed, *reason = lines
    assert heading.split() == ["spec", "passed", "of", "its", "bound", "verdict"]
    assert full.split() == [CASES[0].spec.name, *["2", "of", "2", "d_slopes", "50%", "ok"]]
    assert name == LONG.name and numbers.split() == ["2", "of", "2", "d_slopes", "50%", "ok"]
    assert [line.index("d_slopes") for line in (full, numbers, failed)] == [heading.index("of its bound")] * 3
    assert failed.endswith("FAILED") and len(reason) > 1
    assert " ".join(" ".join(reason).split()).startswith("2x2x113x203 forward: d_slopes 50%, not deterministic: d_a, ")
    assert reason[-1].endswith("d_p (emulator, thread)")


def test_a_wide_terminal_and_a_pipe_get_all_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imitate_terminal(monkeypatch, verify_rows.TABLE_WIDTH)
    heading, full, *_ = shown(capsys)
    assert " ".join(heading.split()) == " ".join(verify_rows.HEADING)
    assert full.split()[1:] == ["2", "of", "2", "d_slopes", "5.0e-02", "1.0e-01", "1.0e-07", "ok"]
    assert len(heading.rstrip()) <= verify_rows.TABLE_WIDTH
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert shown(capsys)[0].split("\t") == [*verify_rows.HEADING]


def test_progress_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The clock is simulated: the first run takes 20 s, the others 5 s."""
    now = 0.0
    progress = pace.Pace(103, lambda: now)
    for done in range(1, 104):
        now += 20 if done == 1 else 5
        progress.update(done)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "2 of 103 runs in 25 s, about 8 min left" and lines[1].startswith("5 of 103 runs in 40 s, ")
    assert len(lines) == 34 and lines[-1] == "101 of 103 runs in 9 min, about 10 s left"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # a terminal has a progress bar
    pace.Pace(103, iter([0.0, 100.0]).__next__).update(2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "words"), [(4.4, "4 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"), (7e3, "1.9 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert pace.duration(seconds) == words


def test_the_time_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_run(cases: Any, **_options: Any) -> Iterator[Result]:
        yield from results([cases[0]])

    monkeypatch.setattr(verify, "verify", one_run)
    done = CliRunner().invoke(app, ["verify", "--emulate"])
    runs = 2 * len(sweep_cases("small"))
    specs = len({case.spec for case in sweep_cases("small")})
    assert f"\n{runs} runs of {specs} specs{expected_time(specs, runs, True, None)}\n" in done.stderr
    one = CliRunner().invoke(app, ["verify", "causal()", "--emulate", "--pass", "forward", "--quick"])
    assert "\n2 runs of 1 spec: about 2 s on two idle cores\n" in one.stderr
    assert expected_time(79, 334, False, None) == ""
    assert expected_time(79, 334, True, None) == ": about 3 min on two idle cores"
    assert expected_time(79, 334, True, "thread") == ": about 6 min on two idle cores"


def test_quick_is_a_part_of_every_kind() -> None:
    cases = sweep_cases("quick")
    specs = [case.spec for case in cases]
    assert len(cases) <= 16 and all(case.shape.len_q > 64 for case in cases)
    assert {spec.head_dim for spec in specs} == {*HEAD_DIMS} and {spec.dtype for spec in specs} == {*DTYPES}
    assert {spec.layout for spec in specs} == {"bhsd", "bshd", "thd"}
    names = " ".join(spec.name for spec in specs)
    for part in ("causal", "sliding_window", "document", "alibi", "softcap", "dropout", "sink", "shard", "padding"):
        assert part in names
    assert {spec.name for spec in specs} <= {case.spec.name for case in sweep_cases("small")}
    assert len(sweep_cases("full")) > len(sweep_cases("small")) > 10 * len(cases)
    assert [str(case.shape) for case in cases_of_spec("causal()", SpecOptions(), "quick")] == [
        str(case.shape) for case in cases_of_spec("causal()", SpecOptions(), "small")[:2]
    ]


def test_quick_and_all_exclude_each_other() -> None:
    done = CliRunner().invoke(app, ["verify", "--quick", "--all", "--emulate"])
    assert done.exit_code == 2 and "exclude each other" in done.stderr
