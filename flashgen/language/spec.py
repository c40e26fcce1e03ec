"""`AttentionSpec`: everything that a kernel is specialised on, and nothing that changes from call to call."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from flashgen.errors import SpecError
from flashgen.language import well_formed
from flashgen.language.bound import Bound, joined
from flashgen.language.captures import Tensor
from flashgen.language.dtypes import CACHED, ELEMENTS, dtype_name
from flashgen.language.masks import full
from flashgen.language.modifiers import Mask, MaskFunction, Score, ScoreFunction, as_mask, as_score
from flashgen.language.operations import SCORE, Capture, captures_of
from flashgen.language.serialize import fields_from_json, fields_to_json
from flashgen.language.shards import PLACES, mask_of_shard, score_of_shard

LAYOUTS = ("bhsd", "bshd", "thd")
RAGGED_ARGUMENTS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k")
"""What a call of layout "thd" is given beside q, k and v; no capture of such a spec has one of these names."""
MAX_NAME = 96
MOST_PAGE_SIZE = 256
CACHED_DIM = 32  # which dims of 8-bit keys and values are multiples of


@dataclass(frozen=True, init=False, eq=False, repr=False)
class AttentionSpec:
    """One attention variant. Lengths, batch, heads and strides are given at each call and are no part of it.

    Args:
        head_dim: elements of a query or key vector, a multiple of 8 from 8 to 256.
        dtype: "float16" or "bfloat16", of q, k, v and the output.
        value_dim: elements of a value vector, a multiple of 8 from 8 to 256; None is head_dim.
        scale: factor of q·k before the score function; None is 1/sqrt(head_dim). A spec of a scale of 0 or less
            without a score function has one that changes nothing, `unchanged`: kernels without take the largest q·k for
            the largest score.
        layout: "bhsd" (batch, heads, length, dim), "bshd" (batch, length, heads, dim), or "thd" (tokens, heads, dim) of
            ragged batches, whose sequences lie one behind the other: each call says where they begin.
        dropout: probability of dropping an attention weight, in steps of 1/256: 0, or what rounds to 1/256 to 255/256.
        score: a Score, a function f(score, b, h, q, k), or None.
        mask: a Mask or a function f(b, h, q, k); None is full().
        page_size: keys of a page, a power of 2 from 1 to 256, for k and v in pages: (pages, page_size, heads_kv, dim)
            whatever the layout, and calls with page_table and seqused_k. None is k and v as the layout says.
        kv_dtype: "float8_e4m3fn" or "int8", of k and v, whose values are times k_scale and v_scale of the call; both
            dims are multiples of 32 then. None is dtype, without scales.
        sink: a Tensor of one dimension and floats, or None: a score of each query head that every row's softmax counts
            beside its keys' and that has no value, not scaled, masked or modified. It is a capture: calls give it.
        sharded: whether calls are of a part of q and of k, which say where these stand in the whole: shard_b, shard_h,
            shard_q and shard_k are added to b, h, q and k, in dropout too, and whole_q and whole_k are len_q and len_k.

    Raises SpecError, naming the argument, for anything else. Specs are equal if their canonical JSON is.
    """

    head_dim: int
    dtype: str
    value_dim: int
    scale: float
    layout: str
    dropout: float
    score: Score | None
    mask: Mask
    page_size: int | None
    kv_dtype: str | None
    sink: Capture | None
    sharded: bool

    def __init__(
        self,
        head_dim: int,
        dtype: Any = "float16",
        value_dim: int | None = None,
        scale: float | None = None,
        layout: str = "bhsd",
        dropout: float = 0.0,
        score: Score | ScoreFunction | None = None,
        mask: Mask | MaskFunction | None = None,
        page_size: int | None = None,
        kv_dtype: Any = None,
        sink: Tensor | None = None,
        sharded: bool = False,
    ) -> None:
        values: dict[str, Any] = {
            "head_dim": _dimension(head_dim, "head_dim"),
            "dtype": dtype_name(dtype, ELEMENTS, "dtype"),
            "value_dim": _dimension(head_dim if value_dim is None else value_dim, "value_dim"),
            "scale": 1 / math.sqrt(head_dim) if scale is None else _scale(scale),
            "layout": _layout(layout),
            "dropout": _dropout(dropout),
            "score": None if score is None else as_score(score),
            "mask": full() if mask is None else as_mask(mask),
            "page_size": None if page_size is None else _page_size(page_size),
            "kv_dtype": None if kv_dtype is None else dtype_name(kv_dtype, CACHED, "kv_dtype"),
            "sink": None if sink is None else _sink(sink),
            "sharded": _sharded(sharded),
        }
        _check_cache(values)
        if values["scale"] <= 0 and values["score"] is None:
            values["score"] = Score("unchanged", SCORE)
        if sharded:
            values |= _of_shard(values)
        bound = _join_arrays(values)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_bound", bound)
        self._check_captures()

    def _check_captures(self) -> None:
        seen: dict[str, Capture] = {}
        if self.sink and self.sink.name in {c.name for c in (*self.mask.captures, *(self.score or self.mask).captures)}:
            raise SpecError(f"sink: the mask or the score function reads {self.sink.name!r} too; give one another name")
        for capture in self.captures:
            well_formed.check_same_capture(seen.setdefault(capture.name, capture), capture)
            if self.is_ragged and capture.name in RAGGED_ARGUMENTS:
                raise SpecError(
                    f"capture {capture.name!r}: with layout='thd' that is an argument of each call; "
                    "give it another name"
                )

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        """What the call supplies by name, sorted by name."""
        own = [*([self.sink] if self.sink else []), *(PLACES.values() if self.sharded else [])]
        return captures_of(self.mask.expression, *([self.score.expression] if self.score else []), *own)

    @property
    def bound(self) -> Bound:
        """The arrays that the mask and the score function closed over, by the names of the captures that they are.

        They are no part of the spec's JSON, nor of what specs are equal by.
        """
        return self._bound  # type: ignore[attr-defined]

    @property
    def is_ragged(self) -> bool:
        """Whether the sequences of a batch lie one behind the other in packed arrays: layout "thd"."""
        return self.layout == "thd"

    def shard(self) -> AttentionSpec:
        """The same variant for parts of q and k, whose calls say where these stand: see the argument `sharded`."""
        return AttentionSpec(**{field.name: getattr(self, field.name) for field in fields(self)} | {"sharded": True})

    @property
    def keep_threshold(self) -> int:
        """T of the dropout rule: a weight is kept iff its random byte is below T = round(256·(1 - dropout))."""
        return round(256 * (1 - self.dropout))

    @cached_property
    def digest(self) -> str:
        """8 hex digits of the sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    @cached_property
    def name(self) -> str:
        """A readable name of [a-z0-9._-], e.g. bf16-d128-causal-softcap30-1a2b3c4d; the digest makes it unique."""
        dim = f"d{self.head_dim}" + ("" if self.value_dim == self.head_dim else f"v{self.value_dim}")
        parts = ["bf16" if self.dtype == "bfloat16" else "fp16", dim, _slug(self.mask.name)]
        parts += [_slug(self.score.name)] if self.score else []
        parts += [f"dropout{self.dropout:g}"] if self.dropout else []
        parts += ["sink"] if self.sink else []
        parts += ["shard"] if self.sharded else []
        parts += [self.layout] if self.layout != "bhsd" else []
        parts += [f"pages{self.page_size}"] if self.page_size else []
        parts += [{"float8_e4m3fn": "fp8"}.get(self.kv_dtype, self.kv_dtype)] if self.kv_dtype else []
        return f"{'-'.join(parts)[:MAX_NAME].rstrip('-._')}-{self.digest}"

    @property
    def of_cache(self) -> bool:
        """Whether k and v are in pages or of 8 bits, which only decode kernels read."""
        return bool(self.page_size or self.kv_dtype)

    @cached_property
    def _json(self) -> str:
        return fields_to_json({field.name: getattr(self, field.name) for field in fields(self)})

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; the same text in every process."""
        return self._json

    @staticmethod
    def from_json(text: str) -> AttentionSpec:
        """The spec of `to_json`'s text, or of JSON written by hand: fields may be left out, and a mask or score may be
        an expression such as "causal() & sliding_window(1024)". SpecError for anything that is not a spec.
        """
        return AttentionSpec(**fields_from_json(text))

    def __eq__(self, other: object) -> bool:
        return self._json == other._json if isinstance(other, AttentionSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._json)

    def __repr__(self) -> str:
        parts = [f"head_dim={self.head_dim}", f"dtype={self.dtype!r}"]
        parts += [f"value_dim={self.value_dim}"] if self.value_dim != self.head_dim else []
        parts += [f"scale={self.scale!r}"] if self.scale != 1 / math.sqrt(self.head_dim) else []
        parts += [f"layout={self.layout!r}"] if self.layout != "bhsd" else []
        parts += [f"dropout={self.dropout!r}"] if self.dropout else []
        parts += [f"score={self.score}"] if self.score else []
        parts += [f"sink={self.sink}"] if self.sink else []
        parts += ["sharded=True"] if self.sharded else []
        pages = [f"page_size={self.page_size}"] if self.page_size else []
        cached = [f"kv_dtype={self.kv_dtype!r}"] if self.kv_dtype else []
        return f"AttentionSpec({', '.join([*parts, f'mask={self.mask}', *pages, *cached])})"


def _join_arrays(values: dict[str, Any]) -> Bound:
    """The arrays of mask and score function; where two have one name, one gets another."""
    mask, score = values["mask"], values["score"]
    if score is None or not (mask.bound or score.bound):
        return mask.bound
    of_mask, of_score, bound = joined(mask.expression, mask.bound, score.expression, score.bound)
    values["mask"] = Mask(mask.name, of_mask, {name: bound[name] for name in _named(of_mask, bound)})
    values["score"] = Score(score.name, of_score, {name: bound[name] for name in _named(of_score, bound)})
    return bound


def _named(expression: Any, bound: Bound) -> list[str]:
    return [capture.name for capture in captures_of(expression) if capture.name in bound]


def _dimension(value: Any, argument: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SpecError(f"{argument}={value!r} must be an integer, a multiple of 8 from 8 to 256")
    if not 1 <= value <= 256:
        raise SpecError(f"{argument}={value} must be from 8 to 256: no kernel here is made for others")
    if value % 8:
        raise SpecError(f"{argument}={value} must be a multiple of 8: {_padded(int(value), argument)}")
    return int(value)


def _padded(value: int, argument: str) -> str:
    """How vectors of another length are taken all the same: zeros add nothing to q·k."""
    larger = -(-value // 8) * 8
    if argument == "value_dim":
        return f"pad v with zeros to {larger}, and cut the output"
    return f"pad q and k with zeros to {larger}, and give scale={value}**-0.5, as that of {value} elements"


def _number(value: Any, argument: str) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise SpecError(f"{argument}={value!r} must be a number")
    try:
        return float(value)
    except OverflowError:
        raise SpecError(f"{argument} is an integer beyond float64; give a number of float32") from None


def _scale(value: Any) -> float:
    scale = _number(value, "scale")
    if scale and not 2.0**-126 <= abs(scale) <= well_formed.FLOAT32_MAX:
        raise SpecError(f"scale={value!r} must be 0 or a normal float32; None is 1/sqrt(head_dim)")
    return scale + 0.0  # -0.0 becomes 0.0


def _sink(value: Any) -> Capture:
    capture = value.capture if isinstance(value, Tensor) else value
    if not isinstance(capture, Capture) or capture.ndim != 1 or capture.kind != "float":
        raise SpecError(
            f"sink={value!r} must be a Tensor of one dimension and floats, such as Tensor('sinks', 'float32', 1)"
        )
    return capture


def _layout(value: Any) -> str:
    if value not in LAYOUTS:
        raise SpecError(
            f"layout={value!r} must be 'bhsd' (batch, heads, length, dim), 'bshd' (batch, length, heads, dim) or 'thd' "
            "(tokens, heads, dim; a ragged batch)"
        )
    return str(value)


def _check_cache(values: dict[str, Any]) -> None:
    """SpecError where keys in pages, or of 8 bits, do not go with the other fields."""
    if values["kv_dtype"] and values["layout"] == "thd" and not values["page_size"]:
        raise SpecError(
            f"kv_dtype={values['kv_dtype']!r} is not supported for layout='thd' without pages: declare page_size=..."
        )
    for name in ("head_dim", "value_dim"):
        if values["kv_dtype"] and values[name] % CACHED_DIM:
            raise SpecError(f"{name}={values[name]} must be a multiple of {CACHED_DIM} with a kv_dtype")


def _sharded(value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise SpecError(f"sharded={value!r} must be True or False")
    return bool(value)


def _of_shard(values: dict[str, Any]) -> dict[str, Any]:
    """The mask and the score function of a shard. SpecError where lengths are known to the device alone."""
    name = "layout" if values["layout"] == "thd" else "page_size"
    if values["layout"] == "thd" or values["page_size"]:
        given = values[name]
        raise SpecError(f"sharded=True is not supported with {name}={given!r}, whose lengths only the device knows")
    score = values["score"]
    return {"mask": mask_of_shard(values["mask"]), "score": score_of_shard(score) if score else None}


def _page_size(value: Any) -> int:
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not integer or not 1 <= value <= MOST_PAGE_SIZE or value & (value - 1):
        raise SpecError(f"page_size={value!r} must be a power of 2 from 1 to {MOST_PAGE_SIZE}, or None for no pages")
    return int(value)


def _dropout(value: Any) -> float:
    dropout = _number(value, "dropout")
    if not 0 <= dropout < 1 or round(256 * (1 - dropout)) < 1:
        raise SpecError(
            f"dropout={value!r} must be at least 0 and at most 255/256 (weights are kept in steps of 1/256)"
        )
    if dropout and round(256 * (1 - dropout)) == 256:
        raise SpecError(
            f"dropout={value!r} would drop nothing: weights are kept in steps of 1/256; give 0, or at least 1/256"
        )
    return dropout + 0.0  # -0.0 becomes 0.0


def _slug(name: str) -> str:
    """A mask's or score's name for a file name: "causal-and-sliding_window1024"."""
    for symbol, word in (("~", "not "), ("&", " and "), ("|", " or "), ("^", " xor ")):
        name = name.replace(symbol, word)
    name = re.sub(r"\w+=", "", name)
    name = re.sub(r"\((?=\d)", "", name)  # softcap(30) is softcap30
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-._")
