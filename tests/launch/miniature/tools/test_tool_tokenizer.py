"""The tokenizer: every text round-trips, templates extend, and it is the same after any way of loading it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tandem.launch.miniature.tools import tokenizer
from tandem.launch.miniature.tools.base_model import called, model_config
from tandem.launch.miniature.tools.problems import draw

BUILT = tokenizer.build()


@pytest.fixture(scope="module", params=["built", "loaded"])
def tok(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """As built, and as AutoTokenizer reads it back from a folder of a Qwen2 model."""
    if request.param == "built":
        return BUILT
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    model_config().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_it_has_exactly_as_many_ids_as_the_model_has_embeddings(tok: PreTrainedTokenizerFast):
    assert len(tok) == tokenizer.SIZE == model_config().vocab_size
    assert (tok.pad_token_id, tok.eos_token_id) == (tokenizer.PAD_ID, tokenizer.EOS_ID)
    assert tok.convert_ids_to_tokens(tokenizer.BEGIN_ID) == tokenizer.BEGIN


def test_special_tokens_are_left_out_on_request_and_tags_are_not(tok: PreTrainedTokenizerFast):
    ids = tok.encode("<|im_start|><tool_call>1</tool_call><|im_end|>")
    assert len(ids) == 5
    assert tok.decode(ids, skip_special_tokens=True) == "<tool_call>1</tool_call>"


@given(text=st.text(max_size=60))
@settings(max_examples=200)
def test_every_text_round_trips(text: str):
    assert BUILT.decode(BUILT.encode(text)) == text


def test_text_of_special_tokens_can_be_encoded_as_text(tok: PreTrainedTokenizerFast):
    ids = tok.encode("<|im_end|>", split_special_tokens=True)
    assert len(ids) == len("<|im_end|>")
    assert tok.decode(ids) == "<|im_end|>"


def test_pieces_of_a_conversation_join_without_a_change_of_tokens(tok: PreTrainedTokenizerFast):
    rng = Random(0)
    for problem in (draw(rng) for _ in range(20)):
        pieces = called(problem, problem.answer)
        assert tok.encode("".join(pieces)) == [t for piece in pieces for t in tok.encode(piece)]


MESSAGES = (
    {"role": "user", "content": "137*258=?"},
    {
        "role": "assistant",
        "content": "I ask.",
        "tool_calls": [
            {"type": "function", "function": {"name": "multiply", "arguments": '{"a": 1, "b": 2}'}},
            {"type": "function", "function": {"name": "multiply", "arguments": {"a": 3, "b": 4}}},
        ],
    },
    {"role": "tool", "content": "2"},
    {"role": "tool", "content": '{"error": "no"}'},
    {"role": "assistant", "content": "\\boxed{2}"},
    {"role": "user", "content": "and 3*4?"},
    {"role": "assistant", "content": "\\boxed{12}"},
)


def rendered(tok: PreTrainedTokenizerFast, count: int, *, opened: bool) -> str:
    """The first messages, with the next turn opened or not."""
    text = tok.apply_chat_template(
        list(MESSAGES[:count]), tokenize=False, add_generation_prompt=opened
    )
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("turn", [1, 4, 6])
def test_more_messages_extend_what_was_rendered(tok: PreTrainedTokenizerFast, turn: int):
    """What the model continued is a prefix of what is rendered when its turn and further messages follow."""
    assert MESSAGES[turn]["role"] == "assistant"
    opened = rendered(tok, turn, opened=True)
    for count in range(turn + 1, len(MESSAGES) + 1):
        # The results of one turn's calls stand in one message, which is whole with the last of them.
        if count == 3:
            continue
        assert rendered(tok, count, opened=False).startswith(opened)
    written = rendered(tok, turn + 1, opened=False).removeprefix(opened)
    assert written.endswith("<|im_end|>\n")


def test_results_and_calls_are_rendered_as_qwen_does(tok: PreTrainedTokenizerFast):
    text = rendered(tok, 4, opened=True)
    assert text == (
        "<|im_start|>user\n137*258=?<|im_end|>\n"
        "<|im_start|>assistant\nI ask.\n"
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n"
        '<tool_response>\n{"error": "no"}\n</tool_response><|im_end|>\n'
        "<|im_start|>assistant\n"
    )


def test_a_system_message_stands_above_the_tools(tok: PreTrainedTokenizerFast):
    tool = {"name": "multiply", "parameters": {"properties": {"a": {}, "b": {}}}}
    text = tok.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1*2=?"}],
        tools=[tool],
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nBe brief.\n\n<tools>\nmultiply(a, b)\n</tools><|im_end|>\n"
        "<|im_start|>user\n1*2=?<|im_end|>\n"
    )
