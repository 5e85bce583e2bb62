"""Text to token ids and back: the one place where a tokenizer is called.

Prompts are rendered once, at ingest, and travel as token ids, so that the reader, the engine and
the learner can't disagree about them. Works with transformers tokenizers, but imports none.
"""

from __future__ import annotations

import hashlib
import sys
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import templates
from .config.data import DataConfig
from .errors import DataError

Int32Array = NDArray[np.int32]


def conversation(messages: Sequence[Mapping[str, str]], data: DataConfig) -> list[dict[str, str]]:
    """The messages that a chat template gets: with the config's system prompt, or without the row's own.

    Raises:
        DataError: no messages, or a malformed one.
    """
    turns = []
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise DataError(
                f"a message needs a role and a content, both text, and this one is {message!r:.120}"
            )
        turns.append({"role": message["role"], "content": message["content"]})
    if not turns:
        raise DataError("a prompt has no messages")
    if templates.named(data.template).text is not None:
        return [turn for turn in turns if turn["role"] != "system"]
    return with_system(turns, data)


def with_system(turns: Sequence[dict[str, Any]], data: DataConfig) -> list[dict[str, Any]]:
    """Messages with the config's system prompt, or without their own."""
    kept = [turn for turn in turns if not (data.remove_system and turn["role"] == "system")]
    if data.system_prompt is not None and (not kept or kept[0]["role"] != "system"):
        kept.insert(0, {"role": "system", "content": data.system_prompt})
    return kept


def render_text(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    data: DataConfig,
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Renders a conversation as the prompt that the model continues.

    Args:
        tokenizer: its chat template renders, unless ``data`` names another one; without one the
            contents are joined by line breaks.
        messages: ``{"role", "content"}`` each.
        data: template, system prompt and prefill.
        tools: tools that the tokenizer's own chat template shows, in OpenAI's form.

    Returns:
        The text, with all special tokens that belong into it (:func:`beginning`).

    Raises:
        DataError: no messages, a malformed message, or more messages than the template holds.
    """
    return render_texts(tokenizer, [messages], data, tools)[0]


def render_texts(
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, str]]],
    data: DataConfig,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """As :func:`render_text`, for several conversations in one call of the chat template's."""
    turns = [conversation(messages, data) for messages in conversations]
    template = templates.named(data.template)
    if template.text is not None:
        for asked in turns:
            if len(asked) != 1:
                raise DataError(
                    f"data.template={data.template} holds one question, and the prompt has {len(asked)} "
                    f"messages: use data.template=own"
                )
        texts = [template.fill(asked[0]["content"]) for asked in turns]
    elif template.name == templates.OWN and getattr(tokenizer, "chat_template", None) and turns:
        texts = by_chat_template(tokenizer, turns, tools, opened=True)
    else:
        texts = ["\n".join(turn["content"] for turn in each) for each in turns]
    begin = beginning(tokenizer, data)
    # A template in a file may write the token itself.
    return [begin + str(text).removeprefix(begin) + data.prefill for text in texts]


def by_chat_template(
    tokenizer: Any,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    opened: bool,
) -> list[str]:
    """Conversations as the tokenizer's own chat template writes them, in one call.

    Args:
        tokenizer: it has a chat template.
        conversations: messages in OpenAI's form.
        tools: the tools that they are offered.
        opened: whether the assistant's next turn is opened.
    """
    _flatten_globals(tokenizer)
    offered = {"tools": list(tools)} if tools else {}
    texts: list[str] = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=opened, tokenize=False, **offered
    )
    return texts


def beginning(tokenizer: Any, data: DataConfig) -> str:
    """The BOS token with which prompts begin if the tokenizer adds one by itself, as Llama's and Gemma's do.

    It is empty for other tokenizers, and for prompts of the tokenizer's own chat template, which writes what it needs.
    """
    named = templates.named(data.template)
    if named.name == templates.OWN and getattr(tokenizer, "chat_template", None):
        return ""
    token, number = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    if not token or number is None or list(tokenizer.encode(""))[:1] != [number]:
        return ""
    return str(token)


def _flatten_globals(tokenizer: Any) -> None:
    """Makes a dict of the globals of a tokenizer's compiled template. Jinja copies them for every conversation, and out of
    the ChainMap that they are otherwise this takes longer than to render a prompt."""
    utils = sys.modules.get("transformers.utils.chat_template_utils")
    compiled = getattr(utils, "_compile_jinja_template", None)
    own = getattr(tokenizer, "get_chat_template", None)
    if compiled is not None and own is not None:
        template = compiled(own())
        if isinstance(template.globals, ChainMap):
            template.globals = dict(template.globals)


def longest_token(tokenizer: Any) -> int:
    """Greatest number of characters of a text that one token can stand for.

    This is the length of the vocabulary's longest entry, with room for a normaliser that joins
    characters (NFC joins up to three). Characters that are unknown to the tokenizer aren't considered.
    """
    return 4 * max(map(len, tokenizer.get_vocab()), default=1)


def encode(tokenizer: Any, text: str) -> Int32Array:
    """``[L]`` token ids of a text, with nothing added."""
    return np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)


def encode_all(tokenizer: Any, texts: Sequence[str]) -> list[Int32Array]:
    """For each text its ``[L]`` token ids, as :func:`encode` does, but on all cores."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [encode(tokenizer, text) for text in texts]
    # A tokenizer's file may ask for either, which the wrapper's own call would undo. Not while another thread encodes.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(one.ids, dtype=np.int32) for one in encoded]


def encode_prompts(tokenizer: Any, texts: Sequence[str], data: DataConfig) -> list[Int32Array]:
    """For each text of :func:`render_texts` its ``[P]`` token ids, to which no special token is added."""
    begin = beginning(tokenizer, data)
    if not begin:
        return encode_all(tokenizer, texts)
    # Some tokenizers encode a text's beginning in another way behind a special token.
    bare = encode_all(tokenizer, [text.removeprefix(begin) for text in texts])
    return [np.insert(tokens, 0, tokenizer.bos_token_id) for tokens in bare]


def encode_responses(tokenizer: Any, texts: Sequence[str]) -> list[Int32Array]:
    """For each whole response its ``[L]`` token ids, with the end token once, as the last one.

    Raises:
        DataError: the tokenizer names no end token.
    """
    return [ended(tokenizer, tokens) for tokens in encode_all(tokenizer, texts)]


def ended(tokenizer: Any, tokens: Int32Array) -> Int32Array:
    """``[L]`` tokens with the end token once, as the last one.

    Raises:
        DataError: the tokenizer names no end token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("the tokenizer names no end-of-sequence token: set eos_token in its files")
    if len(tokens) and tokens[-1] == end:
        return tokens
    return np.append(tokens, np.int32(end))


def decode(tokenizer: Any, rows: Sequence[NDArray[Any]]) -> list[str]:
    """The texts of some responses, without special tokens and with spaces as they are."""
    lists = [row.tolist() for row in rows]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        # The wrapper's own decode calls the same, but one row at a time and with overhead.
        texts: list[str] = backend.decode_batch(lists, skip_special_tokens=True)
        return texts
    return [
        tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for tokens in lists
    ]


def end_tokens(tokenizer: Any, model: Any = None) -> set[int]:
    """Token ids that end a response: the tokenizer's, and those of the model's generation config.

    Raises:
        DataError: neither names one.
    """
    found: set[int] = set()
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if isinstance(named, int):
        found.add(named)
    elif named is not None:
        found.update(int(i) for i in named)
    if not found:
        raise DataError(
            "neither the tokenizer nor the generation config names an end-of-sequence token: "
            "responses would never end"
        )
    return found


def tokenizer_digest(tokenizer: Any) -> str:
    """Names a tokenizer by what it does: 16 hex digits over its vocabulary and rules.

    Equal for a tokenizer and a copy that was saved and loaded again; another vocabulary, merges,
    added tokens or end token give another digest. The chat template isn't part of it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{number}\t{len(token)}\t{token}\n".encode())
    digest.update(f"eos {tokenizer.eos_token_id}\n".encode())
    for probe in _PROBES:
        # Merges and pre-tokenisation show in how texts are split, however the files write them down.
        digest.update(f"{tokenizer.encode(probe, add_special_tokens=False)}\n".encode())
    return digest.hexdigest()


_PROBES = (
    "The quick brown fox jumps over the lazy dog; 12345678.90 + 1e-10 = 3^2?",
    "  def f(x):\n\treturn x**2  # naïve Ω(n log n) — “quoted”\r\n",
    "\\boxed{\\frac{\\sqrt{2}}{3}} <think>\n\n</think> <answer>B</answer>",
    "因为 x≥0，所以 y=∑ᵢ xᵢ². Пусть n ∈ ℕ. 🙂",
)
