"""flashgen in a torch model: attention with gradients, the learned biases of its score function included.

    python examples/torch_autograd.py

trains the slopes of a linear bias for a few steps. Needs a GPU, CuPy and torch.
"""

from __future__ import annotations

from typing import Any

import flashgen as fg

try:
    import torch
    from torch.autograd.function import once_differentiable
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    raise SystemExit(f"error: this example needs torch, which is not installed ({error}): pip install torch") from None


class _Attention(torch.autograd.Function):
    """What torch calls forward and backward: the compiled attention's own two passes."""

    @staticmethod
    def forward(
        ctx: Any, attention: Any, numbers: dict[str, Any], names: tuple[str, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, *captured = tensors
        out, lse = attention(q, k, v, return_lse=True, **numbers, **dict(zip(names, captured, strict=True)))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.attention, ctx.numbers, ctx.names = attention, numbers, names
        ctx.set_materialize_grads(False)  # a result that nothing depends on has no gradient: None
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None) -> tuple[Any, ...]:
        q, k, v, *captured, out, lse = ctx.saved_tensors
        d_out = torch.zeros_like(out) if d_out is None else d_out.contiguous()  # that of a sum is one number, broadcast
        d_lse = None if d_lse is None else d_lse.contiguous()
        given = dict(zip(ctx.names, captured, strict=True))
        gradients = ctx.attention.backward(d_out, q, k, v, out, lse, d_lse=d_lse, **ctx.numbers, **given)
        return None, None, None, *gradients[:3], *(gradients.captures.get(name) for name in ctx.names)


def attend(
    attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of `attention = flashgen.compile(...)`, both differentiable.

    given: the captures by name, and seed and offset of the dropout. Captures declared with grad=True get gradients.
    """
    captured = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    numbers = {name: value for name, value in given.items() if name not in captured}
    out, lse = _Attention.apply(attention, numbers, tuple(captured), q, k, v, *captured.values())
    return out, lse


def main() -> None:
    """Slopes that are learned from the output of others."""
    if not torch.cuda.is_available():
        raise SystemExit("error: this example needs a GPU that torch can use: torch.cuda.is_available() is False")
    slopes = fg.Tensor("slopes", dtype="float32", ndim=1, grad=True)
    spec = fg.AttentionSpec(64, mask=fg.causal(), score=lambda s, b, h, q, k: s + slopes[h] * (k - q))
    attention = fg.compile(spec)
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    goal, _ = attend(attention, q, k, v, slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625], device="cuda"))
    learned = torch.full((4,), 0.01, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([learned], lr=0.02)
    for step in range(101):
        out, _ = attend(attention, q, k, v, slopes=learned)
        loss = (out - goal).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.2e}  slopes {[round(x, 3) for x in learned.tolist()]}")


if __name__ == "__main__":
    try:
        main()
    except fg.errors.FlashgenError as error:  # such as: there is no GPU
        raise SystemExit(f"error: {error}") from None
