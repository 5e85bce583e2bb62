"""Folders in Hugging Face's form: each is there completely or not at all."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...common.disk import write_all
from ...common.errors import DataError
from ...common.models import local_folder
from ...common.run_folder import SCORE, replace_folder, sync_tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..adapters import Adapters

log = logging.getLogger("tandem.learner")

SHARD = "5GB"
"""Most bytes of a weights file, unless a single tensor is larger."""
TEMPLATES = "additional_chat_templates"
"""Where transformers keeps the chat templates of a tokenizer that has several."""
GENERATION = "generation_config.json"
"""Where transformers keeps how a model is sampled from."""


def entries(
    model: PreTrainedModel,
    adapters: Adapters | None,
    trained: Mapping[str, Tensor],
    whole: Callable[[Sequence[str], Tensor], AbstractContextManager[Tensor]],
) -> Iterator[tuple[list[str], Tensor]]:
    """Names and tensor of every entry of the state dict that the model has without adapters, tied ones once.

    Args:
        model: a model, with adapters in it if they are given.
        adapters: are merged into what they adapt.
        trained: the adapters' tensors by name.
        whole: the tensor as it is to be written, from its names and the model's own tensor.
    """
    state = model.state_dict(keep_vars=True)
    if adapters is not None:
        state = adapters.of_base(state)
    tied: dict[int, list[str]] = {}
    for name, tensor in sorted(state.items()):
        tied.setdefault(id(tensor), []).append(name)
    for names in tied.values():
        with whole(names, state[names[0]]) as tensor:
            rest = list(names)
            for name in names:
                merged = adapters.merged(name, tensor, trained) if adapters else tensor
                if merged is not tensor:
                    rest.remove(name)
                    yield [name], merged
            if rest:
                yield rest, tensor


def write_model(
    model: PreTrainedModel,
    tensors: Iterable[tuple[Sequence[str], Tensor]],
    folder: Path,
    base: Path | None,
    dtype: str,
    shard: int | str = SHARD,
) -> None:
    """Writes a model that transformers loads. One tensor at a time is in memory.

    Args:
        model: its class and config are written, its tensors aren't.
        tensors: names and tensor of each entry, see :func:`entries`. Each is used before the next is taken.
        folder: replaced if it exists.
        base: the folder that the model was loaded from, or its name on the hub. Its tokenizer, chat template and
            config files are copied byte for byte, so that whatever reads the base reads the result. One without
            a generation config gives the result none either. None = there are none to copy.
        dtype: what the config says of the tensors.
        shard: most bytes of a weights file, as transformers takes it. If there are several, an index says which
            tensor is in which.
    """

    def fill(staging: Path) -> None:
        kept = {
            name: mapped
            for names, one in tensors
            for mapped in [_mapped(one, staging)]
            for name in names
        }
        with _fresh_generation_config(model):
            model.save_pretrained(staging, state_dict=kept, max_shard_size=shard)
        # What the base has is copied; without one, readers take the same from config.json as they do for the base.
        (staging / GENERATION).unlink(missing_ok=True)
        if base is not None and (side := _side_folder(base)) is not None:
            _copy_side_files(side, staging, dtype)

    write_folder(folder, fill)


@contextmanager
def _fresh_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """The model with a generation config that transformers writes: it refuses many that it loads, such as a
    temperature without do_sample."""
    from transformers import GenerationConfig

    own = getattr(model, "generation_config", None)  # Models that can't generate have none.
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def write_adapters(
    adapters: Adapters, trained: Mapping[str, Tensor], model: Path, base: Path
) -> None:
    """Writes adapters in PEFT's form beside the exported model that they are merged into."""
    write_folder(adapter_folder(model), lambda staging: adapters.write(staging, trained, str(base)))


def _mapped(tensor: Tensor, folder: Path) -> Tensor:
    """The same tensor, mapped from a file without a name, which goes when the tensor goes.

    transformers needs all tensors at once, since the files of some models join or divide them.
    """
    flat = tensor.detach().to("cpu").reshape(-1)
    if not flat.numel():
        return tensor.detach().to("cpu", copy=True)
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        # Written before it is mapped: a full disk is then an error, and no signal.
        write_all(file, flat.view(torch.uint8).numpy().data)
        found = torch.from_file(file.name, shared=False, size=flat.numel(), dtype=flat.dtype)
    return found.view(tensor.shape)


def _side_folder(base: Path) -> Path | None:
    try:
        return local_folder(str(base))
    except DataError as error:
        log.warning(f"the model is written without a tokenizer: {error}")
        return None


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Replaces a folder by one that ``fill`` writes; removes what processes that were killed have left of it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}-????????.tmp"):
        with _locked(left) as free:
            if free:
                shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", suffix=".tmp", dir=folder.parent))
    with _locked(staging):
        _fill(staging, folder, fill)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds the lock of a folder that is being written; whether nobody else held it."""
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # Somebody writes it, or the file system has no locks.
            yield False
            return
        yield True
    finally:
        os.close(place)


def _fill(staging: Path, folder: Path, fill: Callable[[Path], None]) -> None:
    try:
        fill(staging)
        for root, _, names in os.walk(staging):
            os.chmod(root, 0o755)
            for name in names:
                os.chmod(os.path.join(root, name), 0o644)
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
        if path.is_file() and not heavy and path.name != SCORE:
            shutil.copyfile(path, staging / path.name)
    if (base / TEMPLATES).is_dir():
        shutil.copytree(base / TEMPLATES, staging / TEMPLATES)
    config = staging / "config.json"
    content = json.loads(config.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in content:
            content[key] = dtype
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
