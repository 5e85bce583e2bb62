"""Folders in Hugging Face's form: each is there completely or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from ..common.run_folder import replace_folder, sync_tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_model(
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor],
    folder: Path,
    base: Path | None,
    dtype: str,
) -> None:
    """Writes a model that transformers loads.

    Args:
        model: its class and config are written, its tensors aren't.
        tensors: the tensors by the model's names.
        folder: replaced if it exists.
        base: the folder that the model was loaded from. Its tokenizer and config files are copied byte for
            byte, so that whatever reads the base reads the result.
        dtype: what the config says of the tensors.
    """

    def fill(staging: Path) -> None:
        model.save_pretrained(staging, state_dict=dict(tensors))
        if base is not None and base.is_dir():
            _copy_side_files(base, staging, dtype)

    write_folder(folder, fill)


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Replaces a folder by one that ``fill`` writes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fill(staging)
        for path in staging.iterdir():
            path.chmod(0o644)
        staging.chmod(0o755)
        sync_tree(staging)
        replace_folder(staging, folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def adapter_folder(model: Path) -> Path:
    """Where the adapters of an exported model are: ``adapter`` beside ``model``, else ``NAME-adapter``."""
    return model.with_name("adapter" if model.name == "model" else f"{model.name}-adapter")


def _copy_side_files(base: Path, staging: Path, dtype: str) -> None:
    weights = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
    for path in sorted(base.iterdir()):
        heavy = path.suffix in weights or path.name.endswith(".index.json")
        if path.is_file() and not heavy:
            shutil.copyfile(path, staging / path.name)
    config = staging / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = dtype
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
