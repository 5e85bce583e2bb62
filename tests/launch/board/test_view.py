"""The lines of the live view: no wider and no more than the window, and what they tell."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from board_examples import ALARM, KNOWN, NOW, REPORTS, alarmed, facts, history, member, snapshot

from tandem.launch.board.assembly import assemble
from tandem.launch.board.history import History
from tandem.launch.board.page import show
from tandem.launch.board.view import ASCII, draw


def text(columns: int, rows: int | None = None, **changes: object) -> list[str]:
    return [line.plain for line in draw(snapshot(**changes), columns, rows)]


def test_it_tells_every_figure_at_80_columns() -> None:
    told = "\n".join(text(80))
    for figure in (
        *("miniature", "runs/miniature", "running", "1:02", "100/250", "2.0 steps/s", "1:15 left"),
        *("reward    0.400", "no signal in 25% of groups", "50.0% at step 100", "0.0 25.0 50.0"),
        *("sampled 1,500/s", "trained 2,400/s", "length 52.5", "entropy 0.125"),
        *("leased 8", "submitted 3", "grading 2", "graded 4", "taken 5", "trained 792"),
        *("to lease again 1", "rejected 6", "evaluations due 1", "0.8 steps (limit 1)"),
        *("25%", "75%", "waits for rollout: the next batch", "waits for learner: staleness"),
        *("rollout-0 v1.99", "restarts  1", "rollout-0 (SIGKILL) at 03:04:05", "graders 2"),
    ):
        assert figure in told


@pytest.mark.parametrize("columns", [20, 40, 60, 79, 80, 119, 120, 200])
def test_no_line_is_wider_than_the_window(columns: int) -> None:
    many = tuple(member(f"rollout-{n}", version=[1, 99]) for n in range(30))
    for changes in ({}, {"members": many}):
        lines = draw(snapshot(**changes), columns)
        assert max(line.cell_len for line in lines) <= columns


def test_a_wide_window_is_used() -> None:
    assert max(map(len, text(120))) > 100


@pytest.mark.parametrize("rows", [1, 3, 6, 10, 13])
def test_in_a_low_window_the_least_needed_lines_are_left_out(rows: int) -> None:
    told = text(80, rows)
    assert len(told) == rows
    assert any("100/250" in line for line in told)
    if rows >= 3:
        assert any("held-out" in line for line in told)


def test_more_processes_than_find_room_are_counted() -> None:
    many = tuple(member(f"rollout-{n}", version=[1, 99]) for n in range(30))
    told = "\n".join(text(80, members=many))
    assert "rollout-0 v1.99   rollout-1 v1.99" in told
    assert "+2" in told


def test_a_silent_process_is_pointed_out() -> None:
    assert "rollout-0 v1.99 silent for 31 s" in "\n".join(
        text(80, members=(member("rollout-0", age=31),))
    )


def test_what_another_host_says_cannot_move_the_cursor() -> None:
    told = [line.plain for line in draw(replace(snapshot(), alarms=("evil\x1b[2J\n",)), 80)]
    assert all(line.isprintable() for line in told)
    assert any("evil\\u001b[2J" in line for line in told)


def test_a_run_that_has_only_begun_can_be_drawn() -> None:
    told = [line.plain for line in draw(assemble(KNOWN, History(), now=NOW), 80)]
    assert any("0/250" in line for line in told)


def test_a_run_without_rewards_tells_its_loss() -> None:
    told = "\n".join(line.plain for line in draw(replace(snapshot(), reward=None, rewards=()), 80))
    assert "loss      0.500" in told


def test_a_terminal_without_block_characters_gets_none() -> None:
    assert all(line.plain.isascii() for line in draw(snapshot(), 100, glyphs=ASCII))


def test_what_is_printed_once_into_a_pipe_has_no_escape_sequences() -> None:
    stream = io.StringIO()
    show(snapshot(), stream)
    told = stream.getvalue()
    assert "\x1b" not in told
    assert "\r" not in told
    assert "row 101 is waiting for group 0-801" in told
    assert "heldout at step 100: 50.0% of 100" in told
    assert "restart: rollout-0" in told


GRADED: dict[str, object] = {
    "grader/recent": 40,
    "grader/correct": 30,
    "grader/wrong": 10,
    "grader/to_process": 20,
    "grader/cache_hits": 15,
    "grader/coalesced": 5,
    "grader/requests": 20,
    "grader/grade_seconds": 0.1,
    "grader/queue_wait_seconds": 0.02,
    "grader/hang_share": 0.125,
}


def test_what_the_pools_do_is_told_and_their_alarm_too() -> None:
    pool = {**REPORTS["reward-0"], **GRADED, "alarm": "12% of the last minute's requests hung"}
    made = snapshot(reports={**REPORTS, "reward-0": pool})
    assert made.grading is not None
    assert made.grading.verdicts == {"correct": 30, "wrong": 10}
    lines = [line.plain for line in draw(made, 100)]
    assert any("compared 20   cached 50%   each 5.0 ms   waited 1.0 ms" in line for line in lines)
    assert any("alarm" in line and "reward-0: 12% of the last" in line for line in lines)
    stream = io.StringIO()
    show(made, stream)
    assert "alarm: reward-0: 12% of the last minute's requests hung" in stream.getvalue()


def test_what_judges_do_has_a_line_of_its_own_where_there_are_any() -> None:
    judged = {
        "grader/judge_asked": 1200,
        "grader/judge_failures": 30,
        "grader/judge_retries": 45,
        "grader/judge_in_flight": 7,
        "grader/judge_seconds": 1800.0,
        "grader/judge_share": 0.025,
    }
    made = snapshot(reports={**REPORTS, "reward-0": {**REPORTS["reward-0"], **GRADED, **judged}})
    told = "asked 1,200   waiting 7   each 1.5 s   retries 45   failed 30 (2.5% lately)"
    assert any("judge" in line.plain and told in line.plain for line in draw(made, 120))
    without = snapshot(reports={**REPORTS, "reward-0": {**REPORTS["reward-0"], **GRADED}})
    assert not any("judge" in line.plain for line in draw(without, 120))


def test_an_alarm_of_the_learner_is_told_once_live_and_after_the_end() -> None:
    made = history()
    made.add(alarmed(101))
    learner = {**REPORTS["learner-0"], "alarm": f"step 101: {ALARM}"}
    live = assemble(KNOWN, made, facts(reports={**REPORTS, "learner-0": learner}), now=NOW)
    ended = assemble(KNOWN, made, now=NOW)
    elsewhere = assemble(KNOWN, History(), facts(reports={"learner-0": learner}), now=NOW)
    assert live.alarms == ended.alarms == (f"learner: step 101: {ALARM}",)
    assert elsewhere.alarms == (f"learner-0: step 101: {ALARM}",)
    assert any("alarm" in line.plain and "step 101" in line.plain for line in draw(live, 100))
    stream = io.StringIO()
    show(ended, stream)
    assert f"alarm: learner: step 101: {ALARM}" in stream.getvalue()
    assert ended.to_json()["alarms"] == ended.alarms


def test_a_worker_that_no_weights_can_reach_is_told_beside_the_learners_own_alarm() -> None:
    made = history()
    made.add(alarmed(101))
    text = "rollout-0 can't be sent new weights: weights.transport=nccl needs a GPU on each side"
    learner = {**REPORTS["learner-0"], "alarm": f"step 101: {ALARM}", "weights_alarm": text}
    live = assemble(KNOWN, made, facts(reports={"learner-0": learner}), now=NOW)
    assert live.alarms == (f"learner: step 101: {ALARM}", f"learner-0: {text}")


def test_why_the_figures_are_old_is_told() -> None:
    made = assemble(KNOWN, History(), facts(), problem="Redis at h:1 didn't answer", now=NOW)
    assert any("didn't answer" in line.plain for line in draw(made, 80))


def test_of_several_held_out_sets_the_first_of_the_settings_is_shown_by_name() -> None:
    known, made = replace(KNOWN, held_out=("math", "aime")), history(40)

    def told() -> str:
        return "\n".join(line.plain for line in draw(assemble(known, made, now=NOW), 100))

    for name, accuracy in (("aime", 0.75), ("math", 0.25)):
        assert "held-out" not in told()
        figures = {f"eval/{name}/accuracy": accuracy, f"eval/{name}/problems": 30}
        made.add({"step": 40, "eval/id": f"{name}@40", **figures})
    assert "held-out  25.0% at step 40 (30 problems of math)" in told()
    assert "of heldout" not in "\n".join(text(100))
