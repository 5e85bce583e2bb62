"""Reports on a step's groups: figures for metrics.jsonl and texts for samples.jsonl."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...common.objectives.keys import EQUAL_REWARDS
from ...common.records import FinishReason, Int32Array, Sample, Source, Verdict
from ..rows.groups import MixedGroup

# Looked up once: an enum's members are slow to access, and this runs for every sample.
_CORRECT = Verdict.CORRECT
_TOLD = tuple(v for v in Verdict if v not in (Verdict.CORRECT, Verdict.WRONG))

_COUNTED = frozenset(
    (
        *("tool_calls", "malformed_calls", "branches", "retokenised"),
        *("environment_seconds", "model_seconds", "episode_seconds"),
    )
)
"""Tandem's own figures of an episode; all others are the environment's."""
MOST_OWN = 32
"""Number of an environment's own figures that become metrics."""
Decode = Callable[[Int32Array], str]
"""Gives the text of tokens, special ones included."""
OLDEST_TOLD = 8
"""The staleness histogram's last bin, which counts samples of this age and older ones."""


def describe(step: int, groups: Sequence[MixedGroup], *, compared: bool = True) -> dict[str, float]:
    """``reward/…``, ``rollout/…`` and ``replay/…`` figures of a step.

    ``reward/zero_variance`` is the share of groups without a signal (all rewards equal, expert
    rows included), if the rows of a group are ``compared``; ``…_accuracy`` is the same by accuracy
    alone. ``rollout/entropy`` is the estimate −mean log μ over all own tokens.
    ``replay/staleness_…`` is in steps; ``replay/staleness_share_<age>`` is the share of the own
    samples with that age (the last bin, 8, includes the older ones), for every age up to the
    greatest of the step. Samples that traces have replaced count among the own samples.
    """
    sampled = [[*mixed.group.samples, *mixed.replaced] for mixed in groups]
    samples = [sample for members in sampled for sample in members]
    used = [trace for mixed in groups for trace in mixed.traces]
    figures: dict[str, float] = {
        "replay/groups": float(len(groups)),
        "replay/expert_rows": float(len(used)),
    }
    if used:
        figures["replay/expert_length"] = _mean([len(trace.tokens) for trace in used])
    if samples:
        figures |= _rewards(groups, samples) | _rollouts(sampled, samples)
        if not compared:
            # Without comparison, a group of equal rewards, or of one row, still teaches something.
            del figures["reward/zero_variance"], figures["reward/zero_variance_accuracy"]
        figures["replay/replaced_groups"] = _mean([bool(mixed.replaced) for mixed in groups])
        begun = [s for s in samples if len(s.source) and s.source[0] == Source.EXPERT]
        if begun:
            figures["replay/prefixed_rows"] = float(len(begun))
            shares = [float((s.source == Source.EXPERT).mean()) for s in begun]
            figures["replay/prefix_share"] = _mean(shares)
        figures |= _episodes([s for s in samples if s.episode is not None])
        ages = [
            step - 1 - mixed.later - oldest
            for mixed, members in zip(groups, sampled, strict=True)
            for sample in members
            if (oldest := sample.oldest_step) is not None
        ]
        if ages:
            figures["replay/staleness_mean"] = _mean(ages)
            figures["replay/staleness_max"] = float(max(ages))
            figures |= _histogram(ages)
    return figures


def left_out(row: Mapping[str, Any], most: int) -> dict[str, float]:
    """``replay/left_out``: groups without a signal that a step's row left out, if it may leave out ``most``."""
    return {"replay/left_out": float(row.get("left_out", 0))} if most else {}


def _histogram(ages: Sequence[int]) -> dict[str, float]:
    # Stored groups of an earlier run may be "younger" than the step that trains on them.
    bins = [min(max(age, 0), OLDEST_TOLD) for age in ages]
    return {
        f"replay/staleness_share_{age}": bins.count(age) / len(bins) for age in range(max(bins) + 1)
    }


def _rewards(groups: Sequence[MixedGroup], samples: Sequence[Sample]) -> dict[str, float]:
    counted = [s for s in samples if s.has_verdict]
    figures = {"reward/graded": len(counted) / len(samples)}
    if counted:
        figures["reward/mean"] = _mean([s.reward for s in counted])
        figures["reward/accuracy"] = _mean([s.verdict is _CORRECT for s in counted])
        for name in dict.fromkeys(name for s in counted for name in s.components):
            values = [s.components[name] for s in counted if s.components.get(name) is not None]
            if values and name != "accuracy":
                figures[f"reward/{name}"] = _mean(values)
    verdicts = [s.verdict for s in samples]
    for verdict in _TOLD:
        if verdict in verdicts:
            figures[f"reward/verdict_{verdict.value}"] = verdicts.count(verdict) / len(verdicts)
    equal, equal_accuracy, solved, unsolved = [], [], [], []
    for mixed in groups:
        own, experts = [s for s in mixed.group.samples if s.has_verdict], mixed.traces
        rewards = [s.reward for s in own] + [t.reward for t in experts if t.reward is not None]
        right = [s.verdict is _CORRECT for s in own]
        both = right + [t.verdict is _CORRECT for t in experts]
        numbers = [float(r) for r in rewards if r is not None]
        equal.append(not numbers or max(numbers) - min(numbers) <= EQUAL_REWARDS)
        equal_accuracy.append(len(set(both)) <= 1)
        solved.append(bool(right) and all(right))
        unsolved.append(not any(right))
    return figures | {
        "reward/zero_variance": _mean(equal),
        "reward/zero_variance_accuracy": _mean(equal_accuracy),
        "reward/solved_all": _mean(solved),
        "reward/solved_none": _mean(unsolved),
    }


def _rollouts(groups: Sequence[Sequence[Sample]], samples: Sequence[Sample]) -> dict[str, float]:
    lengths = [len(s.tokens) for s in samples]
    own = np.concatenate([s.source for s in samples]) == Source.OWN
    logprobs = np.concatenate([s.logprobs for s in samples])[own]
    ended = [s.finish_reason for s in samples]
    late = FinishReason.DEADLINE
    partial = [any(s.finish_reason is late for s in members) for members in groups]
    figures = {
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(max(lengths)),
        "rollout/truncated": ended.count(FinishReason.LENGTH) / len(ended),
        "rollout/stragglers": ended.count(late) / len(ended),
        "rollout/partial_groups": _mean(partial),
        "rollout/tokens": float(sum(lengths)),
    }
    if len(logprobs):
        figures["rollout/entropy"] = -float(logprobs.mean())
    return figures


def _episodes(samples: Sequence[Sample]) -> dict[str, float]:
    """``environment/…`` figures of samples that were played in environments."""
    episodes = [s.episode for s in samples if s.episode is not None]
    if not episodes:
        return {}

    def total(name: str) -> float:
        return sum(episode.metrics.get(name, 0.0) for episode in episodes)

    count = len(episodes)
    written = np.concatenate([s.source for s in samples]) == Source.ENVIRONMENT
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    figures = {
        "environment/episodes": float(count),
        "environment/failed": _mean([episode.failure is not None for episode in episodes]),
        "environment/turns": _mean([len(episode.turns) for episode in episodes]),
        "environment/tokens": float(written.sum()) / count,
        "environment/tool_calls": total("tool_calls") / count,
        "environment/malformed": total("malformed_calls") / max(1.0, total("tool_calls")),
        "environment/branches": total("branches"),
        "environment/retokenised": total("retokenised"),
        "environment/seconds": total("environment_seconds") / count,
        "environment/model_seconds": total("model_seconds") / count,
        "environment/episode_seconds": total("episode_seconds") / count,
    }
    if rewards:
        figures["environment/reward"] = _mean(rewards)
    own = {name for episode in episodes for name in episode.metrics} - _COUNTED
    for name in sorted(own)[:MOST_OWN]:
        values = [e.metrics[name] for e in episodes if name in e.metrics]
        figures[f"environment/own/{name}"] = _mean(values)
    return figures


def _played(sample: Sample, decode: Decode | None) -> dict[str, Any]:
    """An episode's turns for samples.jsonl, with what the environment said before each."""
    episode = sample.episode
    if episode is None:
        return {}
    turns: list[dict[str, Any]] = []
    ends = [0, *(turn.end for turn in episode.turns)]
    for before, turn in zip(ends, episode.turns, strict=False):
        texts = {}
        if decode is not None:
            texts["shown"] = decode(sample.tokens[before : turn.start])
            texts["text"] = decode(sample.tokens[turn.start : turn.end])
        turns.append(
            {
                "tokens": [turn.start, turn.end],
                "reward": turn.reward,
                "malformed": turn.malformed,
                **texts,
            }
        )
    if decode is not None and len(sample.tokens) > ends[-1]:
        turns.append({"shown": decode(sample.tokens[ends[-1] :])})
    return {
        "environment": episode.environment,
        "environment_reward": episode.reward,
        "failure": None if episode.failure is None else episode.failure.value,
        "detail": episode.detail,
        "turns": turns,
        "figures": dict(episode.metrics),
    }


def text_of(step: int, mixed: MixedGroup, decode: Decode | None = None) -> dict[str, Any]:
    """A group of a step as a record for samples.jsonl.

    Args:
        step: the step.
        mixed: the group.
        decode: gives the text of the turns of episodes; None = they are reported without text.
    """
    group = mixed.group
    rows: list[dict[str, Any]] = [
        {
            "source": "own",
            "text": sample.text,
            "tokens": len(sample.tokens),
            "finish_reason": sample.finish_reason.value,
            "reward": sample.reward,
            "verdict": None if sample.verdict is None else sample.verdict.value,
            "extracted": sample.extracted,
            "components": dict(sample.components),
            "versions": [f"{s.term}.{s.step}" for s in sample.spans],
            # A trace has replaced it, so it wasn't trained on.
            **({"replaced": True} if gone else {}),
            **_played(sample, decode),
        }
        for samples, gone in ((group.samples, False), (mixed.replaced, True))
        for sample in samples
    ]
    rows += [
        {
            "source": "expert",
            "trace_id": trace.trace_id,
            "text": trace.text,
            "tokens": len(trace.tokens),
            "reward": trace.reward,
            "verdict": trace.verdict.value,
        }
        for trace in mixed.traces
    ]
    return {
        "step": step,
        # An archive's spans count the steps of the run that made it.
        **({"later": mixed.later} if mixed.later else {}),
        "group_id": group.group_id,
        "problem_id": group.problem_id,
        "data_source": group.data_source,
        "worker": group.worker,
        "prompt": group.prompt_text,
        "gold": group.gold,
        "rows": rows,
    }


def _mean(values: Sequence[Any]) -> float:
    return float(sum(values)) / len(values)


def trained_on(metrics: dict[str, float]) -> dict[str, int]:
    """The samples and tokens that a step was trained on, for the journal."""
    tokens = metrics.get("train/tokens_own", 0) + metrics.get("train/tokens_expert", 0)
    return {"samples": int(metrics.get("train/rows", 0)), "tokens": int(tokens)}
