"""Measures the host time of a call, in total and by part: `python -m benchmarks host`.

This file uses the public interface of flashgen alone, so that it can measure an older checkout as well:

    PYTHONPATH=CHECKOUT python -P benchmarks/host.py [TARGET] > OLD.json

With --turns instead of a target it measures one group of calls per request, for `python -m benchmarks versions`.

The parts are functions inside flashgen, which are looked up by name. If a checkout has none of the functions of a part,
the time of that part counts as `rest`.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import flashgen as fg

Clock = Callable[[], int]  # nanoseconds
Run = Callable[[], Any]
Timed = Literal["start", "forward", "backward"]

# The functions of each part of a call. The time that one of them spends in another counts for the other.
PARTS: Mapping[str, tuple[str, ...]] = {
    "checks": (
        "flashgen.attention.call_pass:Pass._find",
        "flashgen.attention.call_pass:Pass._lookup_or_prepare",  # in older checkouts
        "flashgen.attention.call_pass:check_captures",  # of names that differ; in older checkouts of all calls
        "flashgen.attention.repeated_calls:RepeatedCalls.find",
    ),
    "numbers": ("flashgen.attention.call_pass:Pass._call_numbers",),
    "allocation": (
        "flashgen.attention.call_pass:Pass._make_results",
        "flashgen.launch.memory:GpuWorkspace.take",
        "flashgen.launch.memory:GpuWorkspace.allocate",
        "flashgen.launch.memory:Block.take",  # in older checkouts
        "flashgen.launch.memory:Block.lay",
        "flashgen.launch.memory:SeparateArrays.take",
    ),
    "lists": ("flashgen.attention.tile_lists:TileLister.lists_for_call",),
    "counter": ("flashgen.launch.engines:Gpu.counter", "flashgen.launch.engines:Emulator.counter"),
    "clears": ("flashgen.launch.engines:Gpu.clear", "flashgen.launch.engines:Emulator.clear"),
    "addresses": ("flashgen.launch.engines:Gpu.add_operands", "flashgen.launch.engines:Emulator.add_operands"),
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
CALLS = 50  # per group
GROUPS = 40
WARM_GROUPS = 4  # groups that run first and are not counted


class Meter:
    """Measures the exclusive time of each part of a call.

    If a function of one part calls a function of another, the time of the inner call counts for the inner part alone.
    The overhead of reading the clock is calibrated at construction and subtracted. `calls` counts the calls per part.
    """

    def __init__(self, clock: Clock = time.perf_counter_ns) -> None:
        self._clock = clock
        self._inner: list[list[int]] = []  # per running function: time in inner metered calls, and their number
        self.clear()
        self._cost_inside, self._cost = self._calibrate()

    def clear(self) -> None:
        """Resets all times and counts."""
        self._spent: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self._inner_calls: dict[str, int] = {}

    def nanoseconds(self) -> dict[str, float]:
        """Returns the total time of each part that ran since `clear`."""
        return {
            part: max(spent - self.calls[part] * self._cost_inside - self._inner_calls[part] * self._cost, 0.0)
            for part, spent in self._spent.items()
        }

    def of(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that its time counts for the part."""

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
        """Wraps the functions of PARTS inside the context, and yields the parts that this checkout has."""
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
        """Returns the overhead of the meter per call: on the time of the part itself, and on that of its caller."""

        def nothing() -> None:
            pass

        metered = self.of("", nothing)
        bare, whole = (_loop(self._clock, function, repeats) / repeats for function in (nothing, metered))
        inside = self._spent[""] / repeats
        self.clear()
        return max(inside - bare, 0.0), max(whole - inside, 0.0)


def owner_of(place: str) -> tuple[Any, str]:
    """Returns the module, class or object that holds an entry of PARTS, or None, and the name of the entry in it."""
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
    """Returns the names that an owner defines itself; inherited methods are wrapped in the class that defines them."""
    slots = getattr(type(owner), "__slots__", ())
    return {*getattr(owner, "__dict__", ()), *slots}


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type) or not hasattr(type(owner), "__slots__"):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)  # also works for frozen dataclasses


def _loop(clock: Clock, run: Run, calls: int) -> int:
    begin = clock()
    for _ in range(calls):
        run()
    return clock() - begin


@dataclass(frozen=True)
class Cost:
    """The host time of a call in microseconds.

    Attributes:
        median, minimum: median and minimum over the medians of the groups.
        parts: the mean time of each part in a group, median over the groups; `rest` is the time outside of all parts.
    """

    median: float
    minimum: float
    parts: Mapping[str, float] = field(default_factory=dict)


def cost_of(run: Run, wait: Run, groups: int = GROUPS, calls: int = CALLS, clock: Clock = time.perf_counter_ns) -> Cost:
    """Measures warm calls in groups. `wait` is called after each group, so that the launch queue does not fill up."""
    (cost,) = costs_in_turns([run], wait, groups, [calls], clock)
    return cost


def costs_in_turns(
    runs: Sequence[Run], wait: Run, groups: int, calls: Sequence[int], clock: Clock = time.perf_counter_ns
) -> list[Cost]:
    """Measures several kinds of calls with interleaved groups, so that a change of the host's speed affects all alike.

    `calls` has the number of calls per group for each of `runs`.
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
    """Returns what each function measured in its groups, without the warm-up groups."""
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
    """A call to measure.

    Attributes:
        sizes: (batch, heads, length).
        given: the caller passes arrays for the results.
        ids: the mask reads an array of document ids.
        passes: the passes that the spec has. Options with a page_size are for a decode step over pages: one query of
            each sequence, and as many keys as the length, in KV_HEADS heads.
    """

    name: str
    options: Mapping[str, Any]
    sizes: tuple[int, int, int]
    given: bool = False
    ids: bool = False
    passes: tuple[Timed, ...] = PASSES


@dataclass(frozen=True)
class HostRow:
    """The measured host time of one pass of a case with arrays of one library, in microseconds.

    Rows of start.py have no library, sizes or parts.
    """

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
DECODE = (64, 32, 256)
KV_HEADS = 8


def host_cases() -> list[HostCase]:
    """Returns plain calls of one tile and of many, with arrays for results, dropout or tile lists, and decode steps."""
    near = fg.trace_mask(lambda b, h, q, k: (abs(q - k) <= 128) | (k < 4), "near_or_global")
    causal = {"mask": fg.causal()}
    pages = causal | {"page_size": 16, "layout": "bshd"}
    packed = pages | {"layout": "thd", "sink": fg.Tensor("sinks", "float16", 1)}
    forward: tuple[Timed, ...] = ("forward",)
    return [
        HostCase("causal", causal, ONE_TILE),
        HostCase("causal", causal, MANY_TILES),
        HostCase("causal, out given", causal, ONE_TILE, given=True),
        HostCase("causal, out given", causal, MANY_TILES, given=True),
        HostCase("causal, dropout", causal | {"dropout": 0.1}, MANY_TILES),
        HostCase("lists, remembered", {"mask": near}, MANY_TILES),
        HostCase("lists of each call", {"mask": fg.document("ids")}, MANY_TILES, ids=True),
        HostCase("decode over pages, out given", pages, DECODE, given=True, passes=forward),
        HostCase("packed decode over pages, sinks, out given", packed, DECODE, given=True, passes=forward),
    ]


def host_rows(
    libraries: Sequence[str] = (),
    passes: Sequence[Timed] = PASSES,
    target: str | None = None,
    groups: int = GROUPS,
    calls: int = CALLS,
    **engine: Any,
) -> Iterator[HostRow]:
    """Measures the cases on the current GPU, one after another.

    Args:
        libraries: the array libraries, names of LIBRARIES; empty selects those that are installed.
        passes: the passes to measure.
        target: the argument of `flashgen.compile`.
        groups, calls: the number of groups of a measurement, and of calls per group.
        engine: further arguments of `flashgen.compile`; emulate=True requires the library "numpy".
    """
    for cell in host_cells(libraries, passes, target, **engine):
        cost = cost_of(cell.run, cell.wait, groups, calls)
        where = cell.target, cell.library, cell.timed, cell.case.sizes
        yield HostRow(cell.case.name, *where, cost.median, cost.minimum, cost.parts)


@dataclass(frozen=True)
class HostCell:
    """A pass of a case with arrays of a library: `run` performs a call, and `wait` waits until the GPU has run all."""

    case: HostCase
    target: str
    library: str
    timed: Timed
    run: Run
    wait: Run

    @property
    def name(self) -> str:
        return f"{self.library} {self.case.name} {self.timed} {list(self.case.sizes)}"


def host_cells(
    libraries: Sequence[str] = (), passes: Sequence[Timed] = PASSES, target: str | None = None, **engine: Any
) -> Iterator[HostCell]:
    """Prepares the cells that `host_rows` measures, one after another."""
    for library in libraries or installed_libraries():
        for case in host_cases():
            spec = fg.AttentionSpec(64, "float16", **case.options)
            attention = fg.compile(spec, target=target, **engine)
            for timed in [name for name in passes if name in case.passes]:
                run = run_of(attention, case, timed, library)
                yield HostCell(case, attention.target.name, library, timed, run, partial(_wait, library))


def serve_groups(cells: Iterable[HostCell], requests: Iterable[str], calls: int = CALLS) -> Iterator[str]:
    """Measures one group of calls per request, so that another process can alternate between checkouts.

    The first line is a JSON list of the names of the cells. A request is the index of a cell, and its answer the median
    of the group in microseconds.
    """
    prepared = list(cells)
    yield json.dumps([cell.name for cell in prepared])
    for request in requests:
        cell = prepared[int(request)]
        yield repr(_group_median(cell.run, cell.wait, calls, time.perf_counter_ns))


def installed_libraries() -> list[str]:
    """Returns the array libraries that can use this GPU: CuPy, and torch if it sees the GPU."""
    try:
        import torch
    except ImportError:
        return ["cupy"]
    return ["cupy", "torch"] if torch.cuda.is_available() else ["cupy"]


def run_of(attention: Any, case: HostCase, timed: Timed, library: str) -> Run:
    """Returns a function that performs one call of a case."""
    if attention.spec.page_size:
        return _paged_run(attention, case, library)
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


def _paged_run(attention: Any, case: HostCase, library: str) -> Run:
    """Returns a function that performs one decode step over pages."""
    spec, (batch, heads, length) = attention.spec, case.sizes
    rows = (batch,) if spec.layout == "thd" else (batch, 1)
    table = [[sequence + batch * page for page in range(length // spec.page_size)] for sequence in range(batch)]
    pages = (batch * len(table[0]), spec.page_size, KV_HEADS, 64)
    q, out = (_random(library, (*rows, heads, 64), seed) for seed in range(2))
    k, v = (_random(library, pages, seed) for seed in range(2, 4))
    given = {"page_table": _integers(library, table), "seqused_k": _integers(library, [length] * batch)}
    if spec.layout == "thd":
        given |= {"cu_seqlens_q": _integers(library, [*range(batch + 1)]), "max_seqlen_q": 1}
    if spec.sink:
        given["sinks"] = _random(library, (heads,), 4)
    place = {"out": out} if case.given else {}
    return lambda: attention(q, k, v, **place, **given)


def _random(library: str, shape: tuple[int, ...], seed: int) -> Any:
    if library == "torch":
        import torch

        return torch.randn(shape, device="cuda", dtype=torch.float16)
    module = importlib.import_module(library)
    return module.random.default_rng(seed).standard_normal(shape, module.float32).astype("float16")


def _integers(library: str, values: list[Any]) -> Any:
    if library == "torch":
        import torch

        return torch.tensor(values, device="cuda", dtype=torch.int32)
    return importlib.import_module(library).asarray(values, "int32")


def _wait(library: str) -> None:
    if library != "numpy":
        import cupy

        cupy.cuda.Device().synchronize()


def main() -> None:
    """Prints the rows as JSON, for a checkout without `python -m benchmarks`, or serves groups of calls."""
    if sys.argv[1:] == ["--turns"]:
        for line in serve_groups(host_cells(), sys.stdin):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        return
    rows = []
    for row in host_rows(target=sys.argv[1] if len(sys.argv) > 1 else None):
        rows.append(row.to_dict())
        line = f"{row.library} {row.name} {row.timed} {row.sizes}"
        sys.stderr.write(f"{line}: median {row.median:.1f} us, minimum {row.minimum:.1f} us\n")
    sys.stdout.write(json.dumps({"flashgen": str(fg.__file__), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
