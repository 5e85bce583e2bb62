"""What every objective of the registry keeps, whatever it computes."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.common.objectives import OBJECTIVES, reads
from tandem.common.objectives.keys import Shaping, switched_off
from tandem.learner.losses.finite import NonFiniteError
from tandem.learner.objectives import REGISTRY, Objective, make
from tandem.learner.rows.packing import plan
from tandem.learner.rows.rows import Rows

NAMES = sorted(REGISTRY)
AGGREGATIONS = ("constant", "width", "token_mean", "sequence_mean", "by_source")
AGGREGATED = [
    (name, how)
    for name in NAMES
    for how in (AGGREGATIONS if "aggregation" in reads(OBJECTIVES[name]) else ("constant",))
]
# Every option that adds a term, so that none is split-invariant only by being off.
BUSY: dict[str, Any] = {
    "entropy_coefficient": 0.01,
    "kl_coefficient": 0.1,
    "sft_coefficient": 0.7,
    "own_advantage_weight": 0.7,
    "expert_advantage_weight": 1.3,
}


def with_those_it_reads(name: str, **wanted: Any) -> Objective:
    """With the keys among these that it reads."""
    read = {key: value for key, value in wanted.items() if key in reads(OBJECTIVES[name])}
    return make(name, expert_negative=True, **read)


def busy(name: str, **more: Any) -> Objective:
    """With all of :data:`BUSY` that it reads."""
    return with_those_it_reads(name, **BUSY, **more)


def evaluate(objective: Objective, parts: list[Rows], scalars: dict[str, float]) -> torch.Tensor:
    """The sum of the parts' losses."""
    return torch.stack([objective.loss(part, scalars)[0] for part in parts]).sum()


def graded(
    objective: Objective, whole: Rows, parts: list[torch.Tensor], hand: ModuleType
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of an update whose rows come in these parts; statistics likewise."""
    assert whole.logprobs is not None
    assert whole.entropy is not None
    assert whole.values is not None
    leaves = [t.clone().requires_grad_() for t in (whole.logprobs, whole.entropy, whole.values)]
    these = hand.filled(
        objective,
        whole.with_columns(logprobs=leaves[0], entropy=leaves[1], values=leaves[2]),
    )
    pieces = [these.select(part) for part in parts]
    scalars = {"constant": hand.CONSTANT, "width": hand.WIDTH, "step": 30.0}
    for piece in pieces:
        for key, value in objective.statistics(piece).items():
            scalars[key] = scalars.get(key, 0.0) + float(value)
    total = evaluate(objective, pieces, scalars)
    total.backward()
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return total.detach(), gradients


def units_of(objective: Objective, rows: Rows) -> torch.Tensor:
    return torch.arange(rows.count) if objective.unit == "row" else rows.group


@pytest.mark.parametrize(("name", "how"), AGGREGATED)
@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_loss_and_gradient_do_not_depend_on_split_order_or_ranks(
    name: str, how: str, hand: ModuleType, data: st.DataObject
) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4]), label="ranks")
    budget = data.draw(st.sampled_from([40, 60, 200]), label="budget")
    seed = data.draw(st.integers(0, 2**20), label="seed")
    size = data.draw(st.sampled_from([1, 3, 4]), label="group size")
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), label="dtype")
    objective = busy(name, aggregation=how)
    whole = hand.random_rows(seed, group_size=size, dtype=dtype)
    shuffle = torch.randperm(whole.count, generator=torch.Generator().manual_seed(seed))
    units = units_of(objective, whole)
    shares = plan(
        whole.lengths[shuffle].numpy(), units[shuffle].numpy(), budget=budget, ranks=ranks
    )
    parts = [shuffle[torch.from_numpy(part)] for rank in shares for part in rank]
    loss, gradients = graded(objective, whole, [torch.arange(whole.count)], hand)
    other, other_gradients = graded(objective, whole, parts, hand)
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    scale = max(1.0, float(loss.abs()))
    torch.testing.assert_close(other, loss, atol=bound * scale, rtol=bound)
    for ours, theirs in zip(other_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=bound * scale, rtol=bound)


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_and_its_gradient_are_there(name: str, hand: ModuleType) -> None:
    """Or the invariance would be that of a constant."""
    objective = make(name, expert_negative=True)
    loss, gradients = graded(objective, hand.random_rows(1), [torch.arange(12)], hand)
    assert loss != 0
    assert (gradients[0] != 0).any()


OTHERWISE: dict[str, Any] = {
    "kl_form": "k2",
    "entropy_over": "all",
    "entropy_step": 0.9,
    "correction_low": 0.9,
    "gamma": 0.9,
    "shaping_exponent": 0.9,
    "shaping_coefficient": 0.9,
}
"""Other values of the loss's keys that another key may switch off."""


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_others_switch_off_change_nothing_and_the_rest_do(
    name: str, hand: ModuleType
) -> None:
    """With each way to shape weights in turn, with and without entropy and KL in the loss."""
    whole, all_rows = hand.random_rows(1), [torch.arange(12)]
    on = {"entropy_coefficient": 0.01, "kl_coefficient": 0.1}
    for how in get_args(Shaping):
        for more in ({}, on):
            chosen = {**more, "shaping": how, "own_shaping": how}
            plain = with_those_it_reads(name, **chosen)
            loss, gradients = graded(plain, whole, all_rows, hand)
            off = switched_off(plain.settings)
            for key in OTHERWISE.keys() & reads(OBJECTIVES[name]):
                changed = (
                    OTHERWISE[key] if getattr(plain.settings, key) != OTHERWISE[key] else "own"
                )
                objective = with_those_it_reads(name, **chosen, **{key: changed})
                other, other_gradients = graded(objective, whole, all_rows, hand)
                same = torch.equal(other, loss) and all(
                    map(torch.equal, other_gradients, gradients)
                )
                assert same == (key in off), (key, chosen)


@pytest.mark.parametrize("name", NAMES)
def test_statistics_are_additive_and_carry_no_gradient(name: str, hand: ModuleType) -> None:
    objective = busy(name)
    whole = hand.filled(objective, hand.random_rows(6))
    whole = whole.with_columns(logprobs=whole.logprobs.clone().requires_grad_())
    parts = [whole.select(part) for part in torch.arange(12).split(4)]
    found = [objective.statistics(part) for part in parts]
    for key, value in objective.statistics(whole).items():
        assert not value.requires_grad
        assert value.dtype == torch.float64
        assert sum(float(one[key]) for one in found) == pytest.approx(float(value), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_said_to_be_inactive_have_no_gradient(name: str, hand: ModuleType) -> None:
    objective = with_those_it_reads(name, entropy_coefficient=0.0)
    these = hand.random_rows(2)
    zeroed = torch.where(torch.arange(these.count) % 3 == 0, 0.0, these.advantages)
    leaf = these.logprobs.clone().requires_grad_()
    these = hand.filled(objective, these.with_columns(advantages=zeroed), leaf)
    objective.loss(these, hand.scalars_of(objective, these))[0].backward()
    moved = these.by_row((leaf.grad != 0).double()) > 0  # type: ignore[operator]
    active = objective.active(these)
    assert not active.all()
    assert moved.any()
    assert not (moved & ~active).any()


EXTREMES = {
    "log-ratio of 100": (-1.0, -101.0),
    "log-ratio of -100": (-101.0, -1.0),
    "log-prob of -1e4": (-1e4, -1e4),
    "log-prob of -1e4, once certain": (-1e4, 0.0),
    "certain, once impossible": (0.0, -1e4),
    "tiny": (-1e-30, -1e30),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_log_probs_give_a_finite_loss_and_gradient(
    name: str, extreme: str, hand: ModuleType
) -> None:
    now, then = EXTREMES[extreme]
    objective = busy(name)
    these = hand.random_rows(3, dtype=torch.float32)
    leaf = torch.full_like(these.logprobs, now).requires_grad_()
    past = torch.full_like(leaf, max(then, -1e4)).detach()
    these = these.with_columns(
        behaviour=torch.where(these.known, past, 0.0), proximal=past, reference=past
    )
    these = hand.filled(objective, these, leaf)
    loss, sums = objective.loss(these, hand.scalars_of(objective, these))
    loss.backward()
    assert loss.isfinite()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert all(value.isfinite() for value in sums.values())


@pytest.mark.parametrize("name", NAMES)
def test_bf16_log_probs_are_computed_with_in_float32(name: str, hand: ModuleType) -> None:
    objective = with_those_it_reads(name, sft_coefficient=1.0)
    exact = hand.filled(objective, hand.random_rows(7, dtype=torch.float32))
    rounded = exact.with_columns(
        **{
            column: getattr(exact, column).bfloat16().float()
            for column in ("logprobs", "behaviour", "entropy", "proximal", "reference")
            if getattr(exact, column) is not None
        }
    )
    narrow = rounded.with_columns(
        **{
            column: getattr(rounded, column).bfloat16()
            for column in ("logprobs", "behaviour", "entropy", "proximal", "reference")
            if getattr(rounded, column) is not None
        }
    )
    leaf = narrow.logprobs.clone().requires_grad_()
    scalars = hand.scalars_of(objective, rounded)
    loss, _ = objective.loss(narrow.with_columns(logprobs=leaf), scalars)
    loss.backward()
    expected, _ = objective.loss(rounded, scalars)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3, abs=1e-5)
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_all_masked_or_none_at_all_give_zero(name: str, hand: ModuleType) -> None:
    objective = busy(name)
    whole = hand.random_rows(4)
    masked = whole.with_columns(
        masked=torch.ones_like(whole.masked),
        # Even a poisoned token must not come through a mask.
        logprobs=torch.full_like(whole.behaviour, math.nan),
    )
    nothing = whole.select(torch.zeros(0, dtype=torch.int64))
    scalars = hand.scalars_of(objective, hand.filled(objective, whole))
    for these in (masked, nothing):
        leaf = these.logprobs.clone().requires_grad_()
        found, _ = objective.loss(hand.filled(objective, these, leaf), scalars)
        found.backward()
        assert found.item() == 0.0
        assert leaf.grad is None or (leaf.grad == 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_a_log_prob_that_is_no_number_is_named(name: str, bad: float, hand: ModuleType) -> None:
    # Without its supervised term, distill doesn't look at them.
    objective = with_those_it_reads(name, sft_coefficient=1.0)
    these = hand.filled(objective, hand.random_rows(5))
    scalars = hand.scalars_of(objective, these)
    active = torch.nonzero(objective.active(these)).squeeze(1)
    spoilt = these.logprobs.clone()
    spoilt[torch.isin(these.row, active)] = bad
    with pytest.raises(NonFiniteError, match=r"rows\.logprobs: \d+ of \d+ are not finite"):
        objective.loss(these.with_columns(logprobs=spoilt), scalars)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [-math.inf, math.nan])
def test_other_columns_that_are_no_numbers_are_named_too(
    name: str, bad: float, hand: ModuleType
) -> None:
    objective = busy(name)
    these = hand.filled(objective, hand.random_rows(5))
    scalars = hand.scalars_of(objective, these)
    asked = set(objective.columns) & {"proximal", "reference", "divergence", "values"}
    if "entropy_coefficient" in reads(OBJECTIVES[name]):
        asked.add("entropy")
    for column in sorted(asked):
        spoilt = these.with_columns(**{column: torch.full_like(these.logprobs, bad)})
        with pytest.raises(NonFiniteError, match=rf"rows\.{column}: \d+ of \d+ are not finite"):
            objective.loss(spoilt, scalars)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "tis", "icepop", "mis", "decoupled_ppo"])
def test_a_behaviour_log_prob_of_minus_infinity_is_refused(name: str, hand: ModuleType) -> None:
    """A ratio to a token of probability 0 has no meaning; a clip would hide it."""
    objective = make(name)
    these = hand.filled(objective, hand.random_rows(5))
    spoilt = these.with_columns(behaviour=torch.full_like(these.behaviour, -math.inf))
    with pytest.raises(NonFiniteError, match=r"(behaviour|log-ratios).* are not finite"):
        objective.loss(spoilt, hand.scalars_of(objective, these))


def moved(
    objective: Objective, these: Rows, where: torch.Tensor, hand: ModuleType
) -> tuple[float, float]:
    """The loss, and the loss with these tokens half a nat less likely, statistics included."""
    found = []
    for gap in (0.0, 0.5):
        there = these.with_columns(logprobs=these.logprobs - gap * where)  # type: ignore[operator]
        there = hand.filled(objective, there)
        found.append(objective.loss(there, hand.scalars_of(objective, there))[0].item())
    return found[0], found[1]


# KTO's z₀ is measured on all own rows, without gradient; PPO's rows are masked before its loss.
@pytest.mark.parametrize("name", sorted(set(NAMES) - {"kto", "ppo"}))
def test_a_cut_row_whose_advantage_is_set_to_0_is_out_of_the_loss(
    name: str, hand: ModuleType
) -> None:
    """Also where a term of the loss doesn't go through the advantage; one row begins with an expert's prefix."""
    objective = with_those_it_reads(name, entropy_coefficient=0.0)
    these = hand.random_rows(2)
    silent = (torch.arange(these.count) == 1) | (torch.arange(these.count) == 7)
    assert not (silent & these.masked).any()
    assert these.expert_row[7]
    advantages = these.advantages.masked_fill(silent, 0.0)
    these = hand.filled(objective, these.with_columns(silent=silent, advantages=advantages))
    before, after = moved(objective, these, silent[these.row], hand)
    assert before == after != 0.0
    assert not objective.active(these)[silent].any()
    before, after = moved(objective, these, ~silent[these.row], hand)
    assert before != after


@pytest.mark.parametrize("name", NAMES)
def test_a_token_of_a_malformed_turn_is_out_of_the_loss(name: str, hand: ModuleType) -> None:
    objective = make(name, expert_negative=True)
    these = hand.filled(objective, hand.random_rows(2))
    muted = torch.arange(len(these.row)) % 3 == 0
    these = these.with_columns(muted=muted)
    if these.reference is not None:
        # So that KTO's z₀ is over 0.
        these = these.with_columns(reference=these.reference - 1.0)
    before, after = moved(objective, these, muted, hand)
    assert before == after != 0.0
    before, after = moved(objective, these, ~muted, hand)
    assert before != after


# GSPO's ratio is that of a row, of which its likely tokens are a part.
@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if "max_probability" in reads(OBJECTIVES[name]) and name != "gspo"],
)
def test_a_token_that_is_too_likely_is_out_of_the_loss(name: str, hand: ModuleType) -> None:
    these = hand.random_rows(2)
    likely = torch.arange(len(these.row)) % 3 == 0
    assert (likely & these.expert).any()
    assert (likely & ~these.expert).any()
    logprobs = these.logprobs.clamp(max=math.log(0.85)).masked_fill(likely, math.log(0.95))
    # As far from the behaviour policy as before, so that no clip has stopped them already.
    shift = logprobs - these.logprobs
    these = these.with_columns(
        behaviour=torch.where(these.known, these.behaviour + shift, 0.0),
        proximal=these.proximal + shift,
    )

    def gradient(most: float | None) -> torch.Tensor:
        objective = with_those_it_reads(name, entropy_coefficient=0.0, max_probability=most)
        leaf = logprobs.clone().requires_grad_()
        filled = hand.filled(objective, these, leaf)
        objective.loss(filled, hand.scalars_of(objective, filled))[0].backward()
        assert leaf.grad is not None
        return leaf.grad

    assert gradient(None)[likely].any()
    found = gradient(0.9)
    assert not found[likely].any()
    assert found[~likely].any()


@pytest.mark.parametrize("name", ["dpo", "cpo", "orpo"])
def test_a_row_of_malformed_turns_alone_is_in_no_pair(name: str, hand: ModuleType) -> None:
    objective = make(name)
    these = hand.filled(objective, hand.random_rows(2))
    whole = objective.statistics(these)["pairs"]
    chosen, _ = objective.pairs(these)  # type: ignore[attr-defined]
    these = these.with_columns(muted=these.row == chosen[0])
    assert 0 < objective.statistics(these)["pairs"] < whole
    assert not objective.active(these)[chosen[0]]


def test_a_row_of_malformed_turns_alone_is_none_of_ktos(hand: ModuleType) -> None:
    objective = make("kto")
    these = hand.filled(objective, hand.random_rows(2))
    (row, *_) = torch.nonzero(objective.active(these) & ~these.expert_row).flatten().tolist()
    before = objective.statistics(these)
    these = these.with_columns(muted=these.row == row)
    after = objective.statistics(these)
    assert not objective.active(these)[row]
    for count in ("pairs", "kto_rows"):
        assert after[count] == before[count] - 1


@pytest.mark.parametrize("baseline", ["none", "group_mean"])
def test_without_a_baseline_kto_takes_a_row_that_is_paid_nothing_as_bad(
    baseline: str, hand: ModuleType
) -> None:
    """Of a group whose mean is 0 it is neither good nor bad."""
    paid = torch.tensor([1.0, 0.0, -1.0, 0.0], dtype=torch.float64)
    these = hand.random_rows(3, 4)
    these = these.with_columns(
        rewards=paid,
        masked=torch.zeros_like(these.masked),
        silent=torch.tensor([False, False, False, True]),
    ).with_advantages(paid, baseline)
    objective = make("kto", advantage=baseline, desirable_weight=0.0)
    these = hand.filled(objective, these)
    scalars = {name: float(value) for name, value in objective.statistics(these).items()}
    assert scalars["pairs"] == (3 if baseline == "none" else 2)
    leaf = these.logprobs.clone().requires_grad_()
    objective.loss(these.with_columns(logprobs=leaf), scalars)[0].backward()
    made_less_likely = these.by_row((leaf.grad > 0).to(torch.int64)) > 0
    assert made_less_likely.tolist() == [False, baseline == "none", True, False]


def test_masked_rows_count_in_the_denominators(hand: ModuleType) -> None:
    these = hand.random_rows(5)
    objective = make("grpo", aggregation="token_mean")
    unmasked = these.with_columns(masked=torch.zeros_like(these.masked))
    assert hand.scalars_of(objective, these) == hand.scalars_of(objective, unmasked)
