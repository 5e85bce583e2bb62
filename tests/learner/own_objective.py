"""A user's objective, as docs/objectives.md shows it; test_trainer.py trains with it."""

from tandem.learner.losses.aggregation import aggregate
from tandem.learner.losses.ratios import log_ratio


def unclipped(rows, scalars, settings):
    ratio = log_ratio(rows.logprobs, rows.behaviour).exp()
    losses = -rows.by_token(rows.advantages.to(ratio.dtype)) * ratio
    counted = ~rows.expert & rows.kept
    return aggregate(
        losses.where(counted, 0.0),
        row=rows.row,
        expert=rows.expert,
        lengths=rows.lengths,
        how=settings.aggregation,
        scalars=scalars,
    )
