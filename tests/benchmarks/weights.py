"""New weights on their way to an engine, beside the least that they could cost, in one run.

    .venv/bin/python tests/benchmarks/weights.py                  # both sizes, 5 pairs
    .venv/bin/python tests/benchmarks/weights.py --models 3M --pairs 3 --no-pause

==============  ==========================================  =====================================
case            ours                                        bare
==============  ==========================================  =====================================
gloo            the transport: buckets from one process to  one gloo broadcast of the same bytes
                another, each checked as it arrives         between two processes
shared memory   a whole publication: gather, checksums,     copying the same bytes into a buffer
                offer, mapping, checking                    that is there, and one such checksum
pause           vLLM loads a version with requests in       ``reload_weights`` in vLLM's worker,
                flight: nothing is sampled meanwhile        of tensors in its memory, at rest
==============  ==========================================  =====================================

Learner and worker are processes with the real publisher, receiver, Redis and ZeroMQ. Sides take
turns; the medians of the pairs are printed, and the median of the ratios (bare / ours, except
for the pause: ours / bare). For the pause vLLM must be installed; it also tells what an update
costs an engine that is busy, by the time that the same work takes with updates and without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from engines import CASES, Case, save_model  # noqa: E402
from redis_server import running  # noqa: E402
from served import wait_served  # noqa: E402

from tandem.common.config import Config, ModelConfig, RolloutConfig, build  # noqa: E402
from tandem.common.models import load_model  # noqa: E402
from tandem.common.records import SamplingParams, Version  # noqa: E402
from tandem.common.run_folder import JoinInfo  # noqa: E402
from tandem.common.weights.gloo import Gloo, enter, meeting_point  # noqa: E402
from tandem.common.weights.manifest import plan  # noqa: E402
from tandem.common.weights.protocol import Meeting  # noqa: E402
from tandem.common.weights.receiver import Target, WeightReceiver  # noqa: E402
from tandem.common.weights.sender import WeightSender  # noqa: E402
from tandem.common.weights.shared_memory import checksum, stage  # noqa: E402
from tandem.replay.connection import connect  # noqa: E402
from tandem.replay.ledger import Ledger  # noqa: E402
from tandem.replay.ledger_records import LedgerSettings  # noqa: E402
from tandem.replay.members import membership  # noqa: E402
from tandem.rollout.vllm.vllm_extension import WorkerExtension  # noqa: E402

SECONDS = 120.0
BUCKET = 64 << 20
FLYING = 32
"""Requests in flight while a version is loaded."""
UPDATES = 5
"""Updates within the work that tells what one costs."""


def settings(transport: str) -> Config:
    """A config that sends by this transport."""
    tree = {
        "run": {"steps": 1},
        "data": {"train": [{"path": "unused"}]},
        "weights": {
            "transport": transport,
            "bucket_mb": BUCKET >> 20,
            "open_seconds": SECONDS,
        },
    }
    return build(tree)


class Bench(WorkerExtension):
    """vLLM's worker with one method more."""

    def bench_reload(self, path: str, layout: str) -> float:
        """Seconds of a bare reload of tensors that are in this process's memory."""
        own = [(name, tensor.clone()) for name, tensor in self._tandem_map(path, layout)]
        start = time.perf_counter()
        self.reload_weights(weights_iterator=iter(own))
        return time.perf_counter() - start


# Processes of the other side.


def gloo_side(pipe: Connection, host: str, port: int) -> None:
    """Receives by the transport, or takes part in a bare broadcast, as it is told."""
    torch.set_num_threads(1)
    transport: Gloo | None = None
    group: Any = None
    while True:
        order, *rest = pipe.recv()
        if order == "open":
            channel, nbytes, sums = rest
            buffer = torch.zeros(nbytes, dtype=torch.uint8)
            pieces = cut(buffer)
            transport = met(host, port, channel, 1)
            group = bare_group(host, port, channel + "-bare", 1)
        elif order == "ours":
            assert transport is not None
            for index in transport._transfer(pieces, "receive"):
                if checksum(pieces[index]) != sums[index]:
                    raise SystemExit("a bucket was damaged")
        elif order == "bare":
            group.broadcast(buffer, 0).wait()
        else:
            return
        pipe.send("done")


def worker_side(pipe: Connection, join: JoinInfo, specs: list[Any]) -> None:
    """A receiver without an engine."""
    torch.set_num_threads(1)
    store = connect(join, name="rollout-0")
    receiver = WeightReceiver(
        membership(store, "rollout-0"),
        settings("shared_memory"),
        Target(specs=specs, load=lambda tensors, version: 0.0),
        Ledger(store, "rollout-0").term,
    )
    receiver.start()
    pipe.recv()
    receiver.close()


def met(host: str, port: int, channel: str, rank: int) -> Gloo:
    """The transport, once both ends have met."""
    transport = Gloo(settings("gloo").weights, torch.device("cpu"))
    transport._meet(meeting(host, port, channel, rank))
    return transport


def meeting(host: str, port: int, channel: str, rank: int) -> Meeting:
    """Of two."""
    return Meeting(host=host, port=port, channel=channel, rank=rank, world_size=2)


def bare_group(host: str, port: int, channel: str, rank: int) -> Any:
    """A process group of two, as torch makes it."""
    from datetime import timedelta

    from torch.distributed import ProcessGroupGloo

    store = enter(meeting(host, port, channel, rank), SECONDS)
    return ProcessGroupGloo(store, rank, 2, timedelta(seconds=SECONDS))


def cut(buffer: torch.Tensor) -> list[torch.Tensor]:
    """The buckets of a buffer."""
    return [buffer[i : i + BUCKET] for i in range(0, buffer.numel(), BUCKET)]


# Measuring.


def timed(function: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turn(ours: Callable[[], float], bare: Callable[[], float], pairs: int) -> dict[str, Any]:
    """Interleaved pairs, after some that don't count: buffers are made and mapped in these.

    Always one after the other: a small copy right after itself finds all in the cache, which no
    publication does.
    """
    for _ in range(4):
        ours(), bare()
    found = [(ours(), bare()) for _ in range(pairs)]
    return {
        "ours": statistics.median(a for a, _ in found),
        "bare": statistics.median(b for _, b in found),
        "ratios": [b / a for a, b in found],
        "ratio": statistics.median(b / a for a, b in found),
    }


def measure_gloo(nbytes: int, pairs: int) -> dict[str, Any]:
    """The transport beside a bare broadcast."""
    point = meeting_point("127.0.0.1")
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(
        target=gloo_side, args=(theirs, point.host, point.port), daemon=True
    )
    process.start()
    buffer = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    pieces = cut(buffer)
    pipe.send(("open", "bench", nbytes, [checksum(piece) for piece in pieces]))
    transport = met(point.host, point.port, "bench", 0)
    group = bare_group(point.host, point.port, "bench-bare", 0)
    pipe.recv()

    def ours() -> float:
        pipe.send(("ours",))
        seconds = timed(lambda: (list(transport._transfer(pieces, "send")), pipe.recv()))
        return seconds

    def bare() -> float:
        pipe.send(("bare",))
        return timed(lambda: (group.broadcast(buffer, 0).wait(), pipe.recv()))

    try:
        return in_turn(ours, bare, pairs)
    finally:
        pipe.send(("end",))
        process.join(10)
        process.kill()


def measure_shared_memory(folder: Path, pairs: int) -> dict[str, Any]:
    """A publication until it is checked, beside a copy and one checksum."""
    model = load_model(str(folder), dtype="float32", attention="sdpa", device="cpu")
    named = [(name, p.detach()) for name, p in model.named_parameters()]
    specs = [(name, tuple(p.shape), "float32") for name, p in named]
    layout = plan(((n, tuple(p.shape), p.dtype) for n, p in named), BUCKET)
    # The same bytes: what was never written to would be read from the kernel's one page of zeros.
    staged = stage(layout, ())
    source = staged.buffer
    for (_, tensor), (_, view) in zip(named, staged.tensors(), strict=True):
        view.copy_(tensor)
    target = torch.zeros_like(source)
    with tempfile.TemporaryDirectory() as redis, running(Path(redis)) as server:
        join = server.join()
        store = connect(join, name="bench")
        ledger = Ledger(store, "bench")
        ledger.create(
            LedgerSettings(
                sources=(("a", 100, 1),),
                seed=0,
                data_digest="d",
                group_size=2,
                groups_per_step=2,
                max_staleness=1,
                steps=100,
            )
        )
        term = ledger.new_term()
        publisher = WeightSender(membership(store, "learner-0"), settings("shared_memory"), term)
        publisher.start()
        pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.Process(
            target=worker_side, args=(theirs, join, specs), daemon=True
        )
        process.start()
        step = 0
        whole: list[float] = []

        def ours() -> float:
            nonlocal step
            step += 1
            for _, tensor in named[:1]:
                tensor.view(-1)[0] += 1.0
            version = Version(term=term, step=step)
            start = time.perf_counter()
            publisher.publish(version, named)
            copied = time.perf_counter() - start
            wait_served(publisher, version, SECONDS)
            whole.append(time.perf_counter() - start)
            last = publisher.stats()["transfers"]["rollout-0"]
            # Until all is checked, the learner's checksums and its thread's wait for its turn
            # included; what follows is the engine's affair.
            return float(copied + last["arrival_seconds"])

        def bare() -> float:
            return timed(lambda: (target.copy_(source), checksum(target)))

        try:
            found = in_turn(ours, bare, pairs)
        finally:
            publisher.close()
            pipe.send("end")
            process.join(10)
            process.kill()
            store.close()
    return found | {"served": statistics.median(whole)}


async def measure_pause(case: Case, folder: Path, pairs: int) -> dict[str, Any]:
    """The pause of a busy vLLM beside a bare reload, and what an update costs."""
    import numpy as np

    from tandem.rollout.engine import GroupRequest
    from tandem.rollout.engines import make_engine

    rows = FLYING
    rollout = RolloutConfig(
        engine="vllm",
        group_size=1,
        groups_per_batch=rows,
        max_new_tokens=case.new * 4,
        vllm={"kv_cache_mb": 512},  # type: ignore[arg-type]
    )
    engine: Any = make_engine(
        ModelConfig(path=str(folder), dtype="float32"), rollout, max_prompt_tokens=case.prompt
    )
    engine._process._arguments["worker_extension_cls"] = "weights.Bench"
    model = load_model(str(folder), dtype="float32", attention="sdpa", device="cpu")
    named = [(name, p.detach()) for name, p in model.named_parameters()]
    layout = plan(((n, tuple(p.shape), p.dtype) for n, p in named), BUCKET)
    staged = stage(layout)
    for (_, tensor), (_, view) in zip(named, staged.tensors(), strict=True):
        view.copy_(tensor)
    names = iter(range(1 << 30))
    step = iter(range(1, 1 << 30))

    def requests(new: int) -> list[GroupRequest]:
        return [
            GroupRequest(
                group_id=f"g-{next(names)}",
                prompt_tokens=np.arange(3, 3 + case.prompt, dtype=np.int32),
                count=1,
                sampling=SamplingParams(max_new_tokens=new, temperature=1.0, top_p=1.0, top_k=0),
                seed=0,
            )
            for _ in range(rows)
        ]

    async def load() -> float:
        before = engine.stats().load_seconds
        await engine.load(staged, Version(term=1, step=next(step)))
        return float(engine.stats().load_seconds - before)

    async def ours() -> float:
        running_ = asyncio.create_task(consume(requests(case.new * 4)))
        begun = engine.stats().decode_steps
        while engine.stats().decode_steps < begun + 3:
            await asyncio.sleep(0.001)
        seconds = await load()
        await running_
        return seconds

    async def bare() -> float:
        return float(
            (
                await engine._process.run(
                    engine._process.llm.collective_rpc("bench_reload", args=tuple(staged.place))
                )
            )[0]
        )

    async def consume(wanted: list[GroupRequest]) -> None:
        async for group in engine.generate(wanted):
            if group.error or len(group.samples[0].tokens) == 0:
                raise RuntimeError(f"a request was lost: {group.error}")

    async def work(updates: int) -> float:
        start = time.perf_counter()
        running_ = asyncio.create_task(consume(requests(case.new * 4)))
        begun = engine.stats().decode_steps
        for i in range(updates):
            while engine.stats().decode_steps < begun + (i + 1) * case.new * 3 // updates:
                await asyncio.sleep(0.001)
            await load()
        await running_
        return time.perf_counter() - start

    await engine.start()
    try:
        await ours(), await bare(), await work(1)
        found = []
        for i in range(pairs):
            if i % 2:
                found.append((await ours(), await bare()))
            else:
                seconds = await bare()
                found.append((await ours(), seconds))
        lost: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(max(1, pairs // 2)):
            for recompute, costs in lost.items():
                engine._recompute = recompute
                without, with_ = await work(0), await work(UPDATES)
                costs.append((with_ - without) / UPDATES)
    finally:
        await engine.close()
        staged.close()
    return {
        "ours": statistics.median(a for a, _ in found),
        "bare": statistics.median(b for _, b in found),
        "ratios": [a / b for a, b in found],
        "ratio": statistics.median(a / b for a, b in found),
        "lost_per_update": statistics.median(lost[True]),
        "lost_per_update_keeping_kv": statistics.median(lost[False]),
    }


def show(name: str, case: str, found: dict[str, Any], nbytes: int) -> None:
    """One line of the table."""
    rate = nbytes / found["ours"] / 1e9
    spread = " ".join(f"{ratio:.2f}" for ratio in sorted(found["ratios"]))
    print(
        f"{name:5} {case:14} {found['ours'] * 1e3:9.1f} {found['bare'] * 1e3:9.1f} "
        f"{rate:7.2f} {found['ratio']:7.2f}   {spread}",
        flush=True,
    )


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["3M", "100M"], help="sizes (3M 100M)")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs a case")
    parser.add_argument("--no-pause", action="store_true", help="leave vLLM out")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print("model case             ours ms   bare ms    GB/s   ratio   of each pair")
    from tandem.rollout.vllm import vllm_version

    with tempfile.TemporaryDirectory() as here:
        for case in [c for c in CASES if c.name in args.models]:
            folder = Path(here) / case.name
            nbytes = save_model(case, folder) * 4
            results = found[case.name] = {"bytes": nbytes}
            results["gloo"] = measure_gloo(nbytes // 8 * 8, args.pairs)
            show(case.name, "gloo", results["gloo"], nbytes)
            results["shared_memory"] = measure_shared_memory(folder, args.pairs)
            show(case.name, "shared memory", results["shared_memory"], nbytes)
            if not args.no_pause and vllm_version.installed():
                pause = results["pause"] = asyncio.run(measure_pause(case, folder, args.pairs))
                show(case.name, "pause", pause, nbytes)
                print(
                    f"      an update costs a busy engine {pause['lost_per_update'] * 1e3:.0f} ms"
                )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), os.environ.get("PYTHONPATH", "")]
    ).rstrip(os.pathsep)
    multiprocessing.set_start_method("spawn")
    sys.exit(main())
