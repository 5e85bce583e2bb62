"""File systems of a few megabytes, which tests fill and empty. Mounting one takes a privilege.

The fixture ``small_disk`` of ``tests/conftest.py`` is made of it.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path

import pytest


class SmallDisk:
    """One of them, at :attr:`folder`."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", str(folder)]
        if shutil.which("mount") is None:
            pytest.skip("a small disk needs the program mount")
        mounted = subprocess.run(words, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")

    def fill(self) -> None:
        """Takes all the space there is."""
        with open(self.folder / "filler", "ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))

    def empty(self) -> None:
        """Gives it back."""
        (self.folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Takes the file system away."""
        subprocess.run(["umount", "-l", str(self.folder)], check=True)
