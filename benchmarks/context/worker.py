"""The process of a rank: answers questions together with the other ranks; rank 0 prints each answer as a JSON line.

python -m benchmarks.context.worker RANK RANKS FOLDER QUESTIONS
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from benchmarks.context.rows import Shape
from flashgen.errors import FlashgenError

_ROUNDS = 3
_BUDGET_MS = 400.0  # of an implementation in a round


def main(rank: int, ranks: int, folder: str, questions: str) -> None:
    """Joins the process group, and answers all questions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        *("nccl", f"file://{folder}/meet", timedelta(minutes=5)), rank=rank, world_size=ranks, device_id=device
    )
    for question in json.loads(questions):
        answer = _answer(Shape(**question.pop("shape")), **question)
        if rank == 0:
            print(json.dumps(answer), file=answers, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _answer(shape: Shape, length_of_one: int, timed: str, contenders: list[str]) -> dict[str, Any]:
    import torch

    from benchmarks.context import contending, sampled

    torch.cuda.empty_cache()
    gigabytes = 0.0
    runs: dict[str, Callable[[], Any]] = {}
    problems: dict[str, str] = {}
    errors: dict[str, float] = {}
    tensors = contending.tensors(shape, shape.tokens)
    for name in contenders:
        made = contending.CONTENDERS[name] if name in contending.CONTENDERS else contending.flashgen(name)
        torch.cuda.reset_peak_memory_stats()
        try:
            run = made(shape, timed, tensors)
            with _context_of(run):
                run()
            torch.cuda.synchronize()
        except (RuntimeError, TypeError, NotImplementedError, ImportError, AttributeError, FlashgenError) as error:
            problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        runs[name] = run
        gigabytes = gigabytes or torch.cuda.max_memory_allocated() / 1e9
    if shape.long:
        errors = sampled.errors(shape, tensors, next(name for name in runs if name in contending.SCHEMES))
    one = contending.one_gpu(shape, timed, contending.tensors(shape, length_of_one))
    times = _medians({"": one, **runs}, once=shape.long)
    return {
        "one_ms": times.pop(""),
        "milliseconds": times,
        "problems": problems,
        "sampled": errors,
        "gigabytes": contending.maximum_of_ranks(gigabytes),
    }


def _medians(runs: Mapping[str, Callable[[], Any]], once: bool) -> dict[str, float]:
    """Returns median milliseconds of the slowest rank over rounds in which the runs are interleaved.

    A run that exceeds the budget of a round is timed in one round only; with `once`, all runs are timed a single time.
    """
    found = {name: [_ms(run, 1)] for name, run in runs.items()}
    for _ in range(0 if once else _ROUNDS):
        for name, run in runs.items():
            repeats = min(20, int(_BUDGET_MS / found[name][0]))
            if repeats or len(found[name]) == 1:
                found[name].append(_ms(run, max(1, repeats)))
    return {name: statistics.median(times[1:] or times) for name, times in found.items()}


def _ms(run: Callable[[], Any], repeats: int) -> float:
    """Returns the mean milliseconds of `repeats` runs, those of the slowest rank."""
    import torch
    import torch.distributed as dist

    from benchmarks.context.contending import maximum_of_ranks

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _context_of(run):
        if repeats > 1:
            run()
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
    return maximum_of_ranks(start.elapsed_time(end) / repeats)


def _context_of(run: Any) -> Any:
    """Returns the context in which a run must be called."""
    return run.around() if hasattr(run, "around") else nullcontext()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
