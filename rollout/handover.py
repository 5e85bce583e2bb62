"""Hands a set of weights to processes of the same host by a file in shared memory.

The file is in the safetensors format and lies in ``/dev/shm`` where that has room, else in the
temporary folder. Its writer holds a lock on it as long as it is wanted; the kernel drops the lock
when the writer dies, so a file that nobody has locked was left behind and may be removed. (A
process id in the name wouldn't tell: containers share ``/dev/shm`` and count processes each for
itself.)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ..common.errors import WeightsError

PREFIX = "tandem-weights-"
SUFFIX = ".safetensors"
SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64
"""Of the first tensor in the file, bytes."""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Names of the format."""


def places() -> tuple[Path, ...]:
    """Where a file may lie, the fastest first."""
    return tuple(path for path in (SHARED_MEMORY, Path(tempfile.gettempdir())) if path.is_dir())


def remove_left_behind() -> int:
    """Removes this user's files whose writers have died; returns how many."""
    removed = 0
    for folder in places():
        for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
            try:
                if path.stat().st_uid != os.getuid():
                    continue
                with open(path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                    removed += 1
            except (FileNotFoundError, PermissionError, BlockingIOError):
                continue  # Gone meanwhile, or in use.
    return removed


@contextlib.contextmanager
def handed_over(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Path]:
    """The tensors as a safetensors file, which is removed at the end.

    One tensor at a time is copied, so this needs the file's size and no more.

    Raises:
        WeightsError: there is no room for it anywhere.
    """
    # Layout first: the format begins with a table of contents.
    content = [(name, tensor.detach()) for name, tensor in tensors]
    header: dict[str, object] = {}
    end = 0
    for name, tensor in content:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    table = json.dumps(header).encode()
    table += b" " * (-(len(table) + 8) % ALIGNMENT)
    needed = 8 + len(table) + end
    path = _place(needed) / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}"
    descriptor = _create(path)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            try:
                # Without its blocks, a file in a full /dev/shm ends the process by SIGBUS.
                os.posix_fallocate(descriptor, 0, needed)
                file.write(len(table).to_bytes(8, "little"))
                file.write(table)
                for _, tensor in content:
                    flat = tensor.cpu().contiguous().reshape(-1)
                    if flat.numel():
                        file.write(flat.view(torch.uint8).numpy().data)
            except OSError as error:
                raise WeightsError(
                    f"weights of {needed:,} bytes can't be written to {path}: {error.strerror}"
                ) from None
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _place(needed: int) -> Path:
    free = {path: shutil.disk_usage(path).free for path in places()}
    for path, room in free.items():
        if room > needed:
            return path
    found = ", ".join(f"{path} {room:,}" for path, room in free.items()) or "no folder at all"
    raise WeightsError(
        f"weights of {needed:,} bytes have to pass through a file and there is no room (bytes "
        f"free: {found}): enlarge /dev/shm (docker run --shm-size), or set TMPDIR to a larger disk"
    )


def _create(path: Path) -> int:
    """Creates and locks the file."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except BlockingIOError:
            pass
        # Another process's look for left-behind files came between the two calls.
        os.close(descriptor)
        path.unlink(missing_ok=True)
