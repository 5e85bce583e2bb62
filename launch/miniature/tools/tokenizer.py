"""Builds the tokenizer of the miniature with a tool: an id for each byte, for each tag and for some words.

It is a byte-level BPE without a single merge, as the miniature's (``../tokenizer.py`` says why), but with all
256 bytes: schemas, results and messages of errors may hold any text. The words are those of a call and of the
template, which would else be three quarters of an episode, letter by letter. The chat template has the form of
Qwen2.5's, and differs where its length would cost more than it shows at this size: the head names the tools
and their parameters in place of a page of instructions and JSON schemas.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..tokenizer import write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD = "<|endoftext|>"
BEGIN = "<|im_start|>"
EOS = "<|im_end|>"
SPECIAL = (PAD, BEGIN, EOS)
"""The special tokens; text that a user or a tool wrote is never encoded as one of them."""
TAGS = (
    "<tools>",
    "</tools>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "\\boxed{",
)
WORDS = (
    "system",
    "user",
    "assistant",
    "multiply",
    "name",
    "arguments",
    '{"',
    '": ',
    '": "',
    '", "',
    ', "',
    "}}",
)
"""With the tags, ordinary tokens, which ``skip_special_tokens`` keeps; of two that begin alike the longer counts."""

PAD_ID, BEGIN_ID, EOS_ID = range(3)
SIZE = 278
"""Number of ids: 3 special tokens, 7 tags, 12 words and 256 bytes."""
CONTEXT = 512
"""Greatest number of tokens of a row."""

CHAT_TEMPLATE = """\
{%- if tools or (messages and messages[0].role == 'system') -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if messages[0].role == 'system' -%}
        {{- messages[0].content -}}
        {%- if tools -%}{{- '\\n\\n' -}}{%- endif -%}
    {%- endif -%}
    {%- if tools -%}
        {{- '<tools>\\n' -}}
        {%- for tool in tools -%}
            {%- set function = tool.function if tool.function is defined else tool -%}
            {{- function.name + '(' + (function.parameters.properties | list | join(', ')) + ')\\n' -}}
        {%- endfor -%}
        {{- '</tools>' -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant' -}}
        {%- if message.content -%}{{- '\\n' + message.content -}}{%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function is defined else call -%}
            {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
            {%- if function.arguments is string -%}
                {{- function.arguments -}}
            {%- else -%}
                {{- function.arguments | tojson -}}
            {%- endif -%}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
            {{- '<|im_start|>user' -}}
        {%- endif -%}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
            {{- '<|im_end|>\\n' -}}
        {%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""ChatML with Hermes' tool calls, as Qwen2.5 renders them: results stand in the user's turn."""


def build() -> PreTrainedTokenizerFast:
    """The tokenizer, with its special tokens and chat template.

    ``decode(encode(text)) == text`` for every text, and no token is added at either end.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: i for i, token in enumerate((*SPECIAL, *TAGS, *WORDS, *letters))}
    backend = Tokenizer(models.BPE(vocab=ids, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in (*TAGS, *WORDS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        # Never produced; named because a Qwen2 tokenizer would otherwise add its own.
        unk_token=PAD,
        additional_special_tokens=[BEGIN],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save(folder: Path) -> None:
    """Writes the tokenizer's files; see :func:`~..tokenizer.write`."""
    write(build(), folder, CONTEXT)
