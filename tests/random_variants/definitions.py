"""Named masks and scores in terms of the operations of the language, as their docstrings define them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from random_variants.terms import INDICES, Term, integer

NDims = Callable[[str], int]  # the number of axes of a capture, by its name

_B, _H, _Q, _K = map(Term, INDICES)
_DISTANCE = Term("-", _K, _Q)


def definition(term: Term, ndim_of: NDims) -> Term | None:
    """What a named mask or score means; None for any other term, and for softcap, which `meaning` knows."""
    defined = _DEFINITIONS.get(term.op)
    return defined(ndim_of, *term.args) if defined else None


def walk_defined(term: Term, ndim_of: NDims) -> Iterator[Term]:
    """The term and all below it, with the definitions of named masks and scores in their places."""
    term = definition(term, ndim_of) or term
    yield term
    for operand in term.terms:
        yield from walk_defined(operand, ndim_of)


def _load(ndim_of: NDims, name: str, *indices: Term) -> Term:
    """A load by the last of these indices, one for each axis of the capture."""
    return Term("load", name, *indices[-ndim_of(name) :])


def _position(align: str) -> Term:
    return Term("+", _Q, Term("-", Term("len_k"), Term("len_q"))) if align == "bottom_right" else _Q


def _causal(_: NDims, align: str) -> Term:
    return Term("<=", _K, _position(align))


def _sliding_window(_: NDims, left: Term, right: Term, align: str) -> Term:
    q = _position(align)
    return Term("and", Term("<=", Term("-", q, left), _K), Term("<=", _K, Term("+", q, right)))


def _dilated_window(_: NDims, window: Term, dilation: Term, align: str) -> Term:
    distance = Term("-", _position(align), _K)
    multiple = Term("==", Term("%", distance, dilation), integer(0))
    return Term("and", Term("<=", Term("abs", distance), window), multiple)


def _prefix_lm(ndim_of: NDims, prefix: Term | str, align: str) -> Term:
    length = _load(ndim_of, prefix, _B) if isinstance(prefix, str) else prefix
    return Term("or", Term("<", _K, length), _causal(ndim_of, align))


def _block_sparse(ndim_of: NDims, layout: str, block_q: Term, block_k: Term) -> Term:
    blocks = Term("//", _Q, block_q), Term("//", _K, block_k)
    return Term("!=", _load(ndim_of, layout, _B, _H, *blocks), integer(0))


def _alibi(_: NDims, inner: Term, heads: Term) -> Term:
    slope = Term("exp2", Term("/", Term("*", integer(-8), Term("+", _H, integer(1))), heads))
    return Term("+", inner, Term("*", slope, _DISTANCE))


def _relative_bias(ndim_of: NDims, inner: Term, table: str, distance: Term) -> Term:
    clamped = Term("min", Term("max", _DISTANCE, Term("neg", distance)), distance)
    return Term("+", inner, _load(ndim_of, table, _H, Term("+", clamped, distance)))


_DEFINITIONS: dict[str, Callable[..., Term]] = {
    "full": lambda _: Term("bool", True),
    "causal": _causal,
    "sliding_window": _sliding_window,
    "dilated_window": _dilated_window,
    "prefix_lm": _prefix_lm,
    "document": lambda n, ids: Term("==", _load(n, ids, _B, _Q), _load(n, ids, _B, _K)),
    "block_sparse": _block_sparse,
    "alibi": _alibi,
    "alibi_table": lambda n, slopes, inner: Term("+", inner, Term("*", _load(n, slopes, _B, _H), _DISTANCE)),
    "relative_bias": _relative_bias,
}
