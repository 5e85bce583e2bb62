"""The same problems as rows of every form."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def asked(n: int) -> str:
    return f"What is {n} + {n}?"


def solution(n: int) -> str:
    return f"Twice {n} is \\boxed{{{2 * n}}}."


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ROWS: dict[str, Callable[[int], Row]] = {
    "task": lambda n: {
        "environment": "doubling",
        "task": {"number": n, "hints": [asked(n)]},
        "gold": str(2 * n),
    },
    "prompt": lambda n: {"prompt": [_said("user", asked(n))], "environment": "sums", "level": n},
    "luffy": lambda n: {
        "data_source": "sums",
        "prompt": [_said("user", asked(n))],
        "target": [_said("assistant", solution(n))],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        "extra_info": {"index": n},
    },
    "prompt_response": lambda n: {
        "prompt": asked(n),
        "response": solution(n),
        "ground_truth": str(2 * n),
    },
    "labelled": lambda n: {
        "prompt": asked(n),
        "completion": solution(n),
        "label": n % 2 == 0,
        "gold": str(2 * n),
    },
    "problem_solution": lambda n: {
        "problem": asked(n),
        "level": "Level 3",
        "type": "Algebra",
        "solution": solution(n),
    },
    "question_answer": lambda n: {"id": n, "question": asked(n), "answer": float(2 * n)},
    "gsm8k": lambda n: {
        "question": asked(n),
        "answer": f"Twice {n} is {n}*2=<<{n}*2={2 * n}>>{2 * n}.\n#### {2 * n:,}",
    },
    "multiple_choice": lambda n: {
        "question": asked(n),
        "choices": {
            "text": [str(2 * n), str(2 * n + 1), "both\nof them"],
            "label": ["1", "2", "3"],
        },
        "answerKey": str(1 + n % 3),
    },
    "conversation": lambda n: {
        "messages": [_said("user", asked(n)), _said("assistant", solution(n))],
        "ground_truth": str(2 * n),
        "dataset": "sums",
    },
    "preference": lambda n: {
        "prompt": asked(n),
        "chosen": solution(n),
        "rejected": "I don't know.",
        "gold": str(2 * n),
    },
    "hh": lambda n: {
        "chosen": f"\n\nHuman: {asked(n)}\n\nAssistant: It is {2 * n}.",
        "rejected": f"\n\nHuman: {asked(n)}\n\nAssistant: No idea.",
    },
    "countdown": lambda n: {"nums": [n, 2, 3], "target": 2 * n + 3},
    "instructions": lambda n: {"id": n, "prompts_final": asked(n), "harm_area": "sums"},
}

BAD: dict[str, Sequence[Row | str]] = {
    "task": ({"task": {}}, {"gold": ["1", "2"]}, {"gold": " "}, {"gold": True}, {"ability": 7}),
    "prompt": (
        {"prompt": ""},
        {"prompt": []},
        {"prompt": None},
        {"prompt": [_said("robot", "x")]},
        {"gold": ["1", "2"]},
    ),
    "luffy": (
        {"prompt": []},
        {"reward_model": {"style": "rule", "ground_truth": None}},
        {"target": [_said("user", "x")]},
        {"data_source": 7},
        {"extra_info": "x"},
    ),
    "prompt_response": (
        {"prompt": ""},
        {"response": None},
        {"response": 5},
        {"ground_truth": ["1", "2"]},
        {"prompt": [_said("robot", "x")]},
    ),
    "labelled": (
        {"label": "yes"},
        {"label": None},
        {"prompt": " "},
        {"completion": ""},
        {"completion": {"a": 1}},
    ),
    "problem_solution": (
        {"problem": None},
        {"problem": ["x"]},
        {"solution": ""},
        {"solution": 3},
        {"problem": "\n"},
    ),
    "question_answer": (
        {"question": ""},
        {"question": 4},
        {"question": None},
        {"answer": True},
        {"answer": " "},
    ),
    "gsm8k": (
        {"answer": "It is 4."},
        {"answer": "It is 4.\n####"},
        {"answer": None},
        {"question": ""},
        {"question": 1},
    ),
    "multiple_choice": (
        {"answerKey": "4"},
        {"choices": {"text": ["4"], "label": ["1"]}},
        {"choices": ["4", ""]},
        {"choices": {"text": ["4", "5"], "label": ["1"]}},
        {"question": None},
    ),
    "conversation": (
        {"messages": []},
        {"messages": [_said("assistant", "x")]},
        {"messages": [{"text": "x"}]},
        {"messages": "x"},
        {"messages": [_said("user", "")]},
    ),
    "preference": (
        {"chosen": "same", "rejected": "same"},
        {"chosen": ""},
        {"rejected": None},
        {"prompt": 3},
        {"rejected": [_said("user", "x")]},
    ),
    "hh": (
        {"chosen": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: d"},
        {"rejected": "\n\nHuman: another\n\nAssistant: b"},
        {"chosen": ""},
        {"rejected": "\n\nAssistant: b"},
        {"chosen": None},
    ),
    "countdown": (
        {"nums": []},
        {"nums": None},
        {"nums": ["3"]},
        {"target": None},
        {"target": 2.5},
    ),
    "instructions": (
        {"prompts_final": None},
        {"prompts_final": ""},
        {"prompts_final": 4},
        {"prompts_final": " "},
        {"prompts_final": ["x"]},
    ),
}
"""For each form five rows that can't be used, by what they change in a good one."""


def write_lines(path: Path, rows: Sequence[Row | str]) -> Path:
    """JSON lines; a text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    data = ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_array(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text(json.dumps(list(rows), indent=1), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[Row]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path
