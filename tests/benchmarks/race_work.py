"""The work of :mod:`race`, the same for every side: a model, prompts and rewards. Imports neither Tandem nor TRL.

**sums** (how fast?): a random Qwen2 of 3.2M parameters with a byte-level tokenizer of 1,024 ids answers sums of two
numbers in up to 64 tokens. Nothing but its speed is of interest; the reward gives it a gradient from the first step.

**chains** (how soon?): the miniature's easy setting, whose prompts, base model and gold answers Tandem ships.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GROUPS, SAMPLES = 8, 8
"""Prompts of a step and samples of each."""
SUMS_TOKENS, CHAINS_TOKENS = 64, 34
"""Most tokens of a response."""
SUMS_RATE, CHAINS_RATE = 1e-3, 6e-4
"""Learning rates; that of the chains where none is searched for."""
LARGEST = 20
_NUMBER = re.compile(r"-?\d+")
_CHAIN = re.compile(r"[0-9+=-]+</think> <answer> \\boxed\{([0-9]{1,2})\} </answer>")


def sums(count: int, seed: int) -> list[dict[str, str]]:
    """Questions with their answers."""
    drawn = random.Random(seed)
    rows = []
    for _ in range(count):
        one, other = drawn.randint(0, LARGEST), drawn.randint(0, LARGEST)
        plus = drawn.random() < 0.5
        question = f"Question: what is {one} {'+' if plus else '-'} {other}? Answer:"
        rows.append({"question": question, "answer": str(one + other if plus else one - other)})
    return rows


def digits(completions: Sequence[str], gold: Sequence[str], **_: Any) -> list[float]:
    """Reward of sums: 1 if the first number is the answer, else half the share of digits."""
    rewards = []
    for text, answer in zip(completions, gold, strict=True):
        first = _NUMBER.search(text)
        right = first is not None and first.group() == answer
        share = 0.5 * sum(map(str.isdigit, text)) / max(1, len(text))
        rewards.append(1.0 if right else share)
    return rewards


def chain(completions: Sequence[str], gold: Sequence[str], **_: Any) -> list[float]:
    """Reward of chains: 1 if the form is exact and the boxed number is the answer, else 0."""
    found = map(_CHAIN.fullmatch, completions)
    return [
        float(match is not None and int(match.group(1)) == int(answer))
        for match, answer in zip(found, gold, strict=True)
    ]


def accuracy(model: Any, tokenizer: Any, problems: Sequence[dict[str, str]]) -> float:
    """Share of chains that a model of transformers answers rightly, each with its most likely tokens."""
    import torch

    tokens = tokenizer(
        [row["question"] for row in problems],
        return_tensors="pt",
        padding=True,
        padding_side="left",
        add_special_tokens=False,
        return_token_type_ids=False,
    )
    with torch.no_grad():
        out = model.generate(**tokens, max_new_tokens=CHAINS_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(out[:, tokens["input_ids"].shape[1] :])
    cut = [text.split(tokenizer.eos_token)[0].removesuffix(tokenizer.pad_token) for text in texts]
    right = chain(cut, [row["answer"] for row in problems])
    return sum(right) / len(right)


def write_model(folder: Path) -> None:
    """Writes the random model of sums and its tokenizer as a Hugging Face folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    # One token per digit, as in Qwen2.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    drawn = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(drawn.choices(letters, k=drawn.randint(2, 6))) for _ in range(3000)]
    texts = [
        f"{row['question']} {row['answer']}. {' '.join(drawn.choices(words, k=6))}"
        for row in sums(20_000, 1)
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast),
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
