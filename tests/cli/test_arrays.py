"""Named arrays in files: both formats, both ways, bfloat16, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flashgen.cli.arrays import BFLOAT16, as_bfloat16, load_arrays, save_arrays
from flashgen.errors import ArgumentError

EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm_qkv.npz"


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "q": random.standard_normal((1, 2, 5, 8)).astype(np.float16),
        "ids": np.arange(5, dtype=np.int32),
        "layout": np.array([[True, False]]),
        "window": np.array(3, dtype=np.int64),
        "empty": np.zeros((0, 4), np.float32),
    }


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_what_is_written_is_read(tmp_path: Path, arrays: dict[str, np.ndarray], suffix: str) -> None:
    path = tmp_path / f"arrays{suffix}"
    save_arrays(path, arrays)
    found = load_arrays(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


def test_safetensors_agrees_with_the_package(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    save_arrays(tmp_path / "ours.safetensors", arrays)
    save_file(arrays, tmp_path / "theirs.safetensors", metadata={"format": "np"})
    theirs, ours = load_file(tmp_path / "ours.safetensors"), load_arrays(tmp_path / "theirs.safetensors")
    for name, array in arrays.items():
        assert np.array_equal(theirs[name], array) and np.array_equal(ours[name], array)


def test_safetensors_keeps_bfloat16(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    values = np.array([1.5, -2.0, 3e38], dtype=ml_dtypes.bfloat16)
    save_arrays(path, {"out": values})
    header = json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert header["out"]["dtype"] == "BF16"
    found = load_arrays(path)["out"]
    assert found.dtype == BFLOAT16 and np.array_equal(found, values)


def test_npz_keeps_bfloat16_as_words(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0]], dtype=ml_dtypes.bfloat16)
    save_arrays(tmp_path / "a.npz", {"out": values})
    words = load_arrays(tmp_path / "a.npz")["out"]
    assert words.dtype == np.uint16 and np.array_equal(as_bfloat16(words), values)


def test_what_numpy_makes_of_bfloat16_is_read_too(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0]], dtype=ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", q=values)
    assert np.array_equal(as_bfloat16(load_arrays(tmp_path / "a.npz")["q"]), values)


def test_other_arrays_are_no_words() -> None:
    array = np.zeros(3, np.float16)
    assert as_bfloat16(array) is array


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", q=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ArgumentError, match="not a sound"):
        load_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"{",
        (2).to_bytes(8, "little") + b"[]",
        b'%c\0\0\0\0\0\0\0{"q":{"dtype":"F16","shape":[4],"data_offsets":[0,8]}}' % 54,
        b'%c\0\0\0\0\0\0\0{"q":{"dtype":"F8_E4M3","shape":[],"data_offsets":[0,0]}}' % 57,
    ],
    ids=["empty", "huge header", "cut header", "a list", "cut data", "unknown type"],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"a\.safetensors is not a sound"):
        load_arrays(tmp_path / "a.safetensors")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more"])
def test_damaged_npz_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"a\.npz is not a sound"):
        load_arrays(tmp_path / "a.npz")


def test_other_files_and_places_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(ArgumentError, match=r"\.npz and \.safetensors are known"):
        load_arrays(tmp_path / "a.pt")
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_arrays(tmp_path / "nowhere.npz")
    with pytest.raises(ArgumentError, match="cannot be written"):
        save_arrays(tmp_path / "nowhere" / "a.npz", arrays)
    with pytest.raises(ArgumentError, match="no type for 'tokens'"):
        save_arrays(tmp_path / "a.safetensors", {"tokens": np.array(["a"])})


def test_the_example_is_what_its_script_says() -> None:
    assert EXAMPLE.stat().st_size < 400_000
    example = load_arrays(EXAMPLE)
    tokens = len(example["tokens"])
    for name in "qkv":
        assert example[name].shape == (1, 12, tokens, 32) and example[name].dtype == np.float16
    assert example["sentence"].shape == (tokens,) and example["sentence"].dtype == np.int32
    assert (np.diff(example["sentence"]) >= 0).all()
    assert example["slopes"].shape == (12,) and example["slopes"].dtype == np.float32
    assert example["tokens"][0] == "[CLS]" and example["tokens"][-1] == "[SEP]"
