"""Runs of torch's functions, or of their gradients, for timing; a peer that refuses a case is warned of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from flashgen.bench.cases import Timed
from flashgen.runtime.timing import Run

_REFUSALS = (RuntimeError, ValueError, AssertionError)  # of a peer that cannot do a case


def differentiated(forward: Callable[..., Any], timed: Timed, arrays: Sequence[Any], d_out: Any) -> Run | None:
    """A run of a torch function of these arrays, or of its gradients by autograd; None where it fails.

    "backward" goes again and again through one graph, which is made before anything is timed.
    """
    import torch

    if timed == "forward":
        return runs_or_none(lambda: forward(*arrays))
    leaves = [array.detach().requires_grad_() for array in arrays]
    if timed == "both":
        return runs_or_none(lambda: torch.autograd.grad(forward(*leaves), leaves, d_out))
    try:
        out = forward(*leaves)
    except _REFUSALS as error:
        say_refusal(error)
        return None
    return runs_or_none(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True))


def runs_or_none(run: Run) -> Run | None:
    """The run, if the peer can do it at all here; what it makes the first time is not timed."""
    try:
        run()
    except _REFUSALS as error:
        say_refusal(error)
        return None
    return run


def say_refusal(error: Exception) -> None:
    """Warns why a peer is not measured, in a line: its figure is not merely missing."""
    why = str(error).partition("\n")[0].strip()
    warnings.warn(f"a peer is not measured: {type(error).__name__}: {why}", stacklevel=3)
