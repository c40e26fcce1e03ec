"""Runs a case's kernels on its calls: compares outputs and gradients with the reference, lists with brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashgen import attention
from flashgen.build import nvrtc
from flashgen.codegen.candidates import candidates
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError, BuildError
from flashgen.verify.random.covers import lie_of_map
from flashgen.verify.random.judging import Judged, complaint
from flashgen.verify.random.outcome import Counts, Found
from flashgen.verify.random.packed import Packed
from flashgen.verify.random.parted import Parted
from flashgen.verify.random.predicates import Checked
from flashgen.verify.random.recipe import Recipe
from flashgen.verify.random.sample import Sample
from flashgen.verify.random.serving import Cached
from flashgen.verify.random.standard import Unjudged
from flashgen.verify.variants import in_layout

if TYPE_CHECKING:
    from flashgen.attention import Attention
    from flashgen.codegen.plan import Plan
    from flashgen.language import AttentionSpec

DRAWS = 6  # of q, k and v are judged together before a failure is believed: the rule may fail by luck
_LONG = 2**20  # calls with so many scores a head or more are forward only
_MULTIPROCESSORS = 132
_REGISTERS = "Insufficient registers"  # ptxas's words where no allocation keeps to the cap


def check_kernels(recipe: Recipe, spec: AttentionSpec, checked: list[Checked], counts: Counts) -> None:
    """Compiles and calls. Raises Found, and whatever compiling and calling raise."""
    fixed = recipe.ragged or recipe.sharded or spec.of_cache or recipe.splits is not None
    plan = None if fixed else _plan(recipe, spec, checked)
    try:
        compiled: Any = attention.compile(
            _compiled_spec(recipe, spec),
            target=recipe.target,
            emulate=recipe.emulate,
            plan=plan,
            deterministic=recipe.deterministic,
            sanitize=recipe.sanitize,
            schedule=recipe.schedule,
        )
        compiled = _of_whole_calls(recipe, spec, compiled)
        if recipe.nvrtc and nvrtc.is_available():
            _compile_for_gpu(recipe, compiled, counts)
    except BuildError as error:
        if plan is None or _REGISTERS not in str(error):
            raise
        counts["plans that the assembler refuses"] += 1  # plans estimate their registers: tuning leaves these out
        return
    for each in checked:
        try:
            _check_call(recipe, compiled, each, counts)
        except Unjudged:
            counts["calls whose scores have no value"] += 1


def _compiled_spec(recipe: Recipe, spec: AttentionSpec) -> AttentionSpec:
    """The spec whose kernels the case runs."""
    return in_layout(spec, "thd") if recipe.ragged else spec.shard() if recipe.sharded else spec


def _of_whole_calls(recipe: Recipe, spec: AttentionSpec, compiled: Attention) -> Any:
    """What takes calls of the spec itself."""
    return Packed(spec, compiled) if recipe.ragged else Parted(spec, compiled) if recipe.sharded else compiled


def _compile_for_gpu(recipe: Recipe, compiled: Attention, counts: Counts) -> None:
    sources = compiled.sources | (compiled.backward_sources if "backward" in recipe.passes else {})
    for name, source in sources.items():
        nvrtc.compile(source, compiled.target.architecture, name)
        counts["kernels compiled by NVRTC"] += 1


def _plan(recipe: Recipe, spec: AttentionSpec, checked: list[Checked]) -> Plan | None:
    """The plan of the case, of those that tuning would time; None for the default, which may pack heads."""
    if recipe.plan == 0 or not checked:
        return None
    shape = checked[0].problem.shape
    workload = Workload(shape.len_q, shape.len_k, shape.batch * shape.heads_q, _MULTIPROCESSORS)
    plans = candidates(spec, target_named(str(recipe.target)), workload)
    return plans[recipe.plan % len(plans)]


def _check_call(recipe: Recipe, compiled: Attention, checked: Checked, counts: Counts) -> None:
    cached = compiled.spec.of_cache
    if not recipe.ragged and not recipe.sharded and not cached:
        _check_lists(compiled, checked, counts, "backward" in recipe.passes)
    of_call = Cached if cached else Sample
    first = of_call(recipe, compiled.spec, checked, checked.problem.seed)
    _ = first.expected.scores  # raises where attention has no value, before any call
    others = [of_call(recipe, compiled.spec, checked, checked.problem.seed + 1 + n) for n in range(DRAWS - 1)]
    _convinced("forward", [first, *others], lambda draw: draw.forward(compiled), recipe)
    what = "forward calls over a cache" if cached else "forward calls in parts" if recipe.sharded else "forward calls"
    counts[f"{what}{' under ' + recipe.sanitize if recipe.sanitize else ''}"] += 1
    first.check_oracle()
    sizes = checked.sizes
    if "backward" in recipe.passes and sizes.len_q * sizes.len_k < _LONG and first.has_gradients:
        first.check_oracles_gradients()
        _convinced("backward", [first, *others], lambda draw: draw.backward(compiled), recipe)
        _count_backward(recipe, checked, counts)
        if recipe.deterministic:
            first.check_deterministic(compiled)


def _count_backward(recipe: Recipe, checked: Checked, counts: Counts) -> None:
    """Counts a backward call that was judged: of all, of its target, and of those that have a size of 0."""
    counts[f"backward calls{' under ' + recipe.sanitize if recipe.sanitize else ''}"] += 1
    counts[f"backward calls of {recipe.target}"] += 1
    if 0 in checked.sizes:
        counts["backward calls of a size of 0"] += 1
        if recipe.sink:
            counts["backward calls of a size of 0 with sinks"] += 1


def _convinced(pass_: str, draws: list[Sample], run: Callable[[Sample], Judged], recipe: Recipe) -> None:
    """Raises Found where the first draw fails, alone and together with the others."""
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
            lists = None  # the ranges are closed forms
        for name in ("keys", "queries"):
            made = getattr(lists, name, None)
            if made is not None:
                maps[f"backward_tile_lists().{name}"] = made.tile_map()
    for name, tiles in maps.items():
        lie = lie_of_map(tiles, checked.allowed, sizes, of_keys=name != "backward_tile_lists().keys")
        if lie:
            raise Found("tiles", f"{name} at {checked.problem.shape}: {lie}")
        counts["maps and lists"] += 1
