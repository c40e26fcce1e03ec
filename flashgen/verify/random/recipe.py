"""A whole random case: the variant, its target, and the calls that check it; as JSON too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import flashgen.language as fg
from flashgen.codegen.stages import Pass
from flashgen.errors import SpecError
from flashgen.language import AttentionSpec
from flashgen.runtime.schedule import Schedule
from flashgen.verify.problems import Shape
from flashgen.verify.random.terms import Declared, Term, captures_of, from_data, text_of, to_data
from flashgen.verify.random.tracing import mask_of, score_of
from flashgen.verify.random.values import Fill

SINKS = "sinks"  # the name of the sinks' capture, which the grammar gives to none
Inputs = Literal["normal", "large", "tiny", "huge", "ones", "zeros", "garbage", "padding"]


@dataclass(frozen=True)
class Problem:
    """One call: sizes, values of captures, how q, k and v are drawn, whether the LSE has a gradient too, and a factor
    of the gradients of both."""

    shape: Shape
    values: Mapping[str, int | float | Fill]
    inputs: Inputs = "normal"
    seed: int = 0
    d_lse: bool = False
    gradient: float = 1.0


@dataclass(frozen=True)
class Recipe:
    """A case. Without `passes` it checks predicates alone. `nvrtc`: the GPU's compiler sees the kernels' text too.

    plan: the place of the forward's plan among those that tuning would time; the default's is 0. ragged: kernels are
    those of layout "thd", of the same sequences packed. sharded: they are those of shards, and calls are in parts.
    page_size, kv_dtype: k and v are pages, of lengths that differ, or of 8 bits. splits: the decode kernel, with the
    keys in so many parts. sink: a score for each head that has no value.
    """

    mask: Term
    score: Term | None
    declared: Mapping[str, Declared]
    problems: tuple[Problem, ...]
    head_dim: int = 32
    value_dim: int = 32
    dtype: str = "float16"
    scale: float | None = None
    layout: str = "bhsd"
    dropout: float = 0.0
    target: str | None = None
    passes: tuple[Pass, ...] = ("forward",)
    deterministic: bool = False
    emulate: bool = True
    sanitize: Literal["address", "thread"] | None = None
    schedule: Schedule | None = None
    nvrtc: bool = False
    plan: int = 0
    ragged: bool = False
    sharded: bool = False
    page_size: int | None = None
    kv_dtype: str | None = None
    splits: int | None = None
    sink: bool = False

    def spec(self) -> AttentionSpec:
        """The spec, traced. Raises SpecError where the language refuses it."""
        return AttentionSpec(
            head_dim=self.head_dim,
            dtype=self.dtype,
            value_dim=self.value_dim,
            scale=self.scale,
            layout="bshd" if self.ragged else self.layout,  # in which sequences stand as they do where packed
            dropout=self.dropout,
            score=score_of(self.score, self.declared) if self.score else None,
            mask=mask_of(self.mask, self.declared),
            page_size=self.page_size,
            kv_dtype=self.kv_dtype,
            sink=fg.Tensor(SINKS, "float32", 1, grad="backward" in self.passes) if self.sink else None,
        )

    def tidied(self) -> Recipe:
        """The case without the captures that nothing reads any more."""
        read = captures_of(self.mask, self.score)
        kept = {name: each for name, each in self.declared.items() if name in read}
        problems = tuple(
            replace(problem, values={name: value for name, value in problem.values.items() if name in read})
            for problem in self.problems
        )
        return replace(self, declared=kept, problems=problems)

    def to_json(self) -> str:
        """One line of JSON, which `from_json` reads."""
        data = asdict(replace(self, mask=None, score=None, declared={}, problems=()))  # type: ignore[arg-type]
        data["mask"] = to_data(self.mask)
        data["score"] = to_data(self.score) if self.score else None
        data["declared"] = {name: [each.dtype, each.ndim, each.grad] for name, each in self.declared.items()}
        data["problems"] = [_problem_to_data(problem) for problem in self.problems]
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The case of `to_json`'s text. SpecError for anything else."""
        try:
            data = json.loads(text)
            data["mask"] = from_data(data["mask"])
            data["score"] = from_data(data["score"]) if data["score"] else None
            data["declared"] = {name: Declared(*each) for name, each in data["declared"].items()}
            data["problems"] = tuple(_problem_from_data(each) for each in data["problems"])
            data["passes"] = tuple(data["passes"])
            data["schedule"] = Schedule(**data["schedule"]) if data["schedule"] else None
            return Recipe(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"no random case: {error}; give what `flashgen verify --random` printed") from None

    def __str__(self) -> str:
        """A few lines of Python and words, for a person."""
        lines = [f"{name} = {each.declaration(name)}" for name, each in self.declared.items()]
        lines += [f"mask = lambda b, h, q, k: {text_of(self.mask)}"]
        lines += [f"score = lambda score, b, h, q, k: {text_of(self.score)}"] if self.score else []
        fields = (
            *("head_dim", "value_dim", "dtype", "scale", "layout", "dropout", "ragged", "sharded"),
            *("page_size", "kv_dtype", "splits", "sink"),
        )
        plain = Recipe(self.mask, None, {}, ())
        shown = [f"{name}={getattr(self, name)!r}" for name in fields if getattr(self, name) != getattr(plain, name)]
        lines += [f"spec: {', '.join(shown)}"] if shown else []
        return "\n".join([*lines, *(_shown(problem) for problem in self.problems)])


def _shown(problem: Problem) -> str:
    values = [
        f"{name}={value.way} {'x'.join(map(str, value.shape))}" if isinstance(value, Fill) else f"{name}={value!r}"
        for name, value in problem.values.items()
    ]
    values += [f"gradients times {problem.gradient:g}"] if problem.gradient != 1 else []
    return f"call: {problem.shape}, {problem.inputs} inputs{''.join(f', {each}' for each in values)}"


def _problem_to_data(problem: Problem) -> dict[str, Any]:
    values = {
        name: [value.way, list(value.shape), value.seed, value.view] if isinstance(value, Fill) else value
        for name, value in problem.values.items()
    }
    return {
        "shape": asdict(problem.shape),
        "values": values,
        "inputs": problem.inputs,
        "seed": problem.seed,
        "d_lse": problem.d_lse,
        "gradient": problem.gradient,
    }


def _problem_from_data(data: dict[str, Any]) -> Problem:
    values = {
        name: Fill(value[0], tuple(value[1]), *value[2:]) if isinstance(value, list) else value
        for name, value in data["values"].items()
    }
    return Problem(Shape(**data["shape"]), values, data["inputs"], data["seed"], data["d_lse"], data["gradient"])
