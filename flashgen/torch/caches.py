"""`append_kv` and `merge_states` as operators of torch, for KV caches of servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from flashgen.attention.appending import append_kv as append
from flashgen.attention.appending import appended_arrays, check_pages_given
from flashgen.attention.merging import Merged
from flashgen.attention.merging import merge_states as merge
from flashgen.errors import ArgumentError, UnsupportedError
from flashgen.torch.operators import LIBRARY, as_operator
from flashgen.torch.table import is_emulated
from flashgen.torch.tensors import Tensor, check_tensors, refuse_tangents, to_array, to_tensor


def append_kv(
    k_new: Tensor,
    v_new: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    *,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    emulate: bool | None = None,
) -> None:
    """Writes the next keys and values of each sequence into its pages, in place; see `flashgen.append_kv`.

    Under torch.compile it is one operator that mutates k and v.

    Args:
        k_new, v_new: (batch, new keys, heads_kv, dim), float16 or bfloat16.
        k, v: the pages, (pages, page_size, heads_kv, dim), which are written to. They may be slices of one tensor.
            Where V is a part of K, v_new and v are None, and only k is written.
        page_table: int32 (batch, pages of a sequence); required.
        seqused_k: int32 (batch,), the number of keys of each sequence before the call; required.
        emulate: run CPU tensors on the emulator. None takes the setting of `flashgen.torch.emulated()`.

    Raises:
        ArgumentError: arguments are missing or do not fit.
        UnsupportedError: a tensor requires a gradient, which pages do not have.
    """
    given = appended_arrays(k_new, v_new, k, v)
    pages = {"page_table": page_table, "seqused_k": seqused_k}
    check_pages_given(**pages)
    check_tensors(**given, **pages)
    _refuse_gradients("append_kv", given)
    torch.ops.flashgen.append_kv(k_new, v_new, k, v, page_table, seqused_k, is_emulated(emulate))


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, layout: str = "bhsd", emulate: bool | None = None
) -> Merged:
    """Merges attention over several sets of keys into attention over their union; see `flashgen.merge_states`.

    Args:
        outs: 2 to 16 outputs of calls with return_lse=True, of equal shapes and dtypes, C-contiguous.
        lses: the LSE of each of these calls.
        layout: the layout of the outputs, "bhsd" or "bshd".
        emulate: run CPU tensors on the emulator. None takes the setting of `flashgen.torch.emulated()`.

    Returns:
        The named pair (out, lse).

    Raises:
        ArgumentError: the outputs and LSEs do not fit together.
        UnsupportedError: a tensor requires a gradient: merging is for inference only.
    """
    named = {f"outs[{i}]": out for i, out in enumerate(outs)} | {f"lses[{i}]": lse for i, lse in enumerate(lses)}
    check_tensors(**named)
    _refuse_gradients("merge_states", named)
    return Merged(*torch.ops.flashgen.merge_states(list(outs), list(lses), layout, is_emulated(emulate)))


def _refuse_gradients(what: str, given: dict[str, Tensor]) -> None:
    refuse_tangents(*given.values())
    if not torch.is_grad_enabled():
        return
    for name, tensor in given.items():
        if tensor.requires_grad:
            raise UnsupportedError(
                f"{name} requires a gradient, and {what} has none: give {name}.detach(), or call it under "
                "torch.no_grad()"
            )


def _operator_append_kv(
    k_new: torch.Tensor,
    v_new: Optional[torch.Tensor],  # noqa: UP045
    k: torch.Tensor,
    v: Optional[torch.Tensor],  # noqa: UP045
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    emulate: bool,
) -> None:
    """Writes into k and v, and increments their versions, which autograd checks."""
    if emulate:
        _check_on_the_cpu(k)
        new, pages = ([None if each is None else to_array(each) for each in pair] for pair in ((k_new, v_new), (k, v)))
        table, lengths = to_array(page_table), to_array(seqused_k)
        append(*new, *pages, page_table=table, seqused_k=lengths, emulate=True)
        for tensor, array in zip((k, v), pages, strict=True):
            if tensor is not None and array is not None:
                tensor.copy_(to_tensor(array))
        return
    append(k_new, v_new, k, v, page_table=page_table, seqused_k=seqused_k)
    for tensor in (k, v):
        if tensor is not None and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


def _operator_merge_states(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], layout: str, emulate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the merged output and LSE."""
    if emulate:
        _check_on_the_cpu(outs[0])
        merged = merge([to_array(out) for out in outs], [to_array(lse) for lse in lses], layout=layout, emulate=True)
        return to_tensor(merged.out), to_tensor(merged.lse)
    out, lse = merge(outs, lses, layout=layout)
    return out, lse


def _check_on_the_cpu(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ArgumentError(f"a tensor is on {tensor.device}; the emulator takes CPU tensors: leave emulate=True out")


as_operator(_operator_append_kv, "append_kv", written=("k", "v"))
as_operator(_operator_merge_states, "merge_states")


@torch.library.register_fake("flashgen::append_kv", lib=LIBRARY)
def _(*_arguments: Any) -> None:
    return None


@torch.library.register_fake("flashgen::merge_states", lib=LIBRARY)
def _(outs: Sequence[Tensor], lses: Sequence[Tensor], _layout: str, _emulate: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(outs[0]), torch.empty_like(lses[0])
