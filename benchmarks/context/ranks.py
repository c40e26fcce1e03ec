"""Starts a process for each GPU, sends all of them the same questions, and returns the answers of rank 0."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from flashgen.errors import LaunchError


def gpus_here() -> int:
    """Returns the number of GPUs that processes started here see."""
    import torch

    return int(torch.cuda.device_count())


def answers_of_ranks(ranks: int, asked: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the answer to each question as soon as it arrives. Raises LaunchError if a rank ends too early."""
    with tempfile.TemporaryDirectory(prefix="flashgen-ranks-") as folder:
        processes = [_started(rank, ranks, folder, asked) for rank in range(ranks)]
        try:
            lines = processes[0].stdout
            assert lines is not None
            for _ in asked:
                line = lines.readline()
                if not line:
                    raise LaunchError(f"a rank of {ranks} has ended before all was measured: {_ends(processes)}")
                yield json.loads(line)
            for process in processes:
                process.wait()
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _started(rank: int, ranks: int, folder: str, asked: Sequence[dict[str, Any]]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.context.worker", str(rank), str(ranks), folder, json.dumps(asked)]
    return subprocess.Popen(command, stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True)


def _ends(processes: Sequence[subprocess.Popen[str]]) -> str:
    return ", ".join(f"rank {rank} with {process.wait()}" for rank, process in enumerate(processes))
