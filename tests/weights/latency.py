"""Measures a publication: the training thread's share, and the time until it is served.

Run it by hand: ``python tests/weights/latency.py``. Real Redis, sockets, gloo and processes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
import conftest
import redis_server
import weight_processes as processes
from served import wait_served

from tandem.common.records import Version

SIZES = {
    "460 KB, 38 tensors": ([(94, 64)] * 18 + [(64,)] * 20),
    "14 MB, 42 tensors": [(256, 325)] * 42,
}
ROUNDS = 200
PAUSE_SECONDS = 0.02


def measure(run: conftest.Run, shapes: list[tuple[int, ...]]) -> tuple[list[float], ...]:
    """Milliseconds of each publication: copy, until served, CPU of all background threads."""
    named = [(f"layers.{i}.weight", torch.randn(shape)) for i, shape in enumerate(shapes)]
    publisher = run.publisher()
    child = run.worker(specs=processes.specs_of(named), quiet=True)
    publisher.publish(Version(term=1, step=0), named)
    wait_served(publisher, Version(term=1, step=0), 60)
    copies, served, behind = [], [], []
    for step in range(1, ROUNDS):
        time.sleep(PAUSE_SECONDS)
        named[step % len(named)][1].add_(1.0)
        cpu, own, start = time.process_time(), time.thread_time(), time.perf_counter()
        publisher.publish(Version(term=1, step=step), named)
        copies.append((time.perf_counter() - start) * 1e3)
        wait_served(publisher, Version(term=1, step=step), 60)
        served.append((time.perf_counter() - start) * 1e3)
        behind.append((time.process_time() - cpu - (time.thread_time() - own)) * 1e3)
    child.kill()
    return copies, served, behind


def main() -> None:
    """Prints one line for each size."""
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server.running(Path(folder)) as server,
    ):
        for title, shapes in SIZES.items():
            run = conftest.Run(server.join(), conftest.Lines())
            try:
                columns = measure(run, shapes)
            finally:
                run.close()
            summaries = []
            for name, values in zip(("copy", "served", "background CPU"), columns, strict=True):
                ordered = sorted(values)
                least, middle, most = (
                    ordered[0],
                    ordered[len(ordered) // 2],
                    ordered[-len(ordered) // 10],
                )
                summaries.append(f"{name} {least:.2f} / {middle:.2f} / {most:.2f}")
            print(f"{title}: ms least / median / p90: {'; '.join(summaries)}")


if __name__ == "__main__":
    main()
