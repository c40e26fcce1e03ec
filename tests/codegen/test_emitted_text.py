"""The text of emitted kernels: tidy, short, without unused names, and reproducible."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys

import pytest

import flashgen.language as fg
from emitted_text import all_called, all_used, functions_fit, members_read, tidy, unconditional
from flashgen.codegen.dispatch import render_forward
from flashgen.codegen.rendered_kernel import RenderedKernel
from flashgen.codegen.targets import TARGETS
from flashgen.codegen.tile_list_kernel import render_lists
from flashgen.errors import UnsupportedError
from flashgen.verify import variants
from flashgen.verify.variants import spec_of


def kernels() -> list[RenderedKernel]:
    """Returns every variant of `flashgen verify`, for a GPU with asynchronous copies and for one without."""
    rendered: list[RenderedKernel] = []
    for number, variant in enumerate(variants()):
        for target in (TARGETS["sm_80"], TARGETS["sm_75"]):
            dim = (64, 128, 40)[number % 3]
            spec = spec_of(variant, dim, "float16", ("bhsd", "bshd")[number % 2])
            forward = render_forward(spec, target)
            rendered += [forward, *([render_lists(spec, target, forward.plan)] if forward.reads else [])]
    return rendered


KERNELS = kernels()
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


@every_kernel
def test_lines_are_tidy(kernel: RenderedKernel) -> None:
    tidy(kernel.source)


@every_kernel
def test_functions_and_kernels_are_short(kernel: RenderedKernel) -> None:
    functions_fit(kernel)


@every_kernel
def test_only_primitives_have_conditional_compilation(kernel: RenderedKernel) -> None:
    unconditional(kernel.source)


@every_kernel
def test_nothing_is_unused(kernel: RenderedKernel) -> None:
    all_used(kernel)
    all_called(kernel)


@every_kernel
def test_members_of_the_struct_are_read(kernel: RenderedKernel) -> None:
    members_read(kernel)


def test_a_kernel_names_its_spec_and_its_command() -> None:
    spec = fg.AttentionSpec(64, mask=fg.causal() & fg.sliding_window(128), score=fg.softcap(30), dropout=0.1)
    kernel = render_forward(spec, TARGETS["sm_86"])
    head = kernel.source.split("\n\n", 1)[0]
    for text in (
        "causal() & sliding_window(128)",
        "softcap(30)",
        "0.1",
        "sm_86",
        spec.to_json(),
        str(kernel.plan.tile_q),
    ):
        assert text in head, text
    assert kernel.entry in kernel.source and re.fullmatch(r"[A-Za-z_]\w*", kernel.entry)
    assert spec.name in kernel.name and "sm86" in kernel.name


def test_names_and_entries_are_unique() -> None:
    assert len({kernel.name for kernel in KERNELS}) == len(KERNELS)
    assert len({(kernel.entry, kernel.target.name) for kernel in KERNELS}) == len(KERNELS)


def test_causal_bounds_print_as_written_by_hand() -> None:
    source = render_forward(fg.AttentionSpec(64, mask=fg.causal()), TARGETS["sm_80"]).source
    for line in (
        "const int q_first = work.first_query;",
        "const int q_last = min(work.first_query + kTileQ, arguments.len_q) - 1;",
        "const int first_key = 0;",
        "const int end_key = min(arguments.len_k, q_last + arguments.len_k - arguments.len_q + 1);",
        "const int full_first_key = 0;",
        "const int full_end_key = min(arguments.len_k, q_first + arguments.len_k - arguments.len_q + 1);",
        "return k <= q + (arguments.len_k - arguments.len_q);",
    ):
        assert line in source, line


def test_a_full_mask_needs_no_mask() -> None:
    source = render_forward(fg.AttentionSpec(64), TARGETS["sm_80"]).source
    assert "mask_mod" not in source and "score_mod" not in source and "philox" not in source


@pytest.mark.rotated(3)
def test_rendering_is_deterministic_across_processes() -> None:
    program = (
        "import hashlib, json, sys\n"
        "from flashgen.codegen.dispatch import render_forward\n"
        "from flashgen.codegen.tile_list_kernel import render_lists\n"
        "from flashgen.codegen.targets import TARGETS\n"
        "from flashgen.language import AttentionSpec\n"
        "out = []\n"
        "for text in json.loads(sys.stdin.read()):\n"
        "    spec = AttentionSpec.from_json(text)\n"
        "    kernel = render_forward(spec, TARGETS['sm_80'])\n"
        "    lists = [render_lists(spec, TARGETS['sm_80'], kernel.plan)] if kernel.reads else []\n"
        "    out += [[k.name, k.entry, hashlib.sha256(k.source.encode()).hexdigest()] for k in [kernel, *lists]]\n"
        "print(json.dumps(out))\n"
    )
    specs = [spec_of(variant, 64, "bfloat16").to_json() for variant in variants()]
    answers = []
    for seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], input=json.dumps(specs), env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1] == answers[2]
    own = render_forward(spec_of(variants()[0], 64, "bfloat16"), TARGETS["sm_80"])
    assert answers[0][0] == [own.name, own.entry, hashlib.sha256(own.source.encode()).hexdigest()]


def test_a_scale_beyond_float32_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="scale="):
        render_forward(fg.AttentionSpec(64, scale=3e38), TARGETS["sm_80"])
    render_forward(fg.AttentionSpec(64, scale=2e38), TARGETS["sm_80"])
