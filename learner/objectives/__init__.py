"""The objectives: statistics of a batch plus an additive loss over its rows.

:mod:`.base` has the contract and the registry; the other modules have the objectives by family. Names,
equations, sources and the settings that each reads are in :mod:`tandem.common.objectives`, from which
``docs/objectives.md`` is made.
"""

from .base import (
    REGISTRY,
    Column,
    FunctionObjective,
    LossFunction,
    Objective,
    Sums,
    Unit,
    make,
    register,
)
from .critic import Ppo
from .mixed import Chord, ExGrpo, Luffy, LuffyCode, PrefixRft, RlPlus, Srft
from .policy import Cispo, Corrected, Decoupled, Grpo, Gspo, GspoToken, PolicyGradient, Reinforce
from .preference import Cpo, Dpo, Kto, Orpo
from .supervised import Distill, RlSftLoss, Sft

__all__ = [
    "Objective",
    "Column",
    "Unit",
    "Sums",
    "FunctionObjective",
    "LossFunction",
    "REGISTRY",
    "make",
    "register",
    "PolicyGradient",
    "Grpo",
    "Reinforce",
    "Gspo",
    "GspoToken",
    "Cispo",
    "Corrected",
    "Decoupled",
    "Ppo",
    "Luffy",
    "LuffyCode",
    "ExGrpo",
    "RlPlus",
    "Srft",
    "PrefixRft",
    "Chord",
    "RlSftLoss",
    "Sft",
    "Distill",
    "Dpo",
    "Cpo",
    "Orpo",
    "Kto",
]
