"""Loads what processes of :mod:`forked` need."""

from __future__ import annotations

import forked_targets  # noqa: F401

from tandem.common.config import ModelConfig, RolloutConfig
from tandem.rollout.engines import load_engine

load_engine(ModelConfig(path="miniature"), RolloutConfig(engine="torch"))
