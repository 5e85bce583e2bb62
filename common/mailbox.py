"""A thread-safe queue that can wake a ZeroMQ poll."""

from __future__ import annotations

import os
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Any thread posts items; one thread polls :attr:`fd` beside its sockets and takes them.

    It uses an eventfd rather than an inproc socket, because each ZeroMQ socket belongs to one thread,
    and a post from a training step should cost no more than a system call.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[T] = SimpleQueue()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False

    def post(self, item: T) -> None:
        """Adds an item and wakes the reader; does nothing once closed."""
        self._queue.put(item)
        if not self._closed:
            try:
                os.eventfd_write(self.fd, 1)
            except OSError:
                # Closed between the check and the write: nobody reads any more.
                pass

    def take(self) -> list[T]:
        """Returns all items that are there, without waiting."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        items: list[T] = []
        while True:
            try:
                items.append(self._queue.get_nowait())
            except Empty:
                return items

    def close(self) -> None:
        """Closes the descriptor; later posts are dropped."""
        self._closed = True
        os.close(self.fd)
