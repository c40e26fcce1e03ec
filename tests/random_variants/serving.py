"""Draws of calls over a cache: keys in pages, of lengths that differ, or of 8 bits; judged by the same reference.

Each sequence is compared with attention over its own keys, contiguous and in float64. Lengths are 0, 1, and those
around the borders of pages.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from flashgen import reference
from flashgen.dtypes import numpy_dtype
from flashgen.verify.problems import Inputs
from random_variants.meaning import Array, Meaning, Sizes
from random_variants.predicates import in_four
from random_variants.samples import Sample
from random_variants.standard import Call, Sequences

_LENGTHS, _PAGES = 4, 5  # streams of random numbers of their own
_MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_SPARE = 2  # pages that belong to no sequence
_NO_PAGE = -7


class Cached(Sample):
    """One draw of a call whose k and v are in pages, of 8 bits, or both."""

    @cached_property
    def lengths(self) -> list[int]:
        """The number of keys of each sequence, which without pages is len_k."""
        shape, size = self.checked.problem.shape, self.spec.page_size
        if size is None:
            return [shape.len_k] * shape.batch
        random = np.random.default_rng((self.checked.problem.seed, _LENGTHS))
        last = shape.len_k // size * size
        borders = (0, 1, size - 1, size, size + 1, last - 1, last, last + 1, *(shape.len_k,) * 4)
        return [min(max(int(random.choice(borders)), 0), shape.len_k) for _ in range(shape.batch)]

    @property
    def inputs(self) -> Inputs:
        return self._contiguous

    @cached_property
    def _contiguous(self) -> Inputs:
        """k and v in the dtype of the cache and in the layout of the spec."""
        plain = self.drawn
        if not self.spec.kv_dtype:
            return plain
        k, v = (self._narrowed(name, array) for name, array in (("k", plain.k), ("v", plain.v)))
        return Inputs(plain.q, k, v, plain.captures)

    @cached_property
    def _scales(self) -> dict[str, Array]:
        """One for each head of k, and one for v, which map the largest magnitude to the largest that 8 bits hold."""
        if not self.spec.kv_dtype:
            return {}
        plain, most = self.drawn, _MOST[self.spec.kv_dtype]
        k, v = (np.abs(array.astype(np.float32)) for array in (plain.k, plain.v))
        of_heads = k.max(axis=(0, 3, 2 if self.spec.layout == "bhsd" else 1), initial=0.0)
        scales = {"k_scale": of_heads / most, "v_scale": v.max(initial=0.0).reshape(1) / most}
        return {name: np.where(scale > 0, scale, 1.0).astype(np.float32) for name, scale in scales.items()}

    def _factors(self, name: str) -> Array:
        """The scales, in a shape that multiplies an array in the layout of the spec."""
        return self._scales[f"{name}_scale"].reshape((-1, 1, 1) if self.spec.layout == "bhsd" else (-1, 1))

    def _narrowed(self, name: str, array: Array) -> Array:
        assert self.spec.kv_dtype is not None
        most, dtype = _MOST[self.spec.kv_dtype], numpy_dtype(self.spec.kv_dtype)
        steps = array.astype(np.float32) / self._factors(name)
        return np.clip(np.rint(steps) if self.spec.kv_dtype == "int8" else steps, -most, most).astype(dtype)

    def _wide(self, name: str, array: Array) -> Array:
        """k or v in float64, heads before lengths."""
        factors = self._factors(name).astype(np.float64) if self.spec.kv_dtype else 1.0
        return self._heads_first(array.astype(np.float64) * factors)

    @property
    def options(self) -> dict[str, Any]:
        return super().options | self._scales | (self._where if self.spec.page_size else {})

    @cached_property
    def _where(self) -> dict[str, Array]:
        """Pages in random order; entries of the table behind the pages of a sequence are invalid."""
        size = self.spec.page_size or 1
        counts = [-(-length // size) for length in self.lengths]
        table = np.full((len(counts), max(counts, default=0) + 1), _NO_PAGE, np.int32)
        pages = np.random.default_rng((self.seed, _PAGES)).permutation(sum(counts) + _SPARE).astype(np.int32)
        for row, end, count in zip(table, np.cumsum(counts), counts, strict=True):
            row[:count] = pages[end - count : end]
        return {"page_table": table, "seqused_k": np.array(self.lengths, np.int32)}

    def _in_pages(self, array: Array) -> Array:
        """k or v in pages, with all bits but the sign's where there is no key of a sequence: NaN, but for int8.

        With the sign, too, the emulator would take copies of it for shared memory that was never written.
        """
        size, table = self.spec.page_size, self._where["page_table"]
        if size is None:
            return array
        rows = array.swapaxes(1, 2) if self.spec.layout == "bhsd" else array
        count = _SPARE + sum(-(-length // size) for length in self.lengths)
        pages = np.empty((count, size, *rows.shape[2:]), array.dtype)
        pages.view(np.uint8 if array.itemsize == 1 else np.uint16)[...] = 2 ** (8 * array.itemsize - 1) - 1
        for b, length in enumerate(self.lengths):
            for number, begin in enumerate(range(0, length, size)):
                part = rows[b, begin : min(begin + size, length)]
                pages[table[b, number], : len(part)] = part
        return pages

    @cached_property
    def given(self) -> Inputs:
        inputs = self._with_garbage()
        return Inputs(inputs.q, self._in_pages(inputs.k), self._in_pages(inputs.v), inputs.captures)

    @property
    def _of_oracle(self) -> tuple[Array, Array, Array]:
        inputs = self.inputs
        return inputs.q, self._in_pages(inputs.k), self._in_pages(inputs.v)

    @cached_property
    def _of_length(self) -> dict[int, Call]:
        """For each length of a sequence, the call of all sequences over so many keys."""
        inputs, shape = self.inputs, self.checked.problem.shape
        q, k, v = self._heads_first(inputs.q), self._wide("k", inputs.k), self._wide("v", inputs.v)
        calls = {}
        for length in sorted(set(self.lengths)):
            sizes = Sizes(shape.batch, shape.heads_q, shape.len_q, length)
            allowed = in_four(Meaning(sizes, self.checked.captures).of(self.case.mask))
            calls[length] = self._call(q, k[:, :, :length], v[:, :, :length], allowed)
        return calls

    @cached_property
    def expected(self) -> Any:
        return Sequences([self._of_length[length] for length in self.lengths])

    @property
    def _allowed(self) -> Array:
        shape = self.checked.problem.shape
        allowed = np.zeros((shape.batch, shape.heads_q, shape.len_q, shape.len_k), np.bool_)
        for b, length in enumerate(self.lengths):
            own = self._of_length[length].allowed
            allowed[b, ..., :length] = np.broadcast_to(own, (shape.batch, *allowed.shape[1:3], length))[b]
        return allowed

    def _low_output(self) -> Array:
        inputs, shape = self.inputs, self.checked.problem.shape
        out = np.zeros((shape.batch, shape.heads_q, shape.len_q, self.spec.value_dim))
        for length, call in self._of_length.items():
            spec, given = self._low_of(call.allowed)
            keys = (slice(None),) * (2 if self.spec.layout == "bhsd" else 1) + (slice(length),)
            given |= self._scales
            made = reference.low_precision(spec, inputs.q, inputs.k[keys], inputs.v[keys], **given)
            own = [b for b, each in enumerate(self.lengths) if each == length]
            out[own] = self._heads_first(made)[own]
        return out
