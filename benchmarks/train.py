"""Trains GPT-2 124M with several attention implementations in one run: `python -m benchmarks train`.

Training uses bfloat16 autocast and fused AdamW, on text that ships with Python. It measures the median time of a step
and the peak memory. Optionally it records the losses of the first steps, from the same weights and on the same batches,
which loss_curves.py compares with those of standard attention.
"""

from __future__ import annotations

import gc
import importlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import Any

from benchmarks.loss_curves import FLOOR, STANDARD, compared
from flashgen.errors import LaunchError
from flashgen.language.masks import causal, document, sliding_window
from flashgen.language.spec import AttentionSpec
from flashgen.runtime.timing import free_flush_buffer

ATTENTIONS = (STANDARD, "FA2", "cuDNN", "Flex", "flashgen")
IN_SDPA = " in SDPA"  # ends the names of flash implementations that are activated in torch's registry
MODES = ("eager", "compile")
SHAPES = ((32, 1024), (4, 8192))  # (batch, length)
LONG = (1, 65536)
LONG_WINDOW, LONG_DOCUMENTS = 1024, 16
_LONG_ATTENTIONS = ("Flex", "flashgen")  # the others do not support windows
_WARMUP, _STEPS = 6, 20


@dataclass(frozen=True)
class TrainRow:
    """The training of a model with one attention at one shape.

    Attributes:
        name, mode: the attention, and "eager" or "compile".
        ms: median milliseconds per step; None if the training failed.
        peak_bytes: peak device memory.
        losses: the losses of the first steps; empty if they were not requested.
        problem: the message of the error that ended the training.
    """

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
    """Trains a model for each shape, mode and attention, and yields their rows.

    Args:
        names, modes, shapes: what to train; names from ATTENTIONS or `registered_names`, modes from MODES, shapes as
            (batch, length).
        loss_steps: the number of steps whose losses are recorded, at the first shape and in the first mode. Standard
            attention is then also trained with scores in float32, as the floor of comparisons.
        long: train at 65536 tokens instead of `shapes`, with a sliding window of 1024 in 16 packed documents, with
            Flex and flashgen alone.
    """
    try:
        import torch
    except ImportError:
        raise LaunchError("models are trained in torch, which is not installed: pip install torch") from None
    for name, mode, (batch, length), steps in trainings(names, modes, shapes, loss_steps, long):
        try:
            with in_sdpa(name.removesuffix(IN_SDPA)) if name.endswith(IN_SDPA) else nullcontext():
                attend = _long(name, length) if long else _causal(name)
                yield _row(name, mode, batch, length, attend, steps)
        except (ImportError, RuntimeError, ValueError) as error:  # the implementation cannot be activated
            yield TrainRow(name, mode, batch, length, None, None, None, (), _reason(error))
        torch.compiler.reset()


def registered_names() -> list[str]:
    """Returns the names of the flash implementations in torch's registry, with flashgen's."""
    from torch.nn.attention import list_flash_attention_impls

    from flashgen.torch import register_sdpa

    register_sdpa()
    return [name + IN_SDPA for name in sorted(list_flash_attention_impls())]


@contextmanager
def in_sdpa(implementation: str) -> Iterator[None]:
    """Activates a flash implementation of torch's registry, such as "flashgen" or "FA4"."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    from flashgen.torch import register_sdpa

    register_sdpa()
    with _results_that_torch_unpacks() if implementation == "FA4" else nullcontext():
        activate_flash_attention_impl(implementation)
        try:
            yield
        finally:
            restore_flash_attention_impl()


@contextmanager
def _results_that_torch_unpacks() -> Iterator[None]:
    """Drops the results of FlashAttention-4 that torch 2.11 does not expect: its newer versions return more."""
    interface: Any = importlib.import_module("flash_attn.cute.interface")
    names = {"_flash_attn_fwd": 2, "_flash_attn_bwd": 3}
    own = {name: getattr(interface, name) for name in names}

    def first_results(function: Callable[..., Any], count: int) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            return function(*arguments, **options)[:count]

        return call

    for name, count in names.items():
        setattr(interface, name, first_results(own[name], count))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(interface, name, function)


def trainings(
    names: Sequence[str], modes: Sequence[str], shapes: Sequence[tuple[int, int]], loss_steps: int, long: bool
) -> list[tuple[str, str, tuple[int, int], int]]:
    """Returns (attention, mode, shape, number of recorded losses) for each row of `train_rows`."""
    planned = []
    for number, shape in enumerate([LONG] if long else shapes):
        for mode in modes:
            steps = loss_steps if number == 0 and mode == modes[0] else 0
            named = [name for name in names if not long or name in _LONG_ATTENTIONS]
            if steps and STANDARD in named:
                named.insert(named.index(STANDARD) + 1, FLOOR)
            planned += [(name, mode, shape, steps) for name in named]
    return planned


def _row(name: str, mode: str, batch: int, length: int, attend: Callable[..., Any], loss_steps: int) -> TrainRow:
    import torch

    gc.collect()
    free_flush_buffer()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row = partial(TrainRow, name, mode, batch, length)
    try:
        times, peak, losses = _trained(attend, mode, batch, length, loss_steps)
    except (RuntimeError, ValueError) as error:  # the peer does not support the shape, or memory is exhausted
        return row(None, None, None, (), _reason(error))
    ms = statistics.median(times)
    return row(ms, 1000 * batch * length / ms, peak, losses)


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, after the name of its class."""
    first, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {first}"[:200]


def _trained(
    attend: Callable[..., Any], mode: str, batch: int, length: int, loss_steps: int
) -> tuple[list[float], int, tuple[float, ...]]:
    """Returns the milliseconds of steps, the peak memory in bytes, and the losses of the first steps."""
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
    """Returns the causal attention of that name."""
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
    backend = SDPBackend.CUDNN_ATTENTION if name == "cuDNN" else SDPBackend.FLASH_ATTENTION

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def _standard(q: Any, k: Any, v: Any) -> Any:
    """Computes causal attention with materialised matrices of scores and weights."""
    import torch

    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).to(v.dtype) @ v


def _standard_in_float32(q: Any, k: Any, v: Any) -> Any:
    """Computes standard attention of the same inputs with scores and weights in float32."""
    import torch

    with torch.autocast(q.device.type, enabled=False):
        return _standard(q.float(), k.float(), v.float()).to(v.dtype)


def _flex(mask: Callable[..., Any]) -> Callable[..., Any]:
    """Returns compiled FlexAttention, whose block mask is created once per length."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled, block_masks = torch.compile(flex_attention), {}

    def attend(q: Any, k: Any, v: Any) -> Any:
        length = q.shape[2]
        if length not in block_masks:
            block_masks[length] = create_block_mask(mask, None, None, length, length, "cuda", _compile=True)
        return compiled(q, k, v, block_mask=block_masks[length])

    return attend


def _long(name: str, length: int) -> Callable[..., Any]:
    """Returns the attention of that name with a sliding window within packed documents."""
    import torch

    ids = torch.arange(length, device="cuda", dtype=torch.int32) // (length // LONG_DOCUMENTS)
    if name == "Flex":
        return _flex(lambda b, h, q, k: (q >= k) & (q - k <= LONG_WINDOW) & (ids[q] == ids[k]))
    from flashgen.torch import attention

    return partial(attention, AttentionSpec(64, "bfloat16", mask=sliding_window(LONG_WINDOW) & document(ids)))


def train_summary(rows: Sequence[TrainRow]) -> list[str]:
    """Returns lines that compare flashgen with the fastest other attention, and losses with standard attention's."""
    lines = []
    for mode, batch, length in dict.fromkeys((row.mode, row.batch, row.length) for row in rows):
        timed = {row.name: row for row in rows if (row.mode, row.batch, row.length) == (mode, batch, length) and row.ms}
        others = [row for name, row in timed.items() if not name.startswith("flashgen")]
        ours = timed.get("flashgen")
        if ours and ours.ms and others:
            best = min(others, key=lambda row: row.ms or 0)
            faster = (best.ms or 0) / ours.ms
            lines.append(f"{batch} x {length}, {mode}: {faster:.3f} times as fast as the best other, {best.name}")
    return lines + compared({row.name: row.losses for row in rows if row.losses})
