"""Publishes the learner's weights: each version once, with the scores by which engines check it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...common.config import Config
from ...common.records import Version
from ...common.telemetry import Clock
from ...common.weights.manifest import ScoredRows
from ...common.weights.protocol import Membership
from ...common.weights.sender import WeightSender
from ..ranks import Leader
from ..scored import as_published, fixed_rows

log = logging.getLogger("tandem.learner")


class Publishing:
    """The versions of one term.

    Args:
        config: the run's config.
        leader: holds the weights.
        clock: clock of the learner's loop.
    """

    def __init__(self, config: Config, leader: Leader, clock: Clock) -> None:
        self._config = config
        self._leader = leader
        self._clock = clock
        # Shorter than the run's own rows, which are the only ones that the model was tested for.
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens - 1
        vocabulary = leader.engine.model.config.get_text_config().vocab_size
        self._rows = fixed_rows(vocabulary, longest, config.run.seed)
        self._sender: WeightSender | None = None
        self._published: Version | None = None

    def start(self, member: Membership, term: int, snapshots: Path) -> None:
        """Starts to send; until then :meth:`publish` does nothing.

        Args:
            member: the learner's membership of the run.
            term: the learner's term.
            snapshots: folder for the way through files.
        """
        self._sender = WeightSender(member, self._config, term, snapshot_folder=snapshots)
        self._sender.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Publishes nothing meanwhile, while steps are trained again."""
        sender, self._sender = self._sender, None
        try:
            yield
        finally:
            self._sender = sender

    def publish(self, version: Version) -> None:
        """Publishes the present weights as this version, unless they are published."""
        if self._sender is None or self._published == version:
            return
        if self._published is not None and not self._config.learner.train:
            self.restamp(version)
            return
        scored = self._scored(version.step)
        with self._clock.doing("publish"):
            self._sender.publish(version, self._leader.parameters(), scored)
        self._leader.engine.memory.staged = int(self._sender.stats()["buffer_bytes"])
        self._published = version

    def has(self, step: int) -> bool:
        """Whether the published weights have the update of this step."""
        return self._published is not None and self._published.step >= step

    def restamp(self, version: Version) -> None:
        """Says that the published weights are this version too."""
        if self._sender is not None:
            self._published = version
            self._sender.restamp(version)

    def stats(self) -> dict[str, Any]:
        """Counters of the sender."""
        return self._sender.stats() if self._sender is not None else {}

    def close(self) -> None:
        """Ends the sender."""
        if self._sender is not None:
            self._sender.close()

    def _scored(self, step: int) -> ScoredRows | None:
        """Scores of the run's fixed rows; None if nobody is to check them."""
        if self._config.weights.check_bound == 0:
            return None
        with self._clock.doing("score"):
            logprobs = self._leader.score(self._rows, getattr(torch, self._config.engine_dtype))
        if not bool(torch.isfinite(logprobs).all()):
            log.warning(f"step {step}: the check's rows have log-probs that aren't finite")
            return None
        return as_published(self._rows, logprobs)
