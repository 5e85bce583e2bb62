"""Stands in for verifiers' own of that name, as far as the lister uses it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


class Data:
    def __init__(self, idx: int, game: str) -> None:
        self.idx, self.game = idx, game

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        return {"idx": self.idx, "name": f"{self.game}#{self.idx}", "prompt": "Grüß Gott"}


class Taskset:
    def __init__(self, config: SimpleNamespace) -> None:
        self.config = config
        self.bounded = not config.endless

    def __iter__(self) -> Iterator[SimpleNamespace]:
        for idx in itertools.count() if not self.bounded else range(3):
            yield SimpleNamespace(data=Data(idx, self.config.game))


def resolve_env_config(data: dict[str, Any]) -> SimpleNamespace:
    taskset = {"game": "?", "endless": False, **data["taskset"]}
    if taskset["id"] != "games":
        raise ModuleNotFoundError(f"taskset {taskset['id']!r} not found")
    return SimpleNamespace(taskset=SimpleNamespace(**taskset))


def load_taskset(config: SimpleNamespace) -> Taskset:
    return Taskset(config)
