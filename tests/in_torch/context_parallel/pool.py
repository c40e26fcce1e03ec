"""A pool of processes that are the ranks of a group, started once for many cases."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_PATHS = [str(HERE), str(HERE.parents[2])]
sys.path[:0] = [path for path in _PATHS if path not in sys.path]
from worker import serve

# Importing torch takes longer than most cases: the server imports it once, and the ranks are its forks.
multiprocessing.set_forkserver_preload(["cases"])


class Pool:
    """The ranks of a group, each a process that runs cases of cases.py on request.

    Ranks that use GPUs are fresh processes, because CUDA does not survive a fork; all others are forks of one server.

    Args:
        ranks: number of ranks.
        backend: that of torch.distributed.
        timeout: that of the group's messages, in seconds.
        stderr: a file to which the ranks' standard error is appended.
    """

    def __init__(self, ranks: int, backend: str = "gloo", timeout: float = 120, stderr: Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flashgen-ranks-")
        context: Any = multiprocessing.get_context("spawn" if backend == "nccl" else "forkserver")
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        with _python_path():
            for rank in range(ranks):
                own, theirs = context.Pipe()
                given = (theirs, rank, ranks, backend, self._folder.name, timeout, stderr and str(stderr))
                process = context.Process(target=serve, args=given, daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(own)
                self.processes.append(process)

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """Returns the results of a case by rank. Raises AssertionError with the traceback of each rank that failed."""
        answers = self.answers(case, **arguments)
        wrong = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer["error"]]
        assert not wrong, "\n".join(wrong)
        return [answer["result"] for answer in answers]

    def answers(self, case: str, **arguments: Any) -> list[dict[str, Any]]:
        """Returns the answer of each rank. Raises an error for a rank that has ended."""
        self.ask(case, **arguments)
        return [self.answer(rank) for rank in range(len(self.processes))]

    def ask(self, case: str, **arguments: Any) -> None:
        """Starts a case on all ranks."""
        for pipe in self._pipes:
            pipe.send_bytes(json.dumps({"case": case, **arguments}).encode())

    def answer(self, rank: int) -> dict[str, Any]:
        """Waits for a rank's answer to the last case."""
        try:
            answer: dict[str, Any] = json.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(60)
            return {"error": f"the process has ended with {self.processes[rank].exitcode}"}
        return answer

    def close(self) -> None:
        """Ends the ranks."""
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.join(60)
        self._folder.cleanup()

    def kill(self) -> None:
        """Kills ranks that may not end by themselves."""
        for process in self.processes:
            process.kill()
            process.join(60)
        self._folder.cleanup()


@contextmanager
def _python_path() -> Iterator[None]:
    """Adds the paths of this folder and of flashgen to the environment of processes that are started meanwhile."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, *filter(None, [before])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
