"""The comment at the top of an emitted backward kernel."""

from __future__ import annotations

from flashgen.codegen.targets import Target
from flashgen.language.spec import AttentionSpec

# Products of a tile's queries and keys that each kernel makes, in head and in value dimensions.
_PRODUCTS = {"keys": (3, 2), "queries": (2, 1), "prepare": (0, 0), "finish": (0, 0), "capture": (0, 0)}
_DOES = {
    "prepare": "a row's LSE to the base 2, and D = rowsum(dO * O) - dLSE",
    "keys": "dK, dV and shares of dQ; a block walks the queries of a tile of keys",
    "finish": "dQ from the sums of its shares",
    "capture": "the gradient of a captured array from its sums",
    "queries": "dQ; a block walks the keys of a tile of queries",
}


def backward_header(part: str, spec: AttentionSpec, target: Target, plan: object, shared_bytes: int) -> str:
    """The header comment of the kernel of that part."""
    heads, values = _PRODUCTS[part]
    flops = 2 * (heads * spec.head_dim + values * spec.value_dim)
    lines = [
        f"flashgen: attention backward, {part}, {spec.name}",
        _DOES[part],
        "",
        f"mask     {spec.mask.name}",
        f"score    {spec.score.name if spec.score else 'none'}; scale {spec.scale:.9g}",
        f"dropout  {spec.dropout:g}",
        f"dims     head {spec.head_dim}, value {spec.value_dim}; {spec.dtype}, accumulated in float32",
        f"target   {target.name}, family {target.family}",
        f"plan     {plan}, {shared_bytes} bytes of shared memory" if plan else "",
        f"FLOPs    {flops} * batch * heads_q * len_q * len_k * (share of tiles visited)" if flops else "",
        "",
        "Made by",
        f"  flashgen show --pass backward --target {target.name} '{spec.to_json()}'",
    ]
    return "\n".join(f"// {line}".rstrip() for line in lines)
