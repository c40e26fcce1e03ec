"""Findings are shrunk and printed; crashes are reported, and the next tests run."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from random_variants import running
from random_variants.cases import Case, Options
from random_variants.check import check
from random_variants.predicates import Found
from random_variants.running import again, options_of, search, slices

# A plugin with a GPU that every case loses, so that its process ends.
LOSING = """
import sys
from types import SimpleNamespace as Some

class CUDARuntimeError(Exception):
    pass

def fails(error):
    def fail(*_):
        raise error
    return fail

def pytest_configure(config):
    from random_variants import running

    device = Some(synchronize=fails(CUDARuntimeError("an illegal address")))
    runtime = Some(CUDARuntimeError=CUDARuntimeError, getDeviceCount=lambda: 0)
    sys.modules["cupy"] = Some(cuda=Some(Device=lambda: device, runtime=runtime))
    running.check = fails(ValueError("the launch fails"))
    running.cases = lambda _, cases=running.cases: cases(running.Options(("sm_90",), sanitize="address", emulate=False))
"""


def test_findings_are_shrunk_and_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mocks a failure of every float division."""

    def planted(case: Case) -> Any:
        if any(part.op == "/" for part in case.mask.walk()):
            raise Found("wrong", "far off")
        return check(Case(case.mask, None, case.declared, case.problems, passes=()))

    monkeypatch.setattr(running, "check", planted)
    with pytest.raises(Found) as raised:
        search(itertools.count(), Options(), "pytest --hypothesis-seed")
    text = "\n".join(raised.value.__notes__)
    case = text.partition("case=Case(")[2].partition("\n")[0]
    assert "again: pytest --hypothesis-seed " in text and "mask = lambda b, h, q, k: " in text
    assert "passes=()" in case and "score=None" in case and case.count("Problem(") == 1 and case.count("Term(") <= 6


def test_a_crashed_process_is_reported_with_its_case(tmp_path: Path) -> None:
    (tmp_path / "losing.py").write_text(LOSING)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "losing", "-n", "1"]
    command += ["tests/random_variants/test_search.py", "-m", "not gpu", "--random-minutes", "0.02"]
    environment = running.os.environ | {"PYTHONPATH": f"{root}:{tmp_path}"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    for words in ("crashed while running", "Case(mask=", "again: ", "the launch fails", "the GPU is lost", "1 skipped"):
        assert words in done.stdout, done.stdout + done.stderr


class Config:
    """Returns the options of a command line."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def getoption(self, name: str) -> Any:
        return self.given.get(name.removeprefix("--").replace("-", "_"))


def test_options_restrict_a_search_and_are_in_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = Config(random_pass="backward", random_target="sm_90", random_sanitize="thread")
    assert options_of(config, gpu=False) == Options(("sm_90",), ("backward",), "thread")
    assert options_of(config, gpu=True) == Options(("sm_90",), ("backward",), emulate=False)
    options = "--random-pass backward --random-target sm_90 --random-sanitize thread"
    assert f'-m "not gpu" {options} --random-minutes 0 --hypothesis-seed' in again(config, gpu=False)


def test_a_search_has_a_test_for_each_minute_and_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**given: Any) -> list[tuple[int, float]]:
        return [(next(iter(seeds)), seconds) for seeds, seconds in slices(Config(hypothesis_seed="5", **given))]

    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    assert of() == [(5, running.SECONDS)]
    assert of(random_minutes=0.0) == [(5, float("inf"))]
    assert of(random_minutes=2.5) == [(5 + 1000 * number, 50.0) for number in range(12)]
