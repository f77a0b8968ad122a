"""Messages between pairs of ranks, waited for as one.

[Note: receive first] A gloo rank sends only once the other has said that it is ready to
receive, and says so itself over the connection that it also sends over. Gloo's collectives
post their sends before their receives. The rank that comes later then finds the other
ready, and sends at once; its own "ready" waits behind all of that, and the other cannot
begin before. The directions take turns, and a link moves half of what it could. So an
exchange is made of messages: a rank that sends much to another first posts what it will
receive from it. Where little is sent the order does not matter, and sends go first, which
takes fewer turns.

Torch's waits for a message have no end that leaves the connection whole, so they are left
to threads, which also keep the buffers until the messages have come and gone, even if
nobody asks for them any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch.distributed as dist

from pyg_distcomm.process import PROCESS

_LONG = timedelta(days=30)  # who waits for messages has a deadline, and breaks them off
_PATIENCE = 5.0  # seconds for threads to come back, where processors are busy


class Messages:
    """Messages under way, with the methods of a `Work` that an exchange needs.

    Args:
        works: what torch returned for each message.
        kept: what must live until they are done.
    """

    def __init__(self, works: Sequence[dist.Work], kept: Any) -> None:
        self._works = works
        self._kept = kept
        self._done = threading.Event()
        self._error: Exception | None = None
        self._told: SimpleQueue[Callable[[Messages], None]] = SimpleQueue()
        if not works:
            self._done.set()
            return
        PROCESS.messages.add(self)
        _inbox().put(self)

    def is_completed(self) -> bool:
        """Tells whether all have arrived, or one has failed."""
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all of them.

        Raises:
            RuntimeError: if the transport broke, or after `timeout`; they go on then.
        """
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"messages are still under way after {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Messages:
        """Returns what can be asked to tell of the end: itself."""
        return self

    def add_done_callback(self, tell: Callable[[Messages], None]) -> None:
        """Calls back once all have arrived, or one has failed."""
        self._told.put(tell)
        if self._done.is_set():
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._told.get_nowait()(self)

    def run(self) -> None:
        """Waits for one after the other, in a thread that has nothing else to do."""
        try:
            self._finish()
        except Exception as error:
            self._error = error.with_traceback(None)
        PROCESS.messages.discard(self)
        # torch's objects go before anyone learns of the end, which may be Python's too
        self._works, self._kept = (), None
        self._done.set()
        self._tell()

    def _finish(self) -> None:
        for work in self._works:
            work.wait(_LONG)

    def give_up(self) -> None:
        """Ends the wait, and with it the connections of the group."""
        # the thread waits in this order: a wait for a later one could take its end from it
        for work in self._works[:1]:
            try:
                work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                self._done.wait(_PATIENCE)


def _inbox() -> SimpleQueue[Messages]:
    try:
        return PROCESS.inboxes.pop()
    except IndexError:
        inbox: SimpleQueue[Messages] = SimpleQueue()
        # a daemon: a process that leaves early must not wait for what will not come
        threading.Thread(target=_serve, args=(inbox,), daemon=True).start()
        return inbox


def _serve(inbox: SimpleQueue[Messages]) -> None:
    while True:
        inbox.get().run()
        PROCESS.inboxes.append(inbox)


def let_go() -> None:
    """Ends all waits, as a process must before it ends: see [Note: at rest]."""
    for messages in list(PROCESS.messages):
        messages.give_up()
