"""Functions passed at a call: what they read is read at that call, and has autograd's gradients."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import numpy as np
import torch
from torch.nn import functional

import flashgen as fg
import flashgen.torch as ours
from flashgen.errors import SpecError
from flashgen.torch.call_keys import ABSENT, call_key
from flashgen.torch.traced_functions import trace_functions
from flashgen.torch.variants import spec_text, variant_of

HEADS, LENGTH, DIM = 2, 24, 32
INFINITY = float("inf")


@pytest.fixture
def q() -> torch.Tensor:
    return torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float16, requires_grad=True)


@pytest.fixture
def kv() -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, 1, HEADS, LENGTH, DIM).half()
    return k, v


def plain(q: Any, k: Any, v: Any, score: Callable[..., Any]) -> Any:
    """Attention in float64, of a score function of index grids."""
    scores = q.double() @ k.double().mT * DIM**-0.5
    grids = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
    return score(scores, *grids).softmax(-1) @ v.double()


def assert_near(got: Any, wanted: Any, what: str, relative: float = 0.02) -> None:
    error, most = (got.double() - wanted).abs().max().item(), relative * max(wanted.abs().max().item(), 0.05)
    assert error <= most, f"{what} is off by {error:.2e}, at most {most:.2e}"


# Numbers --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Plain:
    window: int


@dataclasses.dataclass(slots=True)
class Slots:
    window: int


class Shared:
    window = 3


class WithProperty:
    def __init__(self, window: int) -> None:
        self.value = window

    @property
    def window(self) -> int:
        return self.value


def attribute() -> int:
    return attribute.window  # type: ignore[attr-defined]


WINDOW = 3


def read_global() -> int:
    return WINDOW


def write_global(window: int) -> None:
    global WINDOW
    WINDOW = window


def held(holder: Any) -> tuple[Callable[[], int], Callable[[int], None]]:
    return lambda: holder.window, lambda window: setattr(holder, "window", window)


def item(holder: Any, key: Any) -> tuple[Callable[[], int], Callable[[int], None]]:
    return lambda: holder[key], lambda window: holder.__setitem__(key, window)


def numbers() -> dict[str, tuple[Callable[[], int], Callable[[int], None]]]:
    """The ways in which a function may read a number, and how that is changed."""
    module, with_property = types.ModuleType("settings"), WithProperty(3)
    shared = Shared()
    nested, array, attribute.window = [[3]], np.array(3), 3  # type: ignore[attr-defined]
    module.window = 3  # type: ignore[attr-defined]
    cell = 3

    def write_cell(window: int) -> None:
        nonlocal cell
        cell = window

    return {
        "a dataclass": held(Plain(3)),
        "a dataclass with slots": held(Slots(3)),
        "a namespace": held(types.SimpleNamespace(window=3)),
        "a class": held(Shared),
        "an instance of a class": (lambda of=shared: of.window, lambda window: setattr(Shared, "window", window)),
        "a property": (lambda: with_property.window, lambda window: setattr(with_property, "value", window)),
        "a module": held(module),
        "a dict": item({"window": 3}, "window"),
        "a list in a list": (lambda: nested[0][0], lambda window: nested[0].__setitem__(0, window)),
        "a deque": item(collections.deque([3]), 0),
        "an array of NumPy": (lambda: int(array), lambda window: array.__setitem__((), window)),
        "a global of a helper": (read_global, write_global),
        "an attribute of a function": (attribute, lambda window: setattr(attribute, "window", window)),
        "a cell": (lambda: cell, write_cell),
        "a default argument": (lambda of=nested: of[0][0], lambda window: nested[0].__setitem__(0, window)),
        "a partial": (functools.partial(lambda holder: holder[0], nested[0]), lambda _: None),
    }


@pytest.mark.parametrize("name", numbers())
def test_a_number_is_read_at_the_call(name: str, q: Any, kv: Any) -> None:
    read, write = numbers()[name]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(abs(i - j) <= read(), s, -INFINITY)

    for window in (3, 8, 8, 5):
        write(window)
        assert_near(ours.flex_attention(q, *kv, score_mod=score), plain(q, *kv, score), f"a window of {read()}")
    write(3)


def key_of(score: Any, mask: Any) -> str:
    return call_key(score, "score_mod", mask, "mask_mod", (), spec_text(DIM, DIM, "float16", None, "bhsd", True, False))


def test_a_changing_number_becomes_an_operand_at_its_second_value() -> None:
    def traced(window: int, far: int = 0) -> Any:
        return trace_functions(None, lambda b, h, i, j: (i - j <= window) & (j - i <= far))[1]

    (key,) = {key_of(ABSENT, traced(window)) for window in range(3)}
    q = torch.empty(1, HEADS, LENGTH, DIM)
    at = lambda *integers: variant_of(key).choose(integers, [], q, q).with_lengths([])
    entry, integers, _ = at(*traced(4).numbers)
    assert integers == [] and entry.spec.captures == () and at(4, 0)[0] is entry
    for window in (9, 5, 100):
        general, integers, _ = at(window, 0)
        assert integers == [window] and [capture.name for capture in general.spec.captures] == ["integer"]
    assert at(4, 0)[0] is entry, "the first value keeps its kernel"
    both, integers, _ = at(7, 2)
    assert integers == [7, 2] and [capture.name for capture in both.spec.captures] == ["integer_a", "integer_b"]
    one, integers, _ = at(7, 7)
    assert integers == [7], "equal numbers are one operand"
    assert len(one.spec.captures) == 1


def test_numbers_that_cannot_be_captures_are_in_the_text() -> None:
    def key(value: float) -> str:
        return key_of(*trace_functions(lambda s, b, h, i, j: torch.where(i >= j, s, value), None))

    assert len({key(value) for value in (-INFINITY, INFINITY, -0.0, 1.0)}) == 4 and key(1.0) == key(0.0)


# Tensors --------------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(HEADS))
        self.wide = torch.nn.Parameter(torch.randn(HEADS, dtype=torch.float64))
        self.table = torch.nn.Embedding(HEADS, 1)
        self.several = torch.nn.ParameterList([torch.randn(HEADS) for _ in range(2)])
        self.named = torch.nn.ParameterDict({"slopes": torch.randn(HEADS)})
        self.normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, HEADS, bias=False))

    @property
    def slopes(self) -> torch.Tensor:
        return self.a.exp()


SLOPES: dict[str, Callable[[Layer, Any], Any]] = {
    "a parameter": lambda m, h: m.a[h],
    "exp before the index": lambda m, h: m.a.exp()[h],
    "exp behind the index": lambda m, h: torch.exp(m.a[h]),
    "softplus": lambda m, h: functional.softplus(m.a)[h],
    "a property": lambda m, h: m.slopes[h],
    "a product": lambda m, h: (-m.a * 2)[h],
    "a mean": lambda m, h: m.a.mean() + m.a.max(),
    "float64": lambda m, h: m.wide[h],
    "an embedding": lambda m, h: m.table(h)[..., 0] if isinstance(h, torch.Tensor) else m.table(h)[0],
    "a list of parameters": lambda m, h: m.several[1][h],
    "a dict of parameters": lambda m, h: m.named["slopes"][h],
    "a parametrization": lambda m, h: m.normed.weight[h, 1],
    "detached": lambda m, h: m.a.detach()[h] + m.a[h],
    "under no_grad": lambda m, h: without_gradient(m.a)[h] * m.a[h],
    "an index from the end": lambda m, h: m.a[-1] * m.a[h],
    "gathered": lambda m, h: torch.take(m.a, h),
}


def without_gradient(a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return a.sigmoid()


@pytest.mark.parametrize("name", SLOPES)
def test_a_tensor_is_read_at_the_call_and_has_its_gradient(name: str, q: Any, kv: Any) -> None:
    layer = Layer()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + SLOPES[name](layer, h) * (i - j) / 10

    weights = torch.linspace(-1, 1, DIM)
    for step in range(2):
        found = []
        for out in (ours.flex_attention(q, *kv, score_mod=score), plain(q, *kv, score)):
            layer.zero_grad()
            (out.double() * weights).sum().backward()
            found.append((out.detach(), {key: p.grad for key, p in layer.named_parameters() if p.grad is not None}))
        (got, gradients), (wanted, expected) = found
        assert_near(got, wanted, f"step {step}")
        assert gradients.keys() == expected.keys()
        for key, gradient in expected.items():
            assert_near(gradients[key], gradient, f"step {step}, the gradient of {key}", 0.05)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(torch.randn_like(parameter) / 2)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda table: table.add_(1),
    "by its data": lambda table: setattr(table, "data", torch.tensor([3, 0], dtype=table.dtype)),
    "under inference mode": lambda table: torch.inference_mode()(lambda: table.mul_(-2))(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("how", WRITES)
def test_a_tensor_modified_in_place(how: str, dtype: torch.dtype, q: Any, kv: Any) -> None:
    table = torch.tensor([1, 2], dtype=dtype)
    number = torch.tensor(2, dtype=dtype)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[h] * (i - j) / 10 + number * j / 10

    for _ in range(2):
        assert_near(ours.flex_attention(q, *kv, score_mod=score), plain(q, *kv, score), how)
        WRITES[how](table)
        number.sub_(3)


NEGATIVE: dict[str, Callable[..., Any]] = {
    "a distance": lambda t, u, i, j: t[i - j],
    "a distance that is moved": lambda t, u, i, j: t[i - j + LENGTH - 1],
    "an element": lambda t, u, i, j: t[u[j]],
    "a changing number": lambda t, u, i, j: t[j - len(u) // 2],
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_negative_indices_count_from_the_end(name: str, q: Any, kv: Any) -> None:
    table = torch.randn(2 * LENGTH, requires_grad=True)
    for length in (LENGTH, 7):
        places = torch.arange(LENGTH)[:length] - 9
        keys = [x[:, :, :length] for x in kv]
        score = lambda s, b, h, i, j: s + NEGATIVE[name](table, places, i, j)  # noqa: B023
        got, wanted = (attend(q, *keys, score) for attend in (ours.flex_attention, plain))
        assert_near(got.detach(), wanted.detach(), "the output")
        found, expected = (torch.autograd.grad(out.double().square().sum(), table)[0] for out in (got, wanted))
        assert_near(found, expected, "the gradient of the table", 0.05)


def test_negative_indices_of_tables_of_several_sizes(q: Any, kv: Any) -> None:
    """The calls differ in nothing else, and each counts from the end of its own table."""
    for size in (2 * LENGTH, 3 * LENGTH, 2 * LENGTH, 4 * LENGTH):
        table = torch.randn(size)
        score = lambda s, b, h, i, j: s + table[i - j]  # noqa: B023
        assert_near(ours.flex_attention(q, *kv, score), plain(q, *kv, score), f"the output of a table of {size}")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_arrays_of_other_libraries(dtype: Any) -> None:
    """They cannot be indexed by traced values; stand-ins replace them at each call."""
    q, k, v = (torch.randn(1, HEADS, LENGTH, DIM).half() for _ in range(3))
    table = np.arange(1, HEADS + 1).astype(dtype)
    score = lambda s, b, h, i, j: s + table[h] * (i - j) / 10
    for _ in range(2):
        tensor = torch.from_numpy(table.copy())
        wanted = plain(q, k, v, lambda s, b, h, i, j, tensor=tensor: s + tensor[h] * (i - j) / 10)
        assert_near(ours.flex_attention(q, k, v, score_mod=score), wanted, "an array of NumPy")
        table *= -1


# Gradients ------------------------------------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """Rounds down in the forward, and passes gradients through."""

    @staticmethod
    def forward(x: Any, _keep: Any) -> Any:
        return torch.floor(x * 4) / 4

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 0.5, None


class Scaled(torch.autograd.Function):
    """Returns its input, and scales its gradient."""

    @staticmethod
    def forward(x: Any) -> Any:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        (ctx.x,) = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return torch.where(ctx.x > 0, 0.25 * gradient, 0)


STOPPED: dict[str, Callable[..., Any]] = {
    "straight through": lambda s, h, i, j, gate: s + (torch.tanh(s) - s).detach(),
    "a detached gate": lambda s, h, i, j, gate: s * gate[h].detach(),
    "a detached score": lambda s, h, i, j, gate: s + 0.5 * s.detach() * gate[h],
    "no_grad": lambda s, h, i, j, gate: s + stopped(s, gate[h]),
    "a Function of one's own": lambda s, h, i, j, gate: Rounded.apply(s * gate[h], i <= j),
    "a Function that returns its input": lambda s, h, i, j, gate: Scaled.apply(s) * gate[h],
    "relu": lambda s, h, i, j, gate: functional.relu(s - s.detach() + (j % 3 - 1) * 1.0) + s * gate[h],
    "minimum and maximum": lambda s, h, i, j, gate: torch.maximum(s, torch.minimum(s, 2 * s - s)) * gate[h],
    "clamp": lambda s, h, i, j, gate: torch.clamp(s - s.detach() + (j % 3 - 1) * 1.0, -1, 1) * gate[h],
}


def stopped(s: Any, gate: Any) -> Any:
    with torch.no_grad():
        return s * gate


@pytest.mark.rotated(3)
@pytest.mark.parametrize("name", STOPPED)
def test_gradients_equal_autograds(name: str, q: Any, kv: Any) -> None:
    gate = torch.randn(HEADS, requires_grad=True)
    score = lambda s, b, h, i, j: STOPPED[name](s, h, i, j, gate)
    d_out = torch.randn(1, HEADS, LENGTH, DIM, dtype=torch.float64)
    got, wanted = (attend(q, *kv, score) for attend in (ours.flex_attention, plain))
    assert_near(got.detach(), wanted.detach(), "the output")
    expected = torch.autograd.grad(wanted, [q, gate], d_out, allow_unused=True)
    found = torch.autograd.grad(got, [q, gate], d_out.half(), allow_unused=True)
    for what, one, other in zip(("q", "gate"), found, expected, strict=True):
        zero = torch.zeros(HEADS) if what == "gate" else None
        assert_near(zero if one is None else one, zero if other is None else other, f"the gradient of {what}")


def test_a_table_that_is_frozen_and_then_learned(q: Any, kv: Any) -> None:
    table = torch.randn(HEADS, 2 * LENGTH)
    score = lambda s, b, h, i, j: s + table[h, i - j + LENGTH]

    def step() -> None:
        table.grad = None
        ours.flex_attention(q, *kv, score_mod=score).float().square().sum().backward()

    with torch.no_grad():
        ours.flex_attention(q, *kv, score_mod=score)
    step()
    assert table.grad is None
    table.requires_grad_()
    step()
    assert table.grad is not None and table.grad.any()
    table.requires_grad_(False)
    step()
    assert table.grad is None


@pytest.mark.parametrize("name", ["clamp", "exp", "dtype", "no_such_method"])
def test_a_nonlinear_backward_is_refused(name: str, q: Any, kv: Any) -> None:
    class Clipped(Scaled):
        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            attribute = getattr(gradient, name)
            return attribute(-1, 1) if name == "clamp" else attribute()

    with pytest.raises(SpecError, match=f"computes {name} of its gradient"):
        ours.flex_attention(q, *kv, score_mod=lambda s, b, h, i, j: Clipped.apply(s))


def test_a_spec_does_not_keep_results_of_its_function() -> None:
    table = torch.randn(HEADS, requires_grad=True)
    with pytest.raises(SpecError, match="a tensor that it computes from others"):
        fg.AttentionSpec(DIM, score=lambda s, b, h, q, k: s + table.exp()[h])
    views = table[:2]
    spec = fg.AttentionSpec(DIM, score=lambda s, b, h, q, k: s + views.view(1, 2)[0, h] + torch.arange(2)[h])
    assert len(spec.captures) == 2


# Rows, and functions that kernels do not have -------------------------------------------------------------------------

ROWS: dict[str, Callable[..., Any]] = {
    "any of a row": lambda s, b, h, i, j, t: torch.where((t[i].long() == (j % 4).unsqueeze(-1)).any(-1), s, s * 2),
    "distances": lambda s, b, h, i, j, t: s - (t[i] - t[j]).pow(2).sum(-1) / 100,
    "from the left": lambda s, b, h, i, j, t: s + (1 - t[i]).amax(-1) - (i.unsqueeze(-1) * t[j]).sum(-1) / 1000,
    "a mean": lambda s, b, h, i, j, t: s + t[i].mean(-1) - t[j].amax(-1),
    "all of a row": lambda s, b, h, i, j, t: torch.where((t[i] > 0).all(dim=-1), s, -s),
}


@pytest.mark.parametrize("name", ROWS)
def test_reductions_over_a_row(name: str, kv: Any) -> None:
    q, table = torch.randn(1, HEADS, LENGTH, DIM).half(), torch.randint(0, 5, (LENGTH, 3)).float()
    score = lambda s, b, h, i, j: ROWS[name](s, b, h, i, j, table)
    assert_near(ours.flex_attention(q, *kv, score_mod=score), plain(q, *kv, score), name)


# Memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a score", "a mask"])
def test_tensors_of_past_calls_are_freed(kind: str, kv: Any) -> None:
    q = torch.randn(1, HEADS, LENGTH, DIM).half()

    def step() -> weakref.ref[torch.Tensor]:
        table = torch.rand(1, HEADS, LENGTH, LENGTH) + 0.5
        keep = table > 0.6
        if kind == "a score":
            ours.flex_attention(q, *kv, score_mod=lambda s, b, h, i, j: s + table[b, h, i, j])
            return weakref.ref(table)
        mask = ours.create_block_mask(lambda b, h, i, j: keep[b, h, i, j], 1, HEADS, LENGTH, LENGTH)
        ours.flex_attention(q, *kv, block_mask=mask)
        return weakref.ref(keep)

    found = [step() for _ in range(20)]
    gc.collect()
    assert sum(each() is not None for each in found) == 0
