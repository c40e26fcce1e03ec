"""Checks the names and types of captures, for declarations in Python and in JSON."""

from __future__ import annotations

import keyword
from typing import Any

from flashgen.dtypes import CAPTURES, SCALARS, dtype_name
from flashgen.errors import SpecError
from flashgen.language.operations import Capture

MAX_NDIM = 8

# Keyword arguments of calls, fields of the kernels' argument structs, and the names of the traced indices.
# fmt: off
RESERVED = frozenset({
    "b", "h", "q", "k", "v", "score", "len_q", "len_k", "batch", "heads", "seed", "offset", "return_lse", "out",
    "lse", "dout", "dq", "dk", "dv", "on_chip", "stream", "spec", "target", "emulate", "self",
    "tile_lists", "d_out", "d_lse", "into", "num_splits", "page_table", "seqused_k", "k_scale", "v_scale",
    "shard_b", "shard_h", "shard_q", "shard_k", "whole_q", "whole_k", "decode_schedule", "deterministic",
})
CPLUSPLUS_KEYWORDS = frozenset({
    "alignas", "alignof", "and", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "break", "case", "catch",
    "char", "char8_t", "char16_t", "char32_t", "class", "compl", "concept", "const", "const_cast", "consteval",
    "constexpr", "constinit", "continue", "co_await", "co_return", "co_yield", "decltype", "default", "delete",
    "do", "double", "dynamic_cast", "else", "enum", "explicit", "export", "extern", "false", "float", "for",
    "friend", "goto", "if", "inline", "int", "long", "mutable", "namespace", "new", "noexcept", "not", "not_eq",
    "nullptr", "operator", "or", "or_eq", "private", "protected", "public", "register", "reinterpret_cast",
    "requires", "return", "short", "signed", "sizeof", "static", "static_assert", "static_cast", "struct", "switch",
    "template", "this", "thread_local", "throw", "true", "try", "typedef", "typeid", "typename", "union",
    "unsigned", "using", "virtual", "void", "volatile", "wchar_t", "while", "xor", "xor_eq",
})
# fmt: on


def check_name(name: Any) -> str:
    """Returns the name of a capture. Raises SpecError for names that C++ or Python reserve or that calls use."""
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii() or len(name) > 64:
        raise SpecError(f"capture name {name!r} must be an ASCII identifier of at most 64 characters, e.g. 'slopes'")
    if name.startswith("_") or "__" in name:
        raise SpecError(f"capture name {name!r}: leading and double underscores are reserved in C++; use another name")
    if name in CPLUSPLUS_KEYWORDS or keyword.iskeyword(name):
        raise SpecError(f"capture name {name!r} is a keyword of C++ or Python; use another name, e.g. '{name}_table'")
    if name in RESERVED:
        raise SpecError(
            f"capture name {name!r} already names an argument or an index; use another, e.g. '{name}_table'"
        )
    return name


def array_capture(name: Any, dtype: Any, ndim: Any, grad: Any) -> Capture:
    """Returns the capture of an array. Raises SpecError, naming the argument, for an unsupported declaration."""
    check_name(name)
    kind = dtype_name(dtype, CAPTURES, f"Tensor({name!r}): dtype")
    if isinstance(ndim, bool) or not isinstance(ndim, int) or not 1 <= ndim <= MAX_NDIM:
        raise SpecError(
            f"Tensor({name!r}): ndim={ndim!r} must be an integer from 1 to {MAX_NDIM}; Scalar is for numbers"
        )
    if grad and "float" not in kind:
        raise SpecError(f"Tensor({name!r}): grad=True needs a floating dtype, got {kind}")
    return Capture(name, kind, ndim, bool(grad))


def number_capture(name: Any, dtype: Any) -> Capture:
    """Returns the capture of a number. Raises SpecError, naming the argument, for an unsupported declaration."""
    check_name(name)
    return Capture(name, dtype_name(dtype, SCALARS, f"Scalar({name!r}): dtype"), 0, False)
