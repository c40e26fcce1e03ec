"""One rank: measures what it is asked, together with the others; the first one prints answers, a line of JSON each.

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
_BUDGET_MS = 400.0  # of a contender in a round


def main(rank: int, ranks: int, folder: str, questions: str) -> None:
    """Joins the others, and answers all questions."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
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
            with _around(run):
                run()
            torch.cuda.synchronize()
        except (RuntimeError, TypeError, NotImplementedError, ImportError, AttributeError, FlashgenError) as error:
            problems[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        runs[name] = run
        gigabytes = gigabytes or torch.cuda.max_memory_allocated() / 1e9
    if shape.long:
        errors = sampled.errors(shape, tensors, next(name for name in runs if name in contending.SCHEMES))
    one = contending.alone(shape, timed, contending.tensors(shape, length_of_one))
    times = _medians({"": one, **runs}, once=shape.long)
    return {
        "one_ms": times.pop(""),
        "milliseconds": times,
        "problems": problems,
        "sampled": errors,
        "gigabytes": _most(gigabytes),
    }


def _medians(runs: Mapping[str, Callable[[], Any]], once: bool) -> dict[str, float]:
    """Median milliseconds of a run, of rounds in which all take turns: the slowest rank's. A run that is long is timed
    once more, or with `once` no more."""
    found = {name: [_ms(run, 1)] for name, run in runs.items()}
    for _ in range(0 if once else _ROUNDS):
        for name, run in runs.items():
            repeats = min(20, int(_BUDGET_MS / found[name][0]))
            if repeats or len(found[name]) == 1:
                found[name].append(_ms(run, max(1, repeats)))
    return {name: statistics.median(times[1:] or times) for name, times in found.items()}


def _ms(run: Callable[[], Any], repeats: int) -> float:
    import torch
    import torch.distributed as dist

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _around(run):
        if repeats > 1:
            run()
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
    return _most(start.elapsed_time(end) / repeats)


def _around(run: Any) -> Any:
    """What a run is made inside of."""
    return run.around() if hasattr(run, "around") else nullcontext()


def _most(value: float) -> float:
    """The largest of all ranks' numbers."""
    import torch
    import torch.distributed as dist

    every = torch.tensor([value], dtype=torch.float64, device="cuda")
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return float(every)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
