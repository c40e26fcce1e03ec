"""Named arrays in files: both formats in both directions, bfloat16, and damaged files."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from flashgen.cli.arrays import BFLOAT16, as_bfloat16, load_arrays, save_arrays
from flashgen.errors import ArgumentError

EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm_qkv.npz"


def safetensors(header: str | bytes) -> bytes:
    """Returns a file with a header and no data."""
    text = header.encode() if isinstance(header, str) else header
    return len(text).to_bytes(8, "little") + text


def npy(shape: tuple[int, ...]) -> bytes:
    """Returns a member of an .npz that declares a float16 shape but has four elements."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f2", "fortran_order": False, "shape": shape})
    return file.getvalue() + bytes(8)


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
def test_written_arrays_are_read_back(tmp_path: Path, arrays: dict[str, np.ndarray], suffix: str) -> None:
    path = tmp_path / f"arrays{suffix}"
    save_arrays(path, arrays)
    found = load_arrays(path)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_files_of_numpy_are_read(tmp_path: Path, arrays: dict[str, np.ndarray], save: Any) -> None:
    arrays |= {"columns": np.asfortranarray(np.arange(12.0).reshape(3, 4)), "tokens": np.array(["a", "été"])}
    save(tmp_path / "a.npz", **arrays)
    found = load_arrays(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array) and found[name].flags.writeable


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


def test_bfloat16_written_by_numpy_is_read(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0]], dtype=ml_dtypes.bfloat16)
    np.savez(tmp_path / "a.npz", q=values)
    assert np.array_equal(as_bfloat16(load_arrays(tmp_path / "a.npz")["q"]), values)


def test_other_arrays_are_not_stored_as_words() -> None:
    array = np.zeros(3, np.float16)
    assert as_bfloat16(array) is array


def test_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", q=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ArgumentError, match="'q' holds Python objects, which are pickled and so never read"):
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
        safetensors("[" * 100_000 + "]" * 100_000),
        safetensors('{"q":' * 100_000 + "1" + "}" * 100_000),
        safetensors('{"q": 3, "k": {}}'),
        safetensors('{"q":{"dtype":["F16"],"shape":[],"data_offsets":[0,0]}}'),
        safetensors('{"q":{"dtype":"F16","shape":3,"data_offsets":[0,0]}}'),
        safetensors('{"q":{"dtype":"F16","shape":[0,1267650600228229401496703205376],"data_offsets":[0,0]}}'),
        safetensors('{"q":{"dtype":"F16","shape":[0],"data_offsets":[0]}}'),
        safetensors('{"q":{"dtype":"F16","shape":[1e999],"data_offsets":[0,0]}}'),
        safetensors('{"q":{"dtype":"F16","shape":[],"data_offsets":["a","b"]}}'),
        safetensors("{'\udcff'}".encode(errors="surrogateescape")),
    ],
    ids=lambda content: str(content[:60]),
)
def test_damaged_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"a\.safetensors is not a sound"):
        load_arrays(tmp_path / "a.safetensors")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"\x80\x05]q\x00."])
def test_a_file_that_is_no_zip_is_reported(tmp_path: Path, content: bytes) -> None:
    """The message does not advise to read it as a pickle, as NumPy's does for unknown formats."""
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ArgumentError, match=r"a\.npz is not a sound \.npz file: it is no zip archive") as caught:
        load_arrays(tmp_path / "a.npz")
    assert "pickle" not in str(caught.value)


def test_one_array_is_distinguished_from_several(tmp_path: Path) -> None:
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(ArgumentError, match="it is a single array"):
        load_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy((1600, 1000, 1000, 1000)), "'q' claims 3200000000000 bytes of float16 in the shape .* and holds 8"),
        (npy((3,)), "claims 6 bytes .* and holds 8"),
        (npy((-2, -2)), "shape"),
        (npy((4,)).replace(b"<f2", b"|O8"), "Python objects"),
        (b"", "not an array in NumPy"),
        (b"PK" * 20, "not an array in NumPy"),
        (npy((4,)).replace(b"(4,)", b"(" * 50 + b")" * 50), "not an array in NumPy"),
        (npy((4,)).replace(b"<f2", b"V0 "), "'q' "),
    ],
    ids=["tebibytes", "fewer", "negative", "objects", "empty", "no magic", "nested", "no size"],
)
def test_declared_sizes_are_limited_by_the_bytes_of_the_file(
    tmp_path: Path, member: bytes, message: str, compression: int
) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", compression) as archive:
        archive.writestr("q.npy", member)
    with pytest.raises(ArgumentError, match=message):
        load_arrays(tmp_path / "a.npz")


def test_an_npz_with_a_false_size_is_refused(tmp_path: Path) -> None:
    """The directory of the archive also claims 2.9 TiB; no more memory is touched than there are bytes."""
    path = tmp_path / "a.npz"
    claimed = 1600 * 10**9 * 2
    member = npy((1600, 1000, 1000, 1000))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("q.npy"), member)
        archive.getinfo("q.npy").file_size = claimed + len(member) - 8
    with pytest.raises(ArgumentError, match=r"does not fit into memory|ends after|is damaged"):
        load_arrays(path)


def test_truncated_or_altered_files_are_refused_or_read(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A file that is truncated or altered anywhere gives arrays or a flashgen error, and nothing else."""
    chance = np.random.default_rng(1)
    for suffix in (".npz", ".safetensors"):
        save_arrays(tmp_path / f"whole{suffix}", arrays)
        whole = (tmp_path / f"whole{suffix}").read_bytes()
        for _ in range(200):
            harmed = bytearray(whole[: chance.integers(len(whole))] if chance.random() < 0.3 else whole)
            for at in chance.integers(len(harmed), size=3) if harmed else ():
                harmed[at] = chance.integers(256)
            (tmp_path / f"harmed{suffix}").write_bytes(harmed)
            with contextlib.suppress(ArgumentError), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_arrays(tmp_path / f"harmed{suffix}")


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_full_disk_keeps_the_previous_file(
    tmp_path: Path, arrays: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / name
    save_arrays(path, arrays)
    before = path.read_bytes()

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ArgumentError, match=rf"--output .*{name} cannot be written: No space left"):
        save_arrays(path, {"out": np.zeros(3)})
    assert path.read_bytes() == before and [entry.name for entry in tmp_path.iterdir()] == [name]


def test_other_file_types_and_paths_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(ArgumentError, match=r"\.npz and \.safetensors are supported"):
        load_arrays(tmp_path / "a.pt")
    with pytest.raises(ArgumentError, match="cannot be read"):
        load_arrays(tmp_path / "nowhere.npz")
    with pytest.raises(ArgumentError, match="cannot be written"):
        save_arrays(tmp_path / "nowhere" / "a.npz", arrays)
    with pytest.raises(ArgumentError, match="no type for 'tokens'"):
        save_arrays(tmp_path / "a.safetensors", {"tokens": np.array(["a"])})


def test_the_example_data_equals_its_scripts_output() -> None:
    assert EXAMPLE.stat().st_size < 400_000
    example = load_arrays(EXAMPLE)
    tokens = len(example["tokens"])
    for name in "qkv":
        assert example[name].shape == (1, 12, tokens, 32) and example[name].dtype == np.float16
    assert example["sentence"].shape == (tokens,) and example["sentence"].dtype == np.int32
    assert (np.diff(example["sentence"]) >= 0).all()
    assert example["slopes"].shape == (12,) and example["slopes"].dtype == np.float32
    assert example["tokens"][0] == "[CLS]" and example["tokens"][-1] == "[SEP]"
