"""One rank: joins a group, then runs the cases that it reads from its input, and answers each with a line of JSON.

    python worker.py RANK RANKS BACKEND FOLDER [TIMEOUT]

FOLDER is where the ranks meet. A case is {"case": name, ...}, a function of cases.py with its arguments.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from datetime import timedelta
from typing import Any


def main(rank: int, ranks: int, backend: str, folder: str, timeout: float = 120) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
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

    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {"error": None}
        try:
            answer["result"] = getattr(cases, asked.pop("case"))(**asked)
        except Exception:
            answer["error"] = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], *map(float, sys.argv[5:]))
