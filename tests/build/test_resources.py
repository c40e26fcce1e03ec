"""Registers, spills and shared memory are parsed from ptxas logs of several CUDA versions."""

from __future__ import annotations

from flashgen.build.resources import Resources, combined, parse_resources, without_timings

CUDA_12 = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'forward' for 'sm_80'
ptxas info    : Function properties for forward
    48 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, 1024+0 bytes smem, 360 bytes cmem[0]
"""
CUDA_13 = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'lists' for 'sm_120'
ptxas info    : Function properties for lists
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 23 registers, used 1 barriers, 132 bytes smem
ptxas info    : Compile time = 3.438 ms
"""


def test_both_log_formats() -> None:
    assert parse_resources(CUDA_12) == {"forward": Resources(255, 16, 24, 48, 1024)}
    assert parse_resources(CUDA_13) == {"lists": Resources(23, 0, 0, 0, 132)}
    assert parse_resources(CUDA_12)["forward"].spills == 40


def test_several_kernels_in_one_log() -> None:
    both = parse_resources(CUDA_12 + CUDA_13)
    assert list(both) == ["forward", "lists"]
    assert combined(both) == Resources(255, 16, 24, 48, 1024)
    assert combined({}) == Resources(0)


def test_a_called_function_counts_for_its_kernel() -> None:
    called = "Function properties for helper\n    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\n"
    assert parse_resources(CUDA_13 + called)["lists"].spills == 8


def test_no_shared_memory_is_zero() -> None:
    assert parse_resources(CUDA_13.replace(", 132 bytes smem", ""))["lists"].static_shared == 0


def test_a_log_without_timings_is_reproducible() -> None:
    assert without_timings(CUDA_13) == without_timings(CUDA_13.replace("3.438", "9.1"))
    assert "registers" in without_timings(CUDA_13)


def test_json_round_trip() -> None:
    resources = Resources(1, 2, 3, 4, 5)
    assert Resources.from_dict(resources.to_dict()) == resources
