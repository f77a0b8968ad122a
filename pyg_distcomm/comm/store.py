"""What ranks that trace tell each other: notes in the rendezvous store, and the time.

[Note: clocks] Monotonic clocks of processes on one host are one clock. Elsewhere a rank asks
rank 0 for its time, through the store, and takes the answer for the middle of the round
trip ([Cristian89], on reading a remote clock): it cannot be off by more than half of it. Of
several trips the shortest counts, and between the first and the last reading an offset is
interpolated. Notes are no collectives: they reach a rank also when another has failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyg_distcomm.comm.failure import FailureMonitor
from pyg_distcomm.comm.timeline import clock

TRIPS = 16
_PIECE = 1 << 20  # the store takes values of a few MB
_SLICE = 0.25


@dataclass(frozen=True)
class Reading:
    """What rank 0's clock showed beside this one's.

    Args:
        at: this rank's clock, in ns.
        offset: what to add to it for rank 0's.
        error: how far off that can be.
    """

    at: int
    offset: int
    error: int


def to_first(at: int, readings: Sequence[Reading]) -> int:
    """Returns a time of this rank on rank 0's clock; none known, as it is."""
    if not readings:
        return at
    first, last = readings[0], readings[-1]
    drift = last.offset - first.offset
    span = last.at - first.at
    past = min(max(at - first.at, 0), span)
    return at + first.offset + (drift * past // span if span else 0)


def host() -> str:
    """Returns what processes with the same monotonic clock have in common, or ""."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return ""


class StoreMailbox:
    """Notes between the ranks of a mesh, under a name of their own."""

    def __init__(self, watch: FailureMonitor, name: str) -> None:
        self._watch, self._name = watch, name

    def post(self, key: str, value: str) -> None:
        """Leaves a short note."""
        self._watch.store.set(f"{self._name}/{key}", value)

    def read(self, key: str, patience: float | None = None) -> str | None:
        """Waits for a note, and returns it.

        With `patience`, in seconds, waits no longer, and returns None if it has not come.

        Raises:
            Exception: without `patience`, another rank's failure, or past the deadline.
        """
        watch, name = self._watch, f"{self._name}/{key}"
        begin, pause, looked = time.monotonic(), 0.0, 0.0
        while not self._there(name):
            past = time.monotonic() - begin
            if past > (watch.deadline if patience is None else patience):
                if patience is not None:
                    return None
                raise watch.expired(f"a note of the trace ({key})")
            if patience is None and past > looked + _SLICE:
                watch.look()
                looked = past
            if past > 0.005:  # until then it may be about the time
                pause = min(2 * pause + 1e-4, 0.02)
                time.sleep(pause)
        return str(watch.store.get(name).decode())

    def _there(self, name: str) -> bool:
        try:
            return bool(self._watch.store.check([name]))
        except RuntimeError as error:  # it went with the process that held it
            raise self._watch.broken("a trace", error) from None

    def post_all(self, key: str, data: bytes) -> None:
        """Leaves a note of any size."""
        pieces = range(0, len(data), _PIECE)
        for k, begin in enumerate(pieces):
            piece = data[begin : begin + _PIECE]
            self._watch.store.set(f"{self._name}/{key}/{k}", piece)
        self.post(key, str(len(pieces)))

    def read_all(self, key: str, patience: float | None = None) -> bytes | None:
        """Does as `read` for such a note, and takes it off the store."""
        pieces = self.read(key, patience)
        if pieces is None:
            return None
        store, out = self._watch.store, bytearray()
        for k in range(int(pieces)):
            out += store.get(f"{self._name}/{key}/{k}")
            store.delete_key(f"{self._name}/{key}/{k}")
        return bytes(out)

    def ask_time(self, rank: int, when: str) -> Reading:
        """Returns how this rank's clock stands to that of rank 0, which answers."""
        found = []
        for k in range(TRIPS):
            left = clock()
            self.post(f"{when}/asks/{rank}/{k}", "")
            told = int(self.read(f"{when}/told/{rank}/{k}") or 0)
            back = clock()
            middle = (left + back) // 2
            found.append(Reading(middle, told - middle, (back - left + 1) // 2))
        return min(found, key=lambda reading: reading.error)

    def tell_time(self, rank: int, when: str) -> None:
        """Answers a rank."""
        for k in range(TRIPS):
            self.read(f"{when}/asks/{rank}/{k}")
            self.post(f"{when}/told/{rank}/{k}", str(clock()))
