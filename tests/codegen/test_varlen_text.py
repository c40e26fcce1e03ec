"""The text of emitted varlen kernels, and grids that do not depend on lengths."""

from __future__ import annotations

import random
import re

import pytest

import flashgen.language as fg
from emitted_text import all_called, functions, tidy, unconditional, without_comments
from flashgen.codegen.formula_text import cpp
from flashgen.codegen.hopper.plans import HopperPlan
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.sizes import NAMED_SIZES, Sizes
from flashgen.codegen.stages import backward_kernels, kernels_of
from flashgen.codegen.targets import TARGETS
from flashgen.codegen.varlen import slots
from flashgen.errors import UnsupportedError
from flashgen.verify import variants
from flashgen.verify.variants import spec_of

LONGEST_FUNCTION, LONGEST_KERNEL = 75, 105  # lines
LONGEST_FILE = 90  # additional lines of code compared with the dense kernel


def both(number: int, target: str) -> list[tuple[RenderedKernel, RenderedKernel]]:
    """Returns every kernel of a variant, varlen and dense, with the same plans, without semaphores.

    Gradients of dense arrays, which have kernels of their own unless batches are varlen, are left out.
    """
    dim, deterministic = (64, 128, 40, 256)[number % 4], number % 2 == 1
    found = []
    for layout in ("thd", "bshd"):
        spec = spec_of(variants()[number], dim, "float16", layout)
        kernels = dict(kernels_of(spec, TARGETS[target]))
        plan = found[0]["dkdv"].plan if found else None
        for role, kernel in backward_kernels(spec, TARGETS[target], deterministic, plan=plan).items():
            kernels[f"backward_{role}" if role in kernels else role] = kernel
        found.append(kernels)
    ragged, plain = found
    apart = {"postprocess", *(role for role in plain.keys() | ragged.keys() if role.startswith(("d_", "dense_")))}
    assert ragged.keys() - apart == plain.keys() - apart, "Hopper's own dkdv kernels need no additional ones"
    return [(ragged[role], plain[role]) for role in ragged if role in plain and not role.startswith("d_")]


every_variant = pytest.mark.parametrize("number", range(len(variants())))
targets = pytest.mark.parametrize("target", ["sm_80", "sm_90a"])


@targets
@every_variant
def test_kernels_are_tidy_and_fully_used(number: int, target: str) -> None:
    for kernel, plain in both(number, target):
        tidy(kernel.source)
        unconditional(kernel.source)
        assert unused(kernel) <= unused(plain), kernel.name
        all_called(kernel)
        read = set(re.findall(r"\b(?:arguments|launched)\.(\w+)", kernel.source))
        unread = [field.name for field in kernel.layout.fields if field.name not in read]
        assert not unread, (kernel.name, unread)
        for name, text in functions(kernel.source).items():
            longest = LONGEST_KERNEL if name == kernel.entry else LONGEST_FUNCTION
            assert text.count("\n") < longest, (kernel.name, name)
        assert code_lines(kernel) <= code_lines(plain) + LONGEST_FILE, kernel.name


def unused(kernel: RenderedKernel) -> set[str]:
    """Returns functions without callers and unused constants."""
    source = without_comments(kernel.source)
    words = re.findall(r"[A-Za-z_]\w*", source)
    defined = {name for name in functions(source) if name != kernel.entry and not name.startswith("operator")}
    defined |= set(re.findall(r"^ *(?:static )?constexpr \w+ (k\w+) =", source, re.MULTILINE))
    return {name for name in defined if words.count(name) < 2}


def code_lines(kernel: RenderedKernel) -> int:
    body = without_comments(kernel.source).split("#endif\n", 1)[1]
    return sum(bool(line.strip()) for line in body.splitlines())


@targets
def test_launches_do_not_depend_on_lengths(target: str) -> None:
    """Grids follow from the number of rows and of sequences."""
    spec = fg.AttentionSpec(64, layout="thd", mask=fg.causal())
    for kernel in kernels_of(spec, TARGETS[target], ("forward", "backward")).values():
        grid = " ".join(map(cpp, kernel.grid(NAMED_SIZES)))
        assert "len_" not in grid, (kernel.name, grid)


def test_workspace_slots_suffice_and_are_disjoint_for_any_lengths() -> None:
    """Compares the kernel's search with the formula of the launch."""
    draw = random.Random(7)
    for _ in range(2000):
        tile, batch = draw.choice((16, 48, 64, 128)), draw.randrange(0, 9)
        before, behind = draw.randrange(3) * 5, draw.randrange(3) * 7
        starts = [before]
        for _ in range(batch):
            starts.append(starts[-1] + draw.choice((0, 0, 1, tile - 1, tile, tile + 1, draw.randrange(300))))
        total = starts[-1] + behind
        begins, ends = [0, *starts], [*starts, total]
        sizes = Sizes(batch, 1, 1, total, total, total_q=total)
        free = 0
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            first = begin // tile + number  # the sequence's index - 1, as in sequence_of
            assert first >= free
            free = first + -(-(end - begin) // tile)
        assert free <= slots(total, sizes, tile)


def test_packed_heads_are_refused() -> None:
    spec = fg.AttentionSpec(64, layout="thd")
    with pytest.raises(UnsupportedError, match="packed_heads=2 must be 1 with layout='thd'"):
        HopperPlan(2, 64, packed_heads=2).check(spec, TARGETS["sm_90a"])
