"""What Tandem adds to vLLM's worker processes: loading new weights, and dying with their owner.

vLLM imports this file by name in every process that holds a part of the model, and mixes
:class:`WorkerExtension` into its own worker class; methods are called by ``collective_rpc``.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Any

OWNER = "TANDEM_ENGINE_OWNER"
"""Environment variable with the process id of the rollout worker that the engine belongs to."""


class WorkerExtension:
    """Methods of the worker's, called ``tandem_…`` because the two classes share their names."""

    reload_weights: Any
    """The worker's own, as the next one; declared for type checkers, absent from this class."""
    get_model: Any
    _tandem_staged: list[tuple[str, Any]]
    """Weights to be loaded next: views of shared memory."""

    def tandem_stage(self, path: str, nbytes: int, layout: str) -> int:
        """Maps the weights in a segment, beside those in use; returns how many tensors there are.

        Raises:
            WeightsError: they can't be mapped from here.
        """
        from ..common.weights.buffer import views
        from ..common.weights.manifest import read_layout
        from ..common.weights.segment import Mappings

        mapped: Mappings = self.__dict__.setdefault("_tandem_mapped", Mappings())
        buffer = mapped.get(path, nbytes)
        self._tandem_staged = views(buffer, read_layout(layout))
        return len(self._tandem_staged)

    def tandem_load(self) -> int:
        """Loads what was staged; returns how many tensors there were.

        Goes through vLLM's own reloading, which repacks what its kernels want packed, keeps the
        addresses that CUDA graphs hold, and takes this rank's share of each tensor.
        """
        tensors, self._tandem_staged = self._tandem_staged, []
        self.reload_weights(weights_iterator=iter(tensors))
        _repack_tied(self.get_model())
        return len(tensors)


def _repack_tied(model: Any) -> None:
    """Packs the matrix of an output layer again that shares its weight with the embedding.

    On CPUs vLLM multiplies with a packed copy of each layer's weight. Reloading loads a tied
    weight, and packs it, for the layer that the checkpoint names; the other one keeps the copy of
    the old weights (seen in 0.32). On GPUs there is no copy.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    sharing: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and weight.numel():
            sharing.setdefault(weight.data_ptr(), []).append(layer)
    for layers in sharing.values():
        for layer in layers if len(layers) > 1 else ():
            if getattr(layer, "quant_method", None) is not None:
                layer.quant_method.process_weights_after_loading(layer)


def _die_with(owner: int) -> None:
    """Ends this process, and vLLM's process between it and its owner, when the owner has died.

    vLLM's processes end when their owner closes them; when it is killed they'd wait for ever.
    """
    parent = os.getppid()

    def watch() -> None:
        _wait_for_end(owner)
        if parent != owner and os.getppid() == parent:
            try:
                os.kill(parent, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="tandem-owner", daemon=True).start()


def _wait_for_end(pid: int) -> None:
    """Returns when a process has ended, be it as a zombie."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # Not Linux, or a kernel before 5.3.
        while _exists(pid):
            time.sleep(1.0)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll():
        pass


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# vLLM has no hook for this, and the thread must run before the model is loaded, which takes
# minutes. Only vLLM's processes have the variable from their start.
if os.environ.get(OWNER, "").isdecimal() and int(os.environ[OWNER]) != os.getpid():
    _die_with(int(os.environ[OWNER]))
