"""What a call costs its host thread, whole and by part: `flashgen bench host`.

This file calls what users of flashgen call, and no more, so that it measures an older checkout too, beside a newer one:

    PYTHONPATH=CHECKOUT python -P benchmarks/host.py [TARGET] > OLD.json

Parts are functions inside flashgen, looked up by name. A checkout that has none of a part's functions is measured
without that part, whose time then counts as `rest`.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import flashgen as fg

Clock = Callable[[], int]  # nanoseconds
Run = Callable[[], Any]
Timed = Literal["start", "forward", "backward"]

# The functions of each part of a call. Time that one of them spends in another counts as the other's.
PARTS: Mapping[str, tuple[str, ...]] = {
    "checks": (
        "flashgen.attention.call_pass:Pass._prepare",
        "flashgen.attention.call_pass:check_captures",
    ),
    "numbers": ("flashgen.attention.call_pass:Pass._call_numbers",),
    "allocation": (
        "flashgen.attention.call_pass:Pass._make",
        "flashgen.launch.memory:Block.take",
        "flashgen.launch.memory:Block.lay",
        "flashgen.launch.memory:SeparateArrays.take",
    ),
    "lists": ("flashgen.attention.tile_lists:TileLister.of_call",),
    "counter": ("flashgen.launch.engines:Gpu.counter", "flashgen.launch.engines:Emulator.counter"),
    "clears": ("flashgen.launch.engines:Gpu.clear", "flashgen.launch.engines:Emulator.clear"),
    "addresses": ("flashgen.launch.engines:Gpu.add", "flashgen.launch.engines:Emulator.add"),
    "struct": (
        "flashgen.launch.argument_writer:ArgumentWriter.write_into",
        "flashgen.launch.tensor_map_writer:TensorMapWriter.write_into",
        "flashgen.launch.tensor_map_writer:TensorMapWriter.write_emulated",
    ),
    "launch": ("flashgen.runtime.gpu:GpuKernel.launch", "flashgen.runtime.emulator:launch"),
}
REST = "rest"

PASSES: tuple[Timed, ...] = ("forward", "backward")
LIBRARIES = ("cupy", "torch")
CALLS = 50  # in a group
GROUPS = 40
WARM_GROUPS = 4  # groups before those that count


class Meter:
    """Each part's own time: a function of a part that calls one of another part hands the time over to that.

    Looking at the clock takes time, which is measured first and left out. `calls` counts the calls of each part.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self._clock = clock
        self._inner: list[list[int]] = []  # for each running function: time in metered ones, and how many
        self.clear()
        self._cost_inside, self._cost = self._calibrate()

    def clear(self) -> None:
        """Forgets what was measured."""
        self._spent: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self._inner_calls: dict[str, int] = {}

    def nanoseconds(self) -> dict[str, float]:
        """The total time of each part that ran since `clear`."""
        return {
            part: max(spent - self.calls[part] * self._cost_inside - self._inner_calls[part] * self._cost, 0.0)
            for part, spent in self._spent.items()
        }

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with a meter around it."""

        def metered(*given: Any, **named: Any) -> Any:
            begin = self._clock()
            self._inner.append([0, 0])
            try:
                return function(*given, **named)
            finally:
                inner, calls = self._inner.pop()
                spent = self._clock() - begin
                self._spent[part] = self._spent.get(part, 0) + spent - inner
                self.calls[part] = self.calls.get(part, 0) + 1
                self._inner_calls[part] = self._inner_calls.get(part, 0) + calls
                if self._inner:
                    self._inner[-1][0] += spent
                    self._inner[-1][1] += 1

        return metered

    @contextmanager
    def installed(self) -> Iterator[tuple[str, ...]]:
        """Meters flashgen's own functions inside. Gives the parts that this checkout has."""
        with ExitStack() as undo:
            found = []
            for part, places in PARTS.items():
                for place in places:
                    owner, name = owner_of(place)
                    if owner is not None and name in _names(owner):
                        original = getattr(owner, name)
                        undo.callback(_put, owner, name, original)
                        _put(owner, name, self.of(part, original))
                        found.append(part)
            yield tuple(dict.fromkeys(found))

    def _calibrate(self, repeats: int = 2000) -> tuple[float, float]:
        """What metering adds to a call: to the part's own time, and to its caller's."""

        def nothing() -> None:
            pass

        metered = self.of("", nothing)
        bare, whole = (_loop(self._clock, function, repeats) / repeats for function in (nothing, metered))
        inside = self._spent[""] / repeats
        self.clear()
        return max(inside - bare, 0.0), max(whole - inside, 0.0)


def owner_of(place: str) -> tuple[Any, str]:
    """(the module, class or object that a place of PARTS is in, or None; its name there)."""
    module, _, path = place.partition(":")
    *outer, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return None, name
    for step in outer:
        owner = getattr(owner, step, None)
    return owner, name


def _names(owner: Any) -> set[str]:
    """The names that an owner defines itself: an inherited method is metered where it is written."""
    slots = getattr(type(owner), "__slots__", ())
    return {*getattr(owner, "__dict__", ()), *slots}


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type) or not hasattr(type(owner), "__slots__"):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)  # works for frozen dataclasses too


def _loop(clock: Clock, run: Run, calls: int) -> int:
    begin = clock()
    for _ in range(calls):
        run()
    return clock() - begin


@dataclass(frozen=True)
class Cost:
    """Microseconds of host time for a call: the median of the groups' medians, the least of them, and the parts.

    parts: means over calls, the median of the groups; `rest` is what no part has.
    """

    median: float
    minimum: float
    parts: Mapping[str, float] = field(default_factory=dict)


def cost_of(run: Run, wait: Run, groups: int = GROUPS, calls: int = CALLS, clock: Clock = time.perf_counter_ns) -> Cost:
    """The cost of warm calls in groups; `wait` is called between them, so that no queue of launches fills up."""
    (cost,) = costs_in_turns([run], wait, groups, [calls], clock)
    return cost


def costs_in_turns(
    runs: Sequence[Run], wait: Run, groups: int, calls: Sequence[int], clock: Clock = time.perf_counter_ns
) -> list[Cost]:
    """The costs of several kinds of calls, a group of each in turn: a host that gets slower does so for all of them.

    calls: in a group of each.
    """
    medians = _in_turns(
        [partial(_group_median, run, wait, of, clock) for run, of in zip(runs, calls, strict=True)], groups
    )
    meter = Meter(clock)
    with meter.installed() as found:
        whole = [meter.of(REST, run) for run in runs]
        turns = [partial(_group_parts, meter, run, wait, of) for run, of in zip(whole, calls, strict=True)]
        metered = _in_turns(turns, groups)
    return [
        Cost(
            statistics.median(of_run),
            min(of_run),
            {part: statistics.median(group.get(part, 0.0) for group in parts) for part in (*found, REST)},
        )
        for of_run, parts in zip(medians, metered, strict=True)
    ]


def _in_turns(measures: Sequence[Callable[[], Any]], groups: int) -> list[list[Any]]:
    """What each of them measured in its groups, but for the warm ones before those that count."""
    measured = [[measure() for measure in measures] for _ in range(WARM_GROUPS + groups)][WARM_GROUPS:]
    return [list(of_one) for of_one in zip(*measured, strict=True)]


def _group_median(run: Run, wait: Run, calls: int, clock: Clock) -> float:
    times = [_loop(clock, run, 1) for _ in range(calls)]
    wait()
    return statistics.median(times) / 1e3


def _group_parts(meter: Meter, run: Run, wait: Run, calls: int) -> dict[str, float]:
    meter.clear()
    for _ in range(calls):
        run()
    parts = {part: spent / calls / 1e3 for part, spent in meter.nanoseconds().items()}
    wait()
    return parts


@dataclass(frozen=True)
class HostCase:
    """A call to measure. sizes: (batch, heads, length). given: whether the caller gives the arrays for the results.
    ids: whether its mask reads an array of documents."""

    name: str
    options: Mapping[str, Any]
    sizes: tuple[int, int, int]
    given: bool = False
    ids: bool = False


@dataclass(frozen=True)
class HostRow:
    """A measured case of one pass, with one library's arrays, in microseconds. A start has no arrays, sizes or
    parts."""

    name: str
    target: str
    library: str
    timed: Timed
    sizes: tuple[int, ...]
    median: float
    minimum: float
    parts: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


ONE_TILE = (1, 1, 64)
MANY_TILES = (16, 32, 64)  # more tiles than any GPU has multiprocessors


def host_cases() -> list[HostCase]:
    """Plain calls of one tile and of many, with arrays given or not, and calls with masks and dropout."""
    near = fg.trace_mask(lambda b, h, q, k: (abs(q - k) <= 128) | (k < 4), "near_or_global")
    causal = {"mask": fg.causal()}
    return [
        HostCase("causal", causal, ONE_TILE),
        HostCase("causal", causal, MANY_TILES),
        HostCase("causal, out given", causal, ONE_TILE, given=True),
        HostCase("causal, out given", causal, MANY_TILES, given=True),
        HostCase("causal, dropout", causal | {"dropout": 0.1}, MANY_TILES),
        HostCase("lists, remembered", {"mask": near}, MANY_TILES),
        HostCase("lists of each call", {"mask": fg.document("ids")}, MANY_TILES, ids=True),
    ]


def host_rows(
    libraries: Sequence[str] = (),
    passes: Sequence[Timed] = PASSES,
    target: str | None = None,
    groups: int = GROUPS,
    calls: int = CALLS,
    **engine: Any,
) -> Iterator[HostRow]:
    """Measures the cases on the current GPU, one after the other.

    Args:
        libraries: names from LIBRARIES, whose arrays are given; those that are installed where there are none.
        passes: which to measure. target and `engine` are arguments of `flashgen.compile`; with emulate=True the library
            is "numpy".
        groups, calls: each measurement has so many groups of so many calls.
    """
    for library in libraries or installed_libraries():
        for case in host_cases():
            spec = fg.AttentionSpec(64, "float16", **case.options)
            attention = fg.compile(spec, target=target, **engine)
            for timed in passes:
                run = run_of(attention, case, timed, library)
                cost = cost_of(run, partial(_wait, library), groups, calls)
                where = attention.target.name, library, timed, case.sizes
                yield HostRow(case.name, *where, cost.median, cost.minimum, cost.parts)


def installed_libraries() -> list[str]:
    """The libraries whose arrays calls on this GPU take: CuPy, and torch where it can use the GPU."""
    try:
        import torch
    except ImportError:
        return ["cupy"]
    return ["cupy", "torch"] if torch.cuda.is_available() else ["cupy"]


def run_of(attention: Any, case: HostCase, timed: Timed, library: str) -> Run:
    """One call of a case."""
    batch, heads, length = case.sizes
    shape = (batch, heads, length, 64)
    q, k, v, d_out, *into = (_random(library, shape, seed) for seed in range(8))
    given: dict[str, Any] = {"seed": 1} if attention.spec.dropout else {}
    if case.ids:
        given["ids"] = _integers(library, [position // 40 for position in range(length)])
    if timed == "forward":
        place = {"out": into[0]} if case.given else {}
        return lambda: attention(q, k, v, **place, **given)
    out, lse = attention(q, k, v, return_lse=True, **given)
    place = {"into": tuple(into[1:])} if case.given else {}
    return lambda: attention.backward(d_out, q, k, v, out, lse, **place, **given)


def _random(library: str, shape: tuple[int, ...], seed: int) -> Any:
    if library == "torch":
        import torch

        return torch.randn(shape, device="cuda", dtype=torch.float16)
    module = importlib.import_module(library)
    return module.random.default_rng(seed).standard_normal(shape, module.float32).astype("float16")


def _integers(library: str, values: list[int]) -> Any:
    if library == "torch":
        import torch

        return torch.tensor(values, device="cuda", dtype=torch.int32)
    return importlib.import_module(library).asarray(values, "int32")


def _wait(library: str) -> None:
    if library != "numpy":
        import cupy

        cupy.cuda.Device().synchronize()


def main() -> None:
    """Prints the rows as JSON, for a checkout that has no `flashgen bench host`."""
    rows = []
    for row in host_rows(target=sys.argv[1] if len(sys.argv) > 1 else None):
        rows.append(row.to_dict())
        line = f"{row.library} {row.name} {row.timed} {row.sizes}"
        sys.stderr.write(f"{line}: median {row.median:.1f} us, minimum {row.minimum:.1f} us\n")
    sys.stdout.write(json.dumps({"flashgen": str(fg.__file__), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
