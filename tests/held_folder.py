"""A process that holds a folder's lock, as whoever runs something in it does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLDS = """
import sys, time
from tandem.common.run_folder import RunFolder
from tandem.launch.host.folder_lock import FolderLock
lock = FolderLock(RunFolder(sys.argv[1]))
lock.take()
print("ready", flush=True)
time.sleep(60)
"""


@contextmanager
def held(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Has a process hold a folder; it is killed at the end, if it is still there."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()
