"""Every objective's loss, and the advantages of a step's rows, once more: token by token and row by
row with ``math`` alone, from their formulas.

A loss is a function of the present log-probs ``now`` and of the frozen ones ``held`` (what stands
under a stop-gradient). At ``now = held`` it is the loss; its slope by ``now`` is the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.learner.rows.rows import Rows

Loss = Callable[["Case", Sequence[float], Sequence[float]], float]


@dataclass(frozen=True, kw_only=True)
class Token:
    """One own or expert token."""

    row: int
    expert: bool
    known: bool
    mu: float
    prox: float
    ref: float
    entropy: float
    value: float
    old_value: float
    ret: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """An update's rows and the settings."""

    tokens: list[Token]
    advantages: list[float]
    rewards: list[float]
    group: list[int]
    masked: list[bool]
    expert_row: list[bool]
    settings: Any
    expert_negative: bool
    constant: float
    width: float
    step: float

    @property
    def own(self) -> list[int]:
        """Own tokens in the loss."""
        return [i for i, t in enumerate(self.tokens) if not t.expert and not self.masked[t.row]]

    @property
    def expert(self) -> list[int]:
        """Expert tokens in the loss."""
        return [
            i
            for i, t in enumerate(self.tokens)
            if t.expert
            and not self.masked[t.row]
            and (self.expert_negative or self.advantages[t.row] >= 0)
        ]

    def length(self, row: int) -> int:
        """Tokens of a row."""
        return sum(t.row == row for t in self.tokens)

    def adv(self, i: int) -> float:
        """Advantage of a token's row."""
        return self.advantages[self.tokens[i].row]


def case_of(rows: Rows, objective: Any, scalars: dict[str, float]) -> Case:
    """From tensors to numbers."""

    def column(name: str) -> list[float]:
        found = getattr(rows, name)
        return [0.0] * len(rows.row) if found is None else found.tolist()

    columns = {
        key: column(name)
        for key, name in {
            "mu": "behaviour",
            "prox": "proximal",
            "ref": "reference",
            "entropy": "entropy",
            "value": "values",
            "old_value": "old_values",
            "ret": "returns",
        }.items()
    }
    tokens = [
        Token(
            row=row,
            expert=expert,
            known=known,
            **{key: values[i] for key, values in columns.items()},
        )
        for i, (row, expert, known) in enumerate(
            zip(rows.row.tolist(), rows.expert.tolist(), rows.known.tolist(), strict=True)
        )
    ]
    return Case(
        tokens=tokens,
        advantages=rows.advantages.tolist(),
        rewards=rows.rewards.tolist(),
        group=rows.group.tolist(),
        masked=rows.masked.tolist(),
        expert_row=rows.expert_row.tolist(),
        settings=objective.settings,
        expert_negative=objective.expert_negative,
        constant=scalars["constant"],
        width=scalars["width"],
        step=scalars["step"],
    )


def advantages_of(
    baseline: str,
    rewards: Sequence[float],
    group: Sequence[int],
    expert_row: Sequence[bool],
    lengths: Sequence[int],
) -> list[float]:
    """The advantage of every row of a step, whose mini-batches have no part in it.

    Args:
        baseline: ``learner.objective.advantage``.
        rewards: Of all rows.
        group: Which group each is of.
        expert_row: Whether it holds an expert's tokens.
        lengths: Its own and expert tokens: so often it counts where the batch is whitened.
    """
    rows = range(len(rewards))

    def peers(row: int) -> list[int]:
        mine = [r for r in rows if group[r] == group[row]]
        own = [r for r in mine if not expert_row[r]]
        return own if own and baseline.startswith("own_mean") else mine

    def mean_of(these: Sequence[int]) -> float:
        return sum(rewards[r] for r in these) / len(these)

    def against_the_group(row: int) -> float:
        these = peers(row)
        mean = mean_of(these)
        gap = rewards[row] - mean
        if baseline == "leave_one_out":
            others = [r for r in these if r != row]
            return rewards[row] - mean_of(others) if others else 0.0
        if baseline == "max_rl":
            return gap / mean if mean > 1e-6 else 0.0
        if baseline in ("group_mean_std", "own_mean_std"):
            squares = sum((rewards[r] - mean) ** 2 for r in these)
            std = math.sqrt(squares / (len(these) - 1)) if len(these) > 1 else 0.0
            if std < 1e-6:
                std = 1.0 if baseline == "own_mean_std" else 0.0
            return gap / (std + 1e-6) if abs(gap) > 1e-6 else 0.0
        return gap

    if baseline == "none":
        return list(rewards)
    if baseline not in ("reinforce_pp", "reinforce_pp_baseline"):
        return [against_the_group(row) for row in rows]
    values = [rewards[r] if baseline == "reinforce_pp" else against_the_group(r) for r in rows]
    if max(values) - min(values) <= 1e-6:
        return [0.0] * len(values)
    tokens = sum(lengths)
    mean = sum(n * v for n, v in zip(lengths, values, strict=True)) / tokens
    variance = sum(n * (v - mean) ** 2 for n, v in zip(lengths, values, strict=True)) / tokens
    return [(v - mean) / math.sqrt(max(variance, 1e-8)) for v in values]


def ratio_figures(log_ratios: Sequence[float]) -> dict[str, float]:
    """What the ratio check tells of tokens with these log π_θ/μ."""

    def at_99(values: Sequence[float]) -> float:
        return sorted(values)[min(len(values), max(1, round(0.99 * len(values)))) - 1]

    sizes = [abs(x) for x in log_ratios]
    distances = [math.expm1(x) - x for x in log_ratios]
    weights = [math.exp(x) for x in log_ratios]
    return {
        "tokens": len(log_ratios),
        "log_ratio": math.fsum(sizes) / len(sizes),
        "log_ratio_p99": at_99(sizes),
        "k3": math.fsum(distances) / len(distances),
        "k3_p99": at_99(distances),
        "ess": math.fsum(weights) ** 2 / len(weights) / math.fsum(w * w for w in weights),
    }


def agg(
    case: Case, losses: dict[int, float], among: Callable[[int], bool] = lambda i: True
) -> float:
    """The sum with the denominator of the settings; ``among`` are the rows that it counts."""
    tokens = [t for t in case.tokens if among(t.row)]
    how = case.settings.aggregation
    if how == "constant":
        return sum(losses.values()) / case.constant
    if how == "width":
        return sum(losses.values()) / case.width
    if how == "token_mean":
        return sum(losses.values()) / len(tokens)
    if how == "sequence_mean":
        rows = {t.row for t in tokens}
        return sum(v / case.length(case.tokens[i].row) for i, v in losses.items()) / len(rows)
    own = sum(not t.expert for t in tokens)
    expert = sum(t.expert for t in tokens)
    return sum(v / (expert if case.tokens[i].expert else own) for i, v in losses.items())


def clip(ratio: float, advantage: float, settings: Any) -> float:
    """−min(ρ A, clamp(ρ) A), at most −c A where A < 0."""
    low = -math.inf if settings.clip_low is None else 1 - settings.clip_low
    high = math.inf if settings.clip_high is None else 1 + settings.clip_high
    found = -min(ratio * advantage, min(max(ratio, low), high) * advantage)
    if settings.dual_clip is not None and advantage < 0:
        found = min(found, -settings.dual_clip * advantage)
    return found


def clipped(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    return agg(
        case,
        {
            i: clip(math.exp(now[i] - case.tokens[i].mu), case.adv(i), case.settings)
            for i in case.own
        },
    )


def reinforce(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    return agg(case, {i: -case.adv(i) * now[i] for i in case.own})


def _own_mean(case: Case, row: int, values: Callable[[int], float]) -> float:
    mine = [i for i in case.own if case.tokens[i].row == row]
    return sum(values(i) for i in mine) / len(mine)


def gspo(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    losses = {}
    for i in case.own:
        mean = _own_mean(case, case.tokens[i].row, lambda j: now[j] - case.tokens[j].mu)
        losses[i] = clip(math.exp(mean), case.adv(i), case.settings)
    return agg(case, losses)


def gspo_token(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    losses = {}
    for i in case.own:
        mean = _own_mean(case, case.tokens[i].row, lambda j: held[j] - case.tokens[j].mu)
        losses[i] = clip(math.exp(mean) * math.exp(now[i] - held[i]), case.adv(i), case.settings)
    return agg(case, losses)


def cispo(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    losses = {}
    for i in case.own:
        weight = math.exp(held[i] - case.tokens[i].mu)
        if case.settings.clip_high is not None:
            weight = min(weight, 1 + case.settings.clip_high)
        if case.settings.clip_low is not None:
            weight = max(weight, 1 - case.settings.clip_low)
        losses[i] = -weight * case.adv(i) * now[i]
    return agg(case, losses)


def weight_of(case: Case, i: int, past: Callable[[int], float]) -> float:
    """A truncated or masked weight against μ."""
    settings, row = case.settings, case.tokens[i].row
    mine = [j for j in case.own if case.tokens[j].row == row]
    log_w = {
        "token": past(i) - case.tokens[i].mu,
        "sequence": sum(past(j) - case.tokens[j].mu for j in mine),
        "geometric": sum(past(j) - case.tokens[j].mu for j in mine) / len(mine),
    }[settings.correction_level]
    weight = math.exp(log_w)
    if settings.correction == "truncate":
        return min(weight, settings.correction_high)
    return weight if settings.correction_low <= weight <= settings.correction_high else 0.0


def corrected(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    return agg(
        case,
        {i: -case.adv(i) * weight_of(case, i, lambda j: held[j]) * now[i] for i in case.own},
    )


def decoupled(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    losses = {}
    for i in case.own:
        prox = case.tokens[i].prox
        weight = weight_of(case, i, lambda j: case.tokens[j].prox)
        losses[i] = weight * clip(math.exp(now[i] - prox), case.adv(i), case.settings)
    return agg(case, losses)


def ppo(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    losses = {}
    critic = 0.0
    for i in case.own:
        token = case.tokens[i]
        losses[i] = clip(math.exp(now[i] - token.mu), token.ret, case.settings)
        near = token.old_value + max(
            -case.settings.value_clip, min(case.settings.value_clip, token.value - token.old_value)
        )
        critic += 0.5 * max((token.value - token.ret) ** 2, (near - token.ret) ** 2)
    own = sum(not t.expert for t in case.tokens)
    return agg(case, losses) + case.settings.value_coefficient * critic / own


def shaped(log_w: float, settings: Any) -> float:
    """f(w)."""
    w = math.exp(log_w)
    return {
        "none": w,
        "ratio": w / (w + settings.gamma),
        "log": settings.shaping_coefficient * log_w,
        "power": w**settings.shaping_exponent,
        "square_root": math.sqrt(w),
        "plus_log": w + settings.shaping_coefficient * log_w,
    }[settings.shaping]


def expert_weight(case: Case, i: int, log_p: float) -> float:
    """Of an expert token."""
    settings, token = case.settings, case.tokens[i]
    if settings.expert_behaviour == "published" and token.known:
        found = math.exp(log_p) / (math.exp(token.mu) + 1e-6)
    elif settings.expert_behaviour == "recorded" and token.known:
        found = shaped(log_p - token.mu, settings)
    else:
        found = shaped(log_p, settings)
    if settings.expert_clip_high is not None:
        found = min(found, settings.expert_clip_high)
    if settings.expert_clip_low is not None:
        found = max(found, settings.expert_clip_low)
    return found


def mixed_losses(case: Case, now: Sequence[float]) -> dict[int, float]:
    losses = {
        i: clip(math.exp(now[i] - case.tokens[i].mu), case.adv(i), case.settings) for i in case.own
    }
    for i in case.expert:
        losses[i] = -case.adv(i) * expert_weight(case, i, now[i])
    return losses


def luffy(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    settings = case.settings
    counted = [
        t.entropy
        for t in case.tokens
        if not case.masked[t.row] and (settings.entropy_over == "all" or not t.expert)
    ]
    tokens = len(case.tokens)
    if settings.entropy_over == "own":
        tokens = sum(not t.expert for t in case.tokens)
    bonus = settings.entropy_coefficient * sum(counted) / tokens
    return agg(case, mixed_losses(case, now)) - bonus


def exgrpo(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    replayed_groups = {case.group[r] for r, e in enumerate(case.expert_row) if e}
    groups = set(case.group)
    losses = mixed_losses(case, now)
    total = 0.0
    for kind, share in (
        (False, 1 - case.settings.replay_share),
        (True, case.settings.replay_share),
    ):

        def counts(row: int, kind: bool = kind) -> bool:
            return (case.group[row] in replayed_groups) == kind

        mine = {g for g in groups if (g in replayed_groups) == kind}
        part = {i: v for i, v in losses.items() if counts(case.tokens[i].row)}
        found = agg(case, part, counts)
        if case.settings.aggregation == "constant":
            found *= len(groups) / len(mine)
        total += share * found
    return total


def sft(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    losses = {i: -now[i] for i, t in enumerate(case.tokens) if t.expert and not case.masked[t.row]}
    experts = sum(t.expert for t in case.tokens)
    how = case.settings.aggregation
    if how in ("token_mean", "by_source"):
        return sum(losses.values()) / experts
    if how == "sequence_mean":
        rows = {t.row for t in case.tokens if t.expert}
        lengths = {r: sum(t.expert and t.row == r for t in case.tokens) for r in rows}
        return sum(v / lengths[case.tokens[i].row] for i, v in losses.items()) / len(rows)
    return sum(losses.values()) / (case.constant if how == "constant" else case.width)


def rl_sft_loss(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    kept = [i for i, t in enumerate(case.tokens) if t.expert and not case.masked[t.row]]
    experts = sum(t.expert for t in case.tokens)
    nll = -sum(now[i] for i in kept) / experts
    return clipped(case, now, held) + case.settings.sft_coefficient * nll


def chord(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    settings, step = case.settings, case.step - 1
    if step < settings.mu_warmup_steps:
        mu = step / settings.mu_warmup_steps * settings.mu_peak
    else:
        share = min((step - settings.mu_warmup_steps) / settings.mu_decay_steps, 1)
        mu = (
            settings.mu_valley
            + (settings.mu_peak - settings.mu_valley) * math.cos(math.pi * share / 2) ** 2
        )
    kept = [i for i, t in enumerate(case.tokens) if t.expert and not case.masked[t.row]]
    experts = sum(t.expert for t in case.tokens)
    phi = [math.exp(held[i]) * (1 - math.exp(held[i])) for i in range(len(now))]
    imitation = -sum(phi[i] * now[i] for i in kept) / experts
    return (1 - mu) * clipped(case, now, held) + mu * imitation


def rl_plus(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    losses = {
        i: clip(math.exp(now[i] - case.tokens[i].mu), case.adv(i), case.settings) for i in case.own
    }
    for i in case.expert:
        old = math.exp(case.tokens[i].prox)
        weight = 2 * math.exp(now[i]) / (0.5 * (old + 1) + old)
        explored = case.adv(i) * (1 - math.exp(held[i])) ** case.settings.exploration_power
        losses[i] = -explored * weight
    return agg(case, losses)


def srft(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    own_entropy = [t.entropy for t in case.tokens if not t.expert]
    expert_entropy = [t.entropy for t in case.tokens if t.expert]
    up = 0.1 * math.exp(sum(own_entropy) / len(own_entropy))
    down = 0.5 * math.exp(-sum(expert_entropy) / len(expert_entropy))
    own = sum(
        (-up if case.rewards[case.tokens[i].row] > 0 else 1.0) * now[i] for i in case.own
    ) / len(own_entropy)
    kept = [i for i, t in enumerate(case.tokens) if t.expert and not case.masked[t.row]]
    nll = -sum(now[i] for i in kept) / len(expert_entropy)
    replayed = agg(case, {i: -case.adv(i) * expert_weight(case, i, now[i]) for i in case.expert})
    return own + down * nll + replayed


def prefix_rft(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    losses = {
        i: clip(math.exp(now[i] - case.tokens[i].mu), case.adv(i), case.settings) for i in case.own
    }
    for row in range(len(case.rewards)):
        prefix = [i for i, t in enumerate(case.tokens) if t.row == row and t.expert]
        most = sorted(prefix, key=lambda i: -case.tokens[i].entropy)
        for i in most[: math.ceil(case.settings.entropy_share * len(prefix))]:
            if i in case.expert:
                ratio = math.exp(now[i] - case.tokens[i].prox)
                losses[i] = clip(ratio, case.adv(i), case.settings)
    return agg(case, losses)


def _log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def _pairs(case: Case) -> list[tuple[int, int]]:
    rows = [r for r in range(len(case.rewards)) if not case.masked[r]]
    return [
        (w, l)
        for w in rows
        for l in rows  # noqa: E741 - the letter of the papers
        if case.group[w] == case.group[l] and case.rewards[w] - case.rewards[l] > 1e-6
    ]


def _sum(case: Case, values: Sequence[float], row: int) -> float:
    return sum(values[i] for i, t in enumerate(case.tokens) if t.row == row)


def dpo(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    ref = [t.ref for t in case.tokens]
    beta, eps = case.settings.beta, case.settings.label_smoothing
    total = 0.0
    for w, l in _pairs(case):  # noqa: E741
        margin = _sum(case, now, w) - _sum(case, now, l) - _sum(case, ref, w) + _sum(case, ref, l)
        total -= (1 - eps) * _log_sigmoid(beta * margin) + eps * _log_sigmoid(-beta * margin)
    return total / len(_pairs(case))


def cpo(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    total = 0.0
    for w, l in _pairs(case):  # noqa: E741
        margin = _sum(case, now, w) - _sum(case, now, l)
        mean = _sum(case, now, w) / case.length(w)
        total -= _log_sigmoid(case.settings.beta * margin) + case.settings.sft_coefficient * mean
    return total / len(_pairs(case))


def orpo(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    def log_odds(row: int) -> float:
        mean = _sum(case, now, row) / case.length(row)
        return mean - math.log(1 - math.exp(mean))

    total = 0.0
    for w, l in _pairs(case):  # noqa: E741
        mean = _sum(case, now, w) / case.length(w)
        total -= mean + case.settings.beta * _log_sigmoid(log_odds(w) - log_odds(l))
    return total / len(_pairs(case))


def kto(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    ref = [t.ref for t in case.tokens]
    rows = [r for r in range(len(case.rewards)) if not case.masked[r]]
    own = [r for r in rows if not case.expert_row[r]]
    z0 = max(sum(_sum(case, held, r) - _sum(case, ref, r) for r in own) / len(own), 0.0)
    settings = case.settings
    total = 0.0
    for r in rows:
        gain = _sum(case, now, r) - _sum(case, ref, r)
        if case.advantages[r] > 0:
            value = 1 / (1 + math.exp(-settings.beta * (gain - z0)))
            total += settings.desirable_weight * (1 - value)
        else:
            value = 1 / (1 + math.exp(-settings.beta * (z0 - gain)))
            total += settings.undesirable_weight * (1 - value)
    return total / len(rows)


def distill(case: Case, now: Sequence[float], held: Sequence[float]) -> float:
    """With log μ/π in the place of the divergence, see ``hand_made.filled``."""
    settings = case.settings
    factor = settings.divergence_coefficient * settings.divergence_temperature**2
    losses = {}
    for i, t in enumerate(case.tokens):
        if not case.masked[t.row]:
            losses[i] = factor * (t.mu - now[i]) - settings.sft_coefficient * t.expert * now[i]
    return agg(case, losses)


LOSSES: dict[str, Loss] = {
    **dict.fromkeys(
        (
            "grpo",
            "dr_grpo",
            "dapo",
            "rloo",
            "max_rl",
            "reinforce_pp",
            "reinforce_pp_baseline",
        ),
        clipped,
    ),
    "reinforce": reinforce,
    "reinforce_baseline": reinforce,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "tis": corrected,
    "icepop": corrected,
    "mis": corrected,
    "decoupled_ppo": decoupled,
    "ppo": ppo,
    "luffy": luffy,
    "luffy_paper": luffy,
    "luffy_code": luffy,
    "exgrpo": exgrpo,
    "sft": sft,
    "distill": distill,
    "rl_sft_loss": rl_sft_loss,
    "chord": chord,
    "rl_plus": rl_plus,
    "srft": srft,
    "prefix_rft": prefix_rft,
    "dpo": dpo,
    "cpo": cpo,
    "orpo": orpo,
    "kto": kto,
}
