"""Makes a failing case small: tries ever simpler ones, and gives the last that still fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from flashgen.verify.problems import Shape
from flashgen.verify.random.outcome import Outcome
from flashgen.verify.random.recipe import Problem, Recipe
from flashgen.verify.random.terms import Declarations, Term, captures_of, kind_of
from flashgen.verify.random.values import Fill

Attempt = Callable[[Recipe], Outcome]


def shrunk(recipe: Recipe, outcome: Outcome, attempt: Attempt, seconds: float) -> tuple[Recipe, Outcome]:
    """The smallest case found in the time, and its outcome, of the same kind as the given one.

    It is greedy: the first simpler case that fails alike is simplified further. It ends, as each case is smaller by
    `weight` than the one before.
    """
    deadline = time.monotonic() + seconds
    wanted = _signature(outcome)
    improved = True
    while improved:
        improved = False
        for candidate in simpler(recipe):
            if time.monotonic() >= deadline:
                return recipe, outcome
            candidate = candidate.tidied()
            if weight(candidate) >= weight(recipe):
                continue
            tried = attempt(candidate)
            if tried.status == "found" and _signature(tried) == wanted:
                recipe, outcome, improved = candidate, tried, True
                break
    return recipe, outcome


def _signature(outcome: Outcome) -> tuple[str, str]:
    """What must not change: the kind, and the pass of a wrong result or the class of an exception."""
    if outcome.kind == "wrong":
        return outcome.kind, outcome.message.partition(" ")[0]
    if outcome.kind in ("raised", "refused call"):
        return outcome.kind, outcome.message.strip().splitlines()[-1].partition(":")[0]
    return outcome.kind, ""


def weight(recipe: Recipe) -> tuple[int, ...]:
    """How large a case is: operations first, then options, then sizes and numbers."""
    terms = [term for term in (recipe.mask, recipe.score) if term is not None]
    operations = sum(1 for term in terms for _ in term.walk())
    plain = Recipe(recipe.mask, recipe.score, {}, (), target=_PLAIN_TARGET)
    options = sum(getattr(recipe, name) != getattr(plain, name) for name in _OPTIONS)
    sizes = sum(_weight_of_call(problem) for problem in recipe.problems)
    literals = sum(abs(part.args[0]) for term in terms for part in term.walk() if part.op == "int")
    return len(recipe.problems), operations, options + len(recipe.passes), sizes, literals


def _weight_of_call(problem: Problem) -> int:
    shape = problem.shape
    elements = shape.len_q + shape.len_k + 100 * (shape.batch + shape.heads_q + shape.heads_kv)
    values = sum(
        1000 * (value.way != "few") + (value.view != "plain") + sum(value.shape)
        if isinstance(value, Fill)
        else min(1000, int(abs(value)).bit_length() if abs(value) < float("inf") else 1000)
        for value in problem.values.values()
    )
    return elements + values + 10 * (problem.inputs != "normal") + problem.d_lse + (problem.gradient != 1)


_PLAIN_TARGET = "sm_80"
_OPTIONS = (
    *("head_dim", "value_dim", "dtype", "scale", "layout", "dropout", "target", "deterministic", "sanitize"),
    *("schedule", "nvrtc", "plan", "ragged", "sharded", "page_size", "kv_dtype", "splits", "sink"),
)


def simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Cases with one thing less, the largest things first."""
    if len(recipe.problems) > 1:
        yield from (replace(recipe, problems=(problem,)) for problem in recipe.problems)
    yield from _without_options(recipe)
    for term in _simpler_terms(recipe.mask, recipe.declared):
        yield replace(recipe, mask=term)
    if recipe.score is not None:
        for term in _simpler_terms(recipe.score, recipe.declared):
            yield replace(recipe, score=term)
    bound = set(_bound(recipe))
    for number, problem in enumerate(recipe.problems):
        for smaller in _simpler_calls(problem, bound):
            problems = (*recipe.problems[:number], smaller, *recipe.problems[number + 1 :])
            yield replace(recipe, problems=problems)


def _without_options(recipe: Recipe) -> Iterator[Recipe]:
    if recipe.passes:
        yield replace(recipe, passes=())
    if len(recipe.passes) > 1:
        yield replace(recipe, passes=("forward",))
    if recipe.score is not None:
        yield replace(recipe, score=None)
    yield replace(recipe, mask=Term("full"))
    plain = Recipe(recipe.mask, recipe.score, {}, (), target=_PLAIN_TARGET)
    for name in _OPTIONS:
        if getattr(recipe, name) != getattr(plain, name):
            changed: Any = {name: getattr(plain, name)}
            yield replace(recipe, **changed)


def _simpler_terms(term: Term, declared: Declarations) -> Iterator[Term]:
    """The term with one part replaced by a part of it, or by something plain of the same kind."""
    kind = kind_of(term, declared)
    for operand in term.terms:
        if kind_of(operand, declared) == kind:
            yield operand
    if any(True for _ in term.terms):
        yield from _PLAIN[kind]
    elif term.op == "int":
        yield from (Term("int", (value,)) for value in {0, 1, term.args[0] // 2} if abs(value) < abs(term.args[0]))
    for number, operand in enumerate(term.args):
        if isinstance(operand, Term):
            for part in _simpler_terms(operand, declared):
                yield replace(term, args=(*term.args[:number], part, *term.args[number + 1 :]))


_PLAIN = {
    "bool": (Term("full"),),
    "int": (Term("q"), Term("k"), Term("int", (0,)), Term("int", (1,))),
    "float": (Term("score"), Term("float", (1.0,))),
}


def _bound(recipe: Recipe) -> Iterator[str]:
    """Captures that a named mask or score reads, whose documentation allows certain values alone."""
    for term in (recipe.mask, recipe.score):
        for part in term.walk() if term is not None else ():
            if part.op in ("dilated_window", "softcap", "relative_bias"):
                yield from captures_of(part)


def _simpler_calls(problem: Problem, bound: set[str]) -> Iterator[Problem]:
    """Calls with smaller sizes and plainer values; captures in `bound` keep theirs."""
    shape = problem.shape
    for smaller in (
        replace(shape, batch=1),
        replace(shape, heads_q=1, heads_kv=1),
        replace(shape, heads_kv=shape.heads_q),
        *_shorter(shape),
    ):
        yield replace(problem, shape=smaller)
    yield replace(problem, inputs="normal")
    yield replace(problem, d_lse=False)
    yield replace(problem, gradient=1.0)
    for name, value in problem.values.items():
        if name in bound:
            continue
        for plain in _simpler_values(value):
            yield replace(problem, values={**problem.values, name: plain})


def _shorter(shape: Shape) -> Iterator[Shape]:
    for cut in (lambda length: length // 2, lambda length: length - length // 8, lambda length: length - 1):
        if shape.len_q == shape.len_k and shape.len_q > 1:
            yield replace(shape, len_q=cut(shape.len_q), len_k=cut(shape.len_k))
        if shape.len_q > 1:
            yield replace(shape, len_q=cut(shape.len_q))
        if shape.len_k > 1:
            yield replace(shape, len_k=cut(shape.len_k))


def _simpler_values(value: int | float | Fill) -> Iterator[int | float | Fill]:
    if isinstance(value, Fill):
        yield replace(value, view="plain")
        yield replace(value, way="few")
        if len(value.shape) == 1:
            yield replace(value, shape=(max(1, value.shape[0] // 2),))
    elif isinstance(value, int):
        yield from (plain for plain in (0, 1, value // 2) if abs(plain) < abs(value))
