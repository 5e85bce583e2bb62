"""Which problems' pairs are kept out of the training of preferences."""

from __future__ import annotations

from collections.abc import Iterable

from ...common.errors import DataError
from ...common.records import Problem
from ...common.seeds import keyed_seed


def held_out(problems: Iterable[Problem], share: float, seed: int) -> frozenset[str]:
    """Ids of the problems that are held out: those of a share of the prompts, drawn by the seed.

    All pairs of one prompt are on the same side, so that no held-out response is trained on, and a smaller
    share is a part of a larger one.

    Raises:
        DataError: the share takes all prompts.
    """
    of_prompt: dict[bytes, list[str]] = {}
    for problem in problems:
        of_prompt.setdefault(problem.prompt_tokens.tobytes(), []).append(problem.problem_id)
    ranked = sorted(of_prompt, key=lambda prompt: keyed_seed(seed, "held out", prompt.hex()))
    count = max(1, round(share * len(ranked))) if share else 0
    if share and count >= len(ranked):
        raise DataError(
            f"data.heldout_pairs={share:g} of {len(ranked)} prompts leaves none to train on: lower it, or "
            f"name more data"
        )
    return frozenset(name for prompt in ranked[:count] for name in of_prompt[prompt])
