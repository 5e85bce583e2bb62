"""The reference's log-probs of stored rows: computed once, found again, never wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.rows.groups import MixedGroup, rows_of
from tandem.learner.updates.reference import LogprobStore, keys_of
from tandem.learner.updates.updates import StepOutcome, Updates

pytestmark = pytest.mark.usefixtures("group")

Learner = Callable[..., Updates]


@pytest.fixture
def learner(made_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Learner:
    """Makes an offline rank on a tiny model, whose reference has weights of a seed."""

    def started(
        folder: Path | None,
        name: str = "dpo",
        *,
        reference: int = 5,
        attention: str = "auto",
        **learner: Any,
    ) -> Updates:
        monkeypatch.setattr(
            "tandem.learner.updates.reference.load_model",
            lambda path, **kwargs: made_up.tiny_model(seed=reference),
        )
        config = made_up.config_of(
            learner={"source": "offline", "objective": {"name": name}, **learner},
            model={"attention": attention},
        )
        engine = DeepSpeedEngine(made_up.tiny_model(), config, torch.device("cpu"))
        return Updates(engine, config, reference_folder=folder)

    return started


def pairs(made_up: ModuleType, count: int = 3) -> list[MixedGroup]:
    return [made_up.pair_of(mixed) for mixed in made_up.groups_of(count, size=2)]


def figures(outcome: StepOutcome) -> tuple[float, float]:
    """Rows whose log-probs were computed, and found."""
    found = outcome.metrics
    return found["train/reference_computed"], found["train/reference_found"]


def weights(updates: Updates) -> list[torch.Tensor]:
    return [tensor.clone() for _, tensor in updates.engine.parameters()]


def the_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


@pytest.mark.parametrize(
    ("name", "attention"), [("dpo", "auto"), ("kto", "auto"), ("dpo", "varlen")]
)
def test_log_probs_that_are_found_train_the_same_bits(
    learner: Learner, made_up: ModuleType, tmp_path: Path, name: str, attention: str
) -> None:
    with_store = learner(tmp_path, name, attention=attention)
    without = learner(None, name, attention=attention)
    assert without.columns.reference is not None
    policies = (without.engine.policy, without.columns.reference._policy)
    line = "packed" if attention == "varlen" else "shared"
    assert [policy.layout for policy in policies if policy] == [line, line]
    for step, counts in ((1, (6, 0)), (2, (0, 6))):
        stored = with_store.train(step, pairs(made_up), lr=0.1)
        assert figures(stored) == counts
        computed = without.train(step, pairs(made_up), lr=0.1)
        assert figures(computed) == (6, 0)
        assert stored.metrics["train/loss"] == computed.metrics["train/loss"]
    assert all(map(torch.equal, weights(with_store), weights(without)))
    # Beside other rows, in another order and in smaller micro-batches they are the same ones.
    again = learner(tmp_path, name, attention=attention, micro_batch_tokens=40)
    assert figures(again.train(1, pairs(made_up, 4)[::-1], lr=0.1)) == (2, 6)


def test_another_reference_finds_nothing(
    learner: Learner, made_up: ModuleType, tmp_path: Path
) -> None:
    learner(tmp_path).train(1, pairs(made_up), lr=0.1)
    assert figures(learner(tmp_path, reference=6).train(1, pairs(made_up), lr=0.1)) == (6, 0)
    assert figures(learner(tmp_path).train(1, pairs(made_up), lr=0.1)) == (0, 6)


def test_a_key_is_of_the_prompt_the_response_and_the_temperature(made_up: ModuleType) -> None:
    plain = rows_of(pairs(made_up, 1), step=1, temperature=1.0, baseline="none")
    hot = rows_of(pairs(made_up, 1), step=1, temperature=0.5, baseline="none")
    (one,) = pairs(made_up, 1)
    # The same tokens, of which one more belongs to the prompt.
    longer = replace(
        one.group, prompt_tokens=np.append(one.group.prompt_tokens, one.traces[0].tokens[0])
    )
    cut = replace(one.traces[0], tokens=one.traces[0].tokens[1:])
    moved = rows_of(
        [MixedGroup(group=longer, traces=(cut,))], step=1, temperature=1.0, baseline="none"
    )
    keys = [*keys_of(plain), keys_of(hot)[0], keys_of(moved)[0]]
    assert len(set(keys)) == 4
    assert keys_of(plain.select(torch.tensor([1, 0]))) == [keys[1], keys[0]]


def test_a_row_that_comes_twice_in_a_step_is_scored_once(
    learner: Learner, made_up: ModuleType, tmp_path: Path
) -> None:
    first = pairs(made_up, 1)
    updates = learner(tmp_path)
    assert figures(updates.train(1, [*first, *first], lr=0.1)) == (2, 2)


@pytest.mark.parametrize("damage", ["cut", "flipped", "appended", "lengthened"])
def test_damage_is_noticed_and_computed_again(
    learner: Learner, made_up: ModuleType, tmp_path: Path, damage: str
) -> None:
    learner(tmp_path).train(1, pairs(made_up), lr=0.1)
    file = the_file(tmp_path)
    content = bytearray(file.read_bytes())
    whole = bytes(content)
    if damage == "cut":
        del content[-5:]
    elif damage == "flipped":
        content[len(content) // 2] ^= 4
    elif damage == "lengthened":
        # The first record's number of tokens.
        content[17] ^= 64
    else:
        content += b"\x01" * 30
    file.write_bytes(content)
    outcome = learner(tmp_path).train(1, pairs(made_up), lr=0.1)
    computed, found = figures(outcome)
    assert computed + found == 6
    assert (computed == 0) == (damage == "appended")
    fresh = learner(None).train(1, pairs(made_up), lr=0.1)
    assert outcome.metrics["train/loss"] == fresh.metrics["train/loss"]
    if damage != "flipped":
        assert sorted(whole) == sorted(file.read_bytes())


def test_what_turns_bad_while_it_is_open_is_not_given_out(tmp_path: Path) -> None:
    store = LogprobStore(tmp_path / "deep" / "x.logprobs")
    key, other = b"k" * 16, b"o" * 16
    store.put({key: np.arange(4, dtype=np.float32), other: np.zeros(2, np.float32)})
    content = bytearray(store.path.read_bytes())
    content[25] ^= 1
    store.path.write_bytes(content)
    bad, good, absent = store.get([key, other, b"n" * 16])
    assert bad is None
    assert good is not None
    assert good.tolist() == [0, 0]
    assert absent is None


def test_the_gain_of_mismatched_pairs_is_measured_by_hand(
    learner: Learner, made_up: ModuleType
) -> None:
    """z₀: every prompt with the response before its own, chosen ones first; then the loss by its formula."""
    updates = learner(None, "kto", reference=5)
    groups = pairs(made_up, 3)
    ours, reference = made_up.tiny_model(), made_up.tiny_model(seed=5)

    def gain(group: MixedGroup, response: np.ndarray) -> float:
        prompt = group.group.prompt_tokens
        ids = torch.tensor(np.concatenate([prompt, response]), dtype=torch.int64)[None]
        sums = []
        for model in (ours, reference):
            with torch.no_grad():
                scores = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
            picked = scores.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
            sums.append(float(picked.sum()))
        return sums[0] - sums[1]

    rows = [(group, group.traces[place].tokens) for place in (0, 1) for group in groups]
    shifted = [rows[-1][1], *(tokens for _, tokens in rows[:-1])]
    expected = np.mean(
        [gain(group, tokens) for (group, _), tokens in zip(rows, shifted, strict=True)]
    )
    z0 = max(0.0, float(expected))
    assert z0 > 0.01
    losses = []
    for place, (group, tokens) in enumerate(rows):
        signed = gain(group, tokens) - z0
        losses.append(1 / (1 + np.exp(0.1 * (signed if place < 3 else -signed))))
    found = updates.train(1, groups, lr=0.1).metrics
    assert found["train/kto_z0"] == pytest.approx(z0, rel=1e-5)
    assert found["train/loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    # However the rows are cut into micro-batches.
    small = learner(None, "kto", micro_batch_tokens=20).train(1, groups, lr=0.1).metrics
    assert small["train/micro_batches"] > found["train/micro_batches"]
    assert small["train/kto_z0"] == pytest.approx(z0, rel=1e-5)
    assert small["train/loss"] == pytest.approx(found["train/loss"], rel=1e-5)


def test_one_question_alone_has_nothing_to_be_mismatched_with(
    learner: Learner, made_up: ModuleType
) -> None:
    found = learner(None, "kto").train(1, pairs(made_up, 1), lr=0.1).metrics
    assert found["train/kto_z0"] == 0


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo", "cpo"])
def test_pairs_are_compared_without_being_trained_on(
    learner: Learner, made_up: ModuleType, tmp_path: Path, name: str
) -> None:
    updates = learner(tmp_path, name)
    start = weights(updates)
    before = updates.compare(0, pairs(made_up))
    assert before["preference_pairs"] == 3
    assert all(map(torch.equal, weights(updates), start))
    for step in range(1, 30):
        updates.train(step, pairs(made_up), lr=0.03)
    after = updates.compare(30, pairs(made_up))
    assert after["preference_accuracy"] == 1.0
    assert after["preference_margin"] > before["preference_margin"]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_with_adapters_the_reference_is_the_base_without_them(
    learner: Learner,
    made_up: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    stage: int,
) -> None:
    """The kept log-probs are those that a second model of the same weights gives, and are found by one."""
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    lora = {"rank": 2, "alpha": 16.0}
    updates = learner(tmp_path, name, lora=lora)
    for step in (1, 2):
        outcome = updates.train(step, pairs(made_up, 4)[step - 1 : step + 1], lr=0.1)
        assert outcome.applied
        # The second step's first group was scored before the adapters had moved.
        assert figures(outcome) == ((4, 0) if step == 1 else (2, 2))
    assert max(float(tensor.abs().max()) for tensor in weights(updates)) > 0.1
    monkeypatch.setattr("tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: 0)
    second = learner(tmp_path, name, reference=0)
    outcome = second.train(1, pairs(made_up, 3), lr=0.1)
    assert figures(outcome) == (0, 6)
    fresh = learner(None, name, reference=0).train(1, pairs(made_up, 3), lr=0.1)
    assert outcome.metrics["train/loss"] == fresh.metrics["train/loss"]


def test_with_adapters_a_fresh_groups_reference_is_the_base_too(
    made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO with a KL penalty: trained with adapters, or fully with a second model, it begins the same."""
    monkeypatch.setattr(
        "tandem.learner.updates.reference.load_model", lambda path, **kwargs: made_up.tiny_model()
    )
    objective = {"name": "grpo", "kl_coefficient": 0.05, "kl_reward_coefficient": 0.05}
    found = []
    for lora in (None, {"rank": 2, "alpha": 8.0}):
        config = made_up.config_of(learner={"objective": objective, "lora": lora})
        engine = DeepSpeedEngine(made_up.tiny_model(), config, torch.device("cpu"))
        updates = Updates(engine, config)
        found.append([updates.train(s, made_up.groups_of(3), lr=0.1).metrics for s in (1, 2)])
    (full, _), (adapted, later) = found
    for name in ("train/loss", "train/k1_reference", "train/k3_reference"):
        assert adapted[name] == pytest.approx(full[name], rel=1e-6, abs=1e-9)
    assert full["train/k3_reference"] == 0
    assert later["train/k3_reference"] > 1e-4
    assert later["train/k1_reference"] == pytest.approx(adapted["train/k1_reference"], rel=1e-6)


def test_what_is_loaded_for_the_reference_is_frozen(learner: Learner) -> None:
    updates = learner(None)
    assert updates.frozen_paths == [updates.config.model.path]
    assert learner(None, lora={"rank": 3}).frozen_paths == []
