"""Whether the other ranks of a group are alive, and as far as this one: told through the group's store.

A rank that dies or stands still is seen by the others as a message that does not come, by NCCL as a kernel that never
ends, and nothing says whose fault it is. So each rank has a thread that writes into the store, at every beat, how much
it has begun, and reads what the others wrote. It is the one state of a group here, shared by all threads and streams of
a process, and ends with the group.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from flashgen.errors import FlashgenWarning

_LOG = logging.getLogger("flashgen")
_BEATS = 20  # of a group's timeout
_SHORTEST, _LONGEST = 0.2, 5.0  # seconds of a beat
_STALE = 5  # beats after which a rank is said to stand still
_BEHIND = 0.7  # of the timeout
_LOCK = threading.Lock()


class Sign(NamedTuple):
    """What a rank wrote: its last beat, how many messages it has begun, and whom it blames if it has failed."""

    beat: int
    begun: int
    blamed: tuple[int, ...] = ()

    def to_text(self) -> str:
        return " ".join(map(str, (self.beat, self.begun, *self.blamed)))

    @staticmethod
    def of(text: bytes) -> Sign:
        beat, begun, *blamed = map(int, text.split())
        return Sign(beat, begun, tuple(blamed))


class _Seen(NamedTuple):
    """A rank's last sign, since when its beat is that, and since when it has begun no more and less than this one."""

    sign: Sign
    beat_since: float
    begun_since: float

    @staticmethod
    def after(last: _Seen | None, sign: Sign, begun: int, now: float) -> _Seen:
        """What is seen now, given what was seen last."""
        same_beat = last is not None and last.sign.beat == sign.beat
        waits = last is not None and last.sign.begun == sign.begun < begun
        return _Seen(sign, last.beat_since if last and same_beat else now, last.begun_since if last and waits else now)


class Watch:
    """The signs of a group's ranks, which are called as in the default group."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._store = store.clone()  # so that no other wait on the store holds up a beat
        self._own = dist.get_rank()
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != self._own]
        timeout = _timeout_of(group)
        self.seconds = min(max(timeout / _BEATS, _SHORTEST), _LONGEST)
        self._patience = timeout * _BEHIND
        self._begun = self._beat = 0
        self._blamed: tuple[int, ...] = ()
        self._turn = threading.Lock()  # for the store
        self._end = threading.Event()
        self.problem: str | None = None
        self._said = False
        self._write()
        self._thread = threading.Thread(target=self._run, name="flashgen-ranks", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def begin(self) -> None:
        """Counts a message of this rank."""
        self._begun += 1

    def stop(self) -> None:
        """Ends the thread: a process that ends must not be in the middle of a look."""
        self._end.set()
        self._thread.join(2 * _LONGEST)

    def to_blame(self) -> str | None:
        """Who does not answer, after this rank's messages have failed; None if all others are alive and as far."""
        before = self._signs()
        time.sleep(3 * self.seconds)
        after = self._signs()
        blamed = {rank for sign in after.values() for rank in sign.blamed} - {self._own}
        gone = [rank for rank in after if before.get(rank) == after[rank] and not after[rank].blamed]
        gone += [rank for rank in self._others if rank not in after]
        behind = [rank for rank, sign in after.items() if sign.begun < self._begun and rank not in gone]
        behind = _last(after, [rank for rank in behind if not after[rank].blamed])
        named = sorted(blamed) or sorted(gone) or sorted(behind)
        if not named:
            return None
        self._blamed = tuple(named)
        self._write()
        return f"{_ranks(named)} {_behind(after, behind, self._begun) if named == sorted(behind) else _GONE}"

    def _run(self) -> None:
        seen: dict[int, _Seen] = {}
        while not self._end.wait(self.seconds):
            if self._group() is None:
                break
            try:
                self._beat += 1
                self._write()
                signs = self._signs()
            except (RuntimeError, ValueError):  # the store is gone, as where all ranks come to their end
                break
            now = time.monotonic()
            seen = {rank: _Seen.after(seen.get(rank), sign, self._begun, now) for rank, sign in signs.items()}
            self._tell({rank: each for rank, each in seen.items() if not each.sign.blamed}, now)
        atexit.unregister(self.stop)

    def _tell(self, seen: Mapping[int, _Seen], now: float) -> None:
        """Says which ranks stand still, once. A rank that is alive may yet come: that it is behind stops no call."""
        silent = [rank for rank, each in seen.items() if now - each.beat_since > _STALE * self.seconds]
        self.problem = f"{_ranks(silent)} {_GONE}" if silent else None
        signs = {rank: each.sign for rank, each in seen.items()}
        behind = _last(signs, [rank for rank, each in seen.items() if now - each.begun_since > self._patience])
        said = self.problem or (f"{_ranks(behind)} {_behind(signs, behind, self._begun)}" if behind else None)
        if said and not self._said:
            _say(said)
        self._said = bool(said)

    def _write(self) -> None:
        with self._turn:
            self._store.set(_key(self._own), Sign(self._beat, self._begun, self._blamed).to_text())

    def _signs(self) -> dict[int, Sign]:
        with self._turn:
            there = [rank for rank in self._others if self._store.check([_key(rank)])]
            return dict(zip(there, map(Sign.of, self._store.multi_get([_key(rank) for rank in there])), strict=True))


def _say(message: str) -> None:
    """To the log, and to the program: who waits for a message over NCCL has no other way to learn it."""
    _LOG.error("flashgen: %s", message)
    with suppress(FlashgenWarning):  # where warnings are errors this thread goes on, and the log has it
        warnings.warn(f"flashgen: {message}", FlashgenWarning, stacklevel=2)


_GONE = "not answering: look at what the process has said last, and start the ranks anew"
_WATCHES: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


def watch_of(group: Any) -> Watch:
    """The watch of a group, which begins with its first message."""
    found = _WATCHES.get(group)
    if found is None:
        with _LOCK:
            found = _WATCHES.get(group) or Watch(group)
            _WATCHES[group] = found
    return found


def _timeout_of(group: Any) -> float:
    """Seconds after which the group's messages fail."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout.total_seconds()


def _key(rank: int) -> str:
    return f"flashgen/rank/{rank}"


def _ranks(numbers: list[int]) -> str:
    return f"ranks {', '.join(map(str, numbers))} are" if len(numbers) > 1 else f"rank {numbers[0]} is"


def _last(signs: Mapping[int, Sign], behind: list[int]) -> list[int]:
    """Of the ranks that are behind those that have begun least: the others wait for them, as this one does."""
    least = min((signs[rank].begun for rank in behind), default=0)
    return [rank for rank in behind if signs[rank].begun == least]


def _behind(signs: Mapping[int, Sign], behind: list[int], begun: int) -> str:
    least = min(signs[rank].begun for rank in behind)
    return f"at message {least} of the group and this one at {begun}: it waits, or makes other calls"
