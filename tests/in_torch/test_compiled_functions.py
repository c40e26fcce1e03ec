"""Functions and block masks under torch.compile: everything they read is guarded, or an input of one graph."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flashgen as fg
import flashgen.torch as ours
from flashgen.errors import SpecError
from flashgen.torch import table

HEADS, LENGTH, DIM = 2, 24, 32
INFINITY = float("inf")


@pytest.fixture(autouse=True)
def compiled_afresh() -> Iterator[None]:
    torch.compiler.reset()
    with torch.no_grad():
        yield
    torch.compiler.reset()


@pytest.fixture
def qkv_of_halves() -> tuple[torch.Tensor, ...]:
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, DIM).half()
    return q, k, v


def compiled(function: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_number_arguments(dynamic: bool | None, qkv_of_halves: Any) -> None:
    """In comparisons and in arithmetic, on both sides, and equal to an index."""

    def attend(q: Any, k: Any, v: Any, current: int) -> Any:
        end = current + 1

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            kept = (j <= end) & (abs(i - j) != current) | (end == j) | ~(i // 2 < end)
            return torch.where(kept, s + current * h, -INFINITY)

        return ours.flex_attention(q, k, v, score_mod=score) * 1

    run = compiled(attend, dynamic=dynamic)
    for current in (3, 9, 5, 2):
        assert torch.equal(run(*qkv_of_halves, current), attend(*qkv_of_halves, current))


WINDOW = 3


class Config:
    def __init__(self) -> None:
        self.window = 3

    @property
    def reach(self) -> int:
        return self.window


def test_globals_properties_and_defaults(qkv_of_halves: Any) -> None:
    global WINDOW
    config = Config()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any, of: Any = config) -> Any:
        return torch.where(i - j <= WINDOW, torch.where(j - i <= of.reach, s, -INFINITY), -INFINITY)

    attend = lambda q, k, v: ours.flex_attention(q, k, v, score_mod=score)
    run = compiled(attend)
    for window, config.window in ((3, 3), (8, 3), (8, 5), (2, 9)):
        WINDOW = window
        assert torch.equal(run(*qkv_of_halves), attend(*qkv_of_halves))
    WINDOW = 3


class Layer(torch.nn.Module):
    """A layer with its own table, read by a function that its forward creates."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(HEADS))

    def forward(self, q: Any, k: Any, v: Any, w: Any) -> Any:
        bias = w * 2

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + self.table.exp()[h] * j / 10 + bias[h] * i

        return ours.flex_attention(q, k, v, score_mod=score)


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, q: Any, k: Any, v: Any, w: Any) -> Any:
        return torch.stack([layer(q, k, v, w) for layer in self.layers])


def test_each_layer_has_its_own_table_and_gradient(qkv_of_halves: Any) -> None:
    model, d_out = Layers(), torch.randn(3, 1, HEADS, LENGTH, DIM).half()
    run = compiled(model)
    for _ in range(2):
        w = torch.randn(HEADS)
        found = []
        for call in (run, model):
            model.zero_grad()
            with torch.enable_grad():
                out = call(*qkv_of_halves, w)
                out.backward(d_out)
            found.append([out.detach(), *(layer.table.grad for layer in model.layers)])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_tensors_modified_in_place(dtype: torch.dtype, qkv_of_halves: Any) -> None:
    table, number = torch.tensor([1, 2], dtype=dtype), torch.tensor(2, dtype=dtype)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h] * (i - j) / 10 + number * j / 10

    attend = lambda q, k, v: ours.flex_attention(q, k, v, score_mod=score)
    run = compiled(attend)
    for _ in range(3):
        assert torch.equal(run(*qkv_of_halves), attend(*qkv_of_halves))
        table.add_(1)
        number.sub_(3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_arrays_of_a_spec_modified_in_place(dtype: torch.dtype, qkv_of_halves: Any) -> None:
    table, number = torch.tensor([1, 2], dtype=dtype), torch.tensor(2, dtype=dtype)
    spec = fg.AttentionSpec(DIM, score=lambda s, b, h, q, k: s + table[h] * (q - k) / 10 + number * k / 10)
    attend = lambda q, k, v: ours.attention(spec, q, k, v)
    run = compiled(attend)
    for _ in range(3):
        assert torch.equal(run(*qkv_of_halves), attend(*qkv_of_halves))
        table.add_(1)
        number.sub_(3)


VIEWS = {
    "rows": lambda big: big[1:3],
    "columns": lambda big: big[:2, :LENGTH],
    "expanded": lambda big: big[:1, :LENGTH].expand(2, LENGTH),
    "transposed": lambda big: big.view(-1, 2)[:LENGTH].t(),
    "a row of a parameter": lambda big: torch.nn.Parameter(big[None].repeat(3, 1, 1))[1],
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str, dynamic: bool | None, qkv_of_halves: Any) -> None:
    table = VIEWS[name](torch.randn(4, 2 * LENGTH))
    score = lambda s, b, h, i, j: s + table[b, j]
    run = compiled(ours.flex_attention, dynamic=dynamic)
    assert torch.equal(run(*qkv_of_halves, score), ours.flex_attention(*qkv_of_halves, score))


def test_twelve_block_masks_of_one_kind_share_a_graph(qkv_of_halves: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    run = compiled(lambda q, k, v, mask: ours.flex_attention(q, k, v, block_mask=mask), counter)
    for seed in range(12):
        ids = torch.randint(0, 3, (LENGTH,), generator=torch.Generator().manual_seed(seed)).sort().values
        mask = ours.create_block_mask(lambda b, h, i, j, ids=ids: ids[i] == ids[j], None, None, LENGTH, LENGTH)
        assert torch.equal(run(*qkv_of_halves, mask), ours.flex_attention(*qkv_of_halves, block_mask=mask))
    assert counter.frame_count == 1


def test_block_masks_created_inside(qkv_of_halves: Any) -> None:
    lists = torch.tensor([[[1]]], dtype=torch.int32), torch.tensor([[[[0, 1]]]], dtype=torch.int32)

    def attend(q: Any, k: Any, v: Any, end: int, ids: Any) -> Any:
        mask = ours.create_block_mask(lambda b, h, i, j: (j <= end) | (ids[i] == ids[j]), None, None, LENGTH, LENGTH)
        listed = ours.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=(32, 16), seq_lengths=(LENGTH, LENGTH))
        return ours.flex_attention(q, k, v, block_mask=mask) + ours.flex_attention(q, k, v, block_mask=listed)

    run = compiled(attend)
    for end in (2, 7, 4):
        ids = torch.randint(0, 3, (LENGTH,))
        assert torch.equal(run(*qkv_of_halves, end, ids), attend(*qkv_of_halves, end, ids))


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="Dynamo of torch 2.11 asks objects that it calls whether they are true"
)
def test_named_masks_inside_a_function(qkv_of_halves: Any) -> None:
    window, cap = fg.sliding_window(5) & fg.causal(), fg.softcap(2.0)

    def attend(q: Any, k: Any, v: Any, far: int) -> Any:
        mask = ours.create_block_mask(lambda b, h, i, j: window(b, h, i, j) | (j < far), None, None, LENGTH, LENGTH)
        return ours.flex_attention(q, k, v, lambda s, b, h, i, j: cap(fg.maximum(s, -1.0), b, h, i, j), mask)

    run = compiled(attend)
    for far in (1, 3):
        assert torch.equal(run(*qkv_of_halves, far), attend(*qkv_of_halves, far))


def test_rows_inside_a_function(qkv_of_halves: Any) -> None:
    table = torch.randint(0, 4, (LENGTH, 3))

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (table[i] == (j // 4).unsqueeze(-1)).any(-1) | (i == j)

    def attend(q: Any, k: Any, v: Any) -> Any:
        made = ours.create_block_mask(mask, None, None, LENGTH, LENGTH)
        return ours.flex_attention(q, k, v, block_mask=made)

    assert torch.equal(compiled(attend)(*qkv_of_halves), attend(*qkv_of_halves))


def test_slices_negative_indices_and_lengths(qkv_of_halves: Any) -> None:
    def attend(q: Any, k: Any, v: Any, table: Any, flat: Any) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            part = table[h]
            s = s + part[i - j + LENGTH] + part[-1] + table[-2, -3] + torch.take(flat, j) / 4
            return torch.where(fg.len_k - j > 2, s, -INFINITY)

        return ours.flex_attention(q, k, v, score_mod=score)

    run = compiled(attend)
    for columns in (2 * LENGTH + 1, 3 * LENGTH, 4 * LENGTH):
        given = (torch.randn(HEADS, columns), torch.randn(2, columns))
        assert torch.equal(run(*qkv_of_halves, *given), attend(*qkv_of_halves, *given))


def test_only_numbers_that_select_operations_are_guarded(qkv_of_halves: Any) -> None:
    """An exponent selects operations; other numbers of the function stay inputs of the graph."""
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q: Any, k: Any, v: Any, far: int, exponent: int) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return torch.where(i - j < far, (s * 0.5) ** exponent, far * s)

        return ours.flex_attention(q, k, v, score_mod=score)

    run = compiled(attend, counter, dynamic=True)
    counts = []
    for far, exponent in ((3, 2), (5, 2), (9, 2), (3, 3)):
        assert torch.equal(run(*qkv_of_halves, far, exponent), attend(*qkv_of_halves, far, exponent))
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] == counts[2] < counts[3]


@pytest.mark.parametrize(
    ("score", "says"),
    [
        (lambda s, b, h, i, j: torch.fft.fft(s), "cannot be traced"),
        (lambda s, b, h, i, j: s**j, "one of them must be a literal number"),
        (lambda s, b, h, i, j: i == j, "score_mod must return a number"),
        (lambda s, b, h, i, j: s + 2**40, "does not fit in 32 bits"),
    ],
)
def test_functions_that_cannot_be_traced_are_reported(score: Any, says: str, qkv_of_halves: Any) -> None:
    attend = lambda q, k, v: ours.flex_attention(q, k, v, score_mod=score)
    with pytest.raises(SpecError, match=re.escape(says)):
        torch.compile(attend, backend="aot_eager")(*qkv_of_halves)


def test_control_flow_on_tensor_values_breaks_the_graph_with_a_warning(
    qkv_of_halves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = torch.tensor(3)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(i - j <= far.item(), s, -INFINITY) if far > 0 else s

    attend = lambda q, k, v: ours.flex_attention(q * 2, k, v, score_mod=score) * 2
    run = torch.compile(attend, backend="aot_eager")
    monkeypatch.setattr(table, "_WARNED", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in (3, 6, -1):
            far.fill_(value)
            assert torch.equal(run(*qkv_of_halves), attend(*qkv_of_halves))
    (warning,) = [str(each.message) for each in caught if "flashgen" in str(each.message)]
    assert "depends on the values of tensors" in warning


def test_flashgen_itself_adds_no_more_guards_than_for_a_spec(qkv_of_halves: Any) -> None:
    """Each guard takes host time in every call."""
    table, ids = torch.randn(HEADS, 3 * LENGTH), torch.zeros(LENGTH, dtype=torch.int32)
    score = lambda s, b, h, i, j: s + table[h, i - j + LENGTH]
    mask = lambda b, h, i, j: (i >= j) & (ids[i] == ids[j])
    spec = fg.AttentionSpec(DIM, score=score, mask=mask)
    block_mask = ours.create_block_mask(mask, None, None, LENGTH, LENGTH)

    def guards_on_flashgen(attend: Any) -> int:
        found: list[str] = []

        def keep_all(entries: Any) -> list[bool]:
            found.extend(entry.name for entry in entries)
            return [True] * len(entries)

        compiled(attend, options={"guard_filter_fn": keep_all})(*qkv_of_halves)
        return sum("__import_flashgen" in name for name in found)

    by_spec = guards_on_flashgen(lambda q, k, v: ours.attention(spec, q, k, v))
    by_functions = guards_on_flashgen(lambda q, k, v: ours.flex_attention(q, k, v, score, block_mask))
    assert 0 < by_functions <= by_spec + 3
