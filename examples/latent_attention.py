"""Multi-head latent attention as in DeepSeek-V3, with random weights: trained with separate heads, decoded absorbed.

    python examples/latent_attention.py             # DeepSeek's head dims; needs a GPU and torch
    python examples/latent_attention.py --emulate   # small ones on the CPU with flashgen's emulator

All heads share one latent vector per token. Unabsorbed, it is expanded to keys and values of each head (192 and 128
columns). Absorbed, the expansions are multiplied into the queries and the output, so that the latent vector itself is
the key of all heads, and its first 512 of 576 columns are the value: `shared_kv=True`. Both give the same result.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import flashgen as fg

try:
    import torch
    from torch import Tensor

    from flashgen.torch import append_kv, attention, emulated
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(f"error: this example needs torch ({error}): pip install 'flashgen[torch]'") from None


class Dims(NamedTuple):
    """The sizes of a layer. A head has `plain` columns without and `rope` columns with rotary positions."""

    model: int
    heads: int
    latent: int
    plain: int
    rope: int
    value: int


DEEPSEEK = Dims(model=2048, heads=16, latent=512, plain=128, rope=64, value=128)
SMALL = Dims(model=64, heads=4, latent=64, plain=32, rope=16, value=32)
PAGE_SIZE = 64


class LatentAttention(torch.nn.Module):
    """A layer of latent attention. `forward` computes it unabsorbed, `absorbed` and `step` absorbed."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        d = self.dims = dims
        self.to_q = torch.nn.Linear(d.model, d.heads * (d.plain + d.rope), bias=False)
        self.to_latent = torch.nn.Linear(d.model, d.latent + d.rope, bias=False)
        self.norm = torch.nn.RMSNorm(d.latent)
        self.up_keys = torch.nn.Parameter(torch.randn(d.heads, d.latent, d.plain) * d.latent**-0.5)
        self.up_values = torch.nn.Parameter(torch.randn(d.heads, d.latent, d.value) * d.latent**-0.5)
        self.to_out = torch.nn.Linear(d.heads * d.value, d.model, bias=False)
        common: Any = {"dtype": "bfloat16", "mask": fg.causal(), "scale": (d.plain + d.rope) ** -0.5}
        self.of_heads = fg.AttentionSpec(d.plain + d.rope, value_dim=d.value, **common)
        common |= {"head_dim": d.latent + d.rope, "value_dim": d.latent, "shared_kv": True}
        self.of_latent = fg.AttentionSpec(**common)
        self.of_pages = fg.AttentionSpec(**common, page_size=PAGE_SIZE)

    def rows(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns both parts of the queries, (batch, heads, tokens, columns), and kv, (batch, 1, tokens, columns)."""
        d = self.dims
        q = self.to_q(x).unflatten(-1, (d.heads, -1)).transpose(1, 2)
        latent, key = self.to_latent(x)[:, None].split([d.latent, d.rope], -1)
        plain, turned = q.split([d.plain, d.rope], -1)
        kv = torch.cat([self.norm(latent.float()).to(key.dtype), rotated(key, positions)], -1)
        return plain, rotated(turned, positions), kv

    def forward(self, x: Tensor) -> Tensor:
        plain, turned, kv = self.rows(x, torch.arange(x.shape[1], device=x.device)[None, None])
        latent, key = kv.split([self.dims.latent, self.dims.rope], -1)
        k = torch.cat([latent @ self.up_keys, key.expand(-1, self.dims.heads, -1, -1)], -1)
        out = attention(self.of_heads, torch.cat([plain, turned], -1), k, latent @ self.up_values)
        return self.to_out(out.transpose(1, 2).flatten(2))

    def absorbed(self, x: Tensor) -> Tensor:
        plain, turned, kv = self.rows(x, torch.arange(x.shape[1], device=x.device)[None, None])
        out = attention(self.of_latent, self.queries(plain, turned), kv)
        return self.to_out((out @ self.up_values).transpose(1, 2).flatten(2))

    def queries(self, plain: Tensor, turned: Tensor) -> Tensor:
        """Returns queries of latent keys."""
        return torch.cat([plain @ self.up_keys.mT, turned], -1)

    def step(self, x: Tensor, pages: Tensor, table: Tensor, used: Tensor) -> Tensor:
        """Appends the next tokens of each sequence to its pages, and lets them attend to the whole sequence."""
        positions = used[:, None, None] + torch.arange(x.shape[1], device=x.device)
        plain, turned, kv = self.rows(x, positions)
        append_kv(kv.transpose(1, 2), None, pages, None, page_table=table, seqused_k=used)
        lengths = used + x.shape[1]
        out = attention(self.of_pages, self.queries(plain, turned), pages, page_table=table, seqused_k=lengths)
        return self.to_out((out @ self.up_values).transpose(1, 2).flatten(2))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Applies rotary positions to the last dimension."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * 10000.0 ** -(torch.arange(half, device=x.device) / half)
    a, b = x.float().split(half, -1)
    turned = torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)
    return turned.to(x.dtype)


def training_errors(layer: LatentAttention, x: Tensor) -> dict[str, float]:
    """Takes a training step unabsorbed. Returns how much the absorbed layer's output and gradients differ before it."""
    d_out = torch.randn_like(x)
    named = dict(layer.named_parameters())
    results = []
    for call in (layer, layer.absorbed):
        out = call(x)
        results.append((out, *torch.autograd.grad(out, list(named.values()), d_out.to(out.dtype))))
    with torch.no_grad():
        for parameter, gradient in zip(named.values(), results[0][1:], strict=True):
            parameter.sub_(1e-3 * gradient)
    pairs = zip(("output", *named), *results, strict=True)
    return {name: relative_error(one, other) for name, one, other in pairs}


@torch.no_grad()
def decoding_error(layer: LatentAttention, x: Tensor, prompt: int) -> float:
    """Returns how much decoding, a prompt and then one token at a time, differs from a forward over all tokens."""
    batch, tokens = x.shape[:2]
    used = torch.zeros(batch, dtype=torch.int32, device=x.device)
    count = -(-tokens // PAGE_SIZE)
    table = torch.randperm(batch * count, device=x.device).to(torch.int32).view(batch, count)
    columns = layer.dims.latent + layer.dims.rope
    pages = torch.zeros(batch * count, PAGE_SIZE, 1, columns, dtype=torch.bfloat16, device=x.device)
    outs = []
    for part in x.split([prompt, *[1] * (tokens - prompt)], 1):
        outs.append(layer.step(part, pages, table, used))
        used += part.shape[1]
    return relative_error(torch.cat(outs, 1), layer(x))


def relative_error(one: Tensor, other: Tensor) -> float:
    return ((one.float() - other.float()).abs().max() / other.float().abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", action="store_true", help="run on the CPU with flashgen's emulator")
    emulate = parser.parse_args().emulate
    if not emulate and not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU that torch can use; try --emulate")
    torch.manual_seed(0)
    device, dims, tokens = ("cpu", SMALL, 70) if emulate else ("cuda", DEEPSEEK, 1024)
    layer = LatentAttention(dims).to(device)
    x = torch.randn(2, tokens, dims.model, device=device)
    with emulated(emulate):
        with torch.autocast(device, torch.bfloat16):
            errors = training_errors(layer, x)
        with torch.autocast(device, torch.bfloat16):  # the first one keeps bfloat16 copies of weights before the step
            errors["decoding"] = decoding_error(layer, x, tokens - 3)
    separate = dims.heads * (dims.plain + dims.rope + dims.value)
    print(
        f"a token of a cache has {dims.latent + dims.rope} numbers instead of {separate}; absorbed and unabsorbed "
        "differ, relative to the largest element, by: " + ", ".join(f"{name} {x:.1%}" for name, x in errors.items())
    )
    if not max(errors.values()) <= 0.04:
        raise SystemExit("error: the difference exceeds the rounding of bfloat16")


if __name__ == "__main__":
    try:
        main()
    except fg.errors.FlashgenError as error:
        raise SystemExit(f"error: {error}") from None
