"""What fails is made small, and stays a failure of the same kind."""

from __future__ import annotations

from dataclasses import replace

from flashgen.verify.random import Options, Outcome, Recipe, recipe_of
from flashgen.verify.random.shrink import shrunk, simpler, weight
from flashgen.verify.random.terms import Term


def divides(recipe: Recipe) -> Outcome:
    """As though every division of floats failed, and only forwards."""
    found = any(part.op == "/" for part in recipe.mask.walk()) and recipe.passes
    return Outcome("found", "wrong", "forward at ...") if found else Outcome("passed")


def failing() -> Recipe:
    recipes = (recipe_of(seed, Options()) for seed in range(2000))
    large = (r for r in recipes if divides(r).status == "found" and sum(1 for _ in r.mask.walk()) > 12 and r.score)
    return next(large)


def test_the_smallest_is_found() -> None:
    recipe = failing()
    small, outcome = shrunk(recipe, divides(recipe), divides, seconds=60)
    assert outcome.status == "found" and divides(small).status == "found"
    assert sum(1 for _ in small.mask.walk()) <= 5, str(small)  # a comparison of a quotient of two leaves
    assert small.score is None and small.passes == ("forward",) and len(small.problems) == 1
    shape = small.problems[0].shape
    assert max(shape.len_q, shape.len_k, shape.batch, shape.heads_q, shape.heads_kv) == 1
    assert (small.head_dim, small.value_dim, small.target, small.sanitize, small.dropout) == (
        32,
        32,
        "sm_80",
        None,
        0.0,
    )
    small.spec()


def test_another_kind_of_failure_is_not_taken() -> None:
    recipe = failing()

    def attempt(candidate: Recipe) -> Outcome:
        same = divides(candidate)
        return same if same.status == "found" else Outcome("found", "crash", "another")

    small, outcome = shrunk(recipe, divides(recipe), attempt, seconds=60)
    assert outcome.kind == "wrong" and divides(small).status == "found"


def test_what_fails_only_as_it_is_stays() -> None:
    recipe = recipe_of(8, Options())
    found = Outcome("found", "tiles", "lie")
    assert shrunk(recipe, found, lambda candidate: Outcome("passed"), seconds=30) == (recipe, found)


def test_candidates_that_are_taken_are_smaller() -> None:
    """So that shrinking ends."""
    recipe = recipe_of(12, Options())
    assert any(weight(candidate) < weight(recipe) for candidate in simpler(recipe))
    assert weight(replace(recipe, mask=Term("full"))) < weight(recipe)


def test_the_time_is_kept() -> None:
    recipe = failing()
    assert shrunk(recipe, divides(recipe), divides, seconds=0) == (recipe, divides(recipe))
