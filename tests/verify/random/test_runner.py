"""Cases run in processes of their own: none that dies or hangs ends the run, and each can be run again by itself."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flashgen.verify.random import (
    KINDS,
    Options,
    Outcome,
    Recipe,
    Result,
    Summary,
    command,
    finding_text,
    recipe_of,
    run,
)
from flashgen.verify.random.runner import Worker

# What a case does to the process is planted in the process, before its first case.
PLANTED = """
import os, sys, time
from flashgen.verify.random import Outcome, check
import flashgen.verify.random.worker as worker
def planted(recipe):
    if recipe.head_dim == 40: os.abort()
    if recipe.head_dim == 48: time.sleep(1000)
    if recipe.head_dim == 56: sys.exit(3)
    if recipe.head_dim == 64: return Outcome("found", "raised", str(os.getpid()))
    return check(recipe)
worker.check = planted
worker.main()
"""


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Worker]:
    """A worker that dies of a head dim of 40 or 56 and hangs at 48."""
    (tmp_path / "planted.py").write_text(PLANTED)
    with Worker(own_cache=False, seconds=30.0) as worker:
        worker.command = (sys.executable, str(tmp_path / "planted.py"))
        yield worker


def predicates() -> Recipe:
    """A case that compiles nothing."""
    return replace(next(r for r in map(of, range(100)) if not r.passes), head_dim=32)


def of(seed: int) -> Recipe:
    return recipe_of(seed, Options())


def test_a_process_that_dies_is_a_finding_and_the_next_case_runs(faulty: Worker) -> None:
    for head_dim, words in ((40, "SIGABRT"), (56, "status 3")):
        outcome = faulty.run(replace(predicates(), head_dim=head_dim))
        assert (outcome.status, outcome.kind) == ("found", "crash") and words in outcome.message
        assert faulty.run(predicates()).status == "passed"
    assert "planted.py" in faulty.run(replace(predicates(), head_dim=40)).message, "where it died"


def test_a_case_that_hangs_is_a_finding(faulty: Worker) -> None:
    assert faulty.run(predicates()).status == "passed"
    faulty.seconds = 1.0
    assert faulty.run(replace(predicates(), head_dim=48)).kind == "hang"
    faulty.seconds = 30.0
    assert faulty.run(predicates()).status == "passed"


def test_no_case_meets_what_a_fault_of_the_gpu_left(faulty: Worker) -> None:
    failing = replace(predicates(), head_dim=64, emulate=False)
    assert faulty.run(failing).message != faulty.run(failing).message, "the process"
    emulated = replace(failing, emulate=True)
    assert faulty.run(emulated).message == faulty.run(emulated).message


def test_several_at_a_time_are_the_cases_of_one() -> None:
    options = Options(nvrtc=False)
    seeds = [seed for seed in range(40) if not recipe_of(seed, options).passes][:1]
    two = list(run(seeds[0], options, cases=1, jobs=2, own_cache=False))
    assert [result.seed for result in two] == seeds and two[0].recipe == recipe_of(seeds[0], options)


def test_closing_ends_the_processes() -> None:
    seed = next(seed for seed in range(100) if not of(seed).passes)
    running = run(seed, Options(nvrtc=False), seconds=600.0, own_cache=False)
    assert next(running).seed == seed
    running.close()
    assert not [thread for thread in threading.enumerate() if "work" in thread.name]


def found(seed: int = 5) -> Result:
    return Result(seed, of(seed), Outcome("found", "wrong", "forward at 1x1: out: far off"), 1.0)


def test_the_summary_counts_each_kind_apart() -> None:
    summary = Summary(Options())
    summary.add(Result(1, of(1), Outcome("passed", counts={"predicates": 4}), 1.0))
    for number in (2**31, 7):
        summary.add(Result(2, of(2), Outcome("refused", "", f"SpecError: the integer {number} does not fit"), 1.0))
    assert summary.ok
    summary.add(found())
    text = "\n".join(summary.lines())
    assert "4 cases: 1 passed, 2 refused, 1 wrong" in text and "4 predicates" in text
    assert text.endswith("checked:\n       4 predicates"), "what was checked is a table, the last of all"
    assert "refused 2 times: SpecError: the integer … does not fit" in text
    assert not summary.ok and all(kind in text for kind in KINDS)
    assert json.loads(json.dumps(summary.to_data()))["findings"][0]["seed"] == 5


@pytest.mark.parametrize(
    "options",
    [Options(), Options(targets=("sm_90",), passes=("backward",)), Options(sanitize="thread")],
    ids=["free", "narrow", "sanitized"],
)
def test_the_command_that_is_printed_draws_the_same_case(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from flashgen.cli.app import app
    from flashgen.verify import random

    drawn: list[tuple[int, Options]] = []

    def recorded(seed: int, options: Options, **_given: object) -> Iterator[Result]:
        drawn.append((seed, options))
        yield replace(found(), outcome=Outcome("passed"))

    monkeypatch.setattr(random, "run", recorded)
    line = command(17, options)
    assert line in finding_text(replace(found(), seed=17), options)
    done = CliRunner().invoke(app, shlex.split(line)[1:])
    assert done.exit_code == 0, done.output
    assert [(seed, recipe_of(seed, given)) for seed, given in drawn] == [(17, recipe_of(17, options))]


def test_the_command_runs_a_case_and_cleans_up(tmp_path: Path) -> None:
    options = Options(nvrtc=False)
    seed = next(seed for seed in range(100) if not recipe_of(seed, options).passes)
    arguments = ["verify", "--random", "--seed", str(seed), "--cases", "1", "--emulate", "--json"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "flashgen", *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"] and answer["cases"] == 1 and answer["checked"]["predicates"] > 0
    assert not list(tmp_path.iterdir()), "nothing stays in the folder for temporary files"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--random", "causal()"], "SPEC"), (["--random", "--all"], "--all"), (["--cases", "3"], "--cases")],
)
def test_what_says_nothing_beside_it_is_refused(arguments: list[str], named: str) -> None:
    from typer.testing import CliRunner

    from flashgen.cli.app import app

    done = CliRunner().invoke(app, ["verify", "--emulate", *arguments])
    assert done.exit_code == 2 and named in done.output
