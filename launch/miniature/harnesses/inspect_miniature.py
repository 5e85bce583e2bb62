"""Inspect's task for the miniature's problems: greedy answers, graded by their last box (docs/serve.md).

Imports nothing of Tandem's: it runs where Inspect does.
"""

from __future__ import annotations

import re
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import CORRECT, INCORRECT, Score, Scorer, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate

BOX = re.compile(r"\\boxed\{([0-9]+)\}")


@scorer(metrics=[accuracy()])
def last_box() -> Scorer:
    """Whether an answer's last box holds the gold number."""

    async def score(state: TaskState, target: Target) -> Score:
        boxes = BOX.findall(state.output.completion)
        is_right = bool(boxes) and int(boxes[-1]) == int(target.text)
        return Score(value=CORRECT if is_right else INCORRECT, answer=boxes[-1] if boxes else None)

    return score


@task
def miniature(problems: str = "problems.jsonl", tokens: int = 54) -> Task:
    """The task.

    Args:
        problems: file with a problem a line; relative to the directory in which Inspect was started.
        tokens: greatest length of an answer.
    """
    fields = FieldSpec(input="question", target="answer", id="index")
    return Task(
        dataset=json_dataset(str(Path(problems).absolute()), fields),
        solver=generate(),
        scorer=last_box(),
        config=GenerateConfig(temperature=0.0, max_tokens=tokens),
    )
