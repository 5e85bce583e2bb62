"""The tokenizer: 32 ids, exact round trips, and the same after any way of loading it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tandem.launch.miniature import tokenizer
from tandem.launch.miniature.base_model import model_config
from tandem.launch.miniature.problems import draw


@pytest.fixture(scope="module", params=["built", "loaded"])
def tok(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """As built, and as AutoTokenizer reads it back from a folder of a Qwen2 model."""
    if request.param == "built":
        return tokenizer.build()
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(folder)
    model_config().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_it_has_exactly_as_many_ids_as_the_model_has_embeddings(tok: PreTrainedTokenizerFast):
    assert len(tok) == tokenizer.SIZE == model_config().vocab_size
    assert (tok.pad_token_id, tok.eos_token_id) == (tokenizer.PAD_ID, tokenizer.EOS_ID)


@pytest.mark.parametrize("k", range(1, 11))
def test_problems_round_trip_exactly_with_fixed_lengths(tok: PreTrainedTokenizerFast, k: int):
    rng = Random(k)
    for problem in (draw(rng, k) for _ in range(20)):
        prompt = tok.encode(problem.prompt)
        response = tok.encode(problem.response + tokenizer.EOS)
        assert (len(prompt), len(response)) == (2 * k + 5, 5 * k + 13)
        assert tok.decode(prompt) == problem.prompt
        assert tok.decode(response) == problem.response + tokenizer.EOS
        assert tok.decode(response, skip_special_tokens=True) == problem.response


def test_every_id_round_trips(tok: PreTrainedTokenizerFast):
    ids = list(range(tokenizer.SIZE))
    assert tok.encode(tok.decode(ids)) == ids


def test_prompt_and_response_join_without_a_change_of_tokens(tok: PreTrainedTokenizerFast):
    problem = draw(Random(0), 8)
    joined = tok.encode(problem.prompt + problem.response)
    assert joined == tok.encode(problem.prompt) + tok.encode(problem.response)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_the_chat_template_renders_only_the_content(
    tok: PreTrainedTokenizerFast, add_generation_prompt: bool
):
    problem = draw(Random(0), 8)
    messages = [{"role": "user", "content": problem.prompt}]
    text = tok.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert text == problem.prompt
    encoded = tok.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, return_dict=True
    )
    assert encoded["input_ids"] == tok.encode(problem.prompt)


def test_the_chat_template_joins_user_messages_and_leaves_the_others_out(
    tok: PreTrainedTokenizerFast,
):
    messages = [
        {"role": "system", "content": "add up"},
        {"role": "user", "content": "49-6"},
        {"role": "user", "content": "+8=?<think>"},
    ]
    assert tok.apply_chat_template(messages, tokenize=False) == "49-6+8=?<think>"
