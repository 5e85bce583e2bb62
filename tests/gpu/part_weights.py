"""Staging: a version out of a model into the learner's slot in host memory, beside a bare copy."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from engines import save_model
from measure import free, settle, timed
from record import Recorder
from sizes import Sizes, case_of

from tandem.common.models import load_model
from tandem.common.weights.manifest import plan
from tandem.common.weights.staging import StagingSlot

REPEATS = 5
BUCKET = 64 << 20


def run(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The smaller model in bfloat16, then in float32 with its dtype changed on the way."""
    with tempfile.TemporaryDirectory() as folder:
        case = case_of(sizes.half, rows=1, batches=1, prompt=1, new=1)
        save_model(case, Path(folder), dtype=torch.bfloat16, device=str(device))
        for dtype in ("bfloat16", "float32"):
            with record.case(dtype):
                _one(device, Path(folder), dtype, record)
            free(device)


def _one(device: torch.device, folder: Path, dtype: str, record: Recorder) -> None:
    model = load_model(str(folder), dtype=dtype, attention="sdpa", device=device)
    named = [(name, p.detach()) for name, p in model.named_parameters()]
    layout = plan(((n, p.shape, torch.bfloat16) for n, p in named), BUCKET)
    on_gpu = device.type == "cuda"
    slot = StagingSlot(layout, shared=True, pin=on_gpu)
    try:
        # A bare copy of as many bytes, from one tensor to one that CUDA has pinned itself.
        source = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros(layout.total_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        ours, blocked, sums, bare, back = [], [], [], [], []
        for _ in range(REPEATS + 1):
            slot.reset()

            # The training thread goes on once this has returned; the copies may take longer.
            returned, copied = timed_call(device, lambda: _put(slot, named))
            blocked.append(returned)
            ours.append(copied)
            slot.copied = None
            if on_gpu:
                slot.copied = torch.cuda.Event()
                slot.copied.record()
            start = time.perf_counter()
            slot.checksums()
            sums.append(time.perf_counter() - start)
            bare.append(timed(device, lambda: target.copy_(source, non_blocking=True)))
            back.append(timed(device, lambda: source.copy_(slot.staged.buffer, non_blocking=True)))
        for (name, tensor), (_, view) in zip(named, slot.tensors, strict=True):
            if not torch.equal(tensor.to("cpu", torch.bfloat16), view):
                raise RuntimeError(f"{name} in the slot isn't what it is in the model")
        size = layout.total_bytes
        best = {n: min(v[1:]) for n, v in (("ours", ours), ("bare", bare), ("back", back))}
        record.figures(
            f"{dtype} to bfloat16",
            bytes=size,
            pinned=bool(slot._pinned),
            shared_memory=bool(slot.staged.path),
            seconds=best["ours"],
            gb_per_second=size / best["ours"] / 1e9,
            bare_gb_per_second=size / best["bare"] / 1e9,
            ratio=best["bare"] / best["ours"],
            blocked_seconds=min(blocked[1:]),
            sums_seconds=min(sums[1:]),
            to_device_gb_per_second=size / best["back"] / 1e9,
        )
    finally:
        settle(device)
        slot.close()


def _put(slot: StagingSlot, named: list[tuple[str, torch.Tensor]]) -> None:
    for index, (_, tensor) in enumerate(named):
        slot.put(index, tensor)


def timed_call(device: torch.device, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds until a call returns, and until the device has done what it asked for."""
    settle(device)
    start = time.perf_counter()
    work()
    returned = time.perf_counter() - start
    settle(device)
    return returned, time.perf_counter() - start
