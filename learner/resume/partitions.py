"""Where DeepSpeed keeps each parameter's float32 master and optimizer states on this rank, at every ZeRO stage.

DeepSpeed's own checkpoints are those of one number of ranks and one stage. Here a rank's masters and states are
found as pieces of named parameters (:mod:`.state_files`), which any other division can be filled from. What is
read of DeepSpeed beyond its public interface is in this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import DataError
from . import quantised
from .state_files import PARAMETER, Piece, StateFiles, write_pieces

STEP = "step"
"""The optimizer's count, which isn't a tensor of the parameter's size."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A rank's piece of a parameter, in the tensor that the optimizer steps."""

    master: Tensor
    """Float32: the parameter's own master, or a flat one of many parameters."""
    offset: int
    """Where the piece begins in the master."""
    start: int
    """Where it begins in the parameter."""
    count: int
    """Number of elements; 0 if this rank has none."""


def save_state(engine: Any, named: Sequence[tuple[str, nn.Parameter]], folder: Path) -> None:
    """Writes this rank's pieces of the trained parameters and their optimizer states.

    Args:
        engine: the DeepSpeed engine.
        named: name and parameter of all that is trained, the same on every rank.
        folder: where all ranks write.
    """
    write_pieces(folder, engine.global_rank, _pieces(engine, named))


def load_state(engine: Any, named: Sequence[tuple[str, nn.Parameter]], folder: Path) -> None:
    """The inverse of :func:`save_state`, whatever number of ranks wrote it at whatever stage. Collective.

    Raises:
        DataError: it can't be read, or has other parameters.
    """
    files = StateFiles(folder)
    if other := other_than(files, named):
        raise DataError(
            f"its parameters aren't those that these settings train: {len(other)} differ, such as {other[0]}"
        )
    found = _places(engine)
    eight_bit: dict[int, list[tuple[str, _Place]]] = {}
    for name, parameter in named:
        place = found[id(parameter)]
        if not place.count:
            continue
        kinds, states = files.kinds(name), {}
        if quantised.is_quantised(engine.basic_optimizer):
            # Scales are of blocks of the master, in which many parameters may be.
            eight_bit.setdefault(id(place.master), []).append((name, place))
            kinds = {PARAMETER}
        else:
            states = _states(engine.basic_optimizer, place.master, kinds, files.step(name))
        for kind in kinds:
            tensor = place.master if kind == PARAMETER else states[kind]
            part = files.read(name, kind, place.start, place.count)
            tensor.detach().view(-1).narrow(0, place.offset, place.count).copy_(part)
    for pieces in eight_bit.values():
        name, place = pieces[-1]
        values = partial(_moments, files, pieces)
        quantised.set_moments(engine.basic_optimizer, place.master, values, files.step(name))
    _round(engine)


def _moments(
    files: StateFiles, pieces: Sequence[tuple[str, _Place]], kind: str, start: int, count: int
) -> Tensor:
    """``[count]`` float64 values of a moment of a master, from ``start`` on; 0 where it has no parameter."""
    found = torch.zeros(count, dtype=torch.float64)
    for name, place in pieces:
        low, high = max(start, place.offset), min(start + count, place.offset + place.count)
        if low < high:
            part = files.read(name, kind, place.start + low - place.offset, high - low)
            found[low - start : high - start] = part
    return found


def other_than(files: StateFiles, named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Names of the parameters that only the files or only the model has, then of those that differ in shape."""
    shapes = {name: _shape(parameter) for name, parameter in named}
    other = sorted(shapes.keys() ^ set(files.names))
    other += sorted(n for n in shapes.keys() & set(files.names) if files.shape(n) != shapes[n])
    return other


def _pieces(engine: Any, named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[Piece]:
    found = _places(engine)
    rank, ranks = engine.global_rank, engine.world_size
    optimizer = engine.basic_optimizer
    for name, parameter in named:
        place = found[id(parameter)]
        low, high = 0, place.count
        if not engine.zero_optimization_stage():
            # Every rank has all of it, and writes an equal share.
            low, high = (place.count * one // ranks for one in (rank, rank + 1))
        if low == high:
            continue
        states = dict(optimizer.state.get(place.master, {}))
        step = states.pop(STEP, None)
        first, count = place.offset + low, high - low
        if quantised.is_quantised(optimizer):
            parts = quantised.moments(states, first, count)
        else:
            parts = {
                kind: tensor.detach().view(-1).narrow(0, first, count)
                for kind, tensor in states.items()
            }
        parts[PARAMETER] = place.master.detach().view(-1).narrow(0, first, count)
        yield Piece(
            name=name,
            shape=_shape(parameter),
            start=place.start + low,
            count=count,
            step=None if step is None else float(step),
            tensors=parts,
        )


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """A parameter's own shape, also where ZeRO-3 has divided it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _places(engine: Any) -> dict[int, _Place]:
    """The piece of each parameter that this rank steps, by the parameter's ``id``."""
    wrapper, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        rank = engine.global_rank
        return {id(p): _stage_3(wrapper, p, rank) for group in wrapper.fp16_groups for p in group}
    found: dict[int, _Place] = {}
    if stage:
        # With bf16 and float32 sums, stage 1 has a wrapper of its own.
        own = hasattr(wrapper, "fp32_groups_flat_partition")
        groups = wrapper.bf16_groups if own else wrapper.bit16_groups
        masters = (
            wrapper.fp32_groups_flat_partition if own else wrapper.single_partition_of_fp32_groups
        )
        for group, master in zip(groups, masters, strict=True):
            for parameter in group:
                mapped = parameter._hp_mapping
                if mapped is None:
                    found[id(parameter)] = _Place(master, 0, 0, 0)
                    continue
                here, whole = mapped.hp_fragment_address, mapped.lp_fragment_address
                found[id(parameter)] = _Place(master, here.start, whole.start, here.numel)
        return found
    if wrapper is engine.basic_optimizer:
        pairs = [(p, p) for group in wrapper.param_groups for p in group["params"]]
    else:
        pairs = [
            pair
            for groups in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
            for pair in zip(*groups, strict=True)
        ]
    for parameter, master in pairs:
        found[id(parameter)] = _Place(master, 0, 0, parameter.numel())
    return found


def _stage_3(wrapper: Any, parameter: Any, rank: int) -> _Place:
    group, offset, size = wrapper.grad_position[wrapper.get_param_id(parameter)]
    start = size * rank
    # The last ranks' parts are filled up to the same size.
    count = max(0, min(size, parameter.ds_numel - start))
    return _Place(wrapper.fp32_partitioned_groups_flat[group], offset, start, count)


def _states(
    optimizer: torch.optim.Optimizer, master: Tensor, kinds: set[str], step: float | None
) -> dict[str, Any]:
    """The optimizer's states of a master, made where there are none yet, with their count set."""
    states: dict[str, Any] = optimizer.state[master]
    for kind in kinds - {PARAMETER} - states.keys():
        states[kind] = torch.zeros_like(master, requires_grad=False)
    if step is None:
        states.clear()
    elif isinstance(states.get(STEP), Tensor):
        states[STEP].fill_(step)
    elif type(optimizer).__module__.startswith("deepspeed."):
        states[STEP] = int(step)
    else:
        fused = optimizer.defaults.get("fused")
        states[STEP] = torch.tensor(
            step, dtype=torch.float32, device=master.device if fused else "cpu"
        )
    return states


def _round(engine: Any) -> None:
    """Brings the model's own parameters to the masters, as after a step."""
    wrapper, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        for group in range(len(wrapper.fp32_partitioned_groups_flat)):
            wrapper._reassign_or_swap_out_partitioned_parameters(group)
        # Small parameters are whole on every rank between the steps as well.
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].partition(wrapper.persistent_parameters)
        wrapper.checkpoint_event_epilogue()
    elif stage:
        wrapper.update_lp_params()
    elif wrapper is not engine.basic_optimizer:
        for parameters, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.data.copy_(master.data)
