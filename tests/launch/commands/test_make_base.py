"""``tandem make-base``: a longer context and think tokens, and nothing else changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.launch.cli import main

WORDS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *"abcdefghij 0123456789+-=\n<>/?."]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def plain(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small Qwen2 as Qwen2.5-Math is: padded rows, a short context, sharded weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(WORDS) + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=request.param,
    )
    folder = tmp_path / "plain"
    Qwen2ForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    (folder / "LICENSE").write_text("terms")
    return folder


def loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def test_the_new_base_has_a_longer_context_and_think_tokens(plain: Path, tmp_path: Path) -> None:
    assert main(["make-base", str(plain), str(tmp_path / "base")]) == 0
    model, tokenizer = loaded(tmp_path / "base")
    assert model.config.max_position_embeddings == 16_384
    assert model.config.rope_parameters["rope_theta"] == 40_000.0
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "</think>")]
    assert ids == [len(WORDS), len(WORDS) + 1]
    assert tokenizer.encode("<think>a</think>", add_special_tokens=False) == [
        ids[0],
        WORDS.index("a"),
        ids[1],
    ]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think></think>"
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a+b"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|im_start|>user\na+b<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert model.config.vocab_size == len(WORDS) + 2
    assert (tmp_path / "base" / "LICENSE").read_text() == "terms"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base", "plain"]


def test_only_the_new_tokens_rows_differ(plain: Path, tmp_path: Path) -> None:
    assert main(["make-base", str(plain), str(tmp_path / "base"), "--rope-theta", "10000"]) == 0
    before, tokenizer = loaded(plain)
    after, _ = loaded(tmp_path / "base")
    tokens = torch.tensor([tokenizer.encode("a+b=c", add_special_tokens=False)])
    with torch.no_grad():
        old, new = before(tokens).logits, after(tokens).logits
    torch.testing.assert_close(new[..., : len(WORDS)], old[..., : len(WORDS)])
    rows = after.get_input_embeddings().weight
    mean = before.get_input_embeddings().weight[: len(WORDS)].mean(0)
    torch.testing.assert_close(rows[len(WORDS) :], mean.expand(2, -1))


def test_a_template_of_ones_own(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}<think>")
    words = ["make-base", str(plain), str(tmp_path / "base"), "--chat-template"]
    assert main([*words, str(tmp_path / "t.jinja")]) == 0
    _, tokenizer = loaded(tmp_path / "base")
    message = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "a<think>"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none", "base"], "has no config.json"),
        (["plain", "plain"], "already exists"),
        (["plain", "base", "--context", "0"], "must be greater than 0"),
        (["plain", "base", "--chat-template", "none.jinja"], "none.jinja can't be read"),
    ],
)
def test_refusals_leave_nothing(
    words: list[str],
    said: str,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["make-base", *words]) != 0
    assert said in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["plain"]


def test_a_tokenizer_without_chat_markup_needs_a_template(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = plain / "tokenizer.json"
    content = json.loads(file.read_text().replace("<|im_start|>", "<|start|>"))
    file.write_text(json.dumps(content))
    config = plain / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|im_start|>", "<|start|>"))
    assert main(["make-base", str(plain), str(tmp_path / "base")]) != 0
    assert "--chat-template FILE" in capsys.readouterr().err
