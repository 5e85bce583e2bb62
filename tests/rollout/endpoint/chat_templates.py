"""Tokenizers with chat templates of the common forms, for tests of rendering and of tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are a helpful assistant.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) or \
(message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""The form of Qwen2.5's and Hermes'."""

THINKING = (
    CHATML.replace('(message.role == "assistant" and not message.tool_calls)', "false")
    .replace(
        """{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}""",
        """{%- set said = message.content %}
        {%- set last = namespace(user=0) %}
        {%- for one in messages %}{%- if one.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
        {%- if '</think>' in said and loop.index0 < last.user %}{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
        {%- elif '</think>' not in said and loop.last %}{%- set said = '<think>\\n\\n</think>\\n\\n' + said %}{%- endif %}
        {{- '\\n' + said }}""",
    )
    .replace("in message.tool_calls", "in message.tool_calls or []")
)
"""The form of Qwen3's: thoughts before the last question are left out, and an empty one is put in at the end."""

LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: 26 Jul 2024\\n\\n" }}
{%- if tools %}
    {{- 'Respond in the format {"name": function name, "parameters": dictionary}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
"""The form of Llama 3.1's and 3.2's."""

GPT_OSS = """\
{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- set called.name = message.tool_calls[0].function.name %}
        {{- '<|start|>assistant to=functions.' + called.name + '<|channel|>commentary json<|message|>' }}
        {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + called.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
"""The form of gpt-oss': a result is from the function that the call before it names."""

GEMMA4 = """\
{%- macro written(value) %}
    {{- '<|"|>' + value + '<|"|>' if value is string else value | tojson }}
{%- endmacro %}
{{- bos_token }}
{%- set last = namespace(kind='') %}
{%- for message in messages %}
    {%- if message.role != 'tool' %}
        {%- set last.kind = 'turn' %}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
        {%- for call in message.tool_calls or [] %}
            {%- set last.kind = 'call' %}
            {{- '<|tool_call>call:' + call.function.name + '{' }}
            {%- for key, value in call.function.arguments | dictsort %}
                {{- '' if loop.first else ',' }}{{- key + ':' + written(value) }}
            {%- endfor %}
            {{- '}<tool_call|>' }}
        {%- endfor %}
        {%- if last.kind == 'call' %}
            {%- set results = namespace(over=false, name='unknown') %}
            {%- for result in messages[loop.index:] %}
                {%- set results.over = results.over or result.role != 'tool' %}
                {%- if not results.over %}
                    {%- set last.kind = 'result' %}
                    {%- set results.name = 'unknown' %}
                    {%- for call in message.tool_calls if call.id == result.tool_call_id %}
                        {%- set results.name = call.function.name %}
                    {%- endfor %}
                    {{- '<|tool_response>response:' + results.name + '{value:' }}
                    {{- written(result.content) + '}<tool_response|>' }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
        {{- message.content | trim }}
        {%- if last.kind == 'call' %}{{- '<|tool_response>' }}
        {%- elif last.kind == 'turn' or message.content | trim %}{{- '<turn|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and last.kind == 'turn' %}{{- '<|turn>model\\n' }}{%- endif %}
"""
"""The form of Gemma 4's: a result is from the function whose call has its id, and goes on in the turn that called."""

MISTRAL = """\
{%- macro checked(id) %}
    {%- if id | length != 9 %}{{- raise_exception('an id of a call has nine letters and digits') }}{%- endif %}
    {{- id }}
{%- endmacro %}
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {{- '' if loop.first else ', ' }}{{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + ', "id": "' + checked(call.id) + '"}' }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif message.role == 'assistant' %}{{- message.content | trim + '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | tojson + ', "call_id": "' }}
        {{- checked(message.tool_call_id) + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- '[INST]' + message.content + '[/INST]' }}{%- endif %}
{%- endfor %}
"""
"""The form of Mistral's, which refuses other ids of calls than its own."""

_TEXT = (
    "user assistant system tool the name is and arguments of a call with words that merge: "
    '{"name": "multiply", "arguments": {"a": 1, "b": 22}}\n\n the end of it, e.g. 137*258=?\n'
) * 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A template with the tokens that it writes."""

    template: str
    special: tuple[str, ...]
    """The first one also fills rows up."""
    eos: str
    bos: str | None = None
    tags: tuple[str, ...] = ()
    """Added tokens that aren't special."""


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_FAMILIES = {
    "chatml": _Family(template=CHATML, special=_CHATML, eos="<|im_end|>", tags=_TAGS),
    "thinking": _Family(
        template=THINKING,
        special=_CHATML,
        eos="<|im_end|>",
        tags=(*_TAGS, "<think>", "</think>"),
    ),
    "llama": _Family(
        template=LLAMA,
        special=(
            *("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eom_id|>", "<|python_tag|>"),
        ),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "gpt-oss": _Family(
        template=GPT_OSS,
        special=(
            *("<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
            *("<|end|>", "<|message|>", "<|call|>"),
        ),
        eos="<|return|>",
    ),
    "gemma4": _Family(
        template=GEMMA4,
        special=(
            *("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>"),
            *("<|tool_response>", "<tool_response|>", '<|"|>'),
        ),
        eos="<turn|>",
        bos="<bos>",
    ),
    "mistral": _Family(
        template=MISTRAL,
        special=(
            *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        eos="</s>",
        bos="<s>",
    ),
}


@cache
def tokenizer(form: str) -> Any:
    """A byte-level BPE with a few merges, and a family's special tokens, tags and template."""
    if form == "miniature":
        from tandem.launch.miniature.tools.tokenizer import build

        return build()
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [_TEXT], BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    )
    family = _FAMILIES[form]
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in family.special]
    )
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in family.tags])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=family.eos,
        pad_token=family.special[0],
        bos_token=family.bos,
    )
    made.chat_template = family.template
    return made
