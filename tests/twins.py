"""Twins of the presets for GPUs: each one's method on the miniature (``PRESET+miniature-twin``)."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq

from tandem.common.config import Config
from tandem.launch.miniature.parquet import write
from tandem.launch.run.opened.presets import load, names

STEPS = 3
"""Steps of a twin."""
PRESETS = [name for name in names() if not name.startswith("miniature")]
STAGED = [name for name in PRESETS if load(name).stages]
SAMPLED = "qwen2.5-math-1.5b-expert-iteration-sample-2gpu"
AGAIN = "qwen2.5-math-1.5b-expert-iteration-sft-1gpu"
"""It trains on what :data:`SAMPLED` has archived."""
OTHER_REWARDS = ("qwen2.5-7b-countdown-lora-1gpu", "qwen3-0.6b-appworld-1gpu")
"""They pay for what the miniature doesn't write, tags and equations, and programs: their twins pay for right answers."""


def overrides(name: str) -> list[str]:
    """What a twin needs besides, since the miniature's files and sizes differ."""
    given = ["evaluate.at_end=false"]
    if name in STAGED:
        if load(name).rounds > 1:
            given += ["rounds=2", f"sft.run.steps={STEPS}"]
        if name == "llama3-8b-cs336-sft-then-dpo-4gpu":
            given += ["sft.data.pack_tokens=32", "dpo.data.train=[{path: pairs.jsonl}]"]
        return given
    config = load(name).resolve([])
    if config.learner.objective.rejects:
        given.append("data.train=[{path: pairs.jsonl}]")
    if config.data.pack_tokens is not None:
        given.append("data.pack_tokens=32")
    if name in OTHER_REWARDS:
        given.append("reward.components=[{name: accuracy}]")
    if config.environments.is_on:
        given.append("environments.use={}")
    if name == SAMPLED:
        given.append("run.dir=sampled")
    if name == AGAIN:
        given.append("data.train=[{path: sampled/archive, correct_only: true}]")
    return given


def twin(name: str) -> Config:
    """The config of the twin of a preset that has no stages."""
    return load(f"{name}+miniature-twin").resolve(overrides(name))


def command(name: str) -> str:
    """The command that starts a preset's twin."""
    if name in STAGED:
        return "start"
    return "offline" if twin(name).learner.source == "offline" else "start"


def different() -> list[str]:
    """Of the presets without stages, one of all whose twins are the same run."""
    twins: list[Config] = []
    chosen = []
    for name in PRESETS:
        if name in STAGED:
            continue
        made = twin(name)
        same = made.model_copy(update={"run": made.run.model_copy(update={"dir": None})})
        if same not in twins:
            twins.append(same)
            chosen.append(name)
    return chosen


def prepare(folder: Path) -> None:
    """Writes the pairs of right and wrong chains that some of the twins train on, ``pairs.jsonl``."""
    write(folder / "chains", "easy", traces=64, train=1, held_out=1)
    write_pairs(folder / "chains" / "expert.parquet", folder / "pairs.jsonl")


def write_pairs(source: Path, to: Path) -> None:
    """Right chains and, as the worse ones, the same with another result."""
    lines = []
    for row in pq.read_table(source).to_pylist():
        right = row["target"][0]["content"]
        head, _, tail = right.rpartition("{")
        wrong = f"{head}{{{(int(tail.partition('}')[0]) + 7) % 100}}}{tail.partition('}')[2]}"
        pair = {"prompt": row["prompt"][0]["content"], "chosen": right, "rejected": wrong}
        lines.append(json.dumps(pair))
    to.write_text("\n".join(lines) + "\n")
