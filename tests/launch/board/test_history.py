"""What is kept of metrics.jsonl: recent means, pace, the histogram of staleness, evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from board_examples import ALARM, alarmed, evaluated, history, record

from tandem.launch.board.history import WINDOW, History, read


def test_recent_figures_are_of_the_last_steps_alone() -> None:
    made = history(100)
    assert made.step == 100
    assert made.values("reward/mean") == tuple(step / 250 for step in range(81, 101))
    assert made.seconds_per_step() == pytest.approx(0.5)
    assert made.per_second("train/tokens_own", "train/tokens_expert") == pytest.approx(2400.0)
    assert made.staleness() == (0.25, 0.75)


def test_evaluations_are_all_kept_and_are_no_steps() -> None:
    made = history(100)
    made.add(evaluated(150, 0.9))
    assert [(one.step, one.accuracy, one.problems) for one in made.evaluations] == [
        (50, 0.25, 100),
        (100, 0.5, 100),
        (150, 0.9, 100),
    ]
    assert made.step == 100


def test_held_out_pairs_are_no_step() -> None:
    made = history(100)
    before = made.seconds_per_step(), made.last("reward/mean")
    made.add(record(100, **{"heldout/preference_pairs": 7.0}))
    assert (made.seconds_per_step(), made.last("reward/mean")) == before


def test_the_time_between_two_lives_of_the_learner_is_no_pace() -> None:
    made = history(100)
    made.add(record(101, term=2, time=10_000.0))
    assert made.seconds_per_step() is None
    made.add(record(102, term=2, time=10_002.0))
    assert made.seconds_per_step() == pytest.approx(2.0)


def test_steps_that_are_trained_again_replace_the_recent_ones() -> None:
    made = history(100)
    made.add(record(91, **{"reward/mean": 7.0}))
    assert (made.step, made.values("reward/mean")) == (100, (7.0,))


def test_a_step_without_an_age_counts_as_none_of_it() -> None:
    made = History()
    made.add(record(1, **{"replay/staleness_share_2": 0.0}))
    fresh = {name: value for name, value in record(2).items() if "share" not in name}
    made.add({**fresh, "replay/staleness_share_0": 1.0})
    assert made.staleness() == pytest.approx((0.625, 0.375, 0.0))


def test_a_file_is_read_as_if_record_by_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [record(step) for step in range(1, 5 * WINDOW)]
    records.insert(10, evaluated(5, 0.5))
    path.write_text("".join(json.dumps(one) + "\n" for one in records) + '{"step": 99999, "ti')
    told, by_hand = read(path), History()
    for one in records:
        by_hand.add(one)
    assert told.step == by_hand.step == 5 * WINDOW - 1
    assert told.evaluations == by_hand.evaluations
    assert told.learner_seconds() == by_hand.learner_seconds()
    assert read(tmp_path / "none.jsonl").step == 0


@pytest.mark.parametrize("each", [0, 6])
def test_evaluations_push_no_step_out_of_a_file(tmp_path: Path, each: int) -> None:
    path = tmp_path / "metrics.jsonl"
    records = []
    for step in range(1, 5 * WINDOW):
        records += [record(step), *[evaluated(step, 0.5)] * each]
    # Results of an evaluator that is far behind come all at once.
    records += [evaluated(step, 0.5) for step in range(1, 3 * WINDOW)]
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    told, by_hand = read(path), History()
    for one in records:
        by_hand.add(one)
    assert told.step == by_hand.step == 5 * WINDOW - 1
    assert told.values("reward/mean") == by_hand.values("reward/mean")
    assert len(told.values("reward/mean")) == WINDOW
    assert told.evaluations == by_hand.evaluations


def test_an_alarm_of_the_ratio_check_is_kept_however_long_ago(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [record(step) for step in range(1, 5 * WINDOW)]
    records[4], records[6] = alarmed(5), alarmed(7)
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    told, by_hand = read(path), History()
    # A learner that was killed writes its last steps again.
    for one in [*records[:7], *records[3:]]:
        by_hand.add(one)
    assert told.alarm == by_hand.alarm == f"step 7: {ALARM} (2 such steps in this run)"
    assert told.learner_seconds() == by_hand.learner_seconds()
    assert History().alarm == ""
