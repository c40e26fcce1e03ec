"""A plugin of pytest: the options of random variants, long runs, and a report of the case that a process died of.

A long run is one test for each minute and worker, so that pytest-xdist spreads it, and a process that crashes costs the
rest of its minute. Each worker writes the case that it runs to a file, its journal. Where a worker dies, pytest-xdist
reports the test and starts another worker, and the hook here adds the case to the report.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings

import rotation
from random_variants.cases import Case, Options, cases, targets_of_gpu
from random_variants.check import check

SECONDS = 12.0  # of a search without --random-minutes
PLAIN = settings(
    max_examples=10,  # of a seed: from the eleventh on, Hypothesis mostly varies those that it has drawn
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
LOST = 70  # the status of a process that ends because its GPU is lost
CHECKED = "checked random variants"  # the name of what a search reports
_JOURNAL = "FLASHGEN_TEST_JOURNAL"
_SEARCH = "pytest tests/random_variants/test_search.py"
_terminal = -1  # the standard error of this process, which captures nothing


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("random variants", "tests/random_variants; --hypothesis-seed gives the first seed").addoption
    add("--random-minutes", type=float, metavar="M", help="search for so long in each worker; 0: the first seed alone")
    add("--random-pass", choices=("forward", "backward"), help="only this pass; backward runs the forward, too")
    add("--random-target", metavar="TARGET", help="only this target, such as sm_90a")
    add("--random-sanitize", choices=("address", "thread"), help="every case under this sanitizer of the emulator")


def options_of(config: pytest.Config, gpu: bool) -> Options:
    """What the options of the command line narrow cases to."""
    target, pass_ = config.getoption("--random-target"), config.getoption("--random-pass")
    targets = (target,) if target else ()
    if gpu and not target:
        from flashgen.runtime.gpu import compute_capability

        targets = targets_of_gpu(*compute_capability())
    return Options(
        targets,
        passes=(pass_,) if pass_ else ("forward", "backward"),
        sanitize=None if gpu else config.getoption("--random-sanitize"),
        emulate=not gpu,
    )


def again(config: pytest.Config, gpu: bool) -> str:
    """The command that runs cases of these options, without its seed."""
    names = ("--random-pass", "--random-target", "--random-sanitize")
    given = [f"{name} {value}" for name in names if (value := config.getoption(name))]
    return " ".join([_SEARCH, f'-m "{"gpu" if gpu else "not gpu"}"', *given, "--random-minutes 0 --hypothesis-seed"])


def slices(config: pytest.Config) -> list[tuple[Iterable[int], float]]:
    """The seeds and the seconds of each test of a search."""
    given, minutes = config.getoption("--hypothesis-seed"), config.getoption("--random-minutes")
    first = int(given) if given is not None else int(rotation.commit() or "8", 16) % 2**31
    if minutes == 0:
        return [([first], math.inf)]
    if minutes is None:
        return [(itertools.count(first), SECONDS)]
    count, workers = math.ceil(minutes), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT") or 1)
    return [(itertools.count(first + 1000 * number), 60 * minutes / count) for number in range(count * workers)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "search_slice" in metafunc.fixturenames:
        found = slices(metafunc.config)
        metafunc.parametrize("search_slice", found, ids=map(str, range(len(found))))


def search(seeds: Iterable[int], options: Options, command: str, seconds: float = math.inf) -> Counter[str]:
    """Runs Hypothesis with one seed after the other, until the time is over; gives how much was checked, by name.

    command: what runs one seed, which is to stand behind it.
    """
    end, failed = time.monotonic() + seconds, False
    counts: Counter[str] = Counter()

    def run_case(case: Case) -> None:
        nonlocal failed
        if counts and not failed and time.monotonic() >= end:
            return
        try:
            counts.update(checked(case, f"{command} {number}"))
        except Exception:
            failed = True  # from here on Hypothesis makes the case small, for which it has a time of its own
            raise

    for number in seeds:
        seed(number)(PLAIN(given(case=cases(options))(run_case)))()
        if time.monotonic() >= end:
            break
    return counts


def checked(case: Case, command: str = "") -> Counter[str]:
    """Checks a case within a test by Hypothesis, which prints it where it fails and cannot be made smaller."""
    note(f"{case}\nagain: {command}")
    _journal().write_text(f"{case}\nagain: {command}\n{case!r}\n")
    try:
        return check(case)
    except Exception as error:
        if not case.emulate:
            end_if_gpu_is_lost(error)
        raise


def end_if_gpu_is_lost(error: Exception) -> None:
    """Ends the process where the GPU answers no more, as after an illegal address: all later cases would fail."""
    import cupy

    try:
        cupy.cuda.Device().synchronize()
    except cupy.cuda.runtime.CUDARuntimeError as lost:
        text = f"{_journal().read_text()}{type(error).__name__}: {error}\nthe GPU is lost: {lost}\n"
        _journal().write_text(text)
        os.write(_terminal, text.encode())
        os._exit(LOST)


@pytest.fixture
def removed_kernels(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes what a test of a long run has compiled, but for the runtime of the emulator, as disks are finite."""
    if pytestconfig.getoption("--random-minutes") is None:
        yield
        return
    folder = _journal().with_suffix(".kernels")
    monkeypatch.setenv("FLASHGEN_CACHE_DIR", str(folder))
    yield
    for entry in folder.glob("*"):
        if not entry.name.startswith("emulator-"):
            shutil.rmtree(entry, ignore_errors=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A table of what searches have checked."""
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            counts.update(dict(getattr(report, "user_properties", ())).get(CHECKED, {}))
    if counts:
        terminalreporter.section(CHECKED)
        for what, count in sorted(counts.items()):
            terminalreporter.write_line(f"{count:>8} {what}")


# Crashes -------------------------------------------------------------------------------------------------------------


def _journal(worker: str | None = None) -> Path:
    return Path(os.environ[_JOURNAL]) / (worker or os.environ.get("PYTEST_XDIST_WORKER", "main"))


def pytest_configure(config: pytest.Config) -> None:
    global _terminal
    _terminal = os.dup(2)
    if not hasattr(config, "workerinput"):
        os.environ[_JOURNAL] = tempfile.mkdtemp(prefix="flashgen-random-")


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(_terminal)
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[_JOURNAL], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: Any) -> None:
    """Adds the case to the report of a test that a worker died of."""
    journal = _journal(report.node.gateway.id)
    if "random_variants" in crashitem and journal.exists():
        report.longrepr = f"{report.longrepr}\n{journal.read_text()}"
