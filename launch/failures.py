"""What a command says of the error that ends it, and its exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..common import disk
from ..common.errors import TandemError

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, *disk.FULL)
"""Errors of the system that a user can do something about."""
MISTAKEN = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
"""Errors of the system that a user's mistake makes, where they are about a path that the command line has."""


def tell(error: BaseException, words: Sequence[str]) -> int | None:
    """Says what is wrong in one line on standard error, if a user can do something about it.

    Args:
        error: what ends the command.
        words: its command line.

    Returns:
        The exit code; None = it is a defect, of which Python's traceback should tell.
    """
    if isinstance(error, TandemError):
        print(f"tandem: {error}", file=sys.stderr)
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has gone (`| head`). Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if not isinstance(error, OSError):
        return None
    if disk.is_full(error) and error.filename is None:
        # Python would complain about standard output again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"tandem: the output can't be written: {error.strerror}", file=sys.stderr)
        return 1
    if error.errno in MISTAKEN and _was_given(error.filename, words):
        print(f"tandem: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if error.errno not in REFUSED or error.filename is None:
        return None
    print(
        f"tandem: {error.filename}: {error.strerror}: look at its permissions and its disk, or "
        f"name another place (of a run: run.dir=…)",
        file=sys.stderr,
    )
    return 1


def _was_given(path: object, words: Sequence[str]) -> bool:
    """Whether a path is one of the words of a command line or the value of one, or below it."""
    values = (part for word in words for part in (word, word.partition("=")[2]) if part)
    places = {Path(value).expanduser().absolute() for value in values}
    place = Path(str(path)).absolute()
    return any(one in places for one in (place, *place.parents))
