"""The operators under torch's checks and its compiler."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="flashgen.torch needs torch: pip install 'flashgen[torch]'")

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import flashgen as fg
from flashgen.torch import (
    attention,
    create_block_mask,
    flex_attention,
    register,
    scaled_dot_product_attention,
    varlen_attention,
)

slopes = fg.Tensor("slopes", "float32", 1, grad=True)
ids = fg.Tensor("ids", "int32", 2)
width = fg.Scalar("width")
SPECS: dict[str, Any] = {
    "causal": (fg.AttentionSpec(32, "bfloat16", mask=fg.causal()), [], [], None),
    "dropout": (fg.AttentionSpec(32, "bfloat16", dropout=0.5), [], [], torch.tensor(7)),
    "learned": (
        fg.AttentionSpec(
            32, "bfloat16", mask=fg.document(ids), score=lambda s, b, h, q, k: fg.where(q - k < width, s + slopes[h], s)
        ),
        [torch.zeros(2, 40, dtype=torch.int32), torch.zeros(2, requires_grad=True)],
        [9],
        None,
    ),
    "other layout": (fg.AttentionSpec(32, "bfloat16", value_dim=16, layout="bshd"), [], [], None),
}


def arguments(name: str, qkv: Any) -> Any:
    spec, captures, integers, seed = SPECS[name]
    q, k, v = qkv if spec.layout == "bhsd" else (x.detach().transpose(1, 2).requires_grad_() for x in qkv)
    v = v if spec.value_dim == 32 else v.detach()[..., :16].requires_grad_()
    return q, k, v, captures, register(spec), integers, [], seed


@pytest.mark.parametrize("name", SPECS)
def test_opcheck_of_the_forward(qkv: Any, name: str) -> None:
    """Schema, autograd, fake kernel, and AOTAutograd with symbolic sizes."""
    tolerances = {"atol": 3e-2, "rtol": 3e-2}  # the order of additions to dq varies
    results = torch.library.opcheck(torch.ops.flashgen.forward.default, arguments(name, qkv), **tolerances)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


@pytest.mark.parametrize("name", SPECS)
def test_opcheck_of_the_backward(qkv: Any, name: str) -> None:
    q, k, v, captures, *numbers = arguments(name, [x.detach() for x in qkv])
    captures = [each.detach() for each in captures]
    out, lse = torch.ops.flashgen.forward(q, k, v, captures, *numbers)
    given = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, captures, *numbers)
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    results = torch.library.opcheck(torch.ops.flashgen.backward.default, given, test_utils=utilities)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_outputs_of_transposed_inputs_are_joined_without_a_copy(compiled: bool) -> None:
    """A model splits one product into heads, and saves the output for its backward: a tensor of its own and no copy."""
    spec = SPECS["causal"][0]

    def model(rows: Any) -> Any:
        q, k, v = rows.view(2, 40, 3, 2, 32).permute(2, 0, 3, 1, 4)
        return attention(spec, q, k, v)

    rows = torch.randn(2, 40, 3 * 64, dtype=torch.bfloat16, requires_grad=True)
    out = (torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model)(rows)
    assert out.transpose(1, 2).is_contiguous() and out.shape == (2, 2, 40, 32)
    qkv = rows.detach().view(2, 40, 3, 2, 32).permute(2, 0, 3, 1, 4)
    numbers = ([], register(spec), [], [], None)
    made = torch.ops.flashgen.forward(*qkv, *numbers)
    gradients = torch.ops.flashgen.backward(torch.ones_like(out), None, *qkv, *made, *numbers)
    assert all(each.transpose(1, 2).is_contiguous() for each in gradients)


def fresh(length: int) -> list[Any]:
    return [torch.randn(2, 2, length, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def test_one_graph_for_all_lengths() -> None:
    """fullgraph=True refuses breaks; the counter counts compilations."""
    spec, counter = SPECS["causal"][0], CompileCounterWithBackend("aot_eager")

    def model(q: Any, k: Any, v: Any) -> Any:
        return attention(spec, q * 2, k, v).sin()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (24, 40, 33, 64):
        qkv = fresh(length)
        out = compiled(*qkv)
        torch.testing.assert_close(out, model(*qkv))
        out.sum().backward()
        assert all(x.grad is not None for x in qkv)
    assert counter.frame_count == 1


def test_a_compiled_attention_in_a_graph_names_the_operator_to_call(qkv: Any) -> None:
    made = fg.compile(SPECS["causal"][0], emulate=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call flashgen\.torch\.attention\(attention, q, k, v\)"):
        torch.compile(lambda q, k, v: made(q * 2, k, v), fullgraph=True, backend="eager")(*qkv)
    compiled = torch.compile(lambda q, k, v: attention(made, q * 2, k, v), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*qkv), attention(made, qkv[0] * 2, *qkv[1:]))


def test_functions_of_every_signature_compile_without_breaks() -> None:
    cu, table = torch.tensor([0, 13, 40], dtype=torch.int32), torch.zeros(2, requires_grad=True)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + table[h] * (q - k)

    def model(q: Any, k: Any, v: Any) -> Any:
        first = scaled_dot_product_attention(q, k, v, is_causal=True)
        second = scaled_dot_product_attention(q, k, v, attn_mask=q[0, 0, :, :1] > 0)
        packed = [x[0].transpose(0, 1) for x in (q, k, v)]
        third = varlen_attention(*packed, cu, cu, causal=True)
        return first + second + third.transpose(0, 1) + flex_attention(q, k, v, score)

    qkv = fresh(40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv), model(*qkv))
    compiled(*qkv).sum().backward()
    assert table.grad is not None and table.grad.any()


@pytest.mark.parametrize("name", ["sdpa", "flex", "varlen"])
def test_one_graph_for_all_lengths_of_every_signature(name: str) -> None:
    """With dynamic=True all sizes and numbers are symbols, including those of which a spec is created."""
    counter = CompileCounterWithBackend("aot_eager")

    def model(q: Any, k: Any, v: Any, starts: Any) -> Any:
        if name == "sdpa":
            return scaled_dot_product_attention(q * 2, k, v, is_causal=True)
        if name == "flex":
            return flex_attention(q * 2, k, v)
        packed = [x[0].transpose(0, 1) for x in (q * 2, k, v)]
        return varlen_attention(*packed, starts, starts, 40, 40, causal=True, window_size=(17, -1))

    compiled, counts = torch.compile(model, fullgraph=True, dynamic=True, backend=counter), []
    for length in (24, 40, 33):
        given = (*fresh(length), torch.tensor([0, 13, length], dtype=torch.int32))
        out = compiled(*given)
        torch.testing.assert_close(out, model(*given))
        out.sum().backward()
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1, "the first may recompile once, on a number that is not among its symbols"


def test_functions_created_inside_are_part_of_the_graph() -> None:
    qkv, table = fresh(40), torch.tensor([0.1, -0.2], requires_grad=True)

    def with_score(q: Any, k: Any, v: Any) -> Any:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s + table[h] * (i - j)

        return flex_attention(q * 2, k, v, score) * 2

    def with_mask(q: Any, k: Any, v: Any) -> Any:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40)
        return flex_attention(q * 2, k, v, block_mask=mask) * 2

    for model in (with_score, with_mask):
        expected = model(*qkv)
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*qkv), expected)
    compiled = torch.compile(with_score, backend="aot_eager", fullgraph=True)
    (learned,) = torch.autograd.grad(compiled(*qkv).float().sum(), [table])
    assert torch.equal(learned, *torch.autograd.grad(with_score(*qkv).float().sum(), [table]))


def test_separately_compiled_functions() -> None:
    """As in FlexAttention programs, which pass its two functions to torch.compile."""
    qkv, ids = fresh(40), torch.arange(40) // 13
    mask = lambda b, h, i, j: ids[i] == ids[j]
    made = torch.compile(create_block_mask, backend="aot_eager")(mask, None, None, 40, 40)
    call = torch.compile(flex_attention, backend="aot_eager", dynamic=False)
    score = lambda s, b, h, i, j: s * 2 + (i - j)
    expected = flex_attention(*qkv, score, create_block_mask(mask, None, None, 40, 40))
    assert torch.equal(call(*qkv, score_mod=score, block_mask=made), expected)


def test_specs_of_layers_are_distinguished() -> None:
    specs = [fg.AttentionSpec(32, "bfloat16", mask=mask) for mask in (fg.causal(), fg.full(), fg.sliding_window(3))]
    qkv = fresh(40)
    compiled = torch.compile(lambda spec, *x: attention(spec, *x), fullgraph=True, backend="aot_eager")
    for spec in specs:
        assert torch.equal(compiled(spec, *qkv), attention(spec, *qkv))


def test_a_graph_draws_its_seeds() -> None:
    """One graph, which drops the same elements as the same calls outside it, also with checkpointing."""
    spec = SPECS["dropout"][0]

    def model(q: Any, k: Any, v: Any) -> Any:
        return attention(spec, attention(spec, q, k, v), k, v)

    def again(q: Any, k: Any, v: Any) -> Any:
        return checkpoint(model, q, k, v, use_reentrant=False)

    qkv = fresh(40)
    torch.manual_seed(5)
    expected = model(*qkv)
    for each in (model, again):
        compiled = torch.compile(each, fullgraph=True, backend="aot_eager")
        torch.manual_seed(5)
        out = compiled(*qkv)
        assert torch.equal(out, expected)
        one, other = (torch.autograd.grad(made.float().sum(), qkv, retain_graph=True) for made in (out, expected))
        for ours, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(ours, theirs, atol=5e-2, rtol=5e-2)
        assert not torch.equal(compiled(*qkv), out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, None])
def test_inductors_code(seed: int | None) -> None:
    spec = SPECS["dropout"][0]

    def model(q: Any, k: Any, v: Any) -> Any:
        return attention(spec, q.relu(), k, v, seed=seed) + 1

    qkv = fresh(40)
    compiled = torch.compile(model, fullgraph=True)
    out = compiled(*qkv)
    if seed:
        torch.testing.assert_close(out, model(*qkv))
    else:
        assert not torch.equal(compiled(*qkv), out), "the next call draws another seed"
    assert_dropped_alike(out - 1, qkv)


def assert_dropped_alike(out: Any, qkv: Any) -> None:
    """Checks that the backward drops what the forward did: the output is linear in v, and so is the sum of dv * v."""
    d_out = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, qkv[2], d_out)
    ours, expected = ((x.double() * y.double()).sum().item() for x, y in ((dv, qkv[2]), (d_out, out)))
    size = (d_out.double() * out.double()).norm().item()
    assert abs(ours - expected) <= 0.03 * size, (ours, expected, size)


def test_exported_programs_name_their_specs() -> None:
    spec = SPECS["causal"][0]

    class Model(torch.nn.Module):
        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return attention(spec, q, k, v)

    qkv = [x.detach() for x in fresh(40)]
    program = torch.export.export(Model(), tuple(qkv))
    assert "flashgen.forward" in program.graph_module.code and register(spec) in program.graph_module.code
    assert torch.equal(program.module()(*qkv), attention(spec, *qkv))


@pytest.mark.gpu
def test_a_compiled_attention_between_two_graphs_on_a_gpu() -> None:
    made = fg.compile(fg.AttentionSpec(64, "bfloat16", mask=fg.causal()))
    q, k, v = (x.detach() for x in on_gpu())
    compiled = torch.compile(lambda q, k, v: made(q * 2, k, v).sin())
    torch.testing.assert_close(compiled(q, k, v), made(q * 2, k, v).sin())


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu(mode: str) -> None:
    """Also with CUDA graphs."""
    spec = fg.AttentionSpec(64, "bfloat16", mask=fg.causal())
    from flashgen.torch import emulated

    with emulated(False):
        compiled = torch.compile(lambda q, k, v: attention(spec, q * 2, k, v).sin(), fullgraph=True, mode=mode)
        for _ in range(4):
            qkv = [
                torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
            ]
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*qkv)
            torch.testing.assert_close(out, attention(spec, qkv[0] * 2, *qkv[1:]).sin(), atol=2e-2, rtol=2e-2)
            out.sum().backward()
            assert all(x.grad.isfinite().all() for x in qkv)


DROPPED = fg.AttentionSpec(64, "bfloat16", mask=fg.causal(), dropout=0.5)


def on_gpu(length: int = 256) -> list[Any]:
    shape = (2, 4, length, 64)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_dropout_in_a_graph_of_torchs_compiler(mode: str) -> None:
    """Each replay draws new dropout, and its backward that of its forward; torch.manual_seed repeats it."""
    from flashgen.torch import emulated

    with emulated(False):
        compiled = torch.compile(lambda q, k, v: attention(DROPPED, q * 2, k, v) * 1, fullgraph=True, mode=mode)
        qkv, seen = on_gpu(), []
        for step in range(6):
            torch.manual_seed(step // 2 if step > 2 else step)
            torch.compiler.cudagraph_mark_step_begin()
            out = compiled(*qkv)
            seen.append(out.detach().clone())
            assert_dropped_alike(out, qkv)
        assert torch.equal(seen[4], seen[5]) and not torch.equal(seen[3], seen[4])
        assert len({tuple(each.flatten()[-8:].tolist()) for each in seen}) == 3  # of three seeds


@pytest.mark.gpu
def test_dropout_in_a_graph_captured_by_hand() -> None:
    from flashgen.torch import emulated

    with emulated(False):
        qkv = on_gpu()
        d_out = torch.randn_like(qkv[0])

        def step() -> Any:
            out = attention(DROPPED, *qkv)
            return out, *torch.autograd.grad(out, qkv, d_out)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step()
        seen = []
        for seed in (1, 2, 2):
            torch.manual_seed(seed)
            graph.replay()
            out, _, _, dv = (x.detach().clone() for x in made)
            ours, expected = ((x.double() * y.double()).sum() for x, y in ((dv, qkv[2]), (d_out, out)))
            assert abs(ours - expected) <= 0.03 * (d_out.double() * out.double()).norm()
            seen.append(out)
        assert torch.equal(seen[1], seen[2]) and not torch.equal(seen[0], seen[1])
        graph.replay()
        assert not torch.equal(made[0], seen[2]), "the generator advances"
