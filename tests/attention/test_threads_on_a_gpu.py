"""One compiled attention called by eight threads on a GPU: on any streams, the bits are those of one thread."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import flashgen.language as fg
from flashgen import attention
from flashgen.verify import Shape, random_gradients, random_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hurried")]

AtOnce = Callable[..., list[Any]]

THREADS, STREAMS, GRAPHS = 8, 4, 2
DEFAULT, OTHER = "the default family", "the other family"
MOST_TILE_Q = 192  # for every plan
ROUNDINGS = 8 * 2.0**-11  # relative to the largest element: float32 sums in another order, rounded to float16


def far_or_near(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A band, the first and the last keys: no closed form and no captures, so that lists are cached."""
    return (abs(q - k) < 200) | (k < 4) | (k >= fg.len_k - 30)


def spec_of(mask: Any) -> fg.AttentionSpec:
    return fg.AttentionSpec(64, mask=mask)


SPECS = {
    "full": spec_of(fg.full()),
    "causal": spec_of(fg.causal()),
    "documents": spec_of(fg.document("ids")),
    "remembered lists": spec_of(far_or_near),
}
# Each has more tiles than a GPU has multiprocessors; with lists there are more lengths than cache entries.
SHAPES = {name: tuple(Shape(n, n, 4, 24, 12) for n in (300, 301, 700, 1300)) for name in SPECS}
SHAPES["remembered lists"] = tuple(Shape(n, n, 4, 24, 12) for n in range(300, 540, 20))


@pytest.fixture(scope="module")
def cupy() -> Any:
    module = pytest.importorskip("cupy")
    tiles = min(shape.batch * shape.heads_q * -(-shape.len_q // MOST_TILE_Q) for shape in SHAPES["full"])
    assert tiles > module.cuda.Device().attributes["MultiProcessorCount"], "the kernel would not count tiles"
    return module


def bits(array: Any) -> Any:
    """Returns the same memory as integers, because NaN differs from itself."""
    return array.view(f"u{array.dtype.itemsize}")


def poison(*arrays: Any) -> None:
    """Fills arrays with NaN, so that unwritten elements are noticed."""
    for array in arrays:
        bits(array).fill(0x7FFF if array.dtype.itemsize == 2 else 0x7FFFFFFF)


@dataclass
class Call:
    """The arrays of one call, and its results from a single thread."""

    inputs: list[Any]
    captures: dict[str, Any]
    expected: list[Any]

    def results(self) -> list[Any]:
        """Returns output arrays like the expected ones."""
        return [each.copy() for each in self.expected]


class Forward:
    """Forward calls and the comparison of their results."""

    def __init__(self, cupy: Any, name: str, target: str | None, deterministic: bool = False) -> None:
        self.cupy, self.compiled = cupy, attention.compile(SPECS[name], target, deterministic=deterministic)
        self.calls = [self.made(shape, seed) for seed, shape in enumerate(SHAPES[name])]
        cupy.cuda.Device().synchronize()

    def made(self, shape: Shape, seed: int) -> Call:
        given = random_inputs(self.compiled.spec, shape, seed)
        rows = [self.cupy.asarray(array) for array in (given.q, given.k, given.v)]
        captures = {name: self.cupy.asarray(array) for name, array in given.captures.items()}
        return Call(rows, captures, list(self.compiled(*rows, return_lse=True, **captures)))

    def run(self, call: Call, results: list[Any]) -> None:
        self.compiled(*call.inputs, return_lse=True, out=tuple(results), **call.captures)

    def compare(self, call: Call, results: list[Any], flag: Any) -> None:
        """Sets `flag`, an array with one boolean, on the stream if a result differs in any bit."""
        for found, right in zip(results, call.expected, strict=True):
            flag |= (bits(found) != bits(right)).any()


class Backward(Forward):
    """Backward calls, compared bit by bit, except dq without the deterministic mode, which is summed in any order."""

    def made(self, shape: Shape, seed: int) -> Call:
        call = super().made(shape, seed)
        d_out = self.cupy.asarray(random_gradients(self.compiled.spec, shape, seed)[0])
        inputs = [d_out, *call.inputs, *call.expected]
        return Call(inputs, call.captures, list(self.compiled.backward(*inputs, **call.captures)))

    def run(self, call: Call, results: list[Any]) -> None:
        self.compiled.backward(*call.inputs, into=tuple(results), **call.captures)

    def compare(self, call: Call, results: list[Any], flag: Any) -> None:
        summed = 0 if self.compiled.deterministic else 1
        super().compare(Call([], {}, call.expected[summed:]), results[summed:], flag)
        for found, right in zip(results[:summed], call.expected, strict=False):
            difference, largest = (abs(each).max() for each in (found.astype("f4") - right, right.astype("f4")))
            flag |= ~(difference <= ROUNDINGS * largest)


@dataclass
class Plan:
    """A thread's stream, number of calls, and whether it replays a graph of its calls."""

    stream: AbstractContextManager[Any]
    steps: int
    replays: bool = False


def streams_of(cupy: Any, how: str, steps: int) -> Iterator[Plan]:
    """Returns the plans of all threads."""
    made = [cupy.cuda.Stream(non_blocking=True) for _ in range(1 + max(STREAMS, GRAPHS))]
    for thread in range(THREADS):
        if how == "the stream of each thread":
            yield Plan(cupy.cuda.Stream.ptds, steps)
        elif how == "beside graphs" and thread < GRAPHS:
            yield Plan(made[1 + thread], steps, replays=True)
        else:
            yield Plan(made[thread % STREAMS if how == "four streams" else 0], steps)


def work(kernel: Forward, plan: Plan, thread: int) -> int:
    """Compares each call of one thread and returns the number of wrong ones."""
    calls = [kernel.calls[(thread + number) % len(kernel.calls)] for number in range(len(kernel.calls))]
    cupy = kernel.cupy
    with plan.stream as stream:
        results = [call.results() for call in calls]
        flags = cupy.zeros(plan.steps, bool)  # before capture, because the memory of a graph is its own
        if plan.replays:
            kernel.run(calls[0], results[0])
            stream.synchronize()
            stream.begin_capture()
            kernel.run(calls[0], results[0])
            graph = stream.end_capture()
        for step in range(plan.steps):
            number = 0 if plan.replays else step % len(calls)
            poison(*results[number])
            if plan.replays:
                graph.launch(stream)
            else:
                kernel.run(calls[number], results[number])
            kernel.compare(calls[number], results[number], flags[step : step + 1])
        cupy.cuda.get_current_stream().synchronize()
        return int(flags.sum())


def check(kernel: Forward, how: str, steps: int, at_once: AtOnce, record: Callable[[str, object], None]) -> None:
    """Asserts that no call of any thread is wrong, and prints how many were compared."""
    cupy = kernel.cupy
    warm = cupy.zeros(1, bool)
    for call in kernel.calls:  # compiles the comparison, and shows that it detects unwritten memory
        results = call.results()
        kernel.compare(call, results, warm)
        assert not warm.any()
        poison(*results)
        kernel.compare(call, results, warm)
        assert warm.all()
        warm[...] = False
    cupy.cuda.Device().synchronize()
    plans = list(streams_of(cupy, how, steps))
    wrong = at_once(lambda thread: work(kernel, plans[thread], thread), THREADS)
    cupy.cuda.Device().synchronize()
    record("calls compared", THREADS * steps)
    print(f"{THREADS * steps} calls compared, {sum(wrong)} wrong")
    assert not any(wrong), f"of {steps} calls of each thread {wrong} were wrong"


HOW = ("one stream", "four streams", "beside graphs")
QUICK = {(DEFAULT, "causal", "one stream"), (DEFAULT, "remembered lists", "four streams")}


def cases(quick: bool = True) -> list[Any]:
    """Returns (family, mask, mode), the quick ones marked."""
    each_thread = (DEFAULT, "remembered lists", "the stream of each thread")
    every = [*itertools.product((DEFAULT, OTHER), SPECS, HOW), each_thread]
    return [pytest.param(*case, marks=[pytest.mark.quick] if quick and case in QUICK else []) for case in every]


@pytest.fixture
def target_of(request: pytest.FixtureRequest) -> Callable[[str], str | None]:
    return lambda family: None if family == DEFAULT else request.getfixturevalue("other_target")


@pytest.mark.parametrize(("family", "mask", "how"), cases())
def test_forward(
    family: str, mask: str, how: str, cupy: Any, at_once: AtOnce, target_of: Any, record_property: Any
) -> None:
    """Outputs and LSEs. In kernels that count tiles, a launch once used the counter of another."""
    check(kernel_of(cupy, mask, target_of(family)), how, 100, at_once, record_property)


@pytest.mark.parametrize(("family", "mask", "how"), cases(quick=False))
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "default"])
def test_backward(
    family: str, mask: str, how: str, deterministic: bool, cupy: Any, at_once: AtOnce, target_of: Any,
    record_property: Any,
) -> None:  # fmt: skip
    check(kernel_of(cupy, mask, target_of(family), deterministic), how, 25, at_once, record_property)


@functools.lru_cache(maxsize=1)  # groups the cases of a kernel, because its arrays are large
def kernel_of(cupy: Any, mask: str, target: str | None, deterministic: bool | None = None) -> Forward:
    """Returns forward calls, or backward calls if `deterministic` is given."""
    return Forward(cupy, mask, target) if deterministic is None else Backward(cupy, mask, target, deterministic)


@pytest.mark.quick
def test_arrays_of_numpy(cupy: Any, at_once: AtOnce) -> None:
    """All threads copy to the GPU and back on their own stream."""
    compiled = attention.compile(SPECS["causal"])
    each = [random_inputs(compiled.spec, shape, seed) for seed, shape in enumerate(SHAPES["causal"])]
    expected = [compiled(given.q, given.k, given.v) for given in each]

    def work(thread: int) -> None:
        for step in range(8):
            number = (thread + step) % len(each)
            given = each[number]
            np.testing.assert_array_equal(compiled(given.q, given.k, given.v), expected[number])

    at_once(work, THREADS)


@pytest.mark.parametrize("streams", [1, STREAMS])
def test_tensors_of_torch(streams: int, cupy: Any, at_once: AtOnce) -> None:
    """Streams and memory are torch's."""
    torch = pytest.importorskip("torch")
    compiled = attention.compile(SPECS["remembered lists"])
    each = []
    for seed, shape in enumerate(SHAPES["remembered lists"]):
        given = random_inputs(compiled.spec, shape, seed)
        rows = [torch.from_numpy(array).cuda() for array in (given.q, given.k, given.v)]
        each.append((rows, compiled(*rows, return_lse=True)))
    torch.cuda.synchronize()
    made = [torch.cuda.Stream() for _ in range(streams)]

    def work(thread: int) -> int:
        with torch.cuda.stream(made[thread % streams]):
            wrong = torch.zeros((), dtype=torch.int32, device="cuda")
            for step in range(50):
                rows, expected = each[(thread + step) % len(each)]
                found = tuple(torch.full_like(right, float("nan")) for right in expected)
                compiled(*rows, return_lse=True, out=found)
                wrong += sum((a != b).any().int() for a, b in zip(found, expected, strict=True)) > 0
            return int(wrong)

    assert at_once(work, THREADS) == [0] * THREADS
