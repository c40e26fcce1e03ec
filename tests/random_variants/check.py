"""Checks a case: its predicates against brute force, outputs and gradients of its kernels against the reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flashgen import attention
from flashgen.attention import compiling
from flashgen.build import nvrtc
from flashgen.codegen.candidates import candidates
from flashgen.codegen.targets import target_named
from flashgen.codegen.workload import Workload
from flashgen.errors import ArgumentError, BuildError, SpecError, UnsupportedError
from flashgen.verify.variants import in_layout
from random_variants.cases import Case
from random_variants.covers import mistake_in_map
from random_variants.judging import Judged, complaint
from random_variants.predicates import Checked, Found, check_predicates
from random_variants.samples import Sample
from random_variants.serving import Cached
from random_variants.sharded import Sharded
from random_variants.standard import Unjudged
from random_variants.varlen import Varlen

if TYPE_CHECKING:
    from flashgen.attention import Attention
    from flashgen.codegen.plan import Plan
    from flashgen.language import AttentionSpec

DRAWS = 6  # of q, k and v are judged together before a failure is believed: the rule may fail by luck
_LONG = 2**20  # calls with so many scores a head or more are forward only
_MULTIPROCESSORS = 132
_REGISTERS = "Insufficient registers"  # what ptxas says where no allocation keeps to the limit


def check(case: Case) -> Counter[str]:
    """How much was checked, by name. Raises Found, or what compiling and calling raise.

    A spec that the language or the target refuses by name is no failure, but counted.
    """
    counts: Counter[str] = Counter()
    try:
        spec = case.spec()
        checked = check_predicates(case, spec, counts)
        if case.passes:
            _check_kernels(case, spec, checked, counts)
    except (SpecError, UnsupportedError) as refusal:
        counts[f"refused by {type(refusal).__name__}"] += 1
    finally:
        compiling.clear()  # no case finds the kernels of another one
    return counts


def _check_kernels(case: Case, spec: AttentionSpec, checked: list[Checked], counts: Counter[str]) -> None:
    fixed = case.varlen or case.sharded or spec.of_cache or case.splits is not None
    plan = None if fixed else _plan(case, spec, checked)
    try:
        compiled: Any = attention.compile(
            in_layout(spec, "thd") if case.varlen else spec.shard() if case.sharded else spec,
            target=case.target,
            emulate=case.emulate,
            plan=plan,
            deterministic=case.deterministic,
            sanitize=case.sanitize,
            schedule=case.schedule,
        )
        if case.varlen or case.sharded:
            compiled = (Varlen if case.varlen else Sharded)(spec, compiled)
        if case.nvrtc and nvrtc.is_available():
            _compile_for_gpu(case, compiled, counts)
    except BuildError as error:
        if plan is None or _REGISTERS not in str(error):
            raise
        counts["plans that the assembler refuses"] += 1  # plans estimate their registers: tuning leaves these out
        return
    for each in checked:
        try:
            _check_call(case, compiled, each, counts)
        except Unjudged:
            counts["calls whose scores have no value"] += 1


def _compile_for_gpu(case: Case, compiled: Attention, counts: Counter[str]) -> None:
    sources = compiled.sources | (compiled.backward_sources if "backward" in case.passes else {})
    for name, source in sources.items():
        nvrtc.compile(source, compiled.target.architecture, name)
        counts["kernels compiled by NVRTC"] += 1


def _plan(case: Case, spec: AttentionSpec, checked: list[Checked]) -> Plan | None:
    """The plan of the case among those that tuning would time; None for the default, which may pack heads."""
    if case.plan == 0 or not checked:
        return None
    shape = checked[0].problem.shape
    workload = Workload(shape.len_q, shape.len_k, shape.batch * shape.heads_q, _MULTIPROCESSORS)
    plans = candidates(spec, target_named(str(case.target)), workload)
    return plans[case.plan % len(plans)]


def _check_call(case: Case, compiled: Attention, checked: Checked, counts: Counter[str]) -> None:
    cached, sizes = compiled.spec.of_cache, checked.sizes
    if not case.varlen and not case.sharded and not cached and 0 not in sizes:
        _check_lists(compiled, checked, counts, "backward" in case.passes)
    seed, kind = checked.problem.seed, Cached if cached else Sample
    first, *others = [kind(case, compiled.spec, checked, seed + n) for n in range(DRAWS)]
    _ = first.expected.scores  # raises where attention has no value, before any call
    under = f" under {case.sanitize}" if case.sanitize else ""
    _judge("forward", [first, *others], lambda draw: draw.forward(compiled))
    counts[f"forward calls{' over a cache' if cached else ' in shards' if case.sharded else ''}{under}"] += 1
    first.check_oracle()
    if "backward" in case.passes and sizes.len_q * sizes.len_k < _LONG and first.has_gradients:
        first.check_oracles_gradients()
        _judge("backward", [first, *others], lambda draw: draw.backward(compiled))
        counts[f"backward calls{' of a size of 0' if 0 in sizes else ''}{under}"] += 1
        if case.deterministic:
            first.check_deterministic(compiled)


def _judge(pass_: str, draws: list[Sample], run: Callable[[Sample], Judged]) -> None:
    """Raises Found where the first draw fails, alone and together with the others."""
    case, problem = draws[0].case, draws[0].checked.problem
    judged = [run(draws[0])]
    if complaint(judged, case.dtype) is None:
        return
    judged += [run(draw) for draw in draws[1:]]
    wrong = complaint(judged, case.dtype)
    if wrong:
        raise Found("wrong", f"{pass_} at {problem.shape}, {problem.inputs} inputs, of {len(draws)} draws: {wrong}")


def _check_lists(compiled: Attention, checked: Checked, counts: Counter[str], backward: bool) -> None:
    """Compares with brute force the map that the CPU makes for the plan's own tiles, and the lists of the device."""
    sizes, spec = checked.sizes, compiled.spec
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
            listed = getattr(lists, name, None)
            if listed is not None:
                maps[f"backward_tile_lists().{name}"] = listed.tile_map()
    for name, tiles in maps.items():
        mistake = mistake_in_map(tiles, checked.allowed, sizes, of_keys=name != "backward_tile_lists().keys")
        if mistake:
            raise Found("tiles", f"{name} at {checked.problem.shape}: {mistake}")
        counts["maps and lists"] += 1
