"""``evaluate``: evaluations on the held-out sets during a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .section import NonNegative, Positive, Section


class EvaluateConfig(Section):
    """Evaluation on the held-out sets during a run."""

    every: NonNegative = 0
    """Steps between evaluations by a rollout worker; 0 = none in between."""
    at_start: bool = True
    """Evaluate the base model: ``accuracy_before``."""
    at_end: bool = True
    """Evaluate the trained model: ``accuracy_after``."""
    limit: Positive | None = None
    """Problems of the evaluations in between; first and last use the whole set."""
    exact: bool = False
    """The learner waits for each evaluation, so that it is of exactly that step."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 = greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus that responses are sampled from; at temperature 0 the most likely token is in any."""
    samples: Positive = 1
    """Responses a problem; accuracy is their mean (avg@k)."""
