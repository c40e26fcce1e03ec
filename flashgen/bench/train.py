"""Training GPT-2 124M by one attention after another, in one run: `flashgen bench train`.

bfloat16 autocast and fused AdamW, on the text that ships with Python. Median time of a step and the most memory; and
the loss over some steps, whose curve must be that of standard attention.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from flashgen.bench.timing import free_flush_buffer
from flashgen.errors import LaunchError
from flashgen.language.masks import causal, document, sliding_window
from flashgen.language.spec import AttentionSpec

ATTENTIONS = ("standard", "FA2", "cuDNN", "Flex", "flashgen")
MODES = ("eager", "compile")
SHAPES = ((32, 1024), (4, 8192))  # batch, length
LONG = (1, 65536)
LONG_WINDOW, LONG_DOCUMENTS = 1024, 16
_WARMUP, _STEPS = 6, 20
# As GPT-2 is trained everywhere: without a rate that rises and a bound of the gradients its losses leap, and after
# a leap two runs of one attention are as far apart as those of two.
_RISING_STEPS, _MOST_GRADIENT = 100, 1.0


@dataclass(frozen=True)
class TrainRow:
    """A contender at a shape: median milliseconds a step, tokens a second, the most memory, and losses where asked."""

    name: str
    mode: str
    batch: int
    length: int
    ms: float | None
    tokens_per_second: float | None
    peak_bytes: int | None
    losses: tuple[float, ...] = ()
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def train_rows(
    names: Sequence[str] = ATTENTIONS,
    modes: Sequence[str] = MODES,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    loss_steps: int = 0,
    long: bool = False,
) -> Iterator[TrainRow]:
    """A row for each shape, mode and attention; losses of so many steps at the first shape, under the first mode.

    long: at 65536 tokens instead, with a sliding window of 1024 and 16 packed documents, by Flex and flashgen alone.
    """
    try:
        import torch
    except ImportError:
        raise LaunchError("models are trained in torch, which is not installed: pip install torch") from None
    chosen = [LONG] if long else list(shapes)
    for number, (batch, length) in enumerate(chosen):
        for mode in modes:
            for name in names:
                attend = _long(name, length) if long else _causal(name)
                if attend is None:
                    continue
                steps = loss_steps if number == 0 and mode == modes[0] else 0
                yield _row(name, mode, batch, length, attend, steps)
                torch.compiler.reset()


def _row(name: str, mode: str, batch: int, length: int, attend: Callable[..., Any], loss_steps: int) -> TrainRow:
    import torch

    gc.collect()
    free_flush_buffer()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row = partial(TrainRow, name, mode, batch, length)
    try:
        times, peak, losses = _trained(attend, mode, batch, length, loss_steps)
    except (RuntimeError, ValueError) as error:  # a peer that cannot do a shape, or runs out of memory
        return row(None, None, None, (), f"{type(error).__name__}: {str(error).splitlines()[0]}"[:200])
    ms = statistics.median(times)
    return row(ms, 1000 * batch * length / ms, peak, losses)


def _trained(
    attend: Callable[..., Any], mode: str, batch: int, length: int, loss_steps: int
) -> tuple[list[float], int, tuple[float, ...]]:
    """Milliseconds of steps, the most memory in bytes, and losses."""
    import cupy
    import torch

    from flashgen.bench.gpt2 import GPT2, Config, batches, optimizer_of

    torch.manual_seed(0)
    model = GPT2(Config(length), attend).cuda()
    optimizer, of_step = optimizer_of(model), batches(batch, length, 0, "cuda")
    call = torch.compile(model) if mode == "compile" else model

    def step(tokens: Any, targets: Any, most: float | None = None) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            loss = call(tokens, targets)
        loss.backward()
        if most is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    losses = []
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / _RISING_STEPS, total_iters=_RISING_STEPS)
    for number in range(max(loss_steps, _WARMUP)):
        losses.append(step(*of_step(number), most=_MOST_GRADIENT))
        rising.step()
    given, times = of_step(0), []
    torch.cuda.synchronize()
    for _ in range(_STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step(*given)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    peak = torch.cuda.max_memory_allocated() + cupy.get_default_memory_pool().total_bytes()
    return times, int(peak), tuple(float(loss) for loss in losses[:loss_steps])


def _causal(name: str) -> Callable[..., Any]:
    """Causal attention by a contender's name."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if name == "flashgen":
        from flashgen.torch import attention

        return partial(attention, AttentionSpec(64, "bfloat16", mask=causal("top_left")))
    if name == "Flex":
        return _flex(lambda b, h, q, k: q >= k)
    if name == "standard":
        return _standard
    backend = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}[name]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def _standard(q: Any, k: Any, v: Any) -> Any:
    """Attention as one writes it without a library: whole matrices of scores and weights."""
    import torch

    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).to(v.dtype) @ v


def _flex(mask: Callable[..., Any]) -> Callable[..., Any]:
    """FlexAttention, compiled, with a block mask that is made for each length once."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, made = torch.compile(flex_attention), {}

    def attend(q: Any, k: Any, v: Any) -> Any:
        length = q.shape[2]
        if length not in made:
            made[length] = create_block_mask(mask, None, None, length, length, "cuda", _compile=True)
        return compiled(q, k, v, block_mask=made[length])

    return attend


def _long(name: str, length: int) -> Callable[..., Any] | None:
    """A sliding window within packed documents; None for those that know neither."""
    import torch

    ids = torch.arange(length, device="cuda", dtype=torch.int32) // (length // LONG_DOCUMENTS)
    if name == "Flex":
        return _flex(lambda b, h, q, k: (q >= k) & (q - k <= LONG_WINDOW) & (ids[q] == ids[k]))
    if name == "flashgen":
        from flashgen.torch import attention

        return partial(attention, AttentionSpec(64, "bfloat16", mask=sliding_window(LONG_WINDOW) & document(ids)))
    return None


def train_summary(rows: Sequence[TrainRow]) -> list[str]:
    """flashgen beside the best other of each shape and mode, and how far its losses are from standard attention's."""
    lines = []
    for mode, batch, length in dict.fromkeys((row.mode, row.batch, row.length) for row in rows):
        timed = {row.name: row for row in rows if (row.mode, row.batch, row.length) == (mode, batch, length) and row.ms}
        others = [row for name, row in timed.items() if name != "flashgen"]
        ours = timed.get("flashgen")
        if ours and ours.ms and others:
            best = min(others, key=lambda row: row.ms or 0)
            faster = (best.ms or 0) / ours.ms
            lines.append(f"{batch} x {length}, {mode}: {faster:.3f} times as fast as the best other, {best.name}")
    curves = {row.name: row.losses for row in rows if row.losses}
    if {"standard", "flashgen"} <= curves.keys():
        apart = max(abs(a - b) / b for a, b in zip(curves["flashgen"], curves["standard"], strict=True))
        lines.append(f"the losses of {len(curves['standard'])} steps are at most {100 * apart:.2f}% apart")
    return lines
