"""The teacher of distillation: a frozen model, whole on every rank."""

from __future__ import annotations

from dataclasses import replace

from ...common.config import Config
from ..engine.deepspeed_engine import DeepSpeedEngine
from ..forward.divergence import Lesson
from ..objectives import Distill
from ..rows.microbatch import MicroBatch, laid_out
from .reference import frozen_policy


class Teacher:
    """Reads micro-batches before the policy does.

    Args:
        config: the run's config, with ``learner.teacher``.
        engine: this rank's engine.
        objective: says which divergence is computed.

    Raises:
        ConfigError: its log-probs aren't the model's own.
        DataError: it can't be loaded.
    """

    def __init__(self, config: Config, engine: DeepSpeedEngine, objective: Distill) -> None:
        self._objective = objective
        self.policy = frozen_policy(config, engine.device, "learner.teacher", whose="the teacher's")
        engine.memory.add_frozen(self.policy)
        self._known = self.policy.model.config.get_text_config().vocab_size

    def lesson(self, micro: MicroBatch) -> Lesson:
        """What it says of a micro-batch's tokens. Ranks needn't ask alike often."""
        micro = laid_out(micro, self.policy.layout)
        # Ids beyond its own are padding of the policy's output, which is sampled next to never.
        micro = replace(micro, input_ids=micro.input_ids.clamp(max=self._known - 1))
        settings = self._objective.settings
        return Lesson(
            hidden=self.policy.hidden(micro),
            head=self.policy.head,
            temperature=settings.divergence_temperature,
            mix=settings.divergence_mix,
            logprobs=self._objective.needs_logprobs,
        )
