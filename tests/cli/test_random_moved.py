"""`flashgen verify --random` is deprecated and names its replacement."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from flashgen.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--random", "--emulate"], "--random-minutes 5 -n 1"),
        (["--random", "--emulate", "--minutes", "60", "--jobs", "16"], "--random-minutes 60 -n 16"),
        (["--cases", "3", "--seed", "7", "--emulate"], "--random-minutes 5 -n 1 --hypothesis-seed 7"),
        (
            ["--random", "--pass", "backward", "--target", "sm_90", "--sanitize", "thread"],
            "--random-minutes 5 -n 1 --random-pass backward --random-target sm_90 --random-sanitize thread",
        ),
    ],
)
def test_the_replacement_is_named(arguments: list[str], command: str, request: pytest.FixtureRequest) -> None:
    done = CliRunner().invoke(app, ["verify", *arguments])
    assert done.exit_code == 2 and "--random is deprecated" in done.stderr
    assert done.stdout.strip() == f"pytest tests/random_variants/test_search.py -m 'not gpu' {command}"
    parsed = request.config._parser.parse_known_args(shlex.split(done.stdout)[1:])
    assert parsed.random_minutes == float(command.split()[1])
