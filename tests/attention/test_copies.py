"""Copies and pickles of compiled attentions."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flashgen as fg
from flashgen.errors import UnsupportedError
from flashgen.runtime.schedule import Schedule

SPEC = fg.AttentionSpec(32, mask=fg.causal(), score=fg.softcap(20))


def rows() -> list[np.ndarray]:
    return [np.random.default_rng(n).standard_normal((1, 2, 20, 32)).astype(np.float16) for n in range(3)]


def test_a_copy_is_the_same_object() -> None:
    compiled = fg.compile(SPEC, emulate=True)
    assert copy.copy(compiled) is compiled and copy.deepcopy({"layer": compiled})["layer"] is compiled


def test_a_pickle_keeps_the_compile_options() -> None:
    plan = fg.compile(SPEC, target="sm_80", emulate=True).plan
    for options in (
        {"target": "sm_80", "deterministic": True},
        {"target": "sm_90a"},
        {"plan": plan, "schedule": Schedule(seed=3), "sanitize": "address"},
    ):
        compiled = fg.compile(SPEC, emulate=True, **options)
        assert pickle.loads(pickle.dumps(compiled)) is compiled, "this process has compiled it"


def test_another_process_unpickles_it(tmp_path: Path) -> None:
    compiled, (q, k, v) = fg.compile(SPEC, emulate=True), rows()
    (tmp_path / "attention").write_bytes(pickle.dumps((compiled, q, k, v)))
    script = (
        "import pickle, sys, pathlib, numpy as np\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "attention, q, k, v = pickle.loads((folder / 'attention').read_bytes())\n"
        "np.save(folder / 'out.npy', attention(q, k, v))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), compiled(q, k, v))


def test_closed_over_arrays() -> None:
    """A deep copy copies them; pickling is refused."""
    ids = np.arange(20, dtype=np.int32) // 7
    compiled = fg.compile(fg.AttentionSpec(32, mask=lambda b, h, q, k: ids[q] == ids[k]), emulate=True)
    q, k, v = rows()
    expected, deep = compiled(q, k, v), copy.deepcopy(compiled)
    assert copy.copy(compiled) is compiled
    ids[:] = 0
    assert not np.array_equal(compiled(q, k, v), expected)
    np.testing.assert_array_equal(deep(q, k, v), expected)
    with pytest.raises(UnsupportedError, match=r"pickling .* is not supported: its functions close over ids"):
        pickle.dumps(compiled)


def test_edited_kernels_are_not_pickled() -> None:
    compiled = fg.compile(SPEC, emulate=True)
    edited = fg.compile(SPEC, emulate=True, source=compiled.source + "\n// read by hand\n")
    assert copy.deepcopy(edited) is edited
    with pytest.raises(UnsupportedError, match=r"pickling .* is not supported: its kernels are edited"):
        pickle.dumps(edited)
