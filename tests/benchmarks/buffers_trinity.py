"""Groups through the buffers of Trinity-RFT, in its own virtual environment; :mod:`buffers` starts this.

    python buffers_trinity.py GROUPS.npz --kind queue --groups 256 --row 16

Explorers write and a trainer reads, each an actor of Ray, as Trinity itself has it; a group's samples are one write of
its public writers. Prints the seconds of putting and of taking as JSON on the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from trinity.buffer.reader.queue_reader import QueueReader
from trinity.buffer.reader.sql_reader import SQLReader
from trinity.buffer.writer.queue_writer import QueueWriter
from trinity.buffer.writer.sql_writer import SQLWriter
from trinity.common.config import StorageConfig
from trinity.common.experience import EID, Experience

NAMESPACE = "buffers"


def storage(kind: str, folder: Path, groups: int) -> StorageConfig:
    """The settings of a buffer: kept in SQLite, read once, nothing dropped."""
    config = StorageConfig(
        name="experiences",
        storage_type=kind,
        path=f"sqlite:///{folder}/experiences.db",
        capacity=groups,
        max_read_timeout=60.0,
        ray_namespace=NAMESPACE,
        schema_type="experience",
    )
    assert config.replay_buffer is not None
    config.replay_buffer.enable = False
    return config


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
class Explorer:
    """Writes its share of the groups."""

    def __init__(self, kind: str, config: StorageConfig, path: str, number: int) -> None:
        self._writer = (QueueWriter if kind == "queue" else SQLWriter)(config)
        self._group = np.load(path)
        self._number = number

    async def ready(self) -> None:
        await self._writer.acquire()

    async def put(self, share: int, depth: int) -> None:
        """Makes and writes groups, up to ``depth`` at a time."""
        for first in range(0, share, depth):
            last = min(first + depth, share)
            await asyncio.gather(
                *(self._writer.write(self._experiences(i)) for i in range(first, last))
            )

    def _experiences(self, serial: int) -> list[Experience]:
        arrays = self._group
        prompt, text = arrays["prompt"], arrays["text"]
        return [
            Experience(
                eid=EID(batch=self._number, task=serial, run=run),
                tokens=torch.from_numpy(np.concatenate([prompt, tokens])),
                logprobs=torch.from_numpy(arrays["logprobs"][run]),
                reward=float(run % 2),
                prompt_length=len(prompt),
                prompt_text="x" * 256,
                response_text=text[run].tobytes().decode("ascii"),
                info={"model_version": 1, "use_count": 0, "extracted": "42"},
                metrics={"accuracy": float(run % 2), "format": 1.0},
            )
            for run, tokens in enumerate(arrays["tokens"])
        ]


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
class Learner:
    """Reads rows of groups."""

    def __init__(self, kind: str, config: StorageConfig) -> None:
        self._reader: Any = (QueueReader if kind == "queue" else SQLReader)(config)

    async def take(self, rows: int, samples: int) -> None:
        for _ in range(rows):
            assert len(await self._reader.read(samples)) == samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("group")
    parser.add_argument("--kind", choices=["queue", "sql"], required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--writers", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--row", type=int, required=True)
    arguments = parser.parse_args()
    samples = len(np.load(arguments.group)["tokens"])
    with tempfile.TemporaryDirectory(prefix="trinity-") as folder:
        ray.init(
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=1 << 30,
        )
        try:
            config = storage(arguments.kind, Path(folder), arguments.groups)
            explorers = [
                Explorer.remote(arguments.kind, config, arguments.group, i)
                for i in range(arguments.writers)
            ]
            learner = Learner.remote(arguments.kind, config)
            ray.get([explorer.ready.remote() for explorer in explorers], timeout=120)
            share = arguments.groups // arguments.writers
            begun = time.perf_counter()
            ray.get(
                [explorer.put.remote(share, arguments.depth) for explorer in explorers], timeout=300
            )
            put = time.perf_counter() - begun
            rows = arguments.groups // arguments.row
            begun = time.perf_counter()
            ray.get(learner.take.remote(rows, arguments.row * samples), timeout=300)
            taken = time.perf_counter() - begun
        finally:
            ray.shutdown()
    print(json.dumps({"put": put, "taken": taken, "both": put + taken}))


if __name__ == "__main__":
    main()
