"""``evaluate``: evaluations on the held-out sets during a run."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from .section import NonNegative, Positive, Section


class EvaluateConfig(Section):
    """Evaluation on the held-out sets during a run."""

    every: NonNegative = 0
    """Steps from one evaluation by a rollout worker to the next; 0 = none during the run."""
    at_start: bool = True
    """Evaluate the base model, for ``accuracy_before``."""
    at_end: bool = True
    """Evaluate the trained model, for ``accuracy_after``."""
    limit: Positive | None = None
    """Number of problems in evaluations during the run; the first and the last use the whole set."""
    exact: bool = False
    """Whether the learner waits for each evaluation, so that it measures exactly that step's weights."""
    best: str | None = None
    """Figure of the held-out sets by which the best model of the run is kept in ``best/``, as in
    ``heldout/accuracy`` (``-heldout/length`` keeps the one with the smallest); needs ``exact``. Only
    evaluations of equally many problems are compared: with ``limit`` not the first and the last."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sampling temperature; 0 = greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the probability that responses are sampled from; has no effect at temperature 0."""
    samples: Positive = 1
    """Responses per problem; accuracy is their mean (avg@k)."""
