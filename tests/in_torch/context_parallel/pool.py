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
    """The ranks of a group, each a process of its own that runs cases of cases.py when it is told to."""

    def __init__(self, ranks: int, backend: str = "gloo", timeout: float = 120) -> None:
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
                stderr=subprocess.PIPE if timeout < 120 else None,
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
        for process in self.processes:
            assert process.stdin
            if process.poll() is None:
                process.stdin.write(json.dumps({"case": case, **arguments}) + "\n")
                process.stdin.flush()
        return [self._answer(process) for process in self.processes]

    def close(self) -> None:
        """Ends the ranks."""
        for process in self.processes:
            assert process.stdin
            process.stdin.close()
        for process in self.processes:
            process.wait(60)
        self._folder.cleanup()

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            return {"error": f"the process has ended with {process.wait(60)}", "gone": True}
        answer: dict[str, Any] = json.loads(line)
        return answer
