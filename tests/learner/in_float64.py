"""Whole steps of GRPO, SFT and PPO in float64, without a line of the learner: a second opinion on its updates."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from tandem.common.records import FinishReason, Sample, Source, VersionSpan
from tandem.common.seeds import keyed_generator
from tandem.learner.rows.groups import MixedGroup


class Plain:
    """A model in float64 under AdamW, with its gradient clipped, written out.

    Args:
        model: copied.
        clip: greatest norm of the gradient; 0 = none.
    """

    def __init__(
        self, model: Any, *, lr: float, eps: float, betas: tuple[float, float], clip: float = 0.0
    ) -> None:
        self.model = copy.deepcopy(model).double().eval()
        width = model.config.hidden_size
        self.head = torch.zeros(width + 1, dtype=torch.float64, requires_grad=True)
        self.lr, self.eps, self.betas, self.clip = lr, eps, betas, clip
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.steps = 0

    def parameters(self, *, critic: bool) -> dict[str, Tensor]:
        """What is trained, by name: the model, or its body and the value head."""
        named = dict(self.model.named_parameters())
        return {**named, "head": self.head} if critic else named

    def step(self, loss: Tensor, *, critic: bool = False) -> float:
        """One update; returns the gradient's norm before it is clipped."""
        named = self.parameters(critic=critic)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        found = {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(named.items(), gradients, strict=True)
        }
        norm = math.sqrt(sum(float((g * g).sum()) for g in found.values()))
        factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        self.steps += 1
        low, high = self.betas
        with torch.no_grad():
            for name, parameter in named.items():
                gradient = factor * found[name]
                zero = torch.zeros_like(parameter)
                first, second = self.moments.get(name, (zero, zero))
                first = low * first + (1 - low) * gradient
                second = high * second + (1 - high) * gradient**2
                self.moments[name] = first, second
                root = (second / (1 - high**self.steps)).sqrt() + self.eps
                parameter -= self.lr * first / (1 - low**self.steps) / root
        return norm

    def hidden(self, mixed: MixedGroup, tokens: np.ndarray) -> Tensor:
        """``[T, H]`` hidden states that predict each token of a response."""
        prompt = mixed.group.prompt_tokens
        ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
        states: Tensor = self.model.model(input_ids=ids).last_hidden_state[0]
        return states[len(prompt) - 1 : -1]

    def logprobs(self, mixed: MixedGroup, tokens: np.ndarray) -> Tensor:
        """``[T]`` log-probs of a response."""
        every = torch.log_softmax(self.hidden(mixed, tokens) @ self.model.lm_head.weight.T, -1)
        places = torch.arange(len(tokens))
        return every[places, torch.from_numpy(tokens.astype(np.int64))]

    def values(self, mixed: MixedGroup, tokens: np.ndarray) -> Tensor:
        """``[T]`` values of the states before each token."""
        return self.hidden(mixed, tokens) @ self.head[:-1] + self.head[-1]


def sampled_by(model: Any, groups: Sequence[MixedGroup], noise: float = 0.2) -> list[MixedGroup]:
    """The groups with log-probs that are nearly the model's, a tool's text in one sample of group 1 and a
    last sample that was cut in group 2."""
    rng = np.random.default_rng(7)
    plain = Plain(model, lr=0.0, eps=1.0, betas=(0.0, 0.0))
    found = []
    for number, mixed in enumerate(groups):
        samples = []
        for place, sample in enumerate(mixed.group.samples):
            with torch.no_grad():
                known = plain.logprobs(mixed, sample.tokens).numpy()
            own = np.ones(len(known), bool)
            if (number, place) == (1, 0):
                own[1:3] = False
            known = known + rng.uniform(-noise, noise, len(known))
            cut = (number, place) == (2, len(mixed.group.samples) - 1)
            samples.append(
                replace(
                    sample,
                    source=np.where(own, Source.OWN, Source.ENVIRONMENT).astype(np.uint8),
                    logprobs=np.where(own, known, np.nan).astype(np.float32),
                    spans=tuple(
                        VersionSpan(term=1, step=0, start=token, end=token + 1)
                        for token in np.flatnonzero(own).tolist()
                    ),
                    finish_reason=FinishReason.LENGTH if cut else sample.finish_reason,
                )
            )
        group = replace(mixed.group, samples=tuple(samples))
        found.append(MixedGroup(group=group, traces=mixed.traces))
    return found


def shuffled(groups: int, minibatches: int, epochs: int, seed: int, step: int) -> Iterator[Any]:
    """Groups of each update of a step, one list of mini-batches after the other."""
    order = np.arange(groups)
    for number in range(epochs):
        if number:
            order = keyed_generator("update epoch", seed, step, number).permutation(groups)
        yield from (part.tolist() for part in np.array_split(order, minibatches))


def own(sample: Sample) -> Tensor:
    """``[T]`` bool: the policy's own tokens."""
    return torch.from_numpy(sample.source == Source.OWN)


def cut(sample: Sample) -> bool:
    return sample.finish_reason == FinishReason.LENGTH


def surrogate(gap: Tensor, advantage: Tensor) -> Tensor:
    """−min(ρA, clamp(ρ, 0.8, 1.2) A), at most −3A where A < 0."""
    ratio = gap.exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return torch.where(advantage < 0, torch.minimum(loss, -3.0 * advantage), loss)


def grpo_step(
    policy: Plain, groups: Sequence[MixedGroup], updates: Iterator[list[int]], longest: int
) -> list[float]:
    """A step of grpo with the group's mean as baseline and a constant denominator; the losses."""
    losses = []
    for these in updates:
        rows = sum(len(groups[number].group.samples) for number in these)
        total = torch.zeros((), dtype=torch.float64)
        for number in these:
            mixed = groups[number]
            rewards = [float(sample.reward or 0.0) for sample in mixed.group.samples]
            for sample, reward in zip(mixed.group.samples, rewards, strict=True):
                advantage = torch.tensor(reward - sum(rewards) / len(rewards)).double()
                mine = own(sample)
                now = policy.logprobs(mixed, sample.tokens)[mine]
                gap = now - torch.from_numpy(sample.logprobs).double()[mine]
                total = total + surrogate(gap, advantage).sum()
        losses.append(float(total) / (longest * rows))
        policy.step(total / (longest * rows))
    return losses


def sft_step(policy: Plain, groups: Sequence[MixedGroup], updates: Iterator[list[int]]) -> None:
    """A step of sft on the traces: the mean negative log-prob of an update's tokens."""
    for these in updates:
        parts = [
            -policy.logprobs(groups[number], trace.tokens)
            for number in these
            for trace in groups[number].traces
        ]
        policy.step(torch.cat(parts).mean())


class PpoStep:
    """A step of ppo whose rows cut by length are masked.

    Args:
        reference: ``log π_ref`` of a response; None = no KL in the reward.
    """

    def __init__(
        self,
        policy: Plain,
        critic: Plain,
        groups: Sequence[MixedGroup],
        *,
        discount: float,
        gae_lambda: float,
        value_clip: float,
        value_coefficient: float,
        whiten_rewards: bool = False,
        kl_reward_form: str = "k1",
        beta: float = 0.0,
        reference: Callable[[MixedGroup, np.ndarray], Tensor] | None = None,
    ) -> None:
        self.policy, self.critic, self.groups = policy, critic, groups
        self.value_clip, self.value_coefficient = value_clip, value_coefficient
        self.old: dict[tuple[int, int], Tensor] = {}
        self.advantages: dict[tuple[int, int], Tensor] = {}
        self.returns: dict[tuple[int, int], Tensor] = {}
        rewards: dict[tuple[int, int], Tensor] = {}
        for key, mixed, sample in self._samples(range(len(groups))):
            mine = own(sample)
            with torch.no_grad():
                old = critic.values(mixed, sample.tokens)[mine]
                paid = torch.zeros(len(old), dtype=torch.float64)
                if reference is not None:
                    known = torch.from_numpy(sample.logprobs).double()[mine]
                    gap = known - reference(mixed, sample.tokens)[mine]
                    paid -= beta * (gap if kl_reward_form == "k1" else (-gap).exp() - 1 + gap)
            left = float(sample.reward or 0.0)
            for place, token in enumerate(
                [] if sample.token_rewards is None else sample.token_rewards
            ):
                # What environment text has earned belongs to the own token before it.
                before = int(mine[: place + 1].sum()) - 1
                paid[max(before, 0)] += float(token)
                left -= float(token)
            paid[-1] += left
            self.old[key], rewards[key] = old, paid
        kept = [key for key, _, sample in self._samples(range(len(groups))) if not cut(sample)]
        if whiten_rewards:
            every = torch.cat([rewards[key] for key in kept])
            rewards = {
                key: (paid - every.mean()) / (every.var() + 1e-8).sqrt() + every.mean()
                for key, paid in rewards.items()
            }
        for key, old in self.old.items():
            paid = rewards[key]
            found = torch.zeros(len(old), dtype=torch.float64)
            after = running = 0.0
            for at in reversed(range(len(old))):
                delta = float(paid[at]) + discount * after - float(old[at])
                running = delta + discount * gae_lambda * running
                found[at], after = running, float(old[at])
            self.advantages[key], self.returns[key] = found, found + old
        every = torch.cat([self.advantages[key] for key in kept])
        mean = every.sum() / len(every)
        variance = ((every - mean) ** 2).sum() / (len(every) - 1)
        for key in kept:
            self.advantages[key] = (self.advantages[key] - mean) / (variance + 1e-8).sqrt()

    def _samples(self, these: Any) -> Iterator[tuple[tuple[int, int], MixedGroup, Sample]]:
        for number in these:
            mixed = self.groups[number]
            for place, sample in enumerate(mixed.group.samples):
                yield (number, place), mixed, sample

    def update(self, these: list[int], *, critic_alone: bool = False) -> tuple[float, float]:
        """One update of both; the norms of their gradients."""
        ours = theirs = torch.zeros((), dtype=torch.float64)
        tokens = 0
        for key, mixed, sample in self._samples(these):
            mine = own(sample)
            tokens += int(mine.sum())
            if cut(sample):
                continue
            now = self.policy.logprobs(mixed, sample.tokens)[mine]
            gap = now - torch.from_numpy(sample.logprobs).double()[mine]
            ours = ours + surrogate(gap, self.advantages[key]).sum()
            value, old = self.critic.values(mixed, sample.tokens)[mine], self.old[key]
            near = old + (value - old).clamp(-self.value_clip, self.value_clip)
            goal = self.returns[key]
            theirs = theirs + 0.5 * torch.maximum((value - goal) ** 2, (near - goal) ** 2).sum()
        of_critic = self.critic.step(self.value_coefficient * theirs / tokens, critic=True)
        return 0.0 if critic_alone else self.policy.step(ours / tokens), of_critic
