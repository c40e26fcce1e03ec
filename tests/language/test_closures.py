"""Functions that close over arrays: captures, their names and their values."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import SpecError
from flashgen.language.bound import BoundArray
from flashgen.language.evaluate import evaluate
from flashgen.language.operations import BATCH, HEAD, KEY, LEN_K, LEN_Q, QUERY

IDS = np.repeat([0, 1, 2], 4)
LENGTH = len(IDS)
_parity = np.arange(LENGTH) % 2


def of_mask(mask: fg.Mask) -> np.ndarray:
    """Evaluates the mask at all positions with its own arrays."""
    values = {BATCH: np.arange(2)[:, None, None], QUERY: np.arange(LENGTH)[:, None], KEY: np.arange(LENGTH)}
    values |= {HEAD: 0, LEN_Q: LENGTH, LEN_K: LENGTH}
    captures = {name: array.on_host() for name, array in mask.bound.items()}
    return np.broadcast_to(evaluate(mask.expression, values, captures), (2, LENGTH, LENGTH))


SAME = np.broadcast_to(IDS[:, None] == IDS, (2, LENGTH, LENGTH))


def read_as_a_global(b: Any, h: Any, q: Any, k: Any) -> Any:
    return IDS[q] == IDS[k]


def read_by_another(b: Any, h: Any, q: Any, k: Any) -> Any:
    return read_as_a_global(b, h, q, k)


def read_as_a_default(b: Any, h: Any, q: Any, k: Any, table: Any = IDS) -> Any:
    return table[q] == table[k]


def closing_over(ids: Any) -> Any:
    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ids[q] == ids[k]

    return same


def every(*masks: Any) -> Any:
    def all_of(b: Any, h: Any, q: Any, k: Any) -> Any:
        kept = q >= 0
        for mask in masks:
            kept = kept & mask(b, h, q, k)
        return kept

    return all_of


class Documents:
    """A mask that is a callable object."""

    def __init__(self) -> None:
        self.ids = IDS

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.same(q, k)

    def same(self, q: Any, k: Any) -> Any:
        return self.ids[q] == self.ids[k]

    def method(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.same(q, k)


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (read_as_a_global, "IDS"),
        (read_by_another, "IDS"),
        (read_as_a_default, "table"),
        (closing_over(IDS), "ids"),
        (every(closing_over(IDS), closing_over(IDS)), "ids"),
        (functools.partial(lambda table, b, h, q, k: table[q] == table[k], IDS), "array"),
        (Documents(), "ids"),
        (Documents().method, "ids"),
        (lambda b, h, q, k: fg.document(IDS)(b, h, q, k), "IDS"),
        (fg.document(IDS), "ids"),
        (fg.document(np.stack([IDS, IDS])), "ids"),
    ],
)
def test_every_way_to_refer_to_an_array(mask: Any, name: str) -> None:
    traced = fg.AttentionSpec(64, mask=mask).mask
    assert list(traced.bound) == [name]
    assert [(capture.name, capture.dtype) for capture in traced.captures] == [(name, "int32")]
    assert np.array_equal(of_mask(traced), SAME)


@pytest.mark.parametrize(
    ("made", "declared", "array"),
    [
        (fg.prefix_lm, fg.prefix_lm(fg.Tensor("prefix", "int32", 1)), np.array([3, 9])),
        (fg.alibi, fg.alibi("slopes"), np.array([0.5, 0.25])),
        (fg.alibi, fg.alibi(fg.Tensor("slopes", "float32", 2)), np.array([[0.5, 0.25]])),
        (lambda x: fg.relative_bias(x, 3), fg.relative_bias("table", 3), np.zeros((2, 7))),
        (lambda x: fg.relative_bias(x, 3), fg.relative_bias(fg.Tensor("table", "float16", 1), 3), np.zeros(7, "f2")),
        (fg.tree, fg.tree("bits"), np.zeros((2, 3, 1), np.int32)),
    ],
)
def test_named_variants_accept_arrays_like_tensors(made: Any, declared: Any, array: np.ndarray) -> None:
    given = made(array)
    assert given.expression == declared.expression
    ((name, bound),) = given.bound.items()
    assert np.array_equal(bound.on_host(), array) and [capture.name for capture in declared.captures] == [name]


def test_distinct_arrays_of_one_name_get_distinct_names() -> None:
    other = np.arange(LENGTH) // 6
    for mask in (
        fg.trace_mask(every(closing_over(IDS), closing_over(other))),
        fg.trace_mask(closing_over(IDS)) & closing_over(other),
        fg.trace_mask(every(fg.document(IDS), closing_over(other))),
    ):
        assert sorted(mask.bound) == ["ids", "ids_2"]
        assert np.array_equal(of_mask(mask), SAME & (other[:, None] == other))
    assert list((fg.document(IDS) & fg.document(IDS)).bound) == ["ids"]
    given = fg.document("ids") & fg.document(IDS)
    assert [capture.name for capture in given.captures] == ["ids", "ids_2"] and list(given.bound) == ["ids_2"]
    given = fg.document(IDS) & fg.document("ids")
    assert [capture.name for capture in given.captures] == ["ids", "ids_2"] and list(given.bound) == ["ids_2"]


def test_mask_and_score_may_use_one_name_for_distinct_arrays() -> None:
    table = np.linspace(0, 1, LENGTH)
    spec = fg.AttentionSpec(64, mask=lambda b, h, q, k: table[q] >= 0.5, score=lambda s, b, h, q, k: s + table[k])
    assert [capture.name for capture in spec.captures] == ["table"]
    ids = table * 2

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + ids[k]

    spec = fg.AttentionSpec(64, mask=fg.document(IDS), score=score)
    assert spec.score and {**spec.mask.bound, **spec.score.bound}.keys() == spec.bound.keys() == {"ids", "ids_2"}
    assert np.array_equal(spec.bound["ids"].on_host(), IDS)
    assert np.array_equal(spec.bound["ids_2"].on_host(), ids.astype(np.float32))


def test_names_that_captures_cannot_have() -> None:
    q_ids = {"q": IDS, "class": IDS}
    named = q_ids["q"]
    assert list(fg.trace_mask(lambda b, h, q, k: _parity[q] == 1).bound) == ["parity"]
    assert list(fg.trace_mask(lambda b, h, q, k: named[q] == q_ids["class"][k]).bound) == ["named"]
    out = IDS
    assert list(fg.trace_mask(lambda b, h, q, k: out[q] == out[k]).bound) == ["out_table"]


@pytest.mark.parametrize(
    ("values", "read"),
    [
        (np.arange(LENGTH), "int32"),
        (np.arange(LENGTH) + 2**31, "int64"),
        (np.arange(LENGTH, dtype=np.uint16), "int32"),
        (np.arange(LENGTH, dtype=np.uint32), "int64"),
        (np.arange(LENGTH, dtype=np.uint8), "uint8"),
        (np.arange(LENGTH) % 2 == 0, "bool"),
        (np.linspace(0, 1, LENGTH), "float32"),
        (np.linspace(0, 1, LENGTH).astype(np.float16), "float16"),
    ],
)
def test_dtypes_that_kernels_read(values: np.ndarray, read: str) -> None:
    mask = fg.trace_mask(lambda b, h, q, k: values[q] == values[k])
    (array,) = mask.bound.values()
    assert array.dtype == read
    assert (array.current() is values) == (values.dtype.name == read)
    held = values.astype(read)
    assert np.array_equal(of_mask(mask)[0], held[:, None] == held)


def test_unsupported_dtypes() -> None:
    for values in (np.ones(4, np.complex64), np.array([2**63], np.uint64), np.ones((1,) * 9)):
        with pytest.raises(SpecError, match="the array 'values'"):
            fg.trace_mask(lambda b, h, q, k, values=values: values[(q,) * values.ndim] == 1)


@pytest.mark.parametrize(("function", "message"), [
    (lambda b, h, q, k: IDS[:5][q] == 1, r"Tensor\('IDS', 'int32', ndim=1\): slices, .* slice the array outside"),
    (lambda b, h, q, k: IDS[b, q] == 1, r"Tensor\('IDS', 'int32', ndim=1\) has ndim=1, indexed with 2 indices"),
    (lambda b, h, q, k: [0, 1, 2][q] == 1, "created inside of the function.*: create an array outside of the function"),
    (lambda b, h, q, k: np.arange(3) == q, "an array .* is not a number of a traced function: create it outside"),
    (lambda b, h, q, k: q.half() > 1, "conversion to half is not part .*: values are int32 and float32; give one"),
])  # fmt: skip
def test_errors_use_the_names_of_arrays(function: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fg.AttentionSpec(64, mask=function)


def test_an_array_without_dimensions_is_read_at_the_call() -> None:
    ahead = np.array(2)
    mask = fg.trace_mask(lambda b, h, q, k: q + ahead >= k)
    assert np.array_equal(of_mask(mask)[0], np.tri(LENGTH, k=2))
    assert [(capture.name, capture.ndim) for capture in mask.captures] == [("ahead", 1)]


def test_arrays_without_element_reads_are_no_captures() -> None:
    assert fg.trace_mask(lambda b, h, q, k: q < IDS.shape[0] + len(IDS)).captures == ()


def test_arrays_are_not_part_of_a_spec() -> None:
    one, other = (fg.AttentionSpec(64, mask=closing_over(ids)) for ids in (IDS, IDS[::-1].copy()))
    assert one == other and one.to_json() == other.to_json() and hash(one) == hash(other)
    assert not fg.AttentionSpec.from_json(one.to_json()).bound


def test_a_function_without_arrays_is_unchanged() -> None:
    mask = closing_over(IDS)
    fg.trace_mask(mask)
    assert mask.__closure__[0].cell_contents is IDS and read_as_a_global.__globals__["IDS"] is IDS


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    ids = torch.from_numpy(IDS.copy())
    mask = fg.trace_mask(closing_over(ids))
    assert np.array_equal(of_mask(mask), SAME)
    ids[:] = 0
    assert of_mask(mask).all(), "a tensor that was modified is read again"
    ids[:] = 2**40
    with pytest.raises(SpecError, match="create the mask again"):
        of_mask(mask)
    bias = torch.zeros(4, requires_grad=True)
    spec = fg.AttentionSpec(64, score=lambda s, b, h, q, k: s + bias[h])
    assert [capture.grad for capture in spec.captures] == [True]
    halves = torch.arange(LENGTH, dtype=torch.bfloat16)
    assert fg.trace_mask(lambda b, h, q, k: halves[q] >= halves[k]).bound["halves"].on_host().dtype.name == "bfloat16"


def test_copies_have_current_values() -> None:
    values = np.array([0.0, np.nan, 2.0], np.float32)
    bound, copies = BoundArray(values, "values"), []

    def move(here: np.ndarray, there: int | None) -> int:
        copies.append((here.copy(), there))
        return len(copies)

    assert [bound.moved("there", move), bound.moved("there", move), bound.moved("elsewhere", move)] == [1, 1, 2]
    values[0] = -0.0
    assert bound.moved("there", move) == 3 and np.signbit(copies[-1][0][0])
    assert [there for _, there in copies] == [None, None, 1], "an existing copy is overwritten"


def test_a_torch_tensor_in_a_list_of_another_module() -> None:
    torch = pytest.importorskip("torch")
    tables = {"ids": [torch.from_numpy(IDS.copy())]}
    mask = fg.trace_mask(lambda b, h, q, k: tables["ids"][0][q] == tables["ids"][0][k])
    assert np.array_equal(of_mask(mask), SAME)


def test_jax_arrays() -> None:
    jax = pytest.importorskip("jax")
    mask = fg.trace_mask(closing_over(jax.numpy.asarray(IDS)))
    assert np.array_equal(of_mask(mask), SAME)
