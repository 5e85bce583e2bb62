"""Finds and loads model folders and their tokenizers, with errors that a person can act on.

torch and transformers are imported inside the functions, so that a process that only needs a path, or
``tandem --help``, doesn't pay for them.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DataError
from .hub import TOKENIZER_FILES, has_tokenizer
from .memory import is_out_of_memory
from .plain import one_line, read_object

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger("tandem")

SHIPPED = {
    "miniature": "launch/miniature/base",
    "miniature-tools": "launch/miniature/tools/base",
}
"""Models that are shipped, by the names that ``model.path`` has for them, with their folders in the package."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def resolve(path: str, key: str = "model.path") -> str:
    """The folder (or hub name) that a config's ``model.path`` means.

    ``miniature`` and ``miniature-tools`` are models that are shipped. A name like ``org/model`` that
    isn't a folder here is a hub name and is returned unchanged, unless ``HF_HUB_OFFLINE`` is set and
    the local cache lacks it.

    Args:
        path: the setting's value.
        key: the setting, for the error.

    Raises:
        DataError: there is no such folder, or it holds no model.
    """
    if path in SHIPPED:
        shipped = resources.files("tandem").joinpath(SHIPPED[path])
        folder = Path(str(shipped))
        if not folder.is_dir():
            raise DataError(
                f"{key}={path}: the shipped model is missing at {folder}: install Tandem "
                f"again, or name a model folder"
            )
        return str(folder)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise DataError(
                f"{key}={path}: the folder has no config.json: name the Hugging Face folder "
                f"that holds config.json, the weights and the tokenizer"
            )
        return str(folder)
    if folder.exists():
        raise DataError(f"{key}={path} is a file: name the folder that it is in")
    if _HUB_NAME.fullmatch(path):
        return path
    raise DataError(
        f"{key}={path}: there is no such folder: name a Hugging Face folder, a hub name "
        f"(org/model), or {' or '.join(SHIPPED)}"
    )


def local_folder(path: str, fetch: Sequence[str] = ()) -> Path:
    """The folder of this host with a model's files: the hub's cache has it for a hub name.

    Args:
        path: see :func:`resolve`.
        fetch: patterns of files that are fetched from the hub if the cache lacks them.

    Raises:
        DataError: there is none, and the hub didn't give it.
    """
    place = resolve(path)
    if Path(place).is_dir():
        return Path(place)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            place, allow_patterns=list(fetch) or None, local_files_only=not fetch
        )
        return Path(found)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise DataError(
            f"model.path={path}: its files aren't in the hub's cache here ({one_line(error, 300)}): run "
            f"tandem get model {path}, and name the folder"
        ) from None


def load_tokenizer(path: str, key: str = "model.path") -> PreTrainedTokenizerBase:
    """The tokenizer of a model.

    Args:
        path: see :func:`resolve`.
        key: the setting that has ``path``, for errors.

    Raises:
        DataError: the folder holds none, or it can't be read.
    """
    place = resolve(path, key)
    folder = Path(place)
    if folder.is_dir() and not has_tokenizer(folder):
        raise DataError(
            f"{key}={path}: the folder has no tokenizer ({', '.join(TOKENIZER_FILES[:3])}, "
            f"…): copy the base model's tokenizer files into it"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(unreadable(path, "tokenizer", error, key)) from None
    return tokenizer


def load_class(path: str) -> None:
    """Imports what :func:`load_model` needs for a model that is on this host: seconds of transformers."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    place = resolve(path)
    if Path(place).is_dir():
        MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(place))]


def load_model(
    path: str,
    *,
    dtype: str | torch.dtype = "float32",
    attention: str = "auto",
    device: str | torch.device = "cpu",
    flash: bool = True,
    key: str = "model.path",
) -> PreTrainedModel:
    """Loads a causal language model.

    Args:
        path: see :func:`resolve`.
        dtype: dtype of the parameters.
        attention: see :func:`choose_attention`.
        device: device of the parameters.
        flash: whether ``auto`` may choose flash attention.
        key: the setting that has ``path``, for errors.

    Raises:
        DataError: the weights are missing, unreadable, or don't belong to the config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    place = resolve(path, key)
    folder = Path(place)
    if folder.is_dir() and not any(True for glob in _WEIGHT_FILES for _ in folder.glob(glob)):
        raise DataError(
            f"{key}={path}: the folder has a config.json and no weights (*.safetensors)"
        )
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    # A progress bar is of no use in a log file.
    transformers_logging.disable_progress_bar()
    try:
        chosen = choose_attention(
            attention, device, kind, AutoConfig.from_pretrained(place), flash=flash
        )
        model, info = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=kind,
            attn_implementation=chosen,
            output_loading_info=True,
        )
    except ImportError as error:
        raise DataError(f"model.attention={attention}: {one_line(error, 300)}") from None
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise DataError(unreadable(path, "weights", error, key)) from None
    wrong = sorted(info["missing_keys"]) or sorted(str(name) for name in info["mismatched_keys"])
    if wrong:
        raise DataError(
            f"{key}={path}: the weights aren't those of its config.json: "
            f"{len(wrong)} tensors are missing or of another shape, such as {wrong[0]}"
        )
    return model.to(device)


def choose_attention(
    attention: str,
    device: str | torch.device,
    dtype: Any,
    config: Any = None,
    *,
    flash: bool = True,
) -> str:
    """The name of an attention implementation in transformers.

    ``auto`` is flash_attention_2 on CUDA if the package is installed and the dtype allows it, else
    sdpa; or eager if sdpa can't do what the model needs. So are ``varlen`` and ``flex`` without flash attention,
    since a learner alone has them (:mod:`tandem.learner.forward.packed`).

    Args:
        attention: the config's setting: ``auto`` or a name.
        device: device of the model.
        dtype: dtype of its parameters.
        config: transformers' config of the model, if it is known.
        flash: whether ``auto`` may choose flash attention.
    """
    if attention not in ("auto", "varlen", "flex"):
        return attention
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.utils import is_flash_attn_2_available

    kind: Any = None
    if config is not None and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    cuda = torch.device(device).type == "cuda" and torch.cuda.is_available()
    half = dtype in (torch.bfloat16, torch.float16)
    fast = (
        flash
        and attention == "auto"
        and cuda
        and half
        and getattr(kind, "_supports_flash_attn", True)
    )
    if fast and is_flash_attn_2_available():
        return "flash_attention_2"
    # transformers' sdpa has no argument for a cap of the scores (Gemma 2) and ignores it.
    capped = config is not None and getattr(
        config.get_text_config(), "attn_logit_softcapping", None
    )
    return "eager" if capped or not getattr(kind, "_supports_sdpa", True) else "sdpa"


@lru_cache(maxsize=1)
def has_fast_bfloat16() -> bool:
    """Whether this CPU's products in bfloat16 are faster than in float32: with AVX-512, for which oneDNN has
    kernels."""
    import torch

    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def warn_of_slow_bfloat16(name: str, dtype: str, device: str | torch.device) -> None:
    """Says in the log that this CPU is slow in the dtype that the setting ``name`` has chosen."""
    import torch

    x86 = platform.machine() in ("x86_64", "AMD64")
    if (
        dtype == "bfloat16"
        and torch.device(device).type == "cpu"
        and x86
        and not has_fast_bfloat16()
    ):
        log.warning(
            f"{name}=bfloat16: this CPU has no instructions for it (AVX-512), and takes several times as long "
            f"as in float32: set {name}=float32"
        )


def unreadable(path: str, what: str, error: Exception, key: str = "model.path") -> str:
    """What to tell a user whose model, here or on the hub, couldn't give its tokenizer, weights or config."""
    if not Path(path).expanduser().is_dir() and path not in SHIPPED:
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        return (
            f"{key}={path}: no such folder here, and the hub didn't give its {what}"
            f"{offline}: {one_line(error, 300)}"
        )
    return f"{key}={path}: its {what} can't be read: {one_line(error, 300)}"


def context_of(settings: Mapping[str, Any]) -> int | None:
    """Tokens of a model's context by its ``config.json``; None if it doesn't say."""
    text = settings.get("text_config")
    context = (text if isinstance(text, dict) else settings).get("max_position_embeddings")
    return context if isinstance(context, int) else None


def read_model_config(path: str) -> dict[str, Any]:
    """Reads ``config.json`` of a model folder without transformers; empty for a hub name.

    Raises:
        DataError: it isn't JSON.
    """
    file = Path(resolve(path)) / "config.json"
    if not file.is_file():
        return {}
    return read_object(file.read_bytes(), str(file), DataError, "get the model's files again")
