"""Runs of torch functions or of their gradients, for timing, with a warning for each peer that fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from flashgen.bench.cases import Timed
from flashgen.runtime.timing import Run

_REFUSALS = (RuntimeError, ValueError, AssertionError)  # errors of a peer that does not support a case


def differentiated(forward: Callable[..., Any], timed: Timed, arrays: Sequence[Any], d_out: Any) -> Run | None:
    """Returns a run of a torch function on these arrays, or of its gradients by autograd; None if it fails.

    With "backward", every run uses the same autograd graph, which is built here and is not timed.
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
    """Returns the run, or None if it fails. The first call, which may compile kernels, happens here, untimed."""
    try:
        run()
    except _REFUSALS as error:
        say_refusal(error)
        return None
    return run


def say_refusal(error: Exception) -> None:
    """Warns in one line that a peer is not measured, with the reason."""
    why = str(error).partition("\n")[0].strip()
    warnings.warn(f"a peer is not measured: {type(error).__name__}: {why}", stacklevel=3)
