"""`AttentionSpec`: everything that kernels are specialised on, and nothing that changes from call to call."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from flashgen.dtypes import CACHED, DTYPES, ELEMENTS, RESULTS, DType, dtype_name
from flashgen.errors import SEE_LIMITS, SpecError
from flashgen.language import well_formed
from flashgen.language.batch_layout import BATCH_LAYOUTS, PAGES, BatchLayout
from flashgen.language.bound import Bound, merge_bound
from flashgen.language.captures import Tensor
from flashgen.language.kv_records import KV_RECORDS, KvRecord, check_record
from flashgen.language.masks import full
from flashgen.language.modifiers import Mask, MaskFunction, Score, ScoreFunction, as_mask, as_score
from flashgen.language.operations import SCORE, Capture, captures_of
from flashgen.language.serialize import fields_from_json, fields_to_json
from flashgen.language.shards import SHARD_NUMBERS, shard_mask, shard_score

MAX_NAME = 96
MAX_HEAD_DIM, MAX_VALUE_DIM = 576, 512
"""The maxima of head_dim and value_dim. Targets whose shared memory holds fewer columns say so."""
MAX_PAGE_SIZE = 256
TYPE_FIELDS = ("kv_dtype", "out_dtype", "grad_dtype")
CACHED_DIM = 32  # head_dim and value_dim are multiples of this where k and v have 8 bits


@dataclass(frozen=True, init=False, eq=False, repr=False)
class AttentionSpec:
    """One attention variant. Lengths, batch, heads and strides are given at each call and are not part of the spec.

    Specs are equal if their canonical JSON is equal.

    Args:
        head_dim: Elements of a query or key vector, a multiple of 8 from 8 to 576. Beyond 256 the kernels of all
            targets use mma.sync.
        dtype: "float16" or "bfloat16", the type of q, k, v and the output's gradient; also that of the output and of
            the other gradients, unless `out_dtype` and `grad_dtype` are given.
        value_dim: Elements of a value vector, a multiple of 8 from 8 to 512. None means head_dim.
        scale: Factor of q·k, applied before the score function. None means 1/sqrt(head_dim). Kernels without a score
            function assume that the largest q·k gives the largest score, so a spec with scale <= 0 and no score
            function gets the identity score function `unchanged`.
        layout: "bhsd" (batch, heads, length, dim), "bshd" (batch, length, heads, dim), or "thd" (tokens, heads, dim),
            the varlen layout: sequences are packed along the token dimension, and each call says where they begin.
        dropout: Probability of dropping an attention weight, rounded to a multiple of 1/256. Either 0, or a number that
            rounds to 1/256 to 255/256.
        score: A Score, a function f(score, b, h, q, k), or None.
        mask: A Mask or a function f(b, h, q, k). None means full().
        page_size: Keys per page of a paged KV cache, a power of 2 from 1 to 256. k and v are then (pages, page_size,
            heads_kv, dim) whatever the layout, and each call takes page_table and seqused_k. None means that k and v
            are not paged.
        kv_dtype: "float8_e4m3fn" or "int8" for quantized k and v, which the kernel multiplies by k_scale and v_scale of
            the call. head_dim and value_dim must then be multiples of 32. "fp8_ds_mla" for DeepSeek-V3.2's cache of
            latent attention, uint8 (pages, page_size, 1, 656): each token has 512 float8 e4m3 numbers, four float32
            scales, one per 128 of them, and 64 bfloat16 numbers. It needs head_dim=576, value_dim=512, shared_kv=True,
            dtype="bfloat16" and a page_size. None means that k and v have `dtype` and no scales.
        sink: A floating Tensor of one dimension, one element per query head, or None. Each element is one extra score
            in the softmax of every row of that head. It takes probability but has no value, and is not scaled, masked
            or modified. It is a capture: each call supplies it.
        sharded: Whether each call computes a part of q against a part of k. The call then gives their positions in the
            full problem: shard_b, shard_h, shard_q and shard_k are added to b, h, q and k (in dropout as well), and
            whole_q and whole_k replace len_q and len_k.
        out_dtype: "float32" for an output that is not rounded, such as a partial output that is merged with others.
            None means `dtype`.
        grad_dtype: "float32" for dq, dk and dv that are not rounded, such as gradients that are added to others. None
            means `dtype`. Gradients of captures have the dtypes of their arrays.
        shared_kv: Whether V is a part of K: the value vector of a key is the first value_dim elements of its key
            vector, as in latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1, with absorbed up-projections).
            Calls then take q and kv, and no v. The backward returns one gradient of kv. value_dim must be at most
            head_dim.

    Raises:
        SpecError: An argument is not supported. The message names it.
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
    out_dtype: str | None
    grad_dtype: str | None
    shared_kv: bool

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
        out_dtype: Any = None,
        grad_dtype: Any = None,
        shared_kv: bool = False,
    ) -> None:
        values: dict[str, Any] = {
            "head_dim": _dimension(head_dim, "head_dim", MAX_HEAD_DIM),
            "dtype": dtype_name(dtype, ELEMENTS, "dtype"),
            "value_dim": _dimension(head_dim if value_dim is None else value_dim, "value_dim", MAX_VALUE_DIM),
            "scale": 1 / math.sqrt(head_dim) if scale is None else _scale(scale),
            "layout": _layout(layout),
            "dropout": _dropout(dropout),
            "score": None if score is None else as_score(score),
            "mask": full() if mask is None else as_mask(mask),
            "page_size": None if page_size is None else _page_size(page_size),
            "kv_dtype": None if kv_dtype is None else dtype_name(kv_dtype, (*CACHED, *KV_RECORDS), "kv_dtype"),
            "sink": None if sink is None else _sink(sink),
            "sharded": _flag(sharded, "sharded"),
            "shared_kv": _flag(shared_kv, "shared_kv"),
        }
        values["out_dtype"] = _result_dtype(out_dtype, values["dtype"], "out_dtype")
        values["grad_dtype"] = _result_dtype(grad_dtype, values["dtype"], "grad_dtype")
        _check_cache(values)
        if values["scale"] <= 0 and values["score"] is None:
            values["score"] = Score("unchanged", SCORE)
        if sharded:
            values |= _shard_modifiers(values)
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
            if capture.name in self.batch_layout.arguments:
                raise SpecError(
                    f"capture {capture.name!r}: with layout={self.layout!r} that is an argument of each call; "
                    "give it another name"
                )

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        """The captures that each call supplies by name, sorted by name."""
        own = [*([self.sink] if self.sink else []), *(SHARD_NUMBERS.values() if self.sharded else [])]
        return captures_of(self.mask.expression, *([self.score.expression] if self.score else []), *own)

    @property
    def bound(self) -> Bound:
        """The arrays that the mask and the score function closed over, keyed by the names of their captures.

        They are not part of the spec's JSON, and do not count in comparisons of specs.
        """
        return self._bound  # type: ignore[attr-defined]

    @cached_property
    def batch_layout(self) -> BatchLayout:
        """The order of the axes, and what a call says about its sequences, by `layout`."""
        return BATCH_LAYOUTS[self.layout]

    @property
    def _changed_layout(self) -> list[str]:
        """The layout for names and texts, which leave the default out."""
        return [self.layout] if self.layout != "bhsd" else []

    @cached_property  # every call asks
    def is_varlen(self) -> bool:
        """Whether sequences of different lengths are packed along the token dimension, layout "thd"."""
        return self.batch_layout.is_varlen

    @property
    def is_mixed(self) -> bool:
        """Whether calls are mixed batches: varlen queries over K and V in pages."""
        return bool(self.is_varlen and self.page_size)

    @property
    def is_ragged(self) -> bool:
        """The former name of `is_varlen`."""
        warnings.warn("AttentionSpec.is_ragged is named is_varlen now", DeprecationWarning, stacklevel=2)
        return self.is_varlen

    @property
    def element(self) -> DType:
        """The element type of q."""
        return DTYPES[self.dtype]

    @property
    def out_element(self) -> DType:
        """The element type of the output."""
        return DTYPES[self.out_dtype or self.dtype]

    @property
    def grad_element(self) -> DType:
        """The element type of dq, dk and dv."""
        return DTYPES[self.grad_dtype or self.dtype]

    @property
    def kv_record(self) -> KvRecord | None:
        """The records of the KV cache, if the rows of k are records of bytes."""
        return KV_RECORDS.get(self.kv_dtype or "")

    @property
    def scales_kv(self) -> bool:
        """Whether calls take k_scale and v_scale, the factors of 8-bit k and v."""
        return self.kv_dtype is not None and not self.kv_record

    @property
    def kv_element(self) -> DType:
        """The element type of k and v."""
        return self.kv_record.element if self.kv_record else DTYPES[self.kv_dtype or self.dtype]

    def element_of(self, name: str) -> DType:
        """Returns the element type of an array by name: q, k, v, o, d_o, dq, dk or dv.

        Args:
            name: the array.
        """
        own = {"k": self.kv_element, "v": self.kv_element, "o": self.out_element}
        return own.get(name, self.grad_element if name in ("dq", "dk", "dv") else self.element)

    @cached_property
    def sequence_arrays(self) -> tuple[str, ...]:
        """The arrays of a call that locate its sequences in q, k and v. A page table locates the keys by itself."""
        arrays = self.batch_layout.sequence_arrays
        return tuple(name for name in arrays if name == "cu_seqlens_q") if self.page_size else arrays

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arrays of rows that a call takes: q, k and v, or q and k where V is a part of K."""
        return ("q", "k") if self.shared_kv else ("q", "k", "v")

    @property
    def kv_columns(self) -> int:
        """The elements that a call reads for each key: those of K and V, or of K alone where V is a part of it."""
        return self.last_dim("k") + (0 if self.shared_kv else self.value_dim)

    def last_dim(self, name: str) -> int:
        """Returns the last dimension of q, k or v: a number of columns, or of the bytes of a record.

        Args:
            name: "q", "k" or "v".
        """
        if name == "v":
            return self.value_dim
        return self.kv_record.bytes if name == "k" and self.kv_record else self.head_dim

    @property
    def max_dim(self) -> int:
        """The larger of head_dim and value_dim."""
        return max(self.head_dim, self.value_dim)

    @property
    def widest(self) -> str:
        """The argument that is `max_dim`, for messages: "head_dim=512"."""
        name = "head_dim" if self.head_dim >= self.value_dim else "value_dim"
        return f"{name}={self.max_dim}"

    def array_layout(self, name: str) -> BatchLayout:
        """Returns the layout of q, k, v or the output; K and V may be in pages.

        Args:
            name: "q", "k", "v" or "o".
        """
        return PAGES if self.page_size and name in ("k", "v") else self.batch_layout

    def shard(self) -> AttentionSpec:
        """Returns the same variant with `sharded=True`, for calls on parts of q and k."""
        return AttentionSpec(**{field.name: getattr(self, field.name) for field in fields(self)} | {"sharded": True})

    @property
    def keep_threshold(self) -> int:
        """The threshold T of dropout: a weight is kept if its random byte is below T = round(256·(1 - dropout))."""
        return round(256 * (1 - self.dropout))

    @cached_property
    def digest(self) -> str:
        """The first 8 hex digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:8]

    @cached_property
    def name(self) -> str:
        """A readable name of the characters a-z 0-9 . _ -, for example bf16-d128-causal-softcap30-1a2b3c4d.

        It ends with the digest, which makes it unique.
        """
        dim = f"d{self.head_dim}" + ("" if self.value_dim == self.head_dim else f"v{self.value_dim}")
        parts = [self.element.short_name, dim, _slug(self.mask.name)]
        parts += [_slug(self.score.name)] if self.score else []
        parts += [f"dropout{self.dropout:g}"] if self.dropout else []
        parts += ["sink"] if self.sink else []
        parts += ["shard"] if self.sharded else []
        parts += ["sharedkv"] if self.shared_kv else []
        parts += self._changed_layout
        parts += [f"pages{self.page_size}"] if self.page_size else []
        parts += [(self.kv_record or self.kv_element).short_name] if self.kv_dtype else []
        parts += [f"o{self.out_element.short_name}"] if self.out_dtype else []
        parts += [f"g{self.grad_element.short_name}"] if self.grad_dtype else []
        return f"{'-'.join(parts)[:MAX_NAME].rstrip('-._')}-{self.digest}"

    @cached_property  # every call asks
    def of_cache(self) -> bool:
        """Whether k and v are paged or have 8 bits, so that only kernels for a KV cache can read them."""
        return bool(self.page_size or self.kv_dtype)

    @cached_property
    def _json(self) -> str:
        return fields_to_json({field.name: getattr(self, field.name) for field in fields(self)})

    def to_json(self) -> str:
        """Returns the canonical JSON: sorted keys, no spaces, the same text in every process."""
        return self._json

    @staticmethod
    def from_json(text: str) -> AttentionSpec:
        """Returns the spec of a JSON text, from `to_json` or written by hand.

        JSON written by hand may omit fields, and may give a mask or score as an expression such as
        "causal() & sliding_window(1024)".

        Args:
            text: the JSON.

        Raises:
            SpecError: The text does not describe a spec.
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
        parts += [f"layout={layout!r}" for layout in self._changed_layout]
        parts += [f"dropout={self.dropout!r}"] if self.dropout else []
        parts += [f"score={self.score}"] if self.score else []
        parts += [f"sink={self.sink}"] if self.sink else []
        parts += [f"{name}=True" for name in ("sharded", "shared_kv") if getattr(self, name)]
        pages = [f"page_size={self.page_size}"] if self.page_size else []
        types = [f"{name}={getattr(self, name)!r}" for name in TYPE_FIELDS if getattr(self, name)]
        return f"AttentionSpec({', '.join([*parts, f'mask={self.mask}', *pages, *types])})"


def _join_arrays(values: dict[str, Any]) -> Bound:
    """Returns the arrays of the mask and the score function, and renames captures where two arrays share a name."""
    mask, score = values["mask"], values["score"]
    if score is None or not (mask.bound or score.bound):
        return mask.bound
    mask_expression, score_expression, bound = merge_bound(mask.expression, mask.bound, score.expression, score.bound)
    values["mask"] = Mask(mask.name, mask_expression, _arrays_read(mask_expression, bound))
    values["score"] = Score(score.name, score_expression, _arrays_read(score_expression, bound))
    return bound


def _arrays_read(expression: Any, bound: Bound) -> Bound:
    return {capture.name: bound[capture.name] for capture in captures_of(expression) if capture.name in bound}


def _dimension(value: Any, argument: str, maximum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SpecError(f"{argument}={value!r} must be an integer, a multiple of 8 from 8 to {maximum}")
    if not 1 <= value <= maximum:
        raise SpecError(f"{argument}={value} must be from 8 to {maximum} {SEE_LIMITS}")
    if value % 8:
        raise SpecError(f"{argument}={value} must be a multiple of 8: {_padding_advice(int(value), argument)}")
    return int(value)


def _padding_advice(value: int, argument: str) -> str:
    """Returns the advice to pad with zeros, which add nothing to q·k."""
    larger = -(-value // 8) * 8
    if argument == "value_dim":
        return f"pad v with zeros to {larger}, and slice the output"
    return f"pad q and k with zeros to {larger}, and give scale={value}**-0.5"


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
    if not isinstance(value, str) or value not in BATCH_LAYOUTS:
        raise SpecError(
            f"layout={value!r} must be 'bhsd' (batch, heads, length, dim), 'bshd' (batch, length, heads, dim) or 'thd' "
            "(tokens, heads, dim; a varlen batch)"
        )
    return value


def _check_cache(values: dict[str, Any]) -> None:
    """Raises SpecError if page_size or kv_dtype cannot be combined with the other fields."""
    layout = BATCH_LAYOUTS[values["layout"]]
    if values["kv_dtype"] in KV_RECORDS:
        check_record(KV_RECORDS[values["kv_dtype"]], values)
        return
    if values["kv_dtype"] and not (values["page_size"] or layout.supports("contiguous 8-bit keys")):
        raise SpecError(
            f"kv_dtype={values['kv_dtype']!r} is not supported for layout={layout.name!r} without pages: declare "
            f"page_size=... {SEE_LIMITS}"
        )
    if values["shared_kv"] and values["value_dim"] > values["head_dim"]:
        raise SpecError(
            f"shared_kv=True: value_dim={values['value_dim']} must be at most head_dim={values['head_dim']}, as V is a "
            "part of K"
        )
    if values["shared_kv"] and values["kv_dtype"]:
        raise SpecError(
            f"shared_kv=True is not supported with kv_dtype={values['kv_dtype']!r}, only with {', '.join(KV_RECORDS)} "
            f"{SEE_LIMITS}"
        )
    for name in ("head_dim", "value_dim"):
        if values["kv_dtype"] and values[name] % CACHED_DIM:
            raise SpecError(f"{name}={values[name]} must be a multiple of {CACHED_DIM} with a kv_dtype {SEE_LIMITS}")


def _result_dtype(value: Any, dtype: str, argument: str) -> str | None:
    """Returns the type of a result that is not `dtype`, else None."""
    name = None if value is None else dtype_name(value, RESULTS, argument)
    if name not in (None, dtype, "float32"):
        raise SpecError(f"{argument}={name!r} is not supported with dtype={dtype!r}: give {dtype!r} or 'float32'")
    return None if name == dtype else name


def _flag(value: Any, argument: str) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise SpecError(f"{argument}={value!r} must be True or False")
    return bool(value)


def _shard_modifiers(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the mask and the score function of a sharded spec.

    Raises SpecError for layouts in which only the device knows the lengths.
    """
    if option := without_shards(values["layout"], values["page_size"]):
        raise SpecError(
            f"sharded=True is not supported with {option}={values[option]!r}, whose lengths only the device knows "
            f"{SEE_LIMITS}"
        )
    score = values["score"]
    return {"mask": shard_mask(values["mask"]), "score": shard_score(score) if score else None}


def without_shards(layout: str, page_size: int | None) -> str | None:
    """Returns the field of a spec whose value rules out shards, "layout" or "page_size"; None if neither does."""
    if not BATCH_LAYOUTS[layout].supports("shards"):
        return "layout"
    return "page_size" if page_size else None


def _page_size(value: Any) -> int:
    integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not integer or not 1 <= value <= MAX_PAGE_SIZE or value & (value - 1):
        raise SpecError(f"page_size={value!r} must be a power of 2 from 1 to {MAX_PAGE_SIZE}, or None for no pages")
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
    """Returns a mask's or score's name as part of a file name: "causal-and-sliding_window1024"."""
    for symbol, word in (("~", "not "), ("&", " and "), ("|", " or "), ("^", " xor ")):
        name = name.replace(symbol, word)
    name = re.sub(r"\w+=", "", name)
    name = re.sub(r"\((?=\d)", "", name)  # softcap(30) is softcap30
    return re.sub(r"[^a-z0-9._]+", "-", name.lower()).strip("-._")
