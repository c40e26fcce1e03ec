"""Runs cases in processes of their own, several at a time, and shrinks what fails."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build.cache import default_root
from flashgen.verify.random.draw import Options, recipe_of
from flashgen.verify.random.outcome import Outcome
from flashgen.verify.random.recipe import Recipe
from flashgen.verify.random.shrink import shrunk

CASE_SECONDS = 240.0  # for one case; compiling under a sanitizer on a busy machine takes a minute
SHRINK_SECONDS = 90.0
OWN_CACHE = "FLASHGEN_RANDOM_CACHE"  # names a process's own folder of kernels
RUNTIME = "emulator-*"  # cache entries that every case needs
_LIFETIME = 100  # cases that one process runs: libraries of kernels are never unloaded
_STDERR = 3000  # the last characters that a dead process wrote


@dataclass(frozen=True)
class Result:
    """A case that has run. For a finding, `recipe` and `outcome` are those of the smallest case that fails alike."""

    seed: int
    recipe: Recipe
    outcome: Outcome
    seconds: float


def run(
    seed: int,
    options: Options,
    *,
    cases: int | None = None,
    seconds: float | None = None,
    jobs: int = 1,
    own_cache: bool = True,
    shrink_seconds: float = SHRINK_SECONDS,
) -> Generator[Result, None, None]:
    """Results of the cases `seed`, `seed` + 1 and so on, as they come, until `cases` have run or `seconds` are over.

    own_cache: kernels go to a folder that is removed again, otherwise to the environment's.
    Closing the iterator ends the processes.
    """
    seeds = iter(range(seed, seed + cases)) if cases is not None else itertools.count(seed)
    deadline = None if seconds is None else time.monotonic() + seconds
    shared = _Shared(seeds, deadline, options, own_cache, shrink_seconds)
    threads = [threading.Thread(target=shared.work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            yield from iter(shared.results.get, None)
    finally:
        shared.stop()
        for thread in threads:
            thread.join()
    if shared.errors:
        raise shared.errors[0]


class _Shared:
    """What the threads share: the seeds to come, and the results."""

    def __init__(
        self, seeds: Iterator[int], deadline: float | None, options: Options, own_cache: bool, shrink_seconds: float
    ) -> None:
        self.seeds, self.deadline, self.options = seeds, deadline, options
        self.own_cache, self.shrink_seconds = own_cache, shrink_seconds
        self.results: queue.Queue[Result | None] = queue.Queue()
        self.errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._workers: set[Worker] = set()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for worker in self._workers:
                worker.kill()

    def work(self) -> None:
        """One thread's cases, in one process after another."""
        try:
            while self._cases_of_one_process():
                pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            self.results.put(None)

    def _next_seed(self) -> int | None:
        with self._lock:
            if self._stopped or (self.deadline is not None and time.monotonic() >= self.deadline):
                return None
            return next(self.seeds, None)

    def _cases_of_one_process(self) -> bool:
        """Runs cases in one process; gives whether more are wanted."""
        with Worker(self.own_cache) as worker:
            with self._lock:
                self._workers.add(worker)
            try:
                for _ in range(_LIFETIME):
                    seed = self._next_seed()
                    if seed is None:
                        return False
                    result = self._result(seed, worker)
                    if self._stopped:
                        return False
                    self.results.put(result)
                return True
            finally:
                with self._lock:
                    self._workers.discard(worker)

    def _result(self, seed: int, worker: Worker) -> Result:
        begin = time.monotonic()
        recipe = recipe_of(seed, self.options)
        outcome = worker.run(recipe)
        if outcome.status == "found" and not self._stopped:
            recipe, outcome = shrunk(recipe, outcome, worker.run, self.shrink_seconds)
        return Result(seed, recipe, outcome, time.monotonic() - begin)


class Worker:
    """A process that runs cases. It starts with the first, and anew after a case that it did not survive."""

    def __init__(self, own_cache: bool = True, seconds: float = CASE_SECONDS) -> None:
        self.seconds = seconds
        self.command = (sys.executable, "-m", "flashgen.verify.random.worker")
        self._folder = Path(tempfile.mkdtemp(prefix="flashgen-random-"))
        self._environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        if own_cache:
            self._environment |= {OWN_CACHE: str(self._cache()), "FLASHGEN_CACHE_DIR": str(self._cache())}
        self._process: subprocess.Popen[str] | None = None
        self._stderr: Any = None

    def _cache(self) -> Path:
        """A folder of kernels. It starts with what every case needs, if the user's own cache has that."""
        folder = self._folder / "cache"
        if not folder.exists():
            folder.mkdir()
            for entry in default_root().glob(RUNTIME):
                with contextlib.suppress(OSError):
                    shutil.copytree(entry, folder / entry.name)
        return folder

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, recipe: Recipe) -> Outcome:
        """The outcome of a case: "crash" where the process dies of it, "hang" where it takes too long."""
        process = self._started()
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(recipe.to_json() + "\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(self.seconds):
                self.kill()
                return Outcome("found", "hang", f"no answer after {self.seconds:.0f} s\n{self._said()}")
        line = process.stdout.readline()
        if line:
            outcome = Outcome.from_json(line)
            if outcome.status == "found" and not recipe.emulate:
                self.kill()  # a GPU's fault stays with the process, and would fail every later case
            return outcome
        status = process.wait()
        died = signal.Signals(-status).name if status < 0 else f"status {status}"
        self.kill()
        return Outcome("found", "crash", f"the process ended with {died}\n{self._said()}")

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._stderr = (self._folder / "stderr").open("w+", errors="replace")
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=self._environment,
                start_new_session=True,  # the parent alone gets keyboard interrupts, and ends compilers with the group
            )
        return self._process

    def _said(self) -> str:
        self._stderr.seek(0)
        return str(self._stderr.read())[-_STDERR:]

    def kill(self) -> None:
        """Ends the process and all that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
