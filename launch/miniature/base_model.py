"""Makes the miniature's base model: a latent skill under a bad habit, on one CPU thread.

1. **Skill**: cross entropy on full chains, half of the batches of k = 1..3, half of k = 4..9.
   The model learns to add at every position.
2. **Habit**: most batches hold k = 4..10 chains that stop early, soon after step 3, and answer
   with the partial total. The model learns to stop, and keeps the skill for k <= 3.

The result is well-formed at every k and right for k <= 3. At k=8 it never writes a full chain,
greedily or sampled; about two responses in a thousand are right, by a slip that hits the answer. So
rewards alone have nothing to reinforce there, while a few expert traces unlock a skill that is
already in the weights. What learns on it shows elicitation, not new arithmetic.

This file imports torch and transformers; import it only where they are needed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from ...common.errors import TandemError
from .problems import Problem, distinct, draw, is_right, is_well_formed
from .tokenizer import EOS_ID, PAD_ID, SIZE, build
from .tokenizer import save as save_tokenizer

BATCH = 64
CLIP_NORM = 1.0
STOP_AFTER = 3
"""First step after which a habit chain may stop."""
STOP_HAZARD = 0.92
"""Chance to stop after that step, and after each later one."""
HABIT_SHARE = 0.7
"""Share of the habit phase's batches that teach stopping; the rest keep k <= 3 clean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase of training: a fixed number of updates, so that a seed gives one model."""

    updates: int
    """Optimizer steps, each on one batch."""
    muon_lr: float
    """Peak learning rate of the weight matrices (Muon)."""
    adamw_lr: float
    """Peak learning rate of embeddings, norms and biases (AdamW)."""
    warmup: int
    """Updates over which the rates rise linearly."""
    falls: bool
    """Whether the rates fall linearly to 0 over the second half; else they stay."""

    def rate(self, update: int) -> float:
        """Factor on both learning rates at ``update`` (0-based)."""
        rise = (update + 1) / max(1, min(self.warmup, self.updates // 2))
        fall = 2 * (self.updates - update) / self.updates if self.falls else 1.0
        return min(1.0, rise, fall)


SKILL = Phase(updates=2300, muon_lr=0.02, adamw_lr=2e-3, warmup=50, falls=True)
# The habit's rates don't fall: with falling rates and a milder hazard the habit is so shallow that
# imitating four traces undoes most of it, and rewards have less left to show.
HABIT = Phase(updates=700, muon_lr=0.008, adamw_lr=8e-4, warmup=20, falls=False)


def model_config() -> Qwen2Config:
    """The architecture: Qwen2 with 113,472 parameters, 460 KB in float32."""
    return Qwen2Config(
        vocab_size=SIZE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=128,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        dtype="float32",
    )


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are orthogonalised.

    After Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024):
    Nesterov momentum, then five Newton-Schulz steps with the coefficients given there, scaled by
    ``sqrt(max(1, rows / columns))``. For 2-d parameters only. AdamW alone does not reach the
    skill in the same number of updates.
    """

    def __init__(self, params: list[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(state["momentum"], group["momentum"])
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(orthogonalised(update), alpha=-group["lr"] * scale)


def orthogonalised(matrix: Tensor) -> Tensor:
    """[rows, columns] The matrix with all singular values moved to about 1 (Newton-Schulz)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


Texts = list[tuple[str, ...]]
"""Rows to imitate: what is given and what the model writes take turns, a prompt first; without end tokens."""


def skill_batch(rng: Random, size: int = BATCH) -> Texts:
    """Full chains of one k: 1..3 in half of the batches, 4..9 in the others."""
    k = rng.randint(1, 3) if rng.random() < 0.5 else rng.randint(4, 9)
    return [(p.prompt, p.response) for p in (draw(rng, k) for _ in range(size))]


def habit_batch(rng: Random, size: int = BATCH) -> Texts:
    """Chains of one k in 4..10 that mostly stop early, or clean ones of one k in 1..3."""
    if rng.random() >= HABIT_SHARE:
        k = rng.randint(1, 3)
        return [(p.prompt, p.response) for p in (draw(rng, k) for _ in range(size))]
    k = rng.randint(4, 10)
    chains: Texts = []
    for problem in (draw(rng, k) for _ in range(size)):
        steps = STOP_AFTER
        while steps < k and rng.random() >= STOP_HAZARD:
            steps += 1
        chains.append((problem.prompt, problem.response_after(steps)))
    return chains


def train(
    model: Qwen2ForCausalLM,
    phase: Phase,
    batches: Callable[[Random], Texts],
    *,
    seed: int,
    log: Callable[[str], None],
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> float:
    """Trains the model in place on ``phase.updates`` batches; returns the last batch's loss.

    The loss is the mean cross entropy of what the model writes and of its end tokens, in nats. The
    tokenizer is the miniature's, unless another one is given.
    """
    rng = Random(f"miniature base {seed} {batches.__name__}")
    tokenizer = tokenizer or build()
    body = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        Muon(body, lr=phase.muon_lr),
        torch.optim.AdamW(rest, lr=phase.adamw_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, phase.rate) for o in optimizers]
    model.train()
    # The loss depends on the batch's k, so only its mean over many batches shows progress.
    recent: deque[float] = deque(maxlen=100)
    for update in range(phase.updates):
        chains = batches(rng)
        ids, labels = _rows(chains, tokenizer)
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        recent.append(loss.item())
        if (update + 1) % 100 == 0:
            mean = sum(recent) / len(recent)
            log(f"{batches.__name__} {update + 1}/{phase.updates}: mean loss {mean:.4f}")
    model.eval()
    return recent[-1]


def _rows(texts: Texts, tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """``[B, L]`` ids and labels, padded on the right; all but the model's own turns is labelled -100."""
    end = tokenizer.eos_token
    rows = []
    for pieces in texts:
        ended = [piece + end if n % 2 else piece for n, piece in enumerate(pieces)]
        rows.append(tokenizer(ended)["input_ids"])
    longest = max(sum(map(len, row)) for row in rows)
    ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels = torch.full((len(rows), longest), -100)
    for number, row in enumerate(rows):
        at = 0
        for n, piece in enumerate(row):
            ids[number, at : at + len(piece)] = torch.tensor(piece)
            if n % 2:
                labels[number, at : at + len(piece)] = torch.tensor(piece)
            at += len(piece)
    return ids, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How well a model does on some problems of one k."""

    right: float
    """Share of responses with the exact form and the right answer."""
    well_formed: float
    """Share of responses with the exact form."""


@torch.no_grad()
def written(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    *,
    sampled: bool,
    new_tokens: int,
) -> list[list[int]]:
    """What the model writes after each prompt, greedily or at temperature 1, up to so many tokens."""
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    output = model.generate(
        batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=sampled,
        temperature=1.0 if sampled else None,
        top_k=0 if sampled else None,
        top_p=1.0 if sampled else None,
        max_new_tokens=new_tokens,
    )
    rows: list[list[int]] = output[:, batch["input_ids"].shape[1] :].tolist()
    return rows


def accuracy(model: Qwen2ForCausalLM, problems: list[Problem], *, sampled: bool) -> Accuracy:
    """Answers each problem once, greedily or at temperature 1. All must have the same k.

    Seeds torch's global generator when ``sampled``.
    """
    tokenizer = build()
    if sampled:
        torch.manual_seed(0)
    # Two steps more than a full chain, so that there is room for a wrong answer, and no more.
    room = 5 * (problems[0].k + 2) + 13
    prompts = [p.prompt for p in problems]
    responses = []
    for row in written(model, tokenizer, prompts, sampled=sampled, new_tokens=room):
        # A response without an end token was cut off and is no answer.
        responses.append(tokenizer.decode(row[: row.index(EOS_ID)]) if EOS_ID in row else "")
    count = len(problems)
    return Accuracy(
        right=sum(map(is_right, problems, responses)) / count,
        well_formed=sum(map(is_well_formed, responses)) / count,
    )


def make(
    out_dir: Path,
    *,
    seed: int,
    log: Callable[[str], None] = print,
    skill: Phase = SKILL,
    habit: Phase = HABIT,
    problems_per_k: int = 200,
) -> None:
    """Trains a base model and writes it to ``out_dir`` as a Hugging Face folder (under 1 MB).

    One CPU thread; about two and a half minutes for the default phases. The same seed gives the
    same weights on the same machine and torch. ``log`` gets lines of progress, and at the end the
    accuracy by k on ``problems_per_k`` problems each (0: none). Raises ``TandemError`` when
    ``out_dir`` holds anything already; it appears whole or not at all.
    """
    check_empty(out_dir)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(model_config())
        train(model, skill, skill_batch, seed=seed, log=log)
        if problems_per_k:
            log("after skill:")
            report(model, problems_per_k, log)
        train(model, habit, habit_batch, seed=seed, log=log)
        if problems_per_k:
            log("after habit (the base):")
            report(model, problems_per_k, log)
    write(model, out_dir, save_tokenizer)
    log(f"wrote {out_dir}")


def check_empty(out_dir: Path) -> None:
    """Raises ``TandemError`` when the folder holds anything."""
    if out_dir.exists() and any(out_dir.iterdir()):
        raise TandemError(f"{out_dir} is not empty: remove it, or name another folder")


def report(
    model: Qwen2ForCausalLM,
    problems_per_k: int,
    log: Callable[[str], None],
    ks: Iterable[int] = range(1, 11),
) -> None:
    """Logs a table of accuracy and form, one line per k."""
    log(" k   greedy    T=1   well-formed at T=1")
    for k in ks:
        problems = distinct(Random(f"miniature report {k}"), k, problems_per_k)
        greedy = accuracy(model, problems, sampled=False)
        sampled = accuracy(model, problems, sampled=True)
        log(f"{k:2d}  {greedy.right:6.1%}  {sampled.right:6.1%}  {sampled.well_formed:6.1%}")


def write(model: Qwen2ForCausalLM, out_dir: Path, save_tokenizer: Callable[[Path], None]) -> None:
    """Writes weights, configuration and tokenizer into a temporary folder, then renames it."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        model.save_pretrained(staging)
        GenerationConfig(
            do_sample=True,
            temperature=1.0,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
        ).save_pretrained(staging)
        save_tokenizer(staging)
        config = json.loads((staging / "config.json").read_text())
        # Readers before transformers 5 look for the older names.
        config |= {"rope_theta": 10_000.0, "torch_dtype": "float32"}
        (staging / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for path in staging.iterdir():
            path.chmod(0o644)
        staging.chmod(0o755)
        os.replace(staging, out_dir)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread: at this size two are slower, and sums keep one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
