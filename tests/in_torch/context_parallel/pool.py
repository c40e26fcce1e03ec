"""Processes that are the ranks of a group, started once for many cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class Pool:
    """The ranks of a group, each a process of its own that runs cases of cases.py when it is told to.

    timeout: seconds, of the group's messages. said: a file for what the ranks say beside their answers.
    """

    def __init__(self, ranks: int, backend: str = "gloo", timeout: float = 120, said: Any = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="flashgen-ranks-")
        paths = [str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    str(HERE / "worker.py"),
                    *map(str, (rank, ranks, backend, self._folder.name, timeout)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]

    def run(self, case: str, **arguments: Any) -> list[Any]:
        """What a case gives on each rank; AssertionError with what the ranks say where it fails on one."""
        answers = self.answers(case, **arguments)
        wrong = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if answer["error"]]
        assert not wrong, "\n".join(wrong)
        return [answer["result"] for answer in answers]

    def answers(self, case: str, **arguments: Any) -> list[dict[str, Any]]:
        """The answer of each rank; of one that is gone an error that says so."""
        self.ask(case, **arguments)
        return [self.answer(rank) for rank in range(len(self.processes))]

    def ask(self, case: str, **arguments: Any) -> None:
        """Has all ranks begin a case."""
        for process in self.processes:
            assert process.stdin
            process.stdin.write(json.dumps({"case": case, **arguments}) + "\n")
            process.stdin.flush()

    def answer(self, rank: int) -> dict[str, Any]:
        """A rank's answer to what all were asked last, once it is there."""
        process = self.processes[rank]
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            return {"error": f"the process has ended with {process.wait(60)}"}
        made: dict[str, Any] = json.loads(line)
        return made

    def close(self) -> None:
        """Ends the ranks."""
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        for process in self.processes:
            process.wait(60)
        self._folder.cleanup()

    def kill(self) -> None:
        """Ends ranks that may not come to an end by themselves."""
        for process in self.processes:
            process.kill()
            process.wait(60)
        self._folder.cleanup()
