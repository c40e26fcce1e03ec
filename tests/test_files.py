"""Files are written completely or not at all, and only regular files are read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flashgen.files import is_plain_name, open_file, read_file, read_text, replacing, write_file


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    write_file(tmp_path / "a", "Grüße\n")
    assert content(tmp_path) == {"a": "Grüße\n".encode()}
    write_file(str(tmp_path / "a"), b"\0\xff")
    assert content(tmp_path) == {"a": b"\0\xff"}


def test_a_full_disk_keeps_the_previous_file(tmp_path: Path, full_disk: None) -> None:
    (tmp_path / "a").write_bytes(b"before")
    for name in ("a", "new"):
        with pytest.raises(OSError, match="No space left") as caught:
            write_file(tmp_path / name, b"after")
        assert caught.value.filename == str(tmp_path / name)
    assert content(tmp_path) == {"a": b"before"}


def test_an_error_while_writing_keeps_the_previous_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a"):
        Path("/nowhere/at/all").read_bytes()
    assert caught.value.filename == "/nowhere/at/all"
    assert content(tmp_path) == {"a": b"before"}


def test_a_killed_writer_keeps_the_previous_file(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom flashgen.files import replacing\n"
        "with replacing(sys.argv[1]) as file:\n    file.write(b'x' * 100_000)\n    os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "a").write_bytes(b"before")
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], check=False)
    assert (tmp_path / "a").read_bytes() == b"before"


def test_data_is_flushed_before_the_rename_and_the_rename_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def recorded(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(Path, "replace", lambda path, target: events.append("rename") or replace(path, target))
    write_file(tmp_path / "a", b"12345")
    assert events == ["file of 5", "rename", "folder"]


def test_permissions_and_links_are_kept(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "a", tmp_path / "link"
    target.write_bytes(b"before")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(link, b"after")
    assert link.is_symlink() and target.read_bytes() == b"after"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    umask = os.umask(0o027)
    try:
        write_file(tmp_path / "new", b"")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_devices_and_pipes_are_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_file(pipe, b"through")
    reader.join()
    assert received == [b"through"] and pipe.is_fifo()
    with pytest.raises(OSError, match="No space left") as caught:
        write_file("/dev/full", b"1")
    assert caught.value.filename == "/dev/full" and Path("/dev/full").is_char_device()


def test_a_folder_at_the_path_of_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path / "a", b"")
    with pytest.raises(FileNotFoundError) as caught:
        write_file(tmp_path / "nowhere" / "a", b"")
    assert caught.value.filename == str(tmp_path / "nowhere" / "a")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    assert read_file(tmp_path / "a") == read_file(tmp_path / "link", max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, more than 4"):
        read_file(tmp_path / "a", max_bytes=4)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "nothing")


def test_links_are_followed_unless_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    with open_file(tmp_path / "link") as file:
        assert file.read() == b"12345"
    with pytest.raises(OSError, match="it is a link") as caught, open_file(tmp_path / "link", follow=False):
        pass
    assert caught.value.filename == str(tmp_path / "link")


def test_texts_are_utf_8_with_pythons_line_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("Grüße\r\nzwei\r".encode())
    assert read_text(tmp_path / "a") == "Grüße\nzwei\n"
    (tmp_path / "a").write_bytes(b"latin \xfc")
    with pytest.raises(UnicodeDecodeError) as caught:
        read_text(tmp_path / "a")
    assert caught.value.start == 6


@pytest.mark.parametrize("name", ["kernel.cu", "a b", "..."])
def test_plain_names(name: str) -> None:
    assert is_plain_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "/a", "a/", "a\0", "a\n", "a\\b", "\ud800", 3, None])
def test_invalid_plain_names(name: object) -> None:
    assert not is_plain_name(name)
