"""Objectives of a user's own with bugs; test_own.py and test_trainer.py show what is told of them."""

import torch
from own_objective import unclipped

from tandem.learner.objectives import Grpo


def typo(rows, scalars, settings):
    return rows.logprob.sum()


def without_gradient(rows, scalars, settings):
    return rows.logprobs.sum().detach()


def a_number(rows, scalars, settings):
    return 0.5


def a_vector(rows, scalars, settings):
    return rows.logprobs * 0.1


def nothing(rows, scalars, settings):
    rows.logprobs.sum()


def three(rows, scalars, settings):
    return rows.logprobs.sum(), {}, {}


def a_text_among_sums(rows, scalars, settings):
    return rows.logprobs.sum(), {"mine": torch.tensor(1.0), "x": "text"}


def a_sum_without_a_name(rows, scalars, settings):
    return rows.logprobs.sum(), {3: 1.0}


def a_vector_among_sums(rows, scalars, settings):
    return rows.logprobs.sum(), {"x": rows.logprobs.detach()}


def out_of_memory(rows, scalars, settings):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def good(rows, scalars, settings):
    ratio = rows.logprobs.sum()
    return ratio * 0.0, {"number": 2, "tensor": ratio, "one": ratio.detach().reshape(1)}


def with_statistics(rows, scalars, settings):
    return rows.logprobs.sum()


with_statistics.statistics = lambda rows: {"most": rows.behavior.max()}


class Derived(Grpo):
    def loss(self, rows, scalars):
        total, sums = super().loss(rows, scalars)
        return total / self.scale, sums


def on_the_second_rank(rows, scalars, settings):
    if torch.distributed.get_rank():
        raise ValueError("only here")
    return rows.logprobs.sum()


def with_sums(rows, scalars, settings):
    """A good one, of whose sums one has the name of a metric."""
    return unclipped(rows, scalars, settings), {"loss": 99.0, "mine": 2.0}
