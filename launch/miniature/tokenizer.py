"""Builds the miniature's tokenizer: 32 ids, one for each character and each whole tag.

It is a byte-level BPE without a single merge, its tags added tokens. A word-level model would be
plainer, but transformers 5 rebuilds the tokenizer of every Qwen2 folder as a byte-level BPE from
the vocabulary, the merges and the added tokens, whatever class the folder asks for; anything else
comes back from ``AutoTokenizer`` as a tokenizer that encodes every text to nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "<unk>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "}")
CHARACTERS = tuple("0123456789+-=? ")

SIZE = 32
"""Number of ids."""

_named = (PAD, EOS, UNKNOWN, *TAGS, *CHARACTERS)
VOCABULARY = (*_named, *(f"<spare_{i}>" for i in range(SIZE - len(_named))))
"""[32] The tokens in the order of their ids; the last eight never occur in a text."""

PAD_ID = VOCABULARY.index(PAD)
EOS_ID = VOCABULARY.index(EOS)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- message['content'] -}}{%- endif -%}"
    "{%- endfor -%}"
)
"""Renders the user messages' content and nothing else: a prompt opens its own ``<think>``."""


def build() -> PreTrainedTokenizerFast:
    """The tokenizer, with pad, end-of-sequence and unknown tokens and a chat template.

    ``decode(encode(text)) == text`` for every text made of the vocabulary, spaces included; no
    token is added at either end. Characters outside the vocabulary have no id and are dropped.
    Tags are ordinary tokens, so ``skip_special_tokens`` keeps them.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The byte-level alphabet writes a space as this letter.
    ids = {token.replace(" ", "\u0120"): i for i, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = (PAD, EOS, UNKNOWN)
    backend.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token in VOCABULARY
            if len(token) > 1 and token not in special
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        # Never produced; named because a Qwen2 tokenizer would otherwise add its own, as id 32.
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save(folder: Path) -> None:
    """Writes the tokenizer's files; see :func:`write`."""
    write(build(), folder, 256)


def write(tokenizer: PreTrainedTokenizerFast, folder: Path, context: int) -> None:
    """Writes a tokenizer's files so that ``AutoTokenizer`` of transformers 4 and 5 reads them."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    # Version 5 writes the name of an internal class that version 4 does not know.
    settings["tokenizer_class"] = "Qwen2Tokenizer"
    settings["model_max_length"] = context
    # Version 5 reads both names of this list, version 4 only the older one.
    if extra := settings.pop("extra_special_tokens", None):
        settings["additional_special_tokens"] = extra
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
