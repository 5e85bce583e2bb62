"""Tandem's additions to vLLM's worker processes: loading new weights, and dying with their owner.

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
PACKED = "cpu_linear"
"""Attribute of vLLM's layers on CPUs that computes the product with the packed weight."""

Reply = tuple[str, int, str]
"""A rank's reply to an order: the order's ticket, how many tensors it took, and what went wrong.

vLLM stops reading the ranks' replies at the first exception, and then takes the rest for replies to
its next call, and so on forever: a rank that failed would seem to have succeeded. So a rank doesn't
raise, and each reply names the order that it answers.
"""


class WorkerExtension:
    """Methods of the worker, named ``tandem_…`` because the two classes share a namespace."""

    reload_weights: Any
    """A method of vLLM's worker class, declared here for type checkers."""
    get_model: Any
    add_lora: Any
    list_loras: Any
    _tandem_staged: tuple[str, list[tuple[str, Any]]] = ("", [])
    """A ticket and the weights to load with it, as views of shared memory."""

    def tandem_stage(self, ticket: str, path: str, layout: str) -> Reply:
        """Maps the weights in a segment, without touching those in use."""
        self._tandem_staged = ("", [])
        try:
            self._tandem_staged = (ticket, self._tandem_map(path, layout))
        except Exception as error:  # noqa: BLE001 - see Reply
            return (ticket, 0, f"{type(error).__name__}: {error}")
        return (ticket, len(self._tandem_staged[1]), "")

    def tandem_load(self, ticket: str) -> Reply:
        """Loads the weights staged with this ticket, and nothing else.

        Uses vLLM's own reloading, which repacks what its kernels need packed, keeps the addresses
        that CUDA graphs hold, and takes this rank's share of each tensor.
        """
        (staged, tensors), self._tandem_staged = self._tandem_staged, ("", [])
        if staged != ticket:
            return (ticket, 0, f"what is staged has ticket {staged or '(none)'}")
        try:
            self._tandem_take(tensors)
        except Exception as error:  # noqa: BLE001 - see Reply
            return (ticket, 0, f"{type(error).__name__}: {error}")
        return (ticket, len(tensors), "")

    def tandem_add_adapter(self, name: str, number: int, folder: str) -> Reply:
        """Loads an adapter from its folder; its name is the ticket."""
        try:
            from vllm.lora.request import LoRARequest

            if number in self.list_loras():
                # vLLM would say that it has loaded it, and go on with the one that it holds.
                return (name, 0, f"another adapter has the number {number}")
            added = self.add_lora(LoRARequest(name, number, folder))
        except Exception as error:  # noqa: BLE001 - see Reply
            return (name, 0, f"{type(error).__name__}: {error}")
        return (name, int(added), "")

    def _tandem_map(self, path: str, layout: str) -> list[tuple[str, Any]]:
        from ...common.weights.manifest import read_layout
        from ...common.weights.shared_memory import Memory

        memory: Memory = self.__dict__.setdefault("_tandem_memory", Memory())
        return memory.map(path, read_layout(layout)).tensors()

    def _tandem_take(self, tensors: list[tuple[str, Any]]) -> None:
        model = self.get_model()
        before = {layer: layer.__dict__.get(PACKED) for layer in model.modules()}
        self.reload_weights(weights_iterator=iter(tensors))
        _repack_tied(model, before)


def _repack_tied(model: Any, before: dict[Any, Any]) -> None:
    """Packs the matrix of an output layer again if it shares its weight with the embedding.

    On CPUs vLLM multiplies with a packed copy of each layer's weight. Reloading packs a tied weight
    only for the layer that the checkpoint names; the other layer keeps a copy of the old weights
    (seen in 0.32). On GPUs there is no copy.

    Args:
        model: vLLM's reloaded model.
        before: each layer's packed copy before reloading; a layer with another one now was packed
            during reloading.
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
            packed = layer.__dict__.get(PACKED)
            reloaded = packed is not None and packed is not before.get(layer)
            if getattr(layer, "quant_method", None) is not None and not reloaded:
                layer.quant_method.process_weights_after_loading(layer)


def _die_with(owner: int) -> None:
    """Ends this process, and vLLM's process between it and its owner, once the owner has died.

    vLLM's processes end when their owner closes them, but would wait forever if it is killed.
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
    """Returns when a process has ended, even if it is still a zombie."""
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
