"""How much memory a worker and its engine's processes hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import psutil

from ..common.memory import greatest


def held(processes: Iterable[psutil.Process] = ()) -> dict[str, int]:
    """Bytes for the worker's report.

    Args:
        processes: the engine's own processes, if it has any.

    Returns:
        ``peak``: the most main memory that this process has held since its start, with what those processes
        hold now (pages that they share count in each). ``gpu`` and ``reserved``, if this process has used a
        GPU: the most that tensors had of it, and that torch's allocator keeps. What vLLM's processes hold on
        GPUs is the share that they were given, and isn't measured.
    """
    others = 0
    for process in processes:
        try:
            others += int(process.memory_info().rss)
        except psutil.Error:
            continue  # It has ended.
    found = {"peak": greatest() + others}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["gpu"] = int(torch.cuda.max_memory_allocated())
        found["reserved"] = int(torch.cuda.max_memory_reserved())
    return found
