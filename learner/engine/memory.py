"""What a rank of the learner holds, part by part, and the most that it held in a step.

On a GPU the peaks are those of torch's allocator, on a CPU the process's resident size. Weights, gradients and
optimizer are counted once, tensor by tensor, since they stay the same; what a step needs on top of them are
activations and logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...common.memory import Peaks, resident
from ..rendezvous import max_over_ranks
from .zero import prepared

if TYPE_CHECKING:
    from torch.optim import Optimizer

PARTS = ("weights", "gradients", "optimizer")
"""The parts that are counted tensor by tensor."""
METRICS: Mapping[str, str] = {
    "peak": "memory/learner_peak_bytes",
    "weights": "memory/learner_weights_bytes",
    "gradients": "memory/learner_gradients_bytes",
    "optimizer": "memory/learner_optimizer_bytes",
    "staging": "memory/learner_staging_bytes",
    "activations": "memory/learner_activations_bytes",
    "reserved": "memory/learner_reserved_bytes",
    "host": "memory/learner_host_bytes",
}
"""Figure of :meth:`MemoryWatch.take` to its name among the metrics."""
DEPTH = 4
"""How deep tensors are looked for in DeepSpeed's optimizer: lists of lists in dicts of its attributes."""


def load_libraries(device: torch.device) -> None:
    """Loads what a rank would load with its model, so that the libraries' memory can be told apart from the model's.
    The process group must exist."""
    prepared(device)
    # transformers loads its parts when they are first named, and torch its kernels when they first run.
    from transformers import AutoModelForCausalLM  # noqa: F401

    some = torch.ones(256, 256, device=device, requires_grad=True)
    (some @ some).sum().backward()


def held_by(module: nn.Module, zero: Any) -> dict[str, dict[str, int]]:
    """What a module under DeepSpeed holds now.

    Args:
        module: its parameters and buffers are ``weights``; with ZeRO-3, this rank's share of them.
        zero: the DeepSpeed engine's ``optimizer``. What torch's optimizer inside of it keeps, the master copy
            included, is ``optimizer``. Everything else in it, and the gradients of parameters, is ``gradients``:
            sums over micro-batches and the buffers in which they are reduced.

    Returns:
        Part to device type (``cpu``, ``cuda``) to bytes. Memory that several tensors share counts once, in the
        first of these parts that has it.
    """
    inner: Optimizer = getattr(zero, "optimizer", zero)
    parameters = list(module.parameters())
    spread = [getattr(parameter, "ds_tensor", None) for parameter in parameters]
    shares = [share for share in spread if isinstance(share, Tensor)]
    # With ZeRO-3 only the state names the master copies, outside of a step.
    stepped = [p for group in inner.param_groups for p in group["params"]] + list(inner.state)
    gradients = [p.grad for p in (*parameters, *stepped) if p.grad is not None]
    seen: set[tuple[str, int]] = set()
    return {
        "weights": _counted([*parameters, *shares, *module.buffers()], seen),
        "optimizer": _counted([*stepped, *_tensors(inner.state, DEPTH)], seen),
        "gradients": _counted(
            [*gradients, *(() if zero is inner else _tensors(zero, DEPTH))], seen
        ),
    }


def _counted(tensors: Iterable[Tensor], seen: set[tuple[str, int]]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        place = (str(storage.device), storage.data_ptr())
        if storage.nbytes() and place not in seen:
            seen.add(place)
            kind = storage.device.type
            sizes[kind] = sizes.get(kind, 0) + storage.nbytes()
    return sizes


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Every tensor in an object of DeepSpeed's, in its lists, dicts and the objects that it is made of."""
    if isinstance(value, Tensor):
        yield value
        return
    if depth < 0 or isinstance(value, nn.Module | str | bytes):
        return
    if isinstance(value, Mapping):
        inside: Iterable[Any] = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif type(value).__module__.startswith("deepspeed.runtime"):
        inside = vars(value).values()
    else:
        return
    for one in list(inside):
        yield from _tensors(one, depth - 1)


def _add(total: dict[str, int], more: Mapping[str, int]) -> None:
    for kind, size in more.items():
        total[kind] = total.get(kind, 0) + size


class MemoryWatch:
    """Measures a rank's memory from step to step.

    Make it before the model is loaded, so that what the libraries hold can be told apart from what the run holds.

    Args:
        device: the rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.libraries = resident()
        """Bytes of main memory that the process held when this was made."""
        self.counted: dict[str, dict[str, int]] = {}
        """Part to device type to bytes, as they were counted last."""
        self.staged = 0
        """Bytes of host memory in which new weights are staged for the engines."""
        self._frozen: dict[str, int] = {}
        self._peaks = Peaks()

    def add_frozen(self, module: nn.Module) -> None:
        """Counts the weights of a module that isn't trained."""
        _add(self._frozen, _counted([*module.parameters(), *module.buffers()], set()))

    def count(self, held: Iterable[Mapping[str, Mapping[str, int]]], parts: Iterable[str]) -> None:
        """Takes some of the parts that the modules under DeepSpeed hold now (:func:`held_by`)."""
        modules = list(held)
        for part in parts:
            total = dict(self._frozen) if part == "weights" else {}
            for one in modules:
                _add(total, one[part])
            self.counted[part] = total

    def take(self) -> dict[str, float]:
        """What was held at most since the last call, and its parts, in bytes, under names of metrics; begins
        again.

        ``peak`` is the allocator's, on a CPU the process's. ``weights``, ``gradients``, ``optimizer`` and
        ``staging`` count wherever they are held. ``activations`` is what the peak has beyond those of them that
        are on the device, and on a CPU beyond the libraries. On a GPU ``reserved`` is what the allocator keeps,
        and ``host`` the process's own peak.
        """
        host = self._peaks.take()
        figures = {part: float(sum(sizes.values())) for part, sizes in self.counted.items()}
        figures["staging"] = float(self.staged)
        there = sum(sizes.get(self.device.type, 0) for sizes in self.counted.values())
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            figures["reserved"] = float(torch.cuda.max_memory_reserved(self.device))
            figures["host"] = float(host)
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            peak, there = host, there + self.libraries + self.staged
        figures["peak"] = float(peak)
        if all(part in self.counted for part in PARTS):
            figures["activations"] = float(max(0, peak - there))
        return figures

    def over_ranks(self) -> dict[str, float]:
        """The same of all ranks, which call it together: each figure is that of the rank with the most, under
        its name of :data:`METRICS`. It is one exchange of a few numbers, and none for a single rank."""
        figures = self.take()
        most = max_over_ranks(list(figures.values()))
        return {METRICS[name]: size for name, size in zip(figures, most, strict=True)}

    def parts(self) -> dict[str, int]:
        """What is held now, for a message: the parts that are known, and all of it."""
        found = {part: sum(sizes.values()) for part, sizes in self.counted.items()}
        if self.device.type == "cuda":
            return {**found, "all on the GPU": torch.cuda.memory_allocated(self.device)}
        return {"libraries": self.libraries, **found, "all of the process": resident()}
