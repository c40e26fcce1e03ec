"""Compiled kernels on disk: found by what they were made from, built once, checked whenever they are used.

FLASHGEN_CACHE_DIR   where entries stand; else `flashgen` in the platform's folder for caches
FLASHGEN_JIT=0       compile nothing: a kernel that is not there is an error that says which
FLASHGEN_RELEASE     a folder of `flashgen release build`, looked up before anything else
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashgen.build import nvrtc
from flashgen.build.entries import (
    Artifacts,
    DamagedEntry,
    StoredEntry,
    discard,
    leftover_keys,
    lock_path,
    read_entry,
    remove_leftovers,
    write_entry,
)
from flashgen.build.keys import SHORT_KEY, folder_name, kernel_key
from flashgen.build.locks import exclusive
from flashgen.build.prebuilt import PrebuiltFolder
from flashgen.build.resources import Resources
from flashgen.errors import BuildError, FlashgenWarning

SOURCE, CUBIN = "kernel.cu", "kernel.cubin"

_log = logging.getLogger(__name__)

Build = Callable[[], Mapping[str, bytes] | Artifacts]


@dataclass(frozen=True)
class Entry:
    """A compiled kernel. `cubin` is the very bytes that were checked; `hit` says that nothing was compiled for it."""

    path: Path
    source: str
    cubin_path: Path
    cubin: bytes
    resources: Resources
    meta: Mapping[str, Any]
    hit: bool


@dataclass(frozen=True)
class Listed:
    """A line of `flashgen cache list`: an entry's name, the digits of its key, its folder and its size in bytes."""

    name: str
    key: str
    path: Path
    bytes: int


class KernelCache:
    """A folder of entries `<readable-name>.<16 hex>`. Any number of threads and processes may share one."""

    def __init__(self, root: Path | str, *, jit: bool = True, release: Path | str | None = None) -> None:
        """Nothing is read or made yet.

        Args:
            root: the folder of the entries; made when the first one is written.
            jit: False refuses to build what is not there.
            release: a folder of prebuilt kernels that is looked up first.
        """
        self.root = Path(root).expanduser().absolute()
        self.jit = jit
        self.release = Path(release).expanduser().absolute() if release else None
        self._prebuilt: PrebuiltFolder | None = None

    @classmethod
    def from_environment(cls) -> KernelCache:
        """The cache that FLASHGEN_CACHE_DIR, FLASHGEN_JIT and FLASHGEN_RELEASE describe at this moment."""
        jit = os.environ.get("FLASHGEN_JIT", "")
        if jit not in ("", "0", "1"):
            raise BuildError(f"FLASHGEN_JIT must be 0 (compile nothing) or 1, got {jit!r}")
        return cls(default_root(), jit=jit != "0", release=os.environ.get("FLASHGEN_RELEASE") or None)

    def load_or_compile(self, name: str, source: str, architecture: str, *, prebuild: str | None = None) -> Entry:
        """The compiled kernel: from the release folder, else from the cache, else compiled now.

        Args:
            name: the readable name of the kernel.
            source: its emitted CUDA.
            architecture: `sm_80`, `sm_90a`, ...
            prebuild: the command that would put it into the cache, for the message of FLASHGEN_JIT=0.

        Raises:
            BuildError: it does not compile, NVRTC is missing, the cache folder cannot be used, or FLASHGEN_JIT=0 and
                the kernel is in neither place.
        """
        found = self._from_release(name, source, architecture)
        if found is not None:
            return found
        version = nvrtc.version()
        key = kernel_key(source, architecture, nvrtc.options(architecture), version)

        def build() -> Artifacts:
            compiled = nvrtc.compile(source, architecture, name)
            facts = {
                "name": name,
                "architecture": architecture,
                "nvrtc_version": list(version),
                "options": list(nvrtc.options(architecture)),
                "resources": compiled.resources.to_dict(),
                "log": compiled.log,
            }
            return Artifacts({SOURCE: source.encode(), CUBIN: compiled.cubin}, facts)

        stored, hit = self._get_or_build(name, key, build, self._refusal(f"{name} for {architecture}", prebuild))
        resources = Resources.from_dict(stored.meta["resources"])
        return Entry(stored.path, source, stored.path / CUBIN, stored.files[CUBIN], resources, stored.meta, hit)

    def get_or_build(self, name: str, key: str, build: Build) -> Path:
        """The folder of the entry of any kind of binary, made by `build` when it is not there.

        Args:
            name: a readable name.
            key: of `keys.content_key`: everything that the files are made from.
            build: makes the files, by plain name, or `Artifacts` of them; called once however many processes ask.

        Raises:
            BuildError: the cache folder cannot be used, or FLASHGEN_JIT=0 and the entry is not there.
        """
        refusal = (
            f"{name} is not in the cache {self.root}, and FLASHGEN_JIT=0 forbids building it now; "
            "run once without FLASHGEN_JIT=0, which puts it there"
        )
        return self._get_or_build(name, key, build, refusal)[0].path

    def find(self, name: str, key: str) -> StoredEntry | None:
        """The entry of that name and key, every byte checked; None where there is none.

        A damaged entry is none either, and is said. BuildError: the cache folder cannot be used.
        """
        return self._read(self.root / folder_name(name, key), key, remedy="it is not used")

    def put(self, name: str, key: str, artifacts: Artifacts) -> StoredEntry:
        """Writes an entry, in place of one that may be there. BuildError: the cache folder cannot be used."""
        with self._locked(key):
            remove_leftovers(self.root, key[:SHORT_KEY])
            with self._usable():
                return write_entry(self.root / folder_name(name, key), key, artifacts)

    def path(self) -> Path:
        """The folder of the entries, which may not exist yet."""
        return self.root

    def list(self) -> tuple[Listed, ...]:
        """The entries by name. Nothing of them is checked."""
        with self._usable():
            return tuple(_listed(folder) for folder in sorted(self._entry_folders()))

    def clear(self) -> int:
        """Remove every entry, and what killed builders left; returns how many entries. Builders may run beside it."""
        with self._usable():
            removed = sum(discard(folder, folder.name.rpartition(".")[2]) for folder in self._entry_folders())
            for short_key in leftover_keys(self.root):
                with exclusive(lock_path(self.root, short_key), wait=False) as held:
                    if held:
                        remove_leftovers(self.root, short_key)
        return removed

    def _get_or_build(self, name: str, key: str, build: Build, refusal: str) -> tuple[StoredEntry, bool]:
        """(the entry, whether it was there already); `refusal` is what to say where building is forbidden."""
        folder = self.root / folder_name(name, key)
        found = self._read(folder, key)
        if found is not None:
            return found, True
        if not self.jit:
            raise BuildError(refusal)
        with self._locked(key):
            # Another process may have built it while this one waited.
            found = self._read(folder, key, warn=False)
            if found is not None:
                return found, True
            remove_leftovers(self.root, key[:SHORT_KEY])
            _log.info("building %s", folder.name)
            built = build()
            artifacts = built if isinstance(built, Artifacts) else Artifacts(built)
            with self._usable():
                return write_entry(folder, key, artifacts), False

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds the key's lock. An error of the body is the body's own, not the cache folder's."""
        with ExitStack() as stack:
            with self._usable():
                self.root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive(lock_path(self.root, key)))
            yield

    def _read(self, folder: Path, key: str, *, warn: bool = True, remedy: str | None = None) -> StoredEntry | None:
        try:
            with self._usable():
                return read_entry(folder, key)
        except DamagedEntry as damage:
            if warn:
                remedy = remedy or ("it is built again" if self.jit else "it is not used")
                _say(f"the cache entry {folder} is damaged: {damage}; {remedy}")
            return None

    def _from_release(self, name: str, source: str, architecture: str) -> Entry | None:
        if self.release is None:
            return None
        if self._prebuilt is None:
            self._prebuilt = PrebuiltFolder.open(self.release)
        try:
            found = self._prebuilt.find(source, architecture)
        except DamagedEntry as damage:
            _say(f"the kernel {name} of the release folder {self.release} is damaged: {damage}; it is not used")
            return None
        if found is None:
            return None
        resources = Resources.from_dict(found.meta["resources"])
        return Entry(self.release, source, found.cubin_path, found.cubin, resources, found.meta, hit=True)

    def _refusal(self, what: str, prebuild: str | None) -> str:
        searched = f"neither in the release folder {self.release} nor" if self.release else "not"
        command = f"`{prebuild or 'flashgen release build MANIFEST --out DIR'}`"
        if prebuild is None:
            command += " and set FLASHGEN_RELEASE=DIR"
        return (
            f"kernel {what} is {searched} in the cache {self.root}, and FLASHGEN_JIT=0 forbids building it now; "
            f"build it beforehand with {command}, or unset FLASHGEN_JIT"
        )

    def _entry_folders(self) -> Iterator[Path]:
        for path in self.root.iterdir() if self.root.is_dir() else ():
            name, _, key = path.name.rpartition(".")
            if name and not path.name.startswith(".") and len(key) == SHORT_KEY and path.is_dir():
                yield path

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """Says which setting to change when the operating system refuses the cache folder."""
        try:
            yield
        except OSError as error:
            raise BuildError(
                f"the kernel cache {self.root} cannot be used ({error.strerror}: {error.filename or self.root}); "
                "set FLASHGEN_CACHE_DIR to a folder that can be written"
            ) from error


def default_cache() -> KernelCache:
    """The cache that the environment describes at this moment."""
    return KernelCache.from_environment()


def default_root() -> Path:
    """FLASHGEN_CACHE_DIR, else `flashgen` in XDG_CACHE_HOME, ~/.cache, or on macOS ~/Library/Caches."""
    chosen = os.environ.get("FLASHGEN_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "flashgen"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise BuildError(f"there is no home folder for the kernel cache ({error}); set FLASHGEN_CACHE_DIR") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "flashgen"


def _listed(folder: Path) -> Listed:
    name, _, key = folder.name.rpartition(".")
    try:
        size = sum(file.stat().st_size for file in folder.iterdir())
    except FileNotFoundError:  # cleared at this moment
        size = 0
    return Listed(name, key, folder, size)


def _say(message: str) -> None:
    _log.warning("%s", message)
    warnings.warn(message, FlashgenWarning, stacklevel=5)
