"""Standard attention and its gradients in float64: the reference of random cases.

    S = score(scale Q K^T), -inf where forbidden;  P = softmax(S);  O = (P ∘ Z) V;  LSE = log sum exp S

Dropout's Z is computed from the documentation of its mapping, element by element in NumPy. A complex step
differentiates score functions. It shares no code with `flashgen.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from random_variants.definitions import walk_defined
from random_variants.meaning import Meaning, Sizes
from random_variants.terms import Declared, Term

Array = np.ndarray[Any, Any]
SCORE = Term("score")
_KINKS = ("abs", "min", "max")


class Unjudged(Exception):
    """The scores hold NaN or +infinity, where attention has no value."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call in float64, heads before lengths: q (batch, heads_q, len_q, head_dim), k and v with heads_kv.

    allowed: which elements count, broadcastable to (batch, heads_q, len_q, len_k).
    dropout: (probability of dropping, seed, offset). sink: of each query head, or None.
    """

    q: Array
    k: Array
    v: Array
    scale: float
    allowed: Array
    score: Term | None
    captures: Mapping[str, Any]
    declared: Mapping[str, Declared]
    dropout: tuple[float, int, int] = (0.0, 0, 0)
    sink: Array | None = None
    _group: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_group", self.q.shape[1] // self.k.shape[1])

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2])

    def _for_queries(self, array: Array) -> Array:
        """Heads of k and v, each repeated for the query heads that share it."""
        return np.repeat(array, self._group, axis=1)

    def _for_keys(self, array: Array) -> Array:
        """An array of query heads, summed over those that share a head of k and v."""
        batch, heads, *rest = array.shape
        return array.reshape(batch, heads // self._group, self._group, *rest).sum(axis=2)

    @cached_property
    def _raw(self) -> Array:
        return self.scale * (self.q @ self._for_queries(self.k).swapaxes(-1, -2))

    @cached_property
    def _meaning(self) -> Meaning:
        return Meaning(self.sizes, self.captures, np.float64, self._raw)

    @cached_property
    def scores(self) -> Array:
        """The modified and masked scores. Raises Unjudged."""
        modified = self._meaning.of(self.score) if self.score else self._raw
        scores = np.where(self.allowed, modified, -np.inf)
        scores = np.broadcast_to(scores, self._raw.shape)
        if np.isnan(scores).any() or (scores == np.inf).any():
            raise Unjudged
        return scores

    @cached_property
    def largest(self) -> float:
        """The largest magnitude on the way to the scores, of which float32's rounding is a share."""
        products = np.abs(self.q) @ np.abs(self._for_queries(self.k)).swapaxes(-1, -2)
        _ = self.scores
        sinks = 0.0 if self.sink is None else float(np.abs(self.sink).max(initial=0))
        return max(float(self.scale * products.max(initial=0)), self._meaning.largest, sinks)

    @property
    def largest_value(self) -> float:
        """The largest magnitude of v."""
        return float(np.abs(self.v).max(initial=0))

    @cached_property
    def idle(self) -> Array:
        """Rows that attend to nothing, (batch, heads_q, len_q)."""
        return np.asarray(self.scores.max(axis=-1, initial=-np.inf) == -np.inf)

    @property
    def _sinks(self) -> Array:
        """The sink of each row, -inf where there is none, broadcastable to (batch, heads_q, len_q)."""
        return np.full((1, 1, 1), -np.inf) if self.sink is None else self.sink.reshape(1, -1, 1).astype(np.float64)

    @cached_property
    def lse(self) -> Array:
        highest = np.maximum(self.scores.max(axis=-1, initial=-np.inf), self._sinks)
        shift = np.where(highest == -np.inf, 0, highest)
        with np.errstate(divide="ignore"):
            of_keys = np.exp(self.scores - shift[..., None]).sum(axis=-1)
            return np.asarray(shift + np.log(of_keys + np.exp(self._sinks - shift)))

    @cached_property
    def _probabilities(self) -> Array:
        return np.exp(self.scores - np.where(self.lse == -np.inf, 0, self.lse)[..., None])

    @cached_property
    def _kept(self) -> Array:
        """Z: 0 where dropped, 256 / T where kept."""
        probability, seed, offset = self.dropout
        if not probability:
            return np.ones((1, 1, 1, 1))
        threshold = round(256 * (1 - probability))
        return (random_bytes(seed, offset, self.sizes) < threshold) * (256 / threshold)

    @cached_property
    def out(self) -> Array:
        return (self._probabilities * self._kept) @ self._for_queries(self.v)

    def gradients(self, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
        """The gradients of sum(out · d_out) + sum(lse · d_lse): dq, dk, dv, and d_<name> of captures that have one."""
        d_s, mean = self._of_modified(d_out, d_lse)
        dropped = self._probabilities * self._kept
        found = self._of_scores(d_s, self.q, self.k, self._derivative)
        found["dv"] = self._for_keys(dropped.swapaxes(-1, -2) @ d_out)
        if self.sink is not None:  # a key whose value is 0, and whose score nothing modifies
            share = np.exp(self._sinks - self.lse) * ((0.0 if d_lse is None else d_lse) - mean)
            found["d_sinks"] = share.sum(axis=(0, 2))
        return found

    def unsure(self, d_out: Array, d_lse: Array | None) -> dict[str, Array]:
        """How far dq, dk and gradients of captures may be off as a kernel's errors reach a kink of the score function.

        Empty for a function without kinks.
        """
        if self.score is None or not any(part.op in _KINKS for part in self.score.walk()):
            return {}
        d_s, _ = self._of_modified(d_out, d_lse)
        return self._of_scores(np.abs(d_s), np.abs(self.q), np.abs(self.k), self._spread)

    def _of_modified(self, d_out: Array, d_lse: Array | None) -> tuple[Array, Array]:
        """The gradient of the modified scores, and rowsum(P · dP)."""
        d_p = (d_out @ self._for_queries(self.v).swapaxes(-1, -2)) * self._kept
        mean = (self._probabilities * d_p).sum(axis=-1)
        of_row = mean - (0.0 if d_lse is None else d_lse)
        return self._probabilities * (d_p - of_row[..., None]), mean

    def _of_scores(self, d_s: Array, q: Array, k: Array, derivative: Callable[[Term], Array]) -> dict[str, Array]:
        """The gradients of what the scores are made of, given that of the modified scores and their derivatives."""
        d_x = d_s * derivative(SCORE) if self.score else d_s
        found = {
            "dq": self.scale * (d_x @ self._for_queries(k)),
            "dk": self._for_keys(self.scale * (d_x.swapaxes(-1, -2) @ q)),
        }
        for name, each in self.declared.items():
            if each.grad:
                found[f"d_{name}"] = self._gathered(name, d_s, derivative)
        return found

    def _derivative(self, seed: Term, error: float = 0.0) -> Array:
        """The score's derivative by a seed; 0 where the score is -inf, whatever the derivative is there."""
        assert self.score is not None
        derivative = self._meaning.derivative(self.score, seed, error)
        return np.where(self.scores == -np.inf, 0.0, derivative)

    def _spread(self, seed: Term) -> Array:
        """How much the derivative changes where each operation on the score is off by a kernel's error."""
        exact = self._derivative(seed)
        with np.errstate(invalid="ignore"):
            changes = [np.abs(self._derivative(seed, error) - exact) for error in (-1.0, 1.0)]
        return np.nan_to_num(np.maximum(*changes), nan=0.0, posinf=0.0)

    def _gathered(self, name: str, d_s: Array, derivative: Callable[[Term], Array]) -> Array:
        """The gradient of a capture: each of its loads adds its part where it loaded."""
        gradient = np.zeros(np.shape(self.captures[name]))
        parts = walk_defined(self.score, lambda capture: np.ndim(self.captures[capture])) if self.score else ()
        for load in {part: None for part in parts if part.op == "load" and part.args[0] == name}:
            part = np.broadcast_to(d_s * derivative(load), self._raw.shape)
            places = [
                np.broadcast_to(np.clip(self._meaning.of(index), 0, size - 1), self._raw.shape)
                for index, size in zip(load.terms, gradient.shape, strict=True)
            ]
            np.add.at(gradient, tuple(places), part)
        return gradient


class Sequences:
    """The sequences of a call, each over as many keys as it has itself.

    calls: for sequence b, a call of all of them over as many keys as b has, of whose results those of b are taken.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def _own(self, name: str) -> Array:
        return np.concatenate([getattr(call, name)[b : b + 1] for b, call in enumerate(self._calls)])

    @property
    def scores(self) -> list[Array]:
        """Of each sequence. Raises Unjudged."""
        return [call.scores[b] for b, call in enumerate(self._calls)]

    @property
    def largest(self) -> float:
        return max(call.largest for call in self._calls)

    @property
    def largest_value(self) -> float:
        return max(call.largest_value for call in self._calls)

    @property
    def idle(self) -> Array:
        return self._own("idle")

    @property
    def lse(self) -> Array:
        return self._own("lse")

    @property
    def out(self) -> Array:
        return self._own("out")


def random_bytes(seed: int, offset: int, sizes: Sizes) -> Array:
    """Dropout's byte of each element (batch, heads, len_q, len_k): Philox4x32-7, by the mapping's documentation."""
    b, h, i, j = np.ogrid[: sizes.batch, : sizes.heads, : sizes.len_q, : sizes.len_k]
    lane = (i & 7) * 4 + ((j & 7) >> 1)
    words = _philox((b << 16 | h, j >> 5, offset, (i >> 4) << 5 | lane), (seed % 2**32, seed // 2**32))
    e = ((j >> 3) & 3) * 4 + ((i >> 3) & 1) * 2 + (j & 1)
    result = np.zeros((1, 1, 1, 1), np.uint64)
    for n in range(8):
        bit = (words[n & 3] >> ((n >> 2) * 16 + e).astype(np.uint64)) & np.uint64(1)
        result = result | bit << np.uint64(n)
    return result


def _philox(counter: tuple[Any, ...], key: tuple[int, int]) -> list[Array]:
    """Seven rounds on 32-bit words, held in 64 bits (Salmon et al., SC 2011)."""
    low = np.uint64(2**32 - 1)
    c0, c1, c2, c3 = (np.asarray(word).astype(np.uint64) & low for word in counter)
    k0, k1 = key
    for _ in range(7):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0), second & low,
            (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1), first & low,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]
