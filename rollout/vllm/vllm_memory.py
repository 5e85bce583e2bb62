"""How much of a GPU that a learner shares vLLM takes for keys and values, found without measuring.

By itself vLLM measures how much of the whole GPU was taken while it started, and gives what is left of its share to keys
and values. What a learner takes meanwhile would count as vLLM's, and vLLM ends if the learner frees more than that
(``determine_available_memory`` of its ``v1/worker/gpu_worker.py``). If it is told the size, it doesn't measure.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from ...common.errors import ConfigError, TandemError

if TYPE_CHECKING:
    from ...common.config import VllmConfig

WORKSPACE = 2 << 30
"""Bytes of vLLM's share that it needs for activations, CUDA graphs and the CUDA context, roughly."""
ASK_SECONDS = 120.0
"""Deadline for torch to tell a GPU's size; loading it from a cold disk takes a minute."""


def cache_bytes(share: float, memory: int, held: int) -> int:
    """Bytes of a GPU for keys and values; 0 if nothing is left for them.

    Args:
        share: ``rollout.vllm.gpu_memory_utilization``.
        memory: bytes of the whole GPU.
        held: bytes of weights and adapters on it.
    """
    return max(0, int(share * memory) - held - WORKSPACE)


def beside_a_learner(settings: VllmConfig, held: int) -> int:
    """Bytes for keys and values on each of an engine's GPUs, which a learner shares, unless ``kv_cache_mb`` is set.

    Args:
        settings: ``rollout.vllm``.
        held: see :func:`cache_bytes`.

    Raises:
        ConfigError: vLLM's share has no room for them.
        TandemError: the GPU's size isn't told.
    """
    share, memory = settings.gpu_memory_utilization, gpu_bytes()
    cache = cache_bytes(share, memory, held)
    if not cache:
        raise ConfigError(
            f"rollout.vllm.gpu_memory_utilization={share:g} of a GPU with {memory:,} bytes leaves nothing for keys and "
            f"values beside {held:,} bytes of weights and {WORKSPACE:,} of workspace: raise it, or set "
            f"rollout.vllm.kv_cache_mb"
        )
    return cache


def gpu_bytes() -> int:
    """Bytes of the whole first GPU that this process sees. Another process asks: vLLM's would be started in a slower way
    after CUDA has begun in this one.

    Raises:
        TandemError: there is no answer.
    """
    ask = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ask],
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
            check=True,
        ).stdout
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or [f"status {error.returncode}"]
        raise TandemError(f"torch doesn't tell the size of this worker's GPU: {last[0]}") from error
    except subprocess.TimeoutExpired as error:
        raise TandemError(
            f"torch hasn't told the size of this worker's GPU in {ASK_SECONDS:g} s"
        ) from error
    return int(answer)
