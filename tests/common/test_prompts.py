"""Prompts and responses: text to token ids and back, the same wherever it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from tandem.common import prompts
from tandem.common.config import DataConfig
from tandem.common.errors import DataError
from tandem.launch.miniature import tokenizer as miniature


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return miniature.build()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def render(tokenizer: Any, messages: Any, data: DataConfig | None = None) -> tuple[str, Any]:
    data = data or DataConfig()
    text = prompts.render_text(tokenizer, messages, data)
    return text, prompts.encode_prompts(tokenizer, [text], data)[0]


def test_the_chat_template_renders_and_nothing_is_added(tokenizer: Any) -> None:
    text, tokens = render(tokenizer, user("12+3=?<think>"))
    assert text == "12+3=?<think>"
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens.tolist()) == text


def test_a_system_prompt_comes_first_unless_there_is_one(tokenizer: Any) -> None:
    chat = with_roles()
    three = DataConfig(system_prompt="3")
    assert render(chat, user("1+2"), three)[0] == "s=3?u=1+2?"
    own = [{"role": "system", "content": "4"}, *user("1+2")]
    assert render(chat, own, three)[0] == "s=4?u=1+2?"


def with_roles() -> Any:
    """A tokenizer whose chat template writes each message's role."""
    chat = miniature.build()
    chat.chat_template = (
        "{%- for m in messages -%}{{- m['role'][0] + '=' + m['content'] + '?' -}}{%- endfor -%}"
    )
    return chat


def test_system_messages_can_be_removed_and_a_response_begun() -> None:
    own = [{"role": "system", "content": "4"}, *user("1+2")]
    begun = DataConfig(remove_system=True, prefill="<think>")
    assert render(with_roles(), own, begun)[0] == "u=1+2?<think>"
    replaced = DataConfig(remove_system=True, system_prompt="5")
    assert render(with_roles(), own, replaced)[0] == "s=5?u=1+2?"
    assert render(with_roles(), own, DataConfig(template="none"))[0] == "4\n1+2"


def test_a_template_takes_the_question_alone(tmp_path: Path) -> None:
    own = [{"role": "system", "content": "4"}, *user("{1+2}")]
    file = tmp_path / "few_shot.txt"
    file.write_bytes(b"1=1 {}\r\n{question}=")
    few_shot = DataConfig(template=str(file), prefill="<think>")
    assert prompts.render_text(with_roles(), own, few_shot) == "1=1 {}\r\n{1+2}=<think>"
    bare = DataConfig(template="question_only", system_prompt="5")
    assert prompts.render_text(with_roles(), own, bare) == "{1+2}"
    turns = [*user("1"), {"role": "assistant", "content": "1"}, *user("2")]
    with pytest.raises(DataError, match="holds one question, and the prompt has 3 messages"):
        prompts.render_text(with_roles(), turns, bare)


def test_without_a_template_the_contents_are_the_prompt() -> None:
    plain = miniature.build()
    plain.chat_template = None
    assert render(plain, user("1+2=?"))[0] == "1+2=?"


def adds_bos() -> Any:
    """A tokenizer that begins every text with <s>, and the first word with a blank of its own, as Llama's does."""
    vocabulary = {"<s>": 0, "</s>": 1, "\u2581hi": 2, "hi": 3, "?": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("template", ["own", "none", "question_only", "file"])
def test_a_prompt_begins_with_the_bos_token_that_the_tokenizer_adds(
    template: str, tmp_path: Path
) -> None:
    file = tmp_path / "begins.txt"
    file.write_text("<s>{question}")
    data = DataConfig(template=str(file) if template == "file" else template)
    text, tokens = render(adds_bos(), user("hi"), data)
    assert text == "<s>hi"
    assert tokens.tolist() == adds_bos().encode("hi") == [0, 2]
    assert tokens.dtype == np.int32
    # What follows a prompt has no beginning of its own.
    assert prompts.encode_responses(adds_bos(), ["hi"])[0].tolist() == [2, 1]


def test_no_bos_token_is_added_to_a_chat_templates_prompt() -> None:
    chat = adds_bos()
    chat.chat_template = "{{ messages[0]['content'] }}"
    assert prompts.render_text(chat, user("hi"), DataConfig()) == "hi"
    assert render(chat, user("hi"))[1].tolist() == [2]
    assert prompts.render_text(chat, user("hi"), DataConfig(template="none")) == "<s>hi"


def test_a_bos_token_that_the_tokenizer_does_not_add_stays_away() -> None:
    named = miniature.build()
    named.bos_token = named.eos_token
    text, tokens = render(named, user("1+2=?"), DataConfig(template="none"))
    assert text == "1+2=?"
    assert tokens.tolist() == named.encode("1+2=?")


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "no messages"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": 3}], "content"),
    ],
)
def test_what_is_no_prompt_is_refused(tokenizer: Any, messages: Any, word: str) -> None:
    with pytest.raises(DataError, match=word):
        prompts.render_text(tokenizer, messages, DataConfig())


@pytest.mark.parametrize("text", ["12+3=15", "12+3=15<eos>"])
def test_a_response_ends_with_the_end_token_once(tokenizer: Any, text: str) -> None:
    tokens = prompts.encode_responses(tokenizer, [text])[0]
    assert tokens[-1] == miniature.EOS_ID
    assert (tokens == miniature.EOS_ID).sum() == 1


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    endless = miniature.build()
    endless.eos_token = None
    with pytest.raises(DataError, match="eos_token"):
        prompts.encode_responses(endless, ["1"])
    with pytest.raises(DataError, match="end-of-sequence"):
        prompts.end_tokens(endless)


def test_end_tokens_are_those_of_tokenizer_and_generation_config(tokenizer: Any) -> None:
    class Model:
        class generation_config:
            eos_token_id = (7, 9)

    assert prompts.end_tokens(tokenizer) == {miniature.EOS_ID}
    assert prompts.end_tokens(tokenizer, Model) == {miniature.EOS_ID, 7, 9}


def test_decoding_leaves_special_tokens_out_and_keeps_spaces(tokenizer: Any) -> None:
    text = "<think> 1 + 2 </think> <answer> \\boxed{3} </answer>"
    tokens = prompts.encode_responses(tokenizer, [text])[0]
    assert prompts.decode(tokenizer, [tokens, tokens[:3]]) == [
        text,
        tokenizer.decode(tokens[:3].tolist()),
    ]


def test_decoding_is_the_tokenizers_own(tokenizer: Any) -> None:
    class Slow:
        """The same without a fast backend."""

        decode = staticmethod(tokenizer.decode)

    rows = [np.array([5, 17, 3, 23, 1], dtype=np.int32), np.array([], dtype=np.int32)]
    assert prompts.decode(tokenizer, rows) == prompts.decode(Slow(), rows)


def test_the_digest_survives_saving_and_tells_tokenizers_apart(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen2Config

    miniature.save(tmp_path)
    Qwen2Config(vocab_size=32, num_hidden_layers=1).save_pretrained(tmp_path)
    built = miniature.build()
    digest = prompts.tokenizer_digest(built)
    assert digest == prompts.tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path))
    built.add_tokens(["<more>"])
    assert prompts.tokenizer_digest(built) != digest


def test_a_templates_globals_are_a_dict_after_the_first_prompt(tokenizer: Any) -> None:
    """Out of transformers' ChainMap Jinja copies them for each prompt, which took longer than to render it."""
    messages = [[{"role": "user", "content": "1 + 1?"}]] * 2
    plain = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompts.render_texts(tokenizer, messages, DataConfig()) == plain
    compiled = chat_template_utils._compile_jinja_template(tokenizer.get_chat_template())
    assert type(compiled.globals) is dict
    assert {"raise_exception", "strftime_now", "range"} <= set(compiled.globals)
