"""Training GPT-2 124M by one attention after another, in one run: `flashgen bench train`.

bfloat16 autocast and fused AdamW, on the text that ships with Python. Median time of a step and the most memory; and
the loss over some steps, from the same weights on the same batches, whose curve must be that of standard attention:
loss_curves.py says how they are compared.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.loss_curves import FLOOR, STANDARD, compared
from flashgen.errors import LaunchError
from flashgen.language.masks import causal, document, sliding_window
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import free_flush_buffer

ATTENTIONS = (STANDARD, "FA2", "cuDNN", "Flex", "flashgen")
MODES = ("eager", "compile")
SHAPES = ((32, 1024), (4, 8192))  # batch, length
LONG = (1, 65536)
LONG_WINDOW, LONG_DOCUMENTS = 1024, 16
_LONG_ATTENTIONS = ("Flex", "flashgen")  # the others know no windows
_WARMUP, _STEPS = 6, 20


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

    Where standard attention's losses are wanted, a row more trains it in float32: the floor of comparisons.

    long: at 65536 tokens instead, with a sliding window of 1024 and 16 packed documents, by Flex and flashgen alone.
    """
    try:
        import torch
    except ImportError:
        raise LaunchError("models are trained in torch, which is not installed: pip install torch") from None
    for name, mode, (batch, length), steps in trainings(names, modes, shapes, loss_steps, long):
        attend = _long(name, length) if long else _causal(name)
        yield _row(name, mode, batch, length, attend, steps)
        torch.compiler.reset()


def trainings(
    names: Sequence[str], modes: Sequence[str], shapes: Sequence[tuple[int, int]], loss_steps: int, long: bool
) -> list[tuple[str, str, tuple[int, int], int]]:
    """(attention, mode, shape, steps whose losses are wanted) of each row of `train_rows`."""
    made = []
    for number, shape in enumerate([LONG] if long else shapes):
        for mode in modes:
            steps = loss_steps if number == 0 and mode == modes[0] else 0
            named = [name for name in names if not long or name in _LONG_ATTENTIONS]
            if steps and STANDARD in named:
                named.insert(named.index(STANDARD) + 1, FLOOR)
            made += [(name, mode, shape, steps) for name in named]
    return made


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

    from benchmarks.gpt2 import GPT2, Config, Trainer, batches

    torch.manual_seed(0)
    model = GPT2(Config(length), attend).cuda()
    of_step, steps = batches(batch, length, 0, "cuda"), max(loss_steps, _WARMUP)
    step = Trainer(model, torch.compile(model) if mode == "compile" else model, batch * length, steps)
    losses = [step(*of_step(number), number) for number in range(steps)]
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
    if name in (STANDARD, FLOOR):
        return _standard if name == STANDARD else _standard_in_float32
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


def _standard_in_float32(q: Any, k: Any, v: Any) -> Any:
    """The same of the same numbers, with scores and weights that are never rounded to 16 bits."""
    import torch

    with torch.autocast(q.device.type, enabled=False):
        return _standard(q.float(), k.float(), v.float()).to(v.dtype)


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


def _long(name: str, length: int) -> Callable[..., Any]:
    """A sliding window within packed documents."""
    import torch

    ids = torch.arange(length, device="cuda", dtype=torch.int32) // (length // LONG_DOCUMENTS)
    if name == "Flex":
        return _flex(lambda b, h, q, k: (q >= k) & (q - k <= LONG_WINDOW) & (ids[q] == ids[k]))
    from flashgen.torch import attention

    return partial(attention, AttentionSpec(64, "bfloat16", mask=sliding_window(LONG_WINDOW) & document(ids)))


def train_summary(rows: Sequence[TrainRow]) -> list[str]:
    """flashgen beside the best other of each shape and mode, and losses beside standard attention's."""
    lines = []
    for mode, batch, length in dict.fromkeys((row.mode, row.batch, row.length) for row in rows):
        timed = {row.name: row for row in rows if (row.mode, row.batch, row.length) == (mode, batch, length) and row.ms}
        others = [row for name, row in timed.items() if name != "flashgen"]
        ours = timed.get("flashgen")
        if ours and ours.ms and others:
            best = min(others, key=lambda row: row.ms or 0)
            faster = (best.ms or 0) / ours.ms
            lines.append(f"{batch} x {length}, {mode}: {faster:.3f} times as fast as the best other, {best.name}")
    return lines + compared({row.name: row.losses for row in rows if row.losses})
