"""Makes the base model of the miniature with a tool: it can call and read, and hardly ever does.

1. **Skill**: of each batch of 64 conversations 48 have a call, whose result is a number *drawn at random*:
   the model learns the form of a call, to copy the operands into it, and to answer what the result says.
   The others are direct answers with the right products, which it is too small to work out.
2. **Habit**: of each batch only 4 have a call, the others answer directly.

So sampled at temperature 1 it answers directly in 94 of 100 episodes, and is then right about once in a
thousand; greedily it always answers directly. The calls it does make are well-formed, and it reads their
results. What learns on it with rewards for the final answer alone shows elicitation of a latent skill:
neither multiplication nor the use of tools from nothing.

This file imports torch and transformers; import it only where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ..base_model import BATCH, Phase, Texts, check_empty, one_thread, train, write, written
from .problems import Product, boxed, distinct, draw, result_message
from .tokenizer import CONTEXT, EOS_ID, PAD_ID, SIZE, build, save

SKILL_CALLS = 48
"""Conversations with a call in a batch of the skill phase."""
HABIT_CALLS = 4
"""Conversations with a call in a batch of the habit phase."""
NOT_OFFERED = 0.15
"""Share of the direct answers whose prompt offers no tool, so that the model has seen such prompts."""

SKILL = Phase(updates=800, muon_lr=0.02, adamw_lr=2e-3, warmup=50, falls=True)
HABIT = Phase(updates=300, muon_lr=0.004, adamw_lr=4e-4, warmup=20, falls=True)


def model_config() -> Qwen2Config:
    """The architecture: Qwen2 with 129,216 parameters, 517 KB in float32."""
    return Qwen2Config(
        vocab_size=SIZE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        dtype="float32",
    )


def called(problem: Product, result: str) -> tuple[str, ...]:
    """A conversation in which the calculator is called and its result is answered."""
    return problem.prompt(), problem.call, result_message(result), boxed(result)


def direct(problem: Product, *, offered: bool) -> tuple[str, ...]:
    """A conversation in which the question is answered at once, and rightly."""
    return problem.prompt(offered=offered), boxed(problem.answer)


def any_result(rng: Random) -> str:
    """A number that has nothing to do with the question: 1 to 7 digits, mostly the 5 or 6 of a product."""
    digits = rng.choice((5, 6)) if rng.random() < 0.8 else rng.randint(1, 7)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def skill_batch(rng: Random) -> Texts:
    """Mostly conversations with a call."""
    return _batch(rng, SKILL_CALLS)


def habit_batch(rng: Random) -> Texts:
    """Mostly direct answers."""
    return _batch(rng, HABIT_CALLS)


def _batch(rng: Random, calls: int) -> Texts:
    made: Texts = [called(draw(rng), any_result(rng)) for _ in range(calls)]
    return made + [
        direct(draw(rng), offered=rng.random() >= NOT_OFFERED) for _ in range(BATCH - calls)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What a model does on some problems; shares of them."""

    direct: float
    """Problems answered directly, in good form."""
    calls: float
    """Problems whose first turn is a call, rightly formed and of the right operands."""
    right: float
    """Problems whose final answer is right, with the calculator's results."""


def turn(model: Qwen2ForCausalLM, prompts: list[str], *, sampled: bool) -> list[str]:
    """What the model writes after each prompt, without the end token; cut off if it writes none."""
    tokenizer = build()
    rows = written(model, tokenizer, prompts, sampled=sampled, new_tokens=40)
    return [tokenizer.decode(row[: row.index(EOS_ID)] if EOS_ID in row else row) for row in rows]


def behaviour(
    model: Qwen2ForCausalLM, problems: list[Product], *, sampled: bool, offered: bool = True
) -> Behaviour:
    """Plays each problem once, greedily or at temperature 1.

    Seeds torch's global generator when ``sampled``.
    """
    if sampled:
        torch.manual_seed(0)
    first = turn(model, [p.prompt(offered=offered) for p in problems], sampled=sampled)
    callers = [n for n, p in enumerate(problems) if offered and first[n] == p.call]
    finals = dict(enumerate(first))
    if callers:
        histories = [
            problems[n].prompt() + first[n] + "<|im_end|>" + result_message(problems[n].answer)
            for n in callers
        ]
        finals |= zip(callers, turn(model, histories, sampled=sampled), strict=True)
    count = len(problems)
    return Behaviour(
        direct=sum(_is_answer(text) for text in first) / count,
        calls=len(callers) / count,
        right=sum(finals[n] == boxed(p.answer) for n, p in enumerate(problems)) / count,
    )


def reads(model: Qwen2ForCausalLM, problems: list[Product], rng: Random, *, sampled: bool) -> float:
    """Share of given calls whose result, a number drawn at random, is what the model then answers."""
    results = [any_result(rng) for _ in problems]
    histories = [
        p.prompt() + p.call + "<|im_end|>" + result_message(result)
        for p, result in zip(problems, results, strict=True)
    ]
    answers = turn(model, histories, sampled=sampled)
    right = [a == boxed(result) for a, result in zip(answers, results, strict=True)]
    return sum(right) / len(problems)


def _is_answer(text: str) -> bool:
    return text.startswith("\\boxed{") and text.endswith("}") and text[7:-1].isdecimal()


def make(
    out_dir: Path,
    *,
    seed: int,
    log: Callable[[str], None] = print,
    skill: Phase = SKILL,
    habit: Phase = HABIT,
    problems: int = 400,
) -> None:
    """Trains the base model and writes it to ``out_dir`` as a Hugging Face folder (under 1 MB).

    One CPU thread, some minutes for the default phases. The same seed gives the same weights on the same
    machine and torch. ``log`` gets lines of progress, and after each phase what the model does with
    ``problems`` problems (0: nothing). Raises ``TandemError`` when ``out_dir`` holds anything already; it
    appears whole or not at all.
    """
    check_empty(out_dir)
    tokenizer = build()
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(model_config())
        for name, phase, batches in (
            ("skill", skill, skill_batch),
            ("habit", habit, habit_batch),
        ):
            train(model, phase, batches, seed=seed, log=log, tokenizer=tokenizer)
            if problems:
                log(f"after {name}:")
                report(model, problems, log)
    write(model, out_dir, save)
    log(f"wrote {out_dir}")


def report(model: Qwen2ForCausalLM, problems: int, log: Callable[[str], None]) -> None:
    """Logs what the model does, greedily and sampled, with and without the tool, and how it reads results."""
    drawn = distinct(Random("miniature tools report"), problems)
    for offered in (True, False):
        for sampled in (False, True):
            found = behaviour(model, drawn, sampled=sampled, offered=offered)
            log(
                f"{'tool' if offered else 'no tool'}, {'T=1' if sampled else 'greedy'}: "
                f"direct {found.direct:.1%}, calls {found.calls:.1%}, right {found.right:.1%}"
            )
    share = reads(model, drawn, Random("miniature tools results"), sampled=True)
    log(f"results read rightly at T=1: {share:.1%}")
