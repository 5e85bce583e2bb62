"""Writes the model of a run's checkpoint as a Hugging Face folder, without Redis or the journal."""

from __future__ import annotations

from pathlib import Path

from ..common.config import Config
from ..common.errors import DataError
from ..common.models import load_model, resolve
from ..common.run_folder import RunFolder
from .adapters import identity, require_same
from .engine import DeepSpeedEngine
from .forward.policy import device_of
from .model_folder import adapter_folder
from .rendezvous import process_group
from .resume.checkpoints import Checkpoints


def export(
    folder: RunFolder, config: Config, out: Path | None, port: int, last_step: int | None = None
) -> tuple[int, Path]:
    """Writes the model of the newest whole checkpoint; returns its step and the folder.

    Adapters are merged into the model, and written by themselves beside it.

    Args:
        folder: the run's folder.
        config: the run's config.
        out: a folder that doesn't exist yet; None = ``model-of-step-N`` in the run's folder.
        port: a free port, for the single rank's rendezvous.
        last_step: newest step that may be taken.

    Raises:
        DataError: there is no whole checkpoint, or its adapters are those of other settings or of another base;
            or it has every parameter and is one of ZeRO stage 3, in which each rank has written a part.
    """
    checkpoint = Checkpoints(folder.checkpoints).newest(last_step)
    if checkpoint is None:
        raise DataError(f"{folder.checkpoints} has no whole checkpoint to export")
    step = checkpoint.version.step
    out = out or folder.path / f"model-of-step-{step}"
    for place in (out, adapter_folder(out)):
        if place.exists() and (place == out or config.learner.lora is not None):
            raise DataError(f"{place} is there already: name another folder with --out")
    require_same(checkpoint.state, identity(config), checkpoint.folder)
    in_parts = config.learner.zero_stage == 3 and checkpoint.ranks > 1
    if in_parts and config.learner.lora is None:
        raise DataError(
            f"{checkpoint.folder} is in {checkpoint.ranks} ranks' parts (learner.zero_stage=3): "
            f"python -m deepspeed.utils.zero_to_fp32 {checkpoint.folder}/engine {out} joins them"
        )
    with process_group(0, 1, port):
        model = load_model(
            config.model.path,
            dtype=config.model.dtype,
            attention=config.model.attention,
            device=device_of(0),
        )
        engine = DeepSpeedEngine(model, config, device_of(0))
        if in_parts:
            engine.join_adapters(checkpoint.folder)
        else:
            engine.load_weights(checkpoint.folder)
        engine.export(out, Path(resolve(config.model.path)))
    return step, out
