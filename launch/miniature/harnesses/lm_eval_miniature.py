"""What lm-eval's tasks for the miniature's problems need. Imports nothing of Tandem's: it runs where lm-eval does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

BOX = re.compile(r"\\boxed\{([0-9]+)\}")
PROMPT = re.compile(r"([0-9]{2})((?:[+-][0-9])+)=\?<think>")
OFFERED = 4
"""Solutions to choose from."""


def grade(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether an answer's last box holds the gold number."""
    boxes = BOX.findall(results[0])
    return {"accuracy": float(bool(boxes) and int(boxes[-1]) == int(doc["answer"]))}


def solutions(doc: Mapping[str, Any]) -> list[str]:
    """A right solution, one whose last step is wrong, and two that stop too early, as the base model does."""
    found = PROMPT.fullmatch(doc["question"])
    if found is None:
        raise ValueError(f"{doc['question']!r} isn't a problem of the miniature's")
    total, chains = int(found[1]), [found[1]]
    for step in re.findall("[+-][0-9]", found[2]):
        total = (total + int(step)) % 100
        chains.append(f"{chains[-1]}{step}={total:02d}")
    off = (total + 1) % 100
    wrong = f"{chains[-1][:-2]}{off:02d}"
    made = [
        f"{chain}</think> <answer> \\boxed{{{chain[-2:]}}} </answer>"
        for chain in (chains[-1], wrong, chains[-2], chains[len(chains) // 2])
    ]
    turn = right(doc)
    return made[-turn:] + made[:-turn]


def right(doc: Mapping[str, Any]) -> int:
    """The right one's place among them."""
    return int(doc["index"]) % OFFERED
