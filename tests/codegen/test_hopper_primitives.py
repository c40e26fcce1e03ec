"""Each of Hopper's primitives assembles to the instruction for sm_90a that it stands for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashgen.build import nvrtc
from flashgen.build.inspect import sass
from flashgen.codegen.environment import environment, primitives_for, tidy
from flashgen.codegen.targets import target_named
from flashgen.errors import BuildError

pytestmark = pytest.mark.skipif(not nvrtc.is_available(), reason="needs CuPy and NVRTC: pip install '.[cuda13]'")

MAP = "struct alignas(64) TensorMap { unsigned long long words[16]; };"
STRUCT = "struct Arguments { TensorMap map; float* out; unsigned* counter; unsigned barrier, bytes; };"
BOX = "arguments.map, arguments.barrier, 0, 1, 2, 3"
PRODUCT = "float d[{half}] = {{}}; {a}{name}<{width}, {transposed}>(d, {operand}, {b}, threadIdx.x == 0); {end}"
END = "wgmma_commit(); wgmma_wait<0>(); order_registers(d); for (float x : d) *arguments.out += x;"
SIZES: dict[str, Any] = {
    "shared_forms": [(16, "false"), (128, "false")],
    "register_forms": [(64, "true"), (256, "true")],
}


def shared(dtype: str, width: int) -> str:
    b = "matrix_descriptor<128>(arguments.barrier, 0, 1024)"
    return PRODUCT.format(
        half=width // 2, a="", name=f"wgmma_shared_{dtype}", width=width, transposed="false", operand=b, b=b, end=END
    )


def registers(dtype: str, width: int) -> str:
    a, b = "const unsigned a[4] = {1, 2, 3, 4}; ", "matrix_descriptor<32>(arguments.barrier, 4096, 256)"
    return PRODUCT.format(
        half=width // 2, a=a, name=f"wgmma_registers_{dtype}", width=width, transposed="true", operand="a", b=b, end=END
    )


# The code of a kernel -> a pattern that its PTX or its machine code must contain.
USES = {
    "mbarrier_init(arguments.barrier, 3);": "mbarrier.init",
    "mbarrier_fence_init();": "fence.mbarrier_init",
    "mbarrier_arrive_expect_bytes(arguments.barrier, 128);": "SYNCS.*ARRIVE",
    "mbarrier_arrive(arguments.barrier);": "SYNCS.*ARRIVE",
    "mbarrier_wait(arguments.barrier, 1);": "SYNCS.*TRYWAIT",
    f"tma_load_4d(arguments.bytes, {BOX});": "UTMALDG.4D",
    "tma_prefetch_4d(arguments.map, 0, 1, 2, 3);": "UTMAPF.L2.4D",
    "tma_load_5d(arguments.bytes, arguments.map, arguments.barrier, 0, 1, 2, 3, 4);": "UTMALDG.5D",
    "tma_store_4d(arguments.map, arguments.bytes, 0, 1, 2, 3); bulk_commit(); bulk_wait_read<0>();": "UTMASTG.4D",
    "tma_reduce_add_4d(arguments.map, arguments.bytes, 0, 1, 2, 3); bulk_commit();": "UTMAREDG.4D.ADD",
    "fence_async_shared();": "FENCE.VIEW.ASYNC",
    "wgmma_fence();": "WARPGROUP.ARRIVE",
    "named_barrier_sync(1, 256);": "BAR.SYNC",
    "named_barrier_arrive(1, 256);": "BAR.ARV",
    "registers_increase<240>();": "USETMAXREG",
    "registers_decrease<24>();": "USETMAXREG",
    "store_matrix_x4(arguments.barrier, 1, 2, 3, threadIdx.x);": "STSM.16.M88.4",
    "store_matrix_x4_transposed(arguments.barrier, 1, 2, 3, threadIdx.x);": "STSM.16.MT88.4",
    "*arguments.out = transpose_matrix(threadIdx.x);": "MOVM.16.MT88",
    "bulk_load(arguments.bytes, arguments.out, 128, arguments.barrier);": "UBLKCP",
    "prefetch_bulk(arguments.out, 128);": "UBLKPF",
    "bulk_store(arguments.out, arguments.bytes, 128); bulk_commit(); bulk_wait_read<0>();": "UBLKCP",
    "if (elect_one()) *arguments.out = 1;": "ELECT",
    "*arguments.out = atomic_inc_acq_rel(arguments.counter, 3);": r"(?s)MEMBAR\.ALL\.GPU.*ATOMG\.E\.INC.*CCTL\.IVALL",
    "semaphore_wait(arguments.counter, 3);": r"(?s)LD.*STRONG\.GPU.*FENCE\.VIEW\.ASYNC",
    "*arguments.out = semaphore_test(arguments.counter, 3);": r"(?s)LD.*STRONG\.GPU.*FENCE\.VIEW\.ASYNC",
    "counter_add(arguments.counter, 2);": r"(?s)FENCE\.VIEW\.ASYNC.*REDG\.E\.ADD\.STRONG\.GPU",
    "counter_wait(arguments.counter, 3);": r"(?s)LD.*STRONG\.GPU.*NANOSLEEP",
    "semaphore_release(arguments.counter, 3);": r"(?s)FENCE\.VIEW\.ASYNC.*ST\S*\.STRONG\.GPU",
    "*arguments.out = wide_product(arguments.bytes, threadIdx.x);": r"(?s)mul\.wide\.s32.*IMAD\.WIDE R",
    shared("f16", 16): "HGMMA.64x16x16.F32",
    shared("bf16", 128): "HGMMA.64x128x16.F32.BF16",
    registers("f16", 64): "HGMMA.64x64x16.F32",
    registers("bf16", 256): "HGMMA.64x256x16.F32.BF16.*tnspB",
}


def source_of(use: str) -> str:
    target = target_named("sm_90a")
    device, shared_texts = primitives_for(use, target, SIZES)
    primitives = (
        environment()
        .get_template("primitives.cuh.jinja")
        .render(device_primitives=device, shared_primitives=shared_texts, uses_shared_memory=False)
    )
    head = 'extern "C" __global__ void __launch_bounds__(384, 1) kernel'
    return tidy(f"{MAP}\n{STRUCT}\n{primitives}\n{head}(const __grid_constant__ Arguments arguments) {{\n  {use}\n}}\n")


@pytest.mark.rotated(3)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.split("(")[0][-40:])
def test_a_primitive_is_its_instruction(use: str) -> None:
    source = source_of(use)
    compiled = nvrtc.compile(source, "sm_90a", "primitive")
    assert compiled.resources.spill_stores == 0 and "C75" not in compiled.log, compiled.log
    text = nvrtc.compile_ptx(source, "sm_90a", "primitive")
    try:
        text += sass(compiled.cubin)
    except BuildError:
        pytest.skip("no disassembler here")
    assert re.search(USES[use], text), text


def test_the_target_is_found_by_name() -> None:
    target = target_named("sm_90a")
    assert (target.family, target.compute_capability, target.architecture) == ("hopper", 90, "sm_90a")
    assert target.shared_per_block == 227 * 1024 and target.dtypes == ("float16", "bfloat16")
