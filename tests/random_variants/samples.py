"""One draw of the arrays of a call: what the kernel computes from them, and what it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import flashgen.language as fg
from flashgen import reference
from flashgen.dtypes import numpy_dtype
from flashgen.language import AttentionSpec, Mask
from flashgen.verify.gradients import gradients_by_name, poisoned_gradients, random_gradients, same_bits
from flashgen.verify.problems import Inputs, poisoned_outputs
from random_variants.cases import SINKS, Case
from random_variants.judging import Judged
from random_variants.meaning import Array
from random_variants.predicates import Checked, Found
from random_variants.standard import Call

if TYPE_CHECKING:
    from flashgen.attention import Attention

_FIELDS = (
    "head_dim",
    "dtype",
    "value_dim",
    "scale",
    "layout",
    "dropout",
    "kv_dtype",
    "sink",
    "out_dtype",
    "grad_dtype",
)
_DROPOUT = ("seed", "offset")
_MAGNITUDES = {"large": 8.0, "tiny": 1e-3, "huge": 1e15}
_ROUNDING = 1e-11  # float64's, relative to the largest number, and to the largest score on the way


@dataclass(frozen=True, eq=False)
class Sample:
    """One draw of q, k and v for a call of a case."""

    case: Case
    spec: AttentionSpec
    checked: Checked
    seed: int

    @property
    def inputs(self) -> Inputs:
        """What the reference gets."""
        return self.drawn

    @cached_property
    def drawn(self) -> Inputs:
        """q, k and v in the spec's dtype and layout."""
        shape, spec = self.checked.problem.shape, self.spec
        random, way = np.random.default_rng(self.seed), self.checked.problem.inputs

        def array(name: str, heads: int, length: int, dim: int) -> Array:
            axes = (shape.batch, heads, length, dim) if spec.layout == "bhsd" else (shape.batch, length, heads, dim)
            values = random.standard_normal(axes, dtype=np.float32)
            if way == "ones" or (way == "zeros" and name == "q"):
                values = np.full(axes, float(way == "ones"), np.float32)
            elif way != "zeros" and (name != "v" or way == "tiny"):
                values *= np.float32(_MAGNITUDES.get(way, 1.0))
            return values.astype(numpy_dtype(spec.dtype))

        q = array("q", shape.heads_q, shape.len_q, spec.head_dim)
        k = array("k", shape.heads_kv, shape.len_k, spec.head_dim)
        v = array("v", shape.heads_kv, shape.len_k, spec.value_dim)
        return Inputs(q, k, v, self.checked.captures)

    @cached_property
    def given(self) -> Inputs:
        """What the kernel gets."""
        return self._with_garbage()

    def _with_garbage(self) -> Inputs:
        """`inputs`, with garbage where it must not matter.

        "garbage": k and v are NaN, which rows with nothing to attend to must not read. "padding": for keys that the
        mask forbids to every row, k is NaN and v as large as its dtype allows.
        """
        way, inputs = self.checked.problem.inputs, self.inputs
        if way not in ("garbage", "padding"):
            return inputs
        k, v = inputs.k.copy(), inputs.v.copy()
        forbidden = np.ones(k.shape[:3], np.bool_) if way == "garbage" else self._forbidden
        k[forbidden] = np.nan
        v[forbidden] = np.nan if way == "garbage" else ml_dtypes.finfo(v.dtype).max
        return Inputs(inputs.q, k, v, inputs.captures)

    @property
    def _forbidden(self) -> Array:
        """Keys that no row of any query head attends to, in the layout of k without its last axis."""
        shape, allowed = self.checked.problem.shape, self._allowed
        group = shape.heads_q // shape.heads_kv
        of_groups = allowed.any(axis=2).reshape(shape.batch, shape.heads_kv, group, shape.len_k)
        attended = np.asarray(of_groups.any(axis=2))
        return ~(attended if self.spec.layout == "bhsd" else attended.swapaxes(1, 2))

    @property
    def _allowed(self) -> Array:
        """(batch, heads_q, len_q, len_k)."""
        shape = self.checked.problem.shape
        return np.broadcast_to(self.checked.allowed, (shape.batch, shape.heads_q, shape.len_q, shape.len_k))

    @property
    def has_gradients(self) -> bool:
        """Whether the gradients are defined, which they are not where k and v hold garbage."""
        return self.checked.problem.inputs not in ("garbage", "padding")

    @cached_property
    def d_outs(self) -> tuple[Array, Array | None]:
        problem = self.checked.problem
        d_out, d_lse = random_gradients(self.spec, problem.shape, self.seed, problem.d_lse)
        scaled = (d_out.astype(np.float32) * np.float32(problem.gradient)).astype(d_out.dtype)
        return scaled, None if d_lse is None else d_lse * np.float32(problem.gradient)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a call."""
        dropout: dict[str, Any] = {"seed": self.seed, "offset": self.seed % 7} if self.spec.dropout else {}
        read = {capture.name for capture in self.spec.captures}  # tracing drops those that `full() | other` would read
        return dropout | {name: value for name, value in self.checked.captures.items() if name in read}

    @cached_property
    def expected(self) -> Call:
        q, k, v = (self._heads_first(array) for array in (self.inputs.q, self.inputs.k, self.inputs.v))
        return self._call(q, k, v, self.checked.allowed)

    def _call(self, q: Array, k: Array, v: Array, allowed: Array) -> Call:
        """The reference's call of arrays of float64."""
        case, captures = self.case, self.checked.captures
        dropout = (self.spec.dropout, self.seed, self.seed % 7)
        sink = captures[SINKS] if case.sink else None
        return Call(q, k, v, self.spec.scale, allowed, case.score, captures, case.declared, dropout, sink)

    def _heads_first(self, array: Array) -> Array:
        return (array if self.spec.layout == "bhsd" else array.swapaxes(1, 2)).astype(np.float64)

    @cached_property
    def _low(self) -> tuple[AttentionSpec, dict[str, Any]]:
        return self._low_of(self.checked.allowed)

    def _low_of(self, truth_of_mask: Array) -> tuple[AttentionSpec, dict[str, Any]]:
        """The spec with its mask as a captured array, and its captures, so that standard attention in low precision
        applies the mask of this reference."""
        truth = fg.Tensor("truth_of_mask", "bool", 4)
        mask: Mask = fg.trace_mask(lambda b, h, q, k: truth[b, h, q, k], "truth")
        spec = AttentionSpec(**{name: getattr(self.spec, name) for name in _FIELDS}, score=self.spec.score, mask=mask)
        given = {name: value for name, value in self.options.items() if name in {c.name for c in spec.captures}}
        dropout: dict[str, Any] = {name: self.options[name] for name in _DROPOUT if name in self.options}
        allowed = np.ascontiguousarray(truth_of_mask)
        return spec, {**given, **dropout, "truth_of_mask": allowed if allowed.size else np.zeros((1,) * 4, np.bool_)}

    def forward(self, compiled: Attention) -> Judged:
        """The output and LSE of a call that gets arrays of NaN to write to."""
        inputs, expected = self.inputs, self.expected
        into = poisoned_outputs(self.spec, inputs.q)
        kernel = self.given
        how: dict[str, Any] = {} if self.case.splits is None else {"num_splits": self.case.splits}
        out, lse = compiled(kernel.q, kernel.k, kernel.v, return_lse=True, out=into, **self.options, **how)
        low = self._low_output()
        found = {"out": self._heads_first(out), "lse": lse}
        if self.checked.problem.inputs == "garbage":  # only rows that attend to nothing are defined
            found["out"] = np.where(expected.idle[..., None], found["out"], expected.out)
            found["lse"] = np.where(expected.idle, found["lse"], expected.lse)
        return self._judged(found, {"out": expected.out, "lse": expected.lse}, {"out": low, "lse": expected.lse})

    def _low_output(self) -> Array:
        """The output of standard attention in the spec's dtype, heads before lengths."""
        spec, given = self._low
        inputs = self.inputs
        return self._heads_first(reference.low_precision(spec, inputs.q, inputs.k, inputs.v, **given))

    def backward(self, compiled: Attention) -> Judged:
        """The gradients of a call that gets arrays of NaN to write to, and the output and LSE of the reference."""
        spec, given = self._low
        d_out, d_lse = self.d_outs
        inputs = self.inputs
        low = reference.low_precision_backward(spec, inputs.q, inputs.k, inputs.v, d_out, d_lse=d_lse, **given)
        gradients = self.expected.gradients(self._heads_first(d_out), d_lse)
        expected = {name: array / self.checked.problem.gradient for name, array in gradients.items()}
        found = self._by_name(self.gradients_of(compiled))

        def of_rounded_output() -> dict[str, Array]:
            rounded = reference.backward_of_rounded_output(
                spec, inputs.q, inputs.k, inputs.v, d_out, d_lse=d_lse, **given
            )
            return self._by_name(gradients_by_name(rounded))

        def unsure() -> dict[str, Array]:
            of_kinks = self.expected.unsure(self._heads_first(d_out), d_lse)
            return {name: array / self.checked.problem.gradient for name, array in of_kinks.items()}

        judged = self._judged(found, expected, self._by_name(gradients_by_name(low)))
        return judged._replace(given=of_rounded_output, unsure=unsure)

    def gradients_of(self, compiled: Attention) -> dict[str, Array]:
        inputs, (d_out, d_lse) = self.inputs, self.d_outs
        out = self.expected.out if self.spec.layout == "bhsd" else self.expected.out.swapaxes(1, 2)
        out = np.ascontiguousarray(out).astype(self.spec.out_element.numpy)
        lse = np.ascontiguousarray(self.expected.lse).astype(np.float32)
        into = poisoned_gradients(self.spec, inputs)
        given = {"d_lse": d_lse, "into": into, **self.options}
        return gradients_by_name(compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, **given))

    def _by_name(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Gradients by name, those of q, k and v with heads before lengths, divided by the factor of d_out."""
        wide = {
            name: self._heads_first(array) if name in ("dq", "dk", "dv") else np.asarray(array).astype(np.float64)
            for name, array in gradients.items()
        }
        return {name: array / self.checked.problem.gradient for name, array in wide.items()}

    def _judged(self, found: Any, expected: Any, low: Any) -> Judged:
        score, factor = self.case.score, 256 / self.spec.keep_threshold
        fast = any(part.op == "fast_tanh" or "fast" in part.args for part in score.walk()) if score else False
        largest_value = self.expected.largest_value * factor
        return Judged(found, expected, low, self.expected.largest, largest_value, fast)

    def check_deterministic(self, compiled: Attention) -> None:
        """Raises Found where a second run gives other bits."""
        first, second = self.gradients_of(compiled), self.gradients_of(compiled)
        differing = [name for name in first if not same_bits(first[name], second[name])]
        if differing:
            raise Found("not deterministic", f"{', '.join(differing)} at {self.checked.problem.shape}")

    def check_oracle(self) -> None:
        """Raises Found where `flashgen.reference` and this reference differ by more than float64's rounding."""
        q, k, v = self._of_oracle
        out, lse = reference.attention(self.spec, q, k, v, return_lse=True, **self.options)
        self._compare({"out": self.expected.out, "lse": self.expected.lse}, {"out": self._heads_first(out), "lse": lse})

    @property
    def _of_oracle(self) -> tuple[Array, Array, Array]:
        """q, k and v as a call has them, without garbage."""
        return self.inputs.q, self.inputs.k, self.inputs.v

    def check_oracles_gradients(self) -> None:
        """Does for the backward what `check_oracle` does."""
        inputs, (d_out, d_lse) = self.inputs, self.d_outs
        theirs = reference.backward(self.spec, inputs.q, inputs.k, inputs.v, d_out, d_lse=d_lse, **self.options)
        ours = self.expected.gradients(self._heads_first(d_out), d_lse)
        self._compare(
            ours, {n: a * self.checked.problem.gradient for n, a in self._by_name(gradients_by_name(theirs)).items()}
        )

    def _compare(self, ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> None:
        relative = _ROUNDING + _ROUNDING * self.expected.largest
        if relative > 1e-3:
            return  # the scores are too large for float64 to say
        # Sums that cancel keep the rounding of their terms: for gradients, that of the largest of them.
        largest = max(float(np.abs(mine[np.isfinite(mine)]).max(initial=0)) for mine in ours.values())
        for name, mine in ours.items():
            if name != "lse" and not np.isfinite(mine).all():
                continue  # they overflow float64, or d_out is infinite
            with np.errstate(invalid="ignore"):
                error = np.where(theirs[name] == mine, 0.0, np.abs(theirs[name] - mine))
            if not (error <= relative * max(self.checked.problem.gradient, largest)).all():
                raise Found("oracle", f"{name} at {self.checked.problem.shape} differs by {np.nanmax(error):.2e}")
