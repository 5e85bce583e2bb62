"""A device that a CPU plays: tensors that say they are elsewhere, and refuse to meet those of the host.

Code that mixes devices works on a CPU and fails on a GPU, which no test machine has. :class:`Elsewhere` is a
tensor on the device ``meta`` with its values in host memory. Every operation on it computes on the host and
gives another such tensor, and raises :class:`DeviceMixError` where a GPU would: if a tensor of the host takes part.
As on a GPU, the host's scalars (tensors without dimensions) may, and its indices, and copies go both ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")
"""Where such tensors say that they are: the one device beside the CPU that a backward pass needs no queue for."""

_aten = torch.ops.aten
_MEETS_HOST = {_aten.copy_, _aten._to_copy, _aten._index_put_impl_}
"""Operations that take tensors of both."""
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index}
"""Operations whose indices may be on the host."""


class DeviceMixError(RuntimeError):
    """An operation got tensors of two devices."""


class Elsewhere(torch.Tensor):
    """A tensor on the played device."""

    values: torch.Tensor
    """Its values, in host memory."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, requires_grad: bool = False) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        made.values = values
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    @property  # type: ignore[override]
    def data(self) -> Elsewhere:
        """The same values without a gradient."""
        return Elsewhere(self.values)

    @data.setter
    def data(self, other: Elsewhere) -> None:
        # torch's own would leave the values behind.
        self.values = other.values

    def tolist(self) -> Any:
        """Its values as Python's numbers, which a GPU gives too."""
        return self.values.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuses, as a GPU's tensor does."""
        raise DeviceMixError("numpy() of a tensor elsewhere: copy it to the host first")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.values})"


class _Mode(TorchDispatchMode):
    """Catches what makes a tensor on the played device out of none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, _ = tree_flatten((args, kwargs))
    there = [one for one in flat if isinstance(one, Elsewhere)]
    packet = func.overloadpacket
    wanted = kwargs.get("device")
    to = None if wanted is None else torch.device(wanted)
    if there and packet not in _MEETS_HOST:
        checked = flat
        if packet in _INDEXED:
            checked, _ = tree_flatten((args[0], args[2:], kwargs))
        for one in checked:
            if type(one) is torch.Tensor and one.dim():
                raise DeviceMixError(
                    f"{func} got a tensor of the host, {tuple(one.shape)} {one.dtype}, beside one "
                    f"of {tuple(there[0].shape)} elsewhere"
                )
    goes = bool(there) if to is None else to.type == DEVICE.type
    if packet is _aten.copy_:
        goes = isinstance(args[0], Elsewhere)
    if packet is _aten._pin_memory:
        goes = False
    inner_args, inner_kwargs = tree_map_only(Elsewhere, lambda one: one.values, (args, kwargs))
    if to is not None:
        inner_kwargs["device"] = torch.device("cpu")
    found = func(*inner_args, **inner_kwargs)
    if packet is _aten._to_copy and not goes:
        return found
    if packet is _aten._local_scalar_dense:
        return found
    if packet is _aten.copy_:
        return args[0]
    if not goes:
        return found
    wrapped = tree_map_only(torch.Tensor, lambda one: Elsewhere(one), found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


class _Made(TorchFunctionMode):
    """Makes tensors of Python's numbers on the host first: on ``meta`` torch would drop the numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return args[0].values.new_tensor(*args[1:], **kwargs).to(DEVICE)
        return func(*args, **kwargs)


@contextmanager
def played() -> Iterator[torch.device]:
    """Within it, ``meta`` is a device with values; for this thread."""
    with _Made(), _Mode():
        yield DEVICE


def move(module: nn.Module) -> nn.Module:
    """Moves a module's parameters and buffers there; tied ones stay tied."""
    moved: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    made = Elsewhere(parameter.detach().clone())
                    moved[id(parameter)] = nn.Parameter(made, parameter.requires_grad)
                part._parameters[name] = moved[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = Elsewhere(buffer.clone())
    return module
