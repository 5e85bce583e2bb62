"""Makes a base model for long thoughts from a plain one: a longer context and tokens that enclose thoughts.

As for LUFFY's Qwen2.5-Math-7B-16k-think (Yan et al., arXiv 2504.14945): rope theta 40000 instead of 10000, a
context of 16,384 tokens instead of 4,096, <think> and </think> as tokens, and a chat template whose prompts end
with <think>. Everything else is copied as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError, DataError
from ...common.plain import read_object
from ..wording import shown

if TYPE_CHECKING:
    import torch

THINK = ("<think>", "</think>")
CHAT = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
"""Chat markup as Qwen's models know it, with the opened thoughts at the end of a prompt."""
MATRICES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "wte.weight",
    "embed_in.weight",
    "embed_out.weight",
)
"""Ends of the names of matrices with a row for each token."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="MODEL", help="a Hugging Face folder (`tandem get model`)"
    )
    parser.add_argument("out", metavar="OUT", help="the new folder")
    parser.add_argument("--rope-theta", type=float, default=40_000.0, metavar="X", help="(40000)")
    parser.add_argument("--context", type=int, default=16_384, metavar="N", help="tokens (16384)")
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a template in Jinja (default: ChatML, then <think>)",
    )


def run(arguments: argparse.Namespace) -> int:
    source, out = Path(arguments.source).expanduser(), Path(arguments.out).expanduser()
    if not (source / "config.json").is_file():
        raise DataError(f"{source} has no config.json: name a model's folder")
    if not any(source.glob("*.safetensors")):
        raise DataError(f"{source} has no safetensors: other formats of weights aren't read")
    if out.exists():
        raise ConfigError(f"{out} already exists: name another folder")
    if arguments.context < 1 or not arguments.rope_theta > 0:
        raise ConfigError("--context and --rope-theta must be greater than 0")
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for file in sorted(source.iterdir()):
            if file.is_file() and file.suffix != ".safetensors" and not file.name.startswith("."):
                shutil.copy(file, part)
        new = _tokenizer(source, part, arguments)
        rows = _weights(source, part, new)
        _config(part, arguments, rows)
        part.replace(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    added = ", ".join(f"{token} = {number}" for token, number in new.items()) or "none, it has them"
    print(
        f"{shown(out.absolute())}: context {arguments.context:,}, rope theta {arguments.rope_theta:g}"
    )
    print(f"new tokens: {added}")
    print(f"use it as model.path={shown(out.absolute())}")
    return 0


def _tokenizer(source: Path, out: Path, arguments: argparse.Namespace) -> dict[str, int]:
    """Writes the tokenizer; returns the ids of tokens that it hadn't."""
    from ...common.models import load_tokenizer

    tokenizer = load_tokenizer(str(source))
    known = tokenizer.get_vocab()
    lacking = [token for token in THINK if token not in known]
    if lacking:
        # Not special: they are a part of what a response says.
        tokenizer.add_tokens(lacking)
    if arguments.chat_template is not None:
        try:
            tokenizer.chat_template = Path(arguments.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{arguments.chat_template} can't be read: {error}") from None
    elif "<|im_start|>" in known:
        tokenizer.chat_template = CHAT
    else:
        raise ConfigError(
            f"the tokenizer of {source} doesn't know <|im_start|>: name a chat template for it with "
            f"--chat-template FILE"
        )
    tokenizer.model_max_length = arguments.context
    tokenizer.save_pretrained(out)
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in lacking}


def _weights(source: Path, out: Path, new: dict[str, int]) -> int | None:
    """Writes the weights; returns the matrices' number of rows if that has changed.

    A new token begins as the mean of all others, in the embedding and in the head.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    rows: int | None = None
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            named = [name for name in content.keys() if name.endswith(MATRICES)]  # noqa: SIM118
            metadata = content.metadata()
        if not (named and new):
            shutil.copy(file, out)
            continue
        tensors = load_file(file)
        for name in named:
            tensors[name], grown = _with_rows(tensors[name], list(new.values()))
            rows = grown or rows
        save_file(tensors, out / file.name, metadata=metadata)
    return rows


def _with_rows(matrix: torch.Tensor, new: list[int]) -> tuple[torch.Tensor, int | None]:
    """The matrix with rows for new tokens, and its number of rows if it has grown."""
    import torch

    # Rows past the vocabulary, which some models have as padding, were never trained.
    mean = matrix[: min(new)].float().mean(0).to(matrix.dtype)
    grown = max(new) + 1 if max(new) >= len(matrix) else None
    if grown is not None:
        more = mean.expand(grown - len(matrix), -1)
        matrix = torch.cat([matrix, more])
    matrix = matrix.clone()
    matrix[new] = mean
    return matrix.contiguous(), grown


def _config(out: Path, arguments: argparse.Namespace, rows: int | None) -> None:
    path = out / "config.json"
    config: dict[str, Any] = read_object(path.read_bytes(), str(path), DataError)
    if isinstance(config.get("rope_parameters"), dict):
        config["rope_parameters"]["rope_theta"] = arguments.rope_theta
    if "rope_theta" in config or not isinstance(config.get("rope_parameters"), dict):
        config["rope_theta"] = arguments.rope_theta
    config["max_position_embeddings"] = arguments.context
    if config.get("sliding_window") is not None:
        config["sliding_window"] = arguments.context
    if rows is not None:
        config["vocab_size"] = rows
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
