"""Supervised learning from all answers of conversations, without a rollout worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import Run


def conversation(number: int) -> dict[str, object]:
    """A question that a tool answers, and another one."""
    call = {"function": {"name": "multiply", "arguments": json.dumps({"a": number, "b": 3})}}
    product = str(3 * number)
    return {
        "messages": [
            {"role": "user", "content": f"{number}*3=?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": product},
            {"role": "assistant", "content": product},
            {"role": "user", "content": "And the first number?"},
            {"role": "assistant", "content": str(number)},
        ]
    }


@pytest.mark.timeout(200)
def test_all_answers_of_conversations_are_learned(tmp_path: Path) -> None:
    rows = [json.dumps(conversation(number)) for number in range(10, 18)]
    (tmp_path / "chats.jsonl").write_text("\n".join(rows) + "\n")
    run = Run(
        tmp_path,
        *("offline", "miniature-sft", "model.path=miniature-tools", "run.dir=run", "run.steps=12"),
        *(
            "data.miniature=null",
            "data.train=[{path: chats.jsonl, turns: all}]",
            "data.evaluate=[]",
        ),
        *("evaluate.at_start=false", "evaluate.at_end=false", "rollout.max_new_tokens=128"),
        *("data.max_prompt_tokens=64", "learner.micro_batch_tokens=512"),
        *("learner.objective.aggregation=token_mean", "replay.groups_per_step=8"),
    )
    assert run.wait() == 0, run.said()
    assert "data chats: 8 problems, 8 expert traces (8 not graded)" in run.said()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "train/nll" in record]
    assert steps[-1]["train/nll"] < 0.7 * steps[0]["train/nll"]
    # Most of a conversation's tokens are written by others, and are not scored.
    assert 8 * steps[0]["replay/expert_length"] > 2 * steps[0]["train/tokens_expert"] > 0
