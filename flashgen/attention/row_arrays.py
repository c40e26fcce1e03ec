"""The arrays of rows of a call: q, k and v, or q and k where V is a part of K."""

from __future__ import annotations

from typing import Any

from flashgen.errors import ArgumentError
from flashgen.language.spec import AttentionSpec


def arrays_of_rows(spec: AttentionSpec, q: Any, k: Any, v: Any) -> dict[str, Any]:
    """Returns the arrays by name. Raises ArgumentError if v is missing, or is given although V is a part of K."""
    if spec.shared_kv:
        if v is not None:
            raise ArgumentError(
                f"v: with shared_kv=True, V is the first {spec.value_dim} columns of k: leave v out, and give q and kv"
            )
        return {"q": q, "k": k}
    if v is None:
        raise ArgumentError("v is missing: give q, k and v, or declare shared_kv=True if V is a part of K")
    return {"q": q, "k": k, "v": v}


def without_values(spec: AttentionSpec, out: Any, lse: Any) -> tuple[None, Any, Any]:
    """Returns (v, out, lse) of a backward call without v: `backward(d_out, q, kv, out, lse)`. Raises ArgumentError."""
    if not spec.shared_kv:
        raise ArgumentError("lse is missing: give d_out, q, k, v, out and lse")
    if lse is None:
        raise ArgumentError("lse is missing: give d_out, q, kv, out and lse")
    return None, out, lse
