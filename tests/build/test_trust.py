"""Owners, modes and links of a cache folder, its entries, files and locks: data that others may have written."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashgen.build import Artifacts, KernelCache, cache_folder, content_key, trust
from flashgen.build.entries import META, lock_path
from flashgen.build.trust import may_own, why_file_not_trusted
from flashgen.errors import BuildError, FlashgenWarning

KEY = content_key("test", {"source": "one"})
NOBODY = 65534
ME = os.geteuid()
needs_root = pytest.mark.skipif(ME != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cache_folder, "_warned_kinds", set())
    monkeypatch.delenv("FLASHGEN_CACHE_SHARED", raising=False)
    trust._is_member.cache_clear()
    yield
    trust._is_member.cache_clear()


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return KernelCache(tmp_path / "cache")


def stored(cache: KernelCache) -> Path:
    """Returns the folder of an entry, which is built if there is no usable one."""
    return cache.get_or_build("k", KEY, lambda: {"a": b"good"})


def is_built_again(cache: KernelCache, problem: str) -> None:
    """Asserts that the existing entry is not used: a warning says so, and another one replaces it."""
    with pytest.warns(FlashgenWarning, match=rf"is damaged: .*{problem}.*; it is built again") as caught:
        folder = stored(cache)
    assert len(caught) == 1
    assert (folder / "a").read_bytes() == b"good" and not folder.is_symlink()
    assert {path.lstat().st_uid for path in (folder, *folder.iterdir())} == {ME}
    assert stored(cache) == folder  # without a warning


# ---- entries and files


@needs_root
@pytest.mark.parametrize("name", ["", "a", META])
def test_planted_entries_are_rebuilt(cache: KernelCache, name: str) -> None:
    """An entry or file of another user keeps its owner when the folder's mode is changed as the message advises."""
    folder = stored(cache)
    os.chown(folder / name, NOBODY, -1)
    cache.root.chmod(0o777)
    with pytest.warns(FlashgenWarning, match=r"everybody may write to it \(mode 0777\); `chmod -R go-w .*` fixes that"):
        stored(cache)
    cache.root.chmod(0o700)
    is_built_again(cache, f"{name or 'it'} belongs to ")


@needs_root
def test_an_entry_of_root_is_used(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stored(cache)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert stored(cache) == folder


@pytest.mark.parametrize("name", ["", "a", META])
@pytest.mark.parametrize("mode", [0o722, 0o720, 0o702])
def test_entries_that_others_can_write_to_are_rebuilt(cache: KernelCache, name: str, mode: int) -> None:
    (stored(cache) / name).chmod(mode)
    is_built_again(cache, rf"others may write to {name or 'it'} \(mode {mode:04o}\)")


@pytest.mark.parametrize("name", ["a", META])
def test_files_that_are_links_are_not_followed(cache: KernelCache, tmp_path: Path, name: str) -> None:
    file = stored(cache) / name
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    is_built_again(cache, rf"{name} cannot be read \(it is a link\)")
    assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("name", ["a", META])
def test_files_with_another_name_are_not_used(cache: KernelCache, tmp_path: Path, name: str) -> None:
    os.link(stored(cache) / name, tmp_path / "elsewhere")
    is_built_again(cache, f"{name} is a hard link")
    assert (tmp_path / "elsewhere").stat().st_nlink == 1


def test_an_entry_that_is_a_link_is_not_followed(cache: KernelCache, tmp_path: Path) -> None:
    folder = stored(cache)
    shutil.copytree(folder, tmp_path / "elsewhere")
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path / "elsewhere")
    is_built_again(cache, "it is a link")
    assert (tmp_path / "elsewhere" / "a").read_bytes() == b"good"


def test_a_link_is_neither_listed_nor_cleared(cache: KernelCache, tmp_path: Path) -> None:
    folder = stored(cache)
    (folder / META).rename(tmp_path / META)
    (folder / META).symlink_to(tmp_path / META)
    assert cache.list() == () and cache.clear() == 0


def test_without_jit_nothing_untrusted_is_used(cache: KernelCache) -> None:
    stored(cache).chmod(0o777)
    with (
        pytest.warns(FlashgenWarning, match=r"others may write to it \(mode 0777\); it is not used"),
        pytest.raises(BuildError, match="FLASHGEN_JIT=0"),
    ):
        stored(KernelCache(cache.root, jit=False))
    with pytest.warns(FlashgenWarning, match="it is not used"):
        assert cache.find("k", KEY) is None


# ---- shared folders


def status(user: int = ME, group: int = 7, mode: int = stat.S_IFDIR | 0o700, links: int = 1) -> os.stat_result:
    return os.stat_result((mode, 1, 1, links, user, group, 0, 0, 0, 0))


FILE = stat.S_IFREG | 0o600
SHARED = status(group=7, mode=stat.S_IFDIR | 0o2770)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared folder. User 3 is a member of group 7, user 4 is not, and user 5 has no name."""
    import pwd

    people = {3: "member", 4: "stranger"}
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    monkeypatch.setattr(pwd, "getpwuid", lambda user: pwd.struct_passwd((people[user], "", user, 9, "", "", "")))
    monkeypatch.setattr(os, "getgrouplist", lambda name, group: [group, 7] if name == "member" else [group])


def test_owner_and_group_of_a_shared_folder_are_trusted(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {user: why_file_not_trusted(status(user, mode=FILE), SHARED, "a") for user in (ME, 0, 3, 4, 5)}
    assert found == {ME: None, 0: None, 3: None, 4: "a belongs to stranger", 5: "a belongs to user 5"}
    assert may_own(4, status(user=4)) and not may_own(4, SHARED)
    monkeypatch.delenv("FLASHGEN_CACHE_SHARED")
    assert why_file_not_trusted(status(3, mode=FILE), SHARED, "a") == "a belongs to member"


@pytest.mark.parametrize(
    ("inner", "outer", "problem"),
    [
        (status(mode=FILE | 0o060), SHARED, None),
        (status(mode=FILE | 0o060), status(mode=stat.S_IFDIR | 0o2750), r"others may write to a (mode 0660)"),
        (status(mode=FILE | 0o060, group=8), SHARED, r"others may write to a (mode 0660)"),
        (status(mode=FILE | 0o006), SHARED, r"others may write to a (mode 0606)"),
        (status(mode=FILE, links=2), SHARED, "a is a hard link, so it may also be written to under another name"),
        (status(links=3), SHARED, None),  # folders count the folders within them
    ],
)
def test_only_the_group_of_a_shared_folder_may_write(
    shared: None, inner: os.stat_result, outer: os.stat_result, problem: str | None
) -> None:
    assert why_file_not_trusted(inner, outer, "a") == problem


@needs_root
def test_entries_of_another_group_are_not_group_writable(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder whose group new files do not inherit; otherwise each entry would count as writable by others."""
    cache.root.mkdir()
    os.chown(cache.root, -1, NOBODY)
    cache.root.chmod(0o770)
    monkeypatch.setenv("FLASHGEN_CACHE_SHARED", "1")
    umask = os.umask(0)
    try:
        folder = stored(cache)
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o022 for path in (folder, *folder.iterdir())} == {0}
    assert cache.find("k", KEY) is not None


# ---- the folder, and advice


def warning_of(root: Path) -> str:
    """Returns the single warning of an unusable folder."""
    with pytest.warns(FlashgenWarning) as caught:
        stored(KernelCache(root))
    (warning,) = caught
    return str(warning.message)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
def test_a_device_is_no_folder_and_is_unchanged(path: str) -> None:
    before = os.stat(path).st_mode
    message = warning_of(Path(path))
    assert f"the kernel cache {path} cannot be used (File exists" in message and "set FLASHGEN_CACHE_DIR to" in message
    assert "`chmod" not in message and os.stat(path).st_mode == before
    assert KernelCache(path).list() == () and KernelCache(path).find("k", KEY) is None


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_chmod_is_only_advised_for_a_cache(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "cache and more"
    stored(KernelCache(root))
    lock_path(root, KEY).touch()
    root.chmod(mode)
    assert f"`chmod -R go-w '{root}'` fixes that" in warning_of(root)
    (root / "letters").touch()
    cache_folder._warned_kinds.clear()
    message = warning_of(root)
    assert "`chmod" not in message and "; set FLASHGEN_CACHE_DIR to a folder of your own" in message


@needs_root
def test_chmod_is_not_advised_without_permission(cache: KernelCache) -> None:
    stored(cache)
    os.chown(cache.root, NOBODY, -1)
    cache.root.chmod(0o777)
    assert "`chmod" not in warning_of(cache.root)


@needs_root
def test_a_link_to_the_folder_is_trusted(cache: KernelCache, tmp_path: Path) -> None:
    stored(cache)
    link = tmp_path / "link"
    link.symlink_to(cache.root)
    assert stored(KernelCache(link)).parent == link
    os.chown(link, NOBODY, -1, follow_symlinks=False)
    assert "it is a link that belongs to " in warning_of(link)


# ---- locks


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_removed(cache: KernelCache, tmp_path: Path, there: bool) -> None:
    cache.root.mkdir(mode=0o700)
    if there:
        (tmp_path / "elsewhere").write_bytes(b"mine")
    lock_path(cache.root, KEY).symlink_to(tmp_path / "elsewhere")
    with pytest.warns(FlashgenWarning, match="cannot be trusted: it is a link; it was removed"):
        stored(cache)
    assert (tmp_path / "elsewhere").exists() == there
    assert [path.name for path in cache.root.iterdir()] == [stored(cache).name]


@needs_root
@pytest.mark.timeout(60)
def test_locks_of_others_are_not_used(cache: KernelCache) -> None:
    cache.root.mkdir(mode=0o700)
    lock = lock_path(cache.root, KEY)
    lock.touch()
    os.chown(lock, NOBODY, -1)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.warns(FlashgenWarning, match=r"cannot be trusted: it belongs to .*; it was removed"):
            stored(cache)
    assert not lock.exists()


# ---- concurrency


def test_an_entry_replaced_during_reading_is_read_again(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its new inode: that is no damage, and there is no warning."""
    from flashgen.build import entries

    open_file: Callable[..., object] = entries.open_file
    folder = stored(cache)

    def replacing_first(name: str, *arguments: object, **options: object) -> object:
        if name == "a":
            monkeypatch.setattr(entries, "open_file", open_file)
            cache.clear()
            cache.put("k", KEY, Artifacts({"a": b"good"}, {"number": 2}))
        return open_file(name, *arguments, **options)

    monkeypatch.setattr(entries, "open_file", replacing_first)
    found = cache.find("k", KEY)
    assert found is not None and found.meta["number"] == 2
    assert json.loads((folder / META).read_text())["number"] == 2
