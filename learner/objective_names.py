"""Names of the built-in objectives, for those who check a config and import no torch.

The objectives themselves are in :mod:`tandem.learner.objectives`; its registry takes only names
that stand here.
"""

from __future__ import annotations

import difflib

from ..common.errors import ConfigError

OBJECTIVES = ("grpo", "luffy", "rl_sft_loss", "sft")
"""Values of ``learner.objective.name``, beside import paths."""


def check_name(name: str) -> None:
    """Raises ``ConfigError`` for what is neither a built-in name nor looks like an import path."""
    if name in OBJECTIVES or "." in name or ":" in name:
        return
    near = difflib.get_close_matches(name, OBJECTIVES, n=1, cutoff=0.5)
    raise ConfigError(
        f"learner.objective.name={name!r} is no objective{f' (did you mean {near[0]}?)' if near else ''}"
        f": choose one of {', '.join(OBJECTIVES)}, or name a class as package.module:Class"
    )
