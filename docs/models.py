"""Writes docs/models.md from the list of model families in tests/families.py.

.venv/bin/python docs/models.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("models.md")
LIST = PAGE.parent.parent / "tests" / "families.py"

HEAD = """# Models

Which decoder-only models of transformers train and sample as they are meant to. This page is made of
the list in [tests/families.py](../tests/families.py) by `python docs/models.py`; every entry is a test
(`tests/learner/forward/test_families.py`, `tests/rollout/test_families.py`), in which the family is made small from
its config, with random weights.

## What is checked when a run starts

The learner, the reference model of KL and preference losses, and the torch engine compute log-probs in
ways of their own. Before anything is trained or sampled, each holds its log-probs and entropies
against the model's own `forward(...).logits` in evaluation mode, through everything that it uses later (padded
rows, shared prompts, DeepSpeed with its ZeRO stage and ranks, the key-value cache), and the process ends with the
figures where they differ:

> model type 'phi3' in float32: the learner's log-probs are off the model's own by up to 0.73 nats, …

- The rows are random tokens: short ones of unlike lengths, some with a common prompt, and, for each window, chunk or
  length of the config at which a model computes otherwise, rows up to twice as long. What the run's rows
  can't reach (`data.max_prompt_tokens` + `rollout.max_new_tokens`) isn't tried.
- The bound is 1e-4 nats in float32, and grows with the log-probs beyond 5 nats, as rounding does: a trained model
  gives random tokens -35. In bfloat16 it is 0.3 and in float16 0.1, or four times what two of
  the model's own ways of attention differ by, if that is more: in half precision a small fault can't be told from
  rounding, so try a new model in float32 once.
- Short rows are held against transformers' plain attention (`eager`), since the faster ones leave out what they don't
  know. `model.attention=auto` takes `eager` for models of which that is known (a cap of the scores, attention
  sinks).
- Only the logits of the responses are made, so that long rows need no more memory than in training.

On the miniature all of it takes less than a tenth of a second.

## The list

{count} entries; {agree} agree in learner, reference model and torch engine to 1e-4 in float32. “Shared
prompts” tells whether a learner on a CPU computes a group's prompt once; others keep padded rows. vLLM takes new
weights under the names of the checkpoint: families marked † have others in transformers, and `rollout.engine=vllm`
refuses them. vLLM's log-probs are held against the learner's after every update
([weights](weights.md)).

| family | `model_type` | what a learner or an engine could get wrong | learner, reference | torch engine | shared prompts |
|---|---|---|---|---|---|
"""

TAIL = """
Another model is tried in the same way when a run starts: a refusal costs a few seconds. To have it in the list,
add its config to `tests/families.py`.
"""


def families() -> list[Any]:
    """The list of tests/families.py."""
    spec = importlib.util.spec_from_file_location("families", LIST)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["families"] = module
    spec.loader.exec_module(module)
    found: list[Any] = module.FAMILIES
    return found


def page() -> str:
    """The whole page."""
    known = families()
    agree = sum(not family.learner and not family.engine for family in known)
    rows = [
        f"| {family.name}{' †' if family.renamed else ''} | `{family.kind}` | {family.shows} "
        f"| {told(family.learner)} | {told(family.engine)} | {'yes' if family.shares else 'no'} |"
        for family in known
    ]
    return HEAD.format(count=len(known), agree=agree) + "\n".join(rows) + "\n" + TAIL


def told(refusal: str) -> str:
    """A cell of the table."""
    return f"refused: {refusal}" if refusal else "agrees"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
