"""Writes snapshots of the weights in a thread of its own: a disk may take its time."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from ..common.errors import TandemError
from ..common.records import Version
from ..common.weights import snapshots
from ..common.weights.mailbox import Mailbox
from ..common.weights.staging import Pin


class Snapshotter:
    """Latest wins: a version that isn't begun when another is asked for isn't written.

    Posts ``("snapshot", manifest, folder)`` or ``("no_snapshot", problem)``.

    Args:
        mailbox: of the service.
        folder: of the run's snapshots.
        run_id: of the run.
    """

    def __init__(self, mailbox: Mailbox[tuple[Any, ...]], folder: Path, run_id: str) -> None:
        self._mailbox = mailbox
        self._folder = folder
        self._run_id = run_id
        self._changed = threading.Condition()
        self._asked: tuple[Pin, Version] | None = None
        self._writing: Version | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def ask(self, pin: Pin, version: Version) -> None:
        """Asks for a version, in place of one that isn't begun."""
        with self._changed:
            if version == self._writing or (self._asked and version == self._asked[1]):
                pin.release()
                return
            if self._asked is not None:
                self._asked[0].release()
            self._asked = (pin, version)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weights-snapshot", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Lets the thread end once it has written what it is at."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._asked is None and not self._stopped:
                    self._changed.wait(60.0)
                if self._asked is None or self._stopped:
                    return
                (pin, version), self._asked = self._asked, None
                self._writing = version
            try:
                manifest = pin.slot.manifest_of(self._run_id, version)
                path = snapshots.write(self._folder, manifest, pin.slot.on_host())
                self._mailbox.post(("snapshot", manifest, path))
            except (TandemError, RuntimeError, OSError) as error:
                self._mailbox.post(("no_snapshot", str(error)))
            finally:
                pin.release()
                self._writing = None
