"""The plan's figures of a rank of the learner beside measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...common.longest_pass import alone
from ..wording import human
from . import memory, speed
from .lengths import Lengths
from .node import Node
from .sizes import ModelShape

if TYPE_CHECKING:
    from ...common.config import Config

LEFT_OUT = "weight staging"
"""The part that no measurement has, since there are no engines to stage weights for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A rank's memory on paper and as it was measured, and the speed of its step."""

    paper: dict[str, int]
    """Part to bytes on the device."""
    measured: dict[str, int]
    """The same parts, as they were measured."""
    tokens_per_second: float
    """Measured: tokens of the forward passes by the seconds of the step."""
    paper_tokens_per_second: float | None
    """The same on paper; None on a CPU, for which no speed is known."""
    notes: tuple[str, ...]
    """What the measurement leaves out."""
    step: Mapping[str, Any]
    """The measurement itself, as :mod:`tandem.learner.measuring` gives it."""

    @property
    def ratio(self) -> float:
        """Measured bytes by those on paper, all parts together."""
        return sum(self.measured.values()) / max(1, sum(self.paper.values()))

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {**asdict(self), "ratio": self.ratio}

    def lines(self) -> list[str]:
        """Lines for a person."""
        rows = [("", "on paper", "measured", "ratio")]
        for part, size in self.paper.items():
            rows.append(_row(part, size, self.measured.get(part, 0)))
        rows.append(_row("in all", sum(self.paper.values()), sum(self.measured.values())))
        found = self.step
        lines = ["measured: one rank of the learner in its longest step, on this machine"]
        lines += [f"  {a:<14}{b:>10}{c:>12}{d:>8}" for a, b, c, d in rows]
        lines.append(
            f"  {found['rows']:,} rows of {found['row_tokens']:,} tokens in {found['micro_batches']} "
            f"pass(es), {found['forward_tokens']:,} tokens in {found['seconds']:.3g} s: "
            f"{self.tokens_per_second:,.0f} tokens/s"
            + (
                f" (on paper {self.paper_tokens_per_second:,.0f})"
                if self.paper_tokens_per_second
                else ""
            )
        )
        return [*lines, *(f"  {note}" for note in self.notes)]


def _row(part: str, paper: int, measured: int) -> tuple[str, str, str, str]:
    ratio = f"{measured / paper:.2f}" if paper else "-"
    return part, human(paper), human(measured), ratio


def compare(
    config: Config,
    shape: ModelShape,
    step: Mapping[str, Any],
    node: Node | None = None,
) -> Comparison:
    """Compares a measured step with the plan's figures for one rank.

    Args:
        config: the run's config.
        shape: sizes of its model.
        step: the measurement, as :mod:`tandem.learner.measuring` gives it.
        node: this machine; the speed on paper is known for its GPUs alone.
    """
    notes = [f"left out: {LEFT_OUT}, for which there are no engines here"]
    if config.learner.ranks > 1:
        notes.append(
            f"left out: what learner.ranks={config.learner.ranks} divide by ZeRO and exchange; this is "
            f"one rank that holds everything, and so are the figures on paper"
        )
    if not step["applied"]:
        notes.append("the made-up rows gave no finite loss, so the optimizer made no step")
    return Comparison(
        paper=on_paper(config, shape, str(step["device"])),
        measured=dict(step["parts"]),
        tokens_per_second=step["forward_tokens"] / max(float(step["seconds"]), 1e-9),
        paper_tokens_per_second=None
        if node is None or step["device"] != "cuda"
        else speed_on_paper(config, shape, step, node),
        notes=tuple(notes),
        step=step,
    )


def speed_on_paper(config: Config, shape: ModelShape, step: Mapping[str, Any], node: Node) -> float:
    """Tokens per second of one rank that makes this step on one of the node's GPUs, its optimizer included."""
    tokens = int(step["row_tokens"])
    work = speed.Load(
        samples=0,
        rows=int(step["rows"]),
        groups=1,
        prompt=0.0,
        lengths=Lengths(mean=tokens, limit=tokens, spread=0.0),
    )
    return work.trained / speed.learner_seconds(alone(config), shape, node, work)


def on_paper(config: Config, shape: ModelShape, device: str) -> dict[str, int]:
    """The plan's parts of one rank that is alone, in the measurement's order and under its names."""
    # The largest micro-batch stays that of the run.
    lone = alone(config)
    parts = dict(memory.learner(lone, shape, device).parts)
    parts |= memory.of_a_pass(config, shape, device)
    critic = config.learner.critic
    if critic is not None:
        own = memory.critic_shape(config, shape)
        size = own.parameters
        for part, more in memory.states(lone, size, size, critic.optimizer).items():
            parts[part] += more
    return {
        "weights": parts["weights"]
        + sum(parts.get(name, 0) for name in ("adapters", "reference", "teacher")),
        "gradients": parts["gradients"],
        # On a CPU what is offloaded is as near as the rest; most of it is the optimizer's.
        "optimizer": parts["optimizer"] + parts.get("offloaded", 0),
        "activations": parts["activations"] + parts["logits"],
        "runtime": parts["runtime"],
    }
