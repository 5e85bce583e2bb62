"""What a config may not ask of its evaluations: rules as those of :mod:`.choices`."""

from __future__ import annotations

from ..groups import is_online
from ..reading.of_set import of_set
from ..tree import Config
from .updates import Rule


def _evaluations(config: Config) -> str | None:
    evaluate = config.evaluate
    if evaluate.every and not config.data.evaluate:
        return (
            f"evaluate.every={evaluate.every} has no set to evaluate on: name one in data.evaluate, or "
            f"set evaluate.every=0"
        )
    if evaluate.samples > 1 and evaluate.temperature == 0:
        return (
            f"evaluate.samples={evaluate.samples} at evaluate.temperature=0 are all the same "
            f"response: set evaluate.temperature=1, or evaluate.samples=1"
        )
    for held in config.data.evaluate:
        own = of_set(config, held)
        if held.samples is not None and held.samples > 1 and own.evaluate.temperature == 0:
            return (
                f"data.evaluate {held.name}: samples={held.samples} at temperature 0 are all the same "
                f"response: set its temperature too, or evaluate.temperature"
            )
        if own.rollout.max_new_tokens > config.rollout.max_new_tokens:
            return (
                f"data.evaluate {held.name}: max_new_tokens={held.max_new_tokens} is over "
                f"rollout.max_new_tokens={config.rollout.max_new_tokens}, for which the engines have room: "
                f"lower it, or raise the latter"
            )
    return None


BEST_BY = ("accuracy", "format", "length")
"""Figures of every evaluation by which a model can be the best, beside accuracies of single sources."""


def _best(config: Config) -> str | None:
    evaluate = config.evaluate
    if evaluate.best is None:
        return None
    name, _, figure = evaluate.best.removeprefix("-").partition("/")
    sets = [one.name for one in config.data.evaluate]
    if name not in sets or not (figure in BEST_BY or figure.startswith("source/")):
        return (
            f"evaluate.best={evaluate.best} should be a set of data.evaluate ({', '.join(sets) or 'none'}) "
            f"and {' or '.join(BEST_BY)}, as in {sets[0] if sets else 'heldout'}/accuracy"
        )
    if not evaluate.exact:
        return (
            f"evaluate.best={evaluate.best} keeps the very weights that were measured: set "
            f"evaluate.exact=true, so that the learner waits for each evaluation"
        )
    said = f"evaluate.best={evaluate.best} compares evaluations during the run, and"
    if not evaluate.every:
        return f"{said} evaluate.every=0 makes none: set it to a number of steps"
    # Of other runs a worker that joins evaluates.
    if not is_online(config) and not config.rollout.workers:
        return f"{said} rollout.workers=0 leaves nobody to make them: set rollout.workers=1"
    return None


EVALUATION_RULES: tuple[Rule, ...] = (_evaluations, _best)
