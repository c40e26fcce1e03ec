"""A key depends on the inputs of a binary, and on nothing else."""

from __future__ import annotations

import subprocess
import sys

from flashgen.build.keys import content_key, folder_name, kernel_key, portable_options, readable_name
from flashgen.build.nvrtc import options


def test_each_part_changes_the_key() -> None:
    keys = {
        kernel_key("source", "sm_80", ("-a",), (13, 0)),
        kernel_key("source ", "sm_80", ("-a",), (13, 0)),
        kernel_key("source", "sm_90", ("-a",), (13, 0)),
        kernel_key("source", "sm_80", ("-b",), (13, 0)),
        kernel_key("source", "sm_80", ("-a",), (13, 1)),
    }
    assert len(keys) == 5
    assert all(len(key) == 64 for key in keys)


def test_absolute_paths_do_not_change_it() -> None:
    here = ("--std=c++17", "-I/home/one/include", "--include-path=/usr/include", "-isystem/opt/x", "/one/file")
    there = ("--std=c++17", "-I/elsewhere", r"--include-path=C:\cuda", "-isystem/y", "/two/file")
    assert portable_options(here) == portable_options(there) == ("--std=c++17",)
    assert kernel_key("source", "sm_80", here, (13, 0)) == kernel_key("source", "sm_80", there, (13, 0))
    assert portable_options(options("sm_90a")) == options("sm_90a")


def test_the_order_of_parts_does_not_change_it() -> None:
    assert content_key("host", {"a": "1", "b": "2"}) == content_key("host", {"b": "2", "a": "1"})
    assert content_key("host", {"a": "1"}) != content_key("cubin", {"a": "1"})


def test_another_process_agrees() -> None:
    """Hash randomization and other per-process state have no effect. The value itself must never change."""
    expected = "c3cd77913f659a2c"
    script = "from flashgen.build.keys import kernel_key; print(kernel_key('s', 'sm_80', ('-x',), (13, 0)))"
    keys = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert keys == {kernel_key("s", "sm_80", ("-x",), (13, 0))}
    assert keys.pop()[:16] == expected


def test_folder_names_are_safe() -> None:
    assert folder_name("fwd-bf16-d128v64", "0123456789abcdef" * 4) == "fwd-bf16-d128v64.0123456789abcdef"
    assert readable_name("../a b/c") == "_a_b_c"
    assert readable_name("") == "kernel"
    assert len(readable_name("x" * 1000)) == 150
