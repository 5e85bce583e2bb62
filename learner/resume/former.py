"""Checkpoints as Tandem 0.1.0 wrote them: DeepSpeed's files, read by as many ranks at the same stage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import DataError
from ...common.memory import is_out_of_memory
from ...common.plain import one_line

if TYPE_CHECKING:
    from torch import Tensor, nn

POLICY = "engine"
"""DeepSpeed's name of the policy in such a checkpoint, which no other one has."""


def is_former(folder: Path) -> bool:
    """Whether a checkpoint has DeepSpeed's files."""
    return (folder / POLICY).is_dir()


def load_former(engine: Any, folder: Path) -> dict[str, Any]:
    """Loads a policy's parameters, optimizer and masters; returns what else was kept.

    Raises:
        DataError: it can't be read, or was written by another number of ranks or at another stage.
    """
    try:
        path, kept = engine.load_checkpoint(str(folder), tag=POLICY, custom_load_fn=_restore)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise DataError(
            f"{folder / POLICY} can't be read: {one_line(error, 300)}. An earlier version of Tandem "
            f"wrote it, so it can be resumed only with the same learner.ranks and learner.zero_stage"
        ) from None
    if path is None:
        raise DataError(f"{folder} has no {POLICY}")
    return dict(kept)


def _restore(src: dict[str, Tensor], dst: nn.Module) -> None:
    # The output matrix was kept twice, the second time under this name.
    dst.load_state_dict(
        {name: tensor for name, tensor in src.items() if not name.startswith("head.")}
    )
