"""One rank: a process that joins a group and runs cases on request."""

from __future__ import annotations

import json
import os
import traceback
from datetime import timedelta
from typing import Any


def serve(asked: Any, rank: int, ranks: int, backend: str, folder: str, timeout: float, stderr: str | None) -> None:
    """Answers each case that arrives through the pipe `asked`, until its other end is closed.

    A case is JSON, {"case": name, ...}: a function of cases.py with its arguments. The answer is JSON, too.

    Args:
        folder: the rendezvous of the group's ranks.
        timeout: that of the group's messages, in seconds.
        stderr: a file to which standard error is appended.
    """
    if stderr is not None:
        os.dup2(os.open(stderr, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout),
        device_id=torch.device("cuda", rank) if backend == "nccl" else None,
    )
    import cases

    while True:
        try:
            arguments = json.loads(asked.recv_bytes())
        except EOFError:
            break
        answer: dict[str, Any] = {"error": None}
        try:
            answer["result"] = getattr(cases, arguments.pop("case"))(**arguments)
        except Exception:
            answer["error"] = traceback.format_exc()
        asked.send_bytes(json.dumps(answer).encode())
    dist.destroy_process_group()
