"""All reward components by name; importing this module fills the registry.

To add one, write a factory whose keyword arguments are the component's parameters, and register it
(in one of the modules beside this one, or here).
"""

from __future__ import annotations

from ...common.records import Verdict
from . import classifier, code, environment, equation, formats, judge, lengths
from .registry import COMPONENTS, Component, Graded, Kind, component, register

__all__ = [
    "COMPONENTS",
    "Component",
    "Graded",
    "Kind",
    "classifier",
    "code",
    "component",
    "environment",
    "equation",
    "formats",
    "judge",
    "lengths",
]


@register("accuracy", needs_verdict=True)
def accuracy() -> Component:
    """1 for the verdict ``correct``, 0 if the answer isn't right, None without a verdict."""

    def value(sample: Graded) -> float | None:
        if sample.verdict is Verdict.CORRECT:
            return 1.0
        return None if sample.verdict.leaves_baseline else 0.0

    return value
