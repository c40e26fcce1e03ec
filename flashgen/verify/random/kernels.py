"""The kernels of a case on its calls: outputs and gradients against the reference, lists against brute force."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

import flashgen.language as fg
from flashgen import attention, reference
from flashgen.build import nvrtc
from flashgen.codegen.candidates import Workload, candidates
from flashgen.codegen.targets import target_named
from flashgen.errors import ArgumentError
from flashgen.language import AttentionSpec, Mask
from flashgen.runtime.arrays import numpy_dtype
from flashgen.verify.gradients import gradients_by_name, poisoned_gradients, random_gradients, same_bits
from flashgen.verify.problems import Inputs, poisoned_outputs
from flashgen.verify.random.covers import lie_of_map
from flashgen.verify.random.judging import Judged, complaint
from flashgen.verify.random.meaning import Array
from flashgen.verify.random.outcome import Counts, Found
from flashgen.verify.random.predicates import Checked
from flashgen.verify.random.recipe import Recipe
from flashgen.verify.random.standard import Call, Unjudged

if TYPE_CHECKING:
    from flashgen.attention import Attention
    from flashgen.codegen.families import AnyForwardPlan

DRAWS = 6  # of q, k and v, judged together, before a failure of the rule is believed: it may fail by luck
_LONG = 2**20  # scores of a head from which on a call is forward only
_MAGNITUDES = {"normal": 1.0, "garbage": 1.0, "large": 8.0, "tiny": 1e-3, "huge": 1e15, "ones": 0.0, "zeros": 0.0}
_FIELDS = ("head_dim", "dtype", "value_dim", "scale", "layout", "dropout")
_MULTIPROCESSORS = 132
_DROPOUT = ("seed", "offset")
_ORACLE_ROUNDING = 1e-13  # of float64, relative to the largest score on the way


def check_kernels(recipe: Recipe, spec: AttentionSpec, checked: list[Checked], counts: Counts) -> None:
    """Compiles and calls. Raises Found, and whatever compiling and calling raise."""
    compiled = attention.compile(
        spec,
        target=recipe.target,
        emulate=recipe.emulate,
        plan=_plan(recipe, spec, checked),
        deterministic=recipe.deterministic,
        sanitize=recipe.sanitize,
        schedule=recipe.schedule,
    )
    if recipe.nvrtc and nvrtc.is_available():
        sources = compiled.sources | (compiled.backward_sources if "backward" in recipe.passes else {})
        for name, source in sources.items():
            nvrtc.compile(source, compiled.target.architecture, name)
            counts["kernels compiled by NVRTC"] += 1
    for each in checked:
        try:
            _check_call(recipe, compiled, each, counts)
        except Unjudged:
            counts["calls whose scores have no value"] += 1


def _plan(recipe: Recipe, spec: AttentionSpec, checked: list[Checked]) -> AnyForwardPlan | None:
    """The plan of the case, of those that tuning would time; None for the default, which may pack heads."""
    if recipe.plan == 0 or not checked:
        return None
    shape = checked[0].problem.shape
    workload = Workload(shape.len_q, shape.len_k, shape.batch * shape.heads_q, _MULTIPROCESSORS)
    plans = candidates(spec, target_named(str(recipe.target)), workload)
    return plans[recipe.plan % len(plans)]


def _check_call(recipe: Recipe, compiled: Attention, checked: Checked, counts: Counts) -> None:
    _check_lists(compiled, checked, counts, "backward" in recipe.passes)
    first = _Draw(recipe, compiled.spec, checked, checked.problem.seed)
    _ = first.expected.scores  # what has no value is not called for
    others = [_Draw(recipe, compiled.spec, checked, checked.problem.seed + 1 + n) for n in range(DRAWS - 1)]
    _convinced("forward", [first, *others], lambda draw: draw.forward(compiled), recipe)
    counts[f"forward calls{' under ' + recipe.sanitize if recipe.sanitize else ''}"] += 1
    first.check_oracle()
    sizes = checked.sizes
    if "backward" in recipe.passes and sizes.len_q * sizes.len_k < _LONG and not first.is_garbage:
        _convinced("backward", [first, *others], lambda draw: draw.backward(compiled), recipe)
        counts[f"backward calls{' under ' + recipe.sanitize if recipe.sanitize else ''}"] += 1
        if recipe.deterministic:
            first.check_deterministic(compiled)


def _convinced(pass_: str, draws: list[_Draw], run: Any, recipe: Recipe) -> None:
    """Raises Found where the first draw fails, and fails together with the others, too."""
    judged = [run(draws[0])]
    if complaint(judged, recipe.dtype) is None:
        return
    judged += [run(draw) for draw in draws[1:]]
    wrong = complaint(judged, recipe.dtype)
    if wrong:
        problem = draws[0].checked.problem
        raise Found("wrong", f"{pass_} at {problem.shape}, {problem.inputs} inputs, of {len(draws)} draws: {wrong}")


def _check_lists(compiled: Attention, checked: Checked, counts: Counts, backward: bool) -> None:
    """The lists that the device makes, forwards and backwards, and the map on the CPU for the plan's own tiles."""
    sizes, spec = checked.sizes, compiled.spec
    if 0 in sizes:
        return
    captures = {capture.name: checked.captures[capture.name] for capture in spec.mask.captures}
    places = (sizes.len_q, sizes.len_k, sizes.batch, sizes.heads)
    maps = {"tiles()": compiled.tiles(*places, **captures)}
    if len(compiled.kernels) > 1:
        maps["tile_lists()"] = compiled.tile_lists(*places, **captures).tile_map()
    if backward and sizes.len_q * sizes.len_k < _LONG:
        try:
            lists = compiled.backward_tile_lists(*places, **captures)
        except ArgumentError:
            lists = None  # closed forms
        for name in ("keys", "queries"):
            made = getattr(lists, name, None)
            if made is not None:
                maps[f"backward_tile_lists().{name}"] = made.tile_map()
    for name, tiles in maps.items():
        lie = lie_of_map(tiles, checked.allowed, sizes, of_keys=name != "backward_tile_lists().keys")
        if lie:
            raise Found("tiles", f"{name} at {checked.problem.shape}: {lie}")
        counts["maps and lists"] += 1


@dataclass(frozen=True, eq=False)
class _Draw:
    """One draw of q, k and v for a call."""

    recipe: Recipe
    spec: AttentionSpec
    checked: Checked
    seed: int

    @cached_property
    def inputs(self) -> Inputs:
        shape, spec = self.checked.problem.shape, self.spec
        random, way = np.random.default_rng(self.seed), self.checked.problem.inputs

        def array(name: str, heads: int, length: int, dim: int) -> Array:
            axes = (shape.batch, heads, length, dim) if spec.layout == "bhsd" else (shape.batch, length, heads, dim)
            values = random.standard_normal(axes, dtype=np.float32)
            if way == "ones" or (way == "zeros" and name == "q"):
                values = np.full(axes, float(way == "ones"), np.float32)
            elif way != "zeros" and (name != "v" or way == "tiny"):
                values *= np.float32(_MAGNITUDES[way])
            return values.astype(numpy_dtype(spec.dtype))

        q = array("q", shape.heads_q, shape.len_q, spec.head_dim)
        k = array("k", shape.heads_kv, shape.len_k, spec.head_dim)
        v = array("v", shape.heads_kv, shape.len_k, spec.value_dim)
        return Inputs(q, k, v, self.checked.captures)

    @property
    def is_garbage(self) -> bool:
        """Whether the kernel's V holds NaN, which rows with nothing to attend to must not see."""
        return self.checked.problem.inputs == "garbage"

    @cached_property
    def d_outs(self) -> tuple[Array, Array | None]:
        problem = self.checked.problem
        d_out, d_lse = random_gradients(self.spec, problem.shape, self.seed, problem.d_lse)
        scaled = (d_out.astype(np.float32) * np.float32(problem.gradient)).astype(d_out.dtype)
        return scaled, None if d_lse is None else d_lse * np.float32(problem.gradient)

    @property
    def options(self) -> dict[str, Any]:
        """What a call takes by keyword."""
        dropout: dict[str, Any] = {"seed": self.seed, "offset": self.seed % 7} if self.spec.dropout else {}
        read = {capture.name for capture in self.spec.captures}  # tracing drops what `full() | other` would read
        return dropout | {name: value for name, value in self.checked.captures.items() if name in read}

    @cached_property
    def expected(self) -> Call:
        inputs, recipe = self.inputs, self.recipe
        q, k, v = (self._heads_first(array) for array in (inputs.q, inputs.k, inputs.v))
        return Call(
            q,
            k,
            v,
            self.spec.scale,
            self.checked.allowed,
            recipe.score,
            self.checked.captures,
            recipe.declared,
            (self.spec.dropout, self.seed, self.seed % 7),
        )

    def _heads_first(self, array: Array) -> Array:
        return (array if self.spec.layout == "bhsd" else array.swapaxes(1, 2)).astype(np.float64)

    @cached_property
    def _low(self) -> tuple[AttentionSpec, dict[str, Any]]:
        """The spec with its mask given as an array, and its captures: for the rule's low precision, which then has
        this reference's mask and nobody else's."""
        truth = fg.Tensor("truth_of_mask", "bool", 4)
        mask: Mask = fg.trace_mask(lambda b, h, q, k: truth[b, h, q, k], "truth")
        spec = AttentionSpec(**{name: getattr(self.spec, name) for name in _FIELDS}, score=self.spec.score, mask=mask)
        given = {name: value for name, value in self.options.items() if name in {c.name for c in spec.captures}}
        dropout: dict[str, Any] = {name: self.options[name] for name in _DROPOUT if name in self.options}
        allowed = np.ascontiguousarray(self.checked.allowed)
        return spec, {**given, **dropout, "truth_of_mask": allowed if allowed.size else np.zeros((1,) * 4, np.bool_)}

    def forward(self, compiled: Attention) -> Judged:
        """The output and its LSE, of a call into arrays full of NaN."""
        inputs, expected = self.inputs, self.expected
        into = poisoned_outputs(self.spec, inputs.q, inputs.v)
        v = np.full_like(inputs.v, np.nan) if self.is_garbage else inputs.v
        out, lse = compiled(inputs.q, inputs.k, v, return_lse=True, out=into, **self.options)
        spec, given = self._low
        low = self._heads_first(reference.low_precision(spec, inputs.q, inputs.k, inputs.v, **given))
        found = {"out": self._heads_first(out), "lse": lse}
        if self.is_garbage:  # of which only rows that attend to nothing are promised something
            found["out"] = np.where(expected.lse[..., None] == -np.inf, found["out"], expected.out)
        return self._judged(found, {"out": expected.out, "lse": expected.lse}, {"out": low, "lse": expected.lse})

    def backward(self, compiled: Attention) -> Judged:
        """The gradients of a call into arrays full of NaN, given the reference's output and LSE."""
        spec, given = self._low
        d_out, d_lse = self.d_outs
        inputs = self.inputs
        low = reference.low_precision_backward(spec, inputs.q, inputs.k, inputs.v, d_out, d_lse=d_lse, **given)
        gradients = self.expected.gradients(self._heads_first(d_out), d_lse)
        expected = {name: array / self.checked.problem.gradient for name, array in gradients.items()}
        return self._judged(self._by_name(self._gradients(compiled)), expected, self._by_name(gradients_by_name(low)))

    def _gradients(self, compiled: Attention) -> dict[str, Array]:
        inputs, (d_out, d_lse) = self.inputs, self.d_outs
        out = self.expected.out if self.spec.layout == "bhsd" else self.expected.out.swapaxes(1, 2)
        out = np.ascontiguousarray(out).astype(inputs.q.dtype)
        lse = np.ascontiguousarray(self.expected.lse).astype(np.float32)
        into = poisoned_gradients(self.spec, inputs)
        given = {"d_lse": d_lse, "into": into, **self.options}
        return gradients_by_name(compiled.backward(d_out, inputs.q, inputs.k, inputs.v, out, lse, **given))

    def _by_name(self, gradients: Mapping[str, Array]) -> dict[str, Array]:
        """Gradients by name, those of q, k and v with heads before lengths, as they would be of gradients around 1."""
        wide = {
            name: self._heads_first(array) if name in ("dq", "dk", "dv") else np.asarray(array).astype(np.float64)
            for name, array in gradients.items()
        }
        return {name: array / self.checked.problem.gradient for name, array in wide.items()}

    def _judged(self, found: Any, expected: Any, low: Any) -> Judged:
        score, factor = self.recipe.score, 256 / self.spec.keep_threshold
        fast = any(part.op == "fast_tanh" or "fast" in part.args for part in score.walk()) if score else False
        largest_value = float(np.abs(self.expected.v).max(initial=0)) * factor
        return Judged(found, expected, low, self.expected.largest, largest_value, fast)

    def check_deterministic(self, compiled: Attention) -> None:
        """Raises Found where a second run gives other bits."""
        first, second = self._gradients(compiled), self._gradients(compiled)
        differing = [name for name in first if not same_bits(first[name], second[name])]
        if differing:
            raise Found("not deterministic", f"{', '.join(differing)} at {self.checked.problem.shape}")

    def check_oracle(self) -> None:
        """Raises Found where `flashgen.reference` and this reference differ by more than float64's rounding."""
        inputs, spec = self.inputs, self.spec
        out, lse = reference.attention(spec, inputs.q, inputs.k, inputs.v, return_lse=True, **self.options)
        allowance = 1e-8 + _ORACLE_ROUNDING * self.expected.largest * max(
            1.0, float(np.abs(self.expected.v).max(initial=0))
        )
        if allowance > 1e-3:
            return  # the scores are too large for float64 to say
        for name, theirs, ours in (
            ("out", self._heads_first(out), self.expected.out),
            ("lse", lse, self.expected.lse),
        ):
            with np.errstate(invalid="ignore"):
                error = np.where(theirs == ours, 0.0, np.abs(theirs - ours))
            if not (error <= allowance * (256 / spec.keep_threshold)).all():
                raise Found("oracle", f"{name} at {self.checked.problem.shape} differs by {np.nanmax(error):.2e}")
