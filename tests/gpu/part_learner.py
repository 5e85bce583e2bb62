"""The learner: whole updates of random models in half precision, in each of the ways that a config names."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from engines import save_model
from measure import free, kernels, product_flops, settle
from record import NotRunError, Recorder, refusals
from sizes import Sizes, case_of

from tandem.common.config import Config, build
from tandem.common.models import load_model
from tandem.common.records import FinishReason, Group, Sample, SamplingParams, Verdict, VersionSpan
from tandem.launch.plan import memory
from tandem.launch.plan.sizes import ModelShape, shape_of
from tandem.launch.plan.speed import forward_flops
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.engine.memory import MemoryWatch
from tandem.learner.forward import layouts
from tandem.learner.rendezvous import Seat, process_group
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.updates.updates import Updates

Settings = Mapping[str, Any]

WAYS: dict[str, Settings] = {
    "auto": {},
    "plain": {"model.kernels": "plain"},
    "padded": {"model.attention": "sdpa"},
    "checkpointing": {"learner.gradient_checkpointing": True},
    "lora": {"learner.lora": {}},
    "adamw_8bit": {"learner.optimizer": {"name": "adamw_8bit"}},
    "varlen": {"model.attention": "varlen"},
    "flash_attention_2": {"model.attention": "flash_attention_2"},
    # Late, since its kernels are compiled first.
    "flex": {"model.attention": "flex"},
    # Last: DeepSpeed keeps these engines' weights after their end.
    "offload": {"learner.offload": "optimizer"},
    "float16": {"model.dtype": "float16"},
}
"""Settings of each way; one that this version of Tandem, or this machine, doesn't have is not run."""
NOT_ON_CPUS = {"flex": "no GPU, and flex attention has no backward pass on a CPU"}
"""Ways that only a GPU has."""
PACKING = ("varlen", "flex", "flash_attention_2")
"""Ways in which rows are packed; where they aren't, something is wrong."""
MOST_SKIPPED = 20
"""Updates that may be skipped before the first one that isn't."""
OUTSIDE = ("runtime", "weight staging")
"""Parts of the plan that aren't in torch's allocator here."""


def half(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The smaller model, in all ways."""
    _all(device, sizes, record, sizes.half, sizes.micro_batch, WAYS)


def large(device: torch.device, sizes: Sizes, record: Recorder) -> None:
    """The larger model, in some."""
    ways = {name: WAYS[name] for name in sizes.large_ways}
    _all(device, sizes, record, sizes.large, sizes.micro_batch // 2, ways)


def _all(
    device: torch.device,
    sizes: Sizes,
    record: Recorder,
    shape: ModelShape,
    budget: int,
    ways: Mapping[str, Settings],
) -> None:
    with tempfile.TemporaryDirectory() as folder, process_group(Seat()):
        if device.type == "cuda":
            torch.cuda.set_device(device)
        case = case_of(shape, rows=1, batches=1, prompt=1, new=1)
        save_model(case, Path(folder), dtype=torch.bfloat16, device=str(device))
        for name, settings in ways.items():
            with record.case(name):
                if device.type == "cpu" and name in NOT_ON_CPUS:
                    raise NotRunError(NOT_ON_CPUS[name])
                if name == "adamw_8bit" and find_spec("bitsandbytes") is None:
                    raise NotRunError("bitsandbytes isn't installed")
                if name == "float16" and not get_accelerator().is_fp16_supported():
                    raise NotRunError(f"this {device.type.upper()} has no float16")
                found = _one(device, sizes, Path(folder), budget, settings)
                record.figures(name, **found)
                if name in PACKING and found["layout"] != "packed":
                    raise RuntimeError(f"{name} was asked for, and {found['chosen']}")
            free(device)


def config_of(sizes: Sizes, folder: Path, budget: int, settings: Settings) -> Config:
    """The config of a way.

    Raises:
        TandemError: there is no such setting, or it doesn't go with the others.
    """
    tree: dict[str, Any] = {
        "run": {"steps": 1000},
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "data": {"train": [{"path": "unused"}], "max_prompt_tokens": sizes.prompt},
        "rollout": {
            "engine": "torch",
            "group_size": sizes.group_size,
            "groups_per_batch": sizes.groups,
            "max_new_tokens": sizes.response,
        },
        "replay": {"groups_per_step": sizes.groups},
        "learner": {"micro_batch_tokens": budget},
    }
    for name, value in settings.items():
        section, key = name.split(".")
        tree[section][key] = value
    return build(tree)


def useful_passes(config: Config) -> int:
    """Number of forward passes that an update is worth, without what checkpointing computes again. A frozen base has
    no gradient of its own, which is a third."""
    return 3 if config.learner.lora is None else 2


def _one(
    device: torch.device, sizes: Sizes, folder: Path, budget: int, settings: Settings
) -> dict[str, Any]:
    with refusals():
        config = config_of(sizes, folder, budget, settings)
        shape = shape_of(str(folder))
        assert shape is not None
        planned = memory.learner(config, shape, device.type)
        _require_memory(device, planned.total)
        watch = MemoryWatch(device)
        model = load_model(
            str(folder),
            dtype=config.model.dtype,
            attention=config.model.attention,
            device=device,
        )
    with _said() as said:
        engine = DeepSpeedEngine(model, config, device, memory=watch)
    updates = Updates(engine, config)
    seconds: list[float] = []
    fed: list[int] = []
    update = engine.update

    def measured(micro_batches: Sequence[Any], *rest: Any, **others: Any) -> Any:
        fed.append(sum(micro.forward_tokens for micro in micro_batches))
        settle(device)
        start = time.perf_counter()
        result = update(micro_batches, *rest, **others)
        settle(device)
        seconds.append(time.perf_counter() - start)
        return result

    engine.update = measured  # type: ignore[method-assign]
    # The first update allocates the optimizer's states and chooses kernels. In float16 some are skipped until
    # the scale of the loss is found.
    warm_up, skipped = _groups(sizes, shape.vocabulary, 1)[0], 0
    while not updates.train(1, warm_up, lr=1e-6).applied and skipped < MOST_SKIPPED:
        skipped += 1
    first = seconds[0]
    watch.take()
    del seconds[:], fed[:]
    steps, lengths = [], []
    for step in range(2, sizes.updates + 2):
        groups, read = _groups(sizes, shape.vocabulary, step)
        lengths += read
        start = time.perf_counter()
        outcome = updates.train(step, groups, lr=1e-6)
        steps.append(time.perf_counter() - start)
        if not outcome.applied:
            raise RuntimeError(f"update {step} wasn't applied: {outcome.metrics}")
    tokens, took, padded = sum(lengths), sum(seconds), sum(fed)
    longer = sum(length**2 for length in lengths) / tokens
    flops = useful_passes(config) * forward_flops(shape, tokens, longer) / took
    held = watch.take()
    times: dict[str, dict[str, float]] = {}
    if device.type == "cuda" and not settings:
        groups, _ = _groups(sizes, shape.vocabulary, sizes.updates + 2)
        times = kernels(device, lambda: updates.train(sizes.updates + 2, groups, lr=1e-6))
    best = product_flops(device, model.dtype, sizes.matrix)
    there = sum(size for name, size in planned.parts.items() if name not in OUTSIDE)
    return {
        "model": f"{shape.parameters / 1e9:.2f}B",
        "parameters": shape.parameters,
        "dtype": config.model.dtype,
        "attention": layouts.named(str(model.config._attn_implementation)),
        "layout": engine.policy.layout,
        "chosen": next((line for line in said if "attention is" in line), ""),
        "zero_stage": engine.stage,
        "tokens": tokens,
        "padded_tokens": padded,
        "update_seconds": took / sizes.updates,
        "step_seconds": sum(steps) / sizes.updates,
        "first_update_seconds": first,
        "skipped_updates": skipped,
        "tokens_per_second": tokens / took,
        "tflops": flops / 1e12,
        "product_tflops": best / 1e12,
        "mfu": flops / best,
        "loss": outcome.metrics["train/loss"],
        "grad_norm": outcome.metrics["train/grad_norm"],
        **{f"{part}_bytes": int(size) for part, size in held.items()},
        "planned_bytes": there,
        "planned_parts": dict(planned.parts),
        **times,
    }


@contextmanager
def _said() -> Iterator[list[str]]:
    """What the learner logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("tandem.learner")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _require_memory(device: torch.device, planned: int) -> None:
    if device.type != "cuda":
        return
    has = torch.cuda.mem_get_info(device)[1]
    if planned > has:
        raise NotRunError(
            f"tandem plan: it needs {planned / 2**30:.1f} GB, and the GPU has {has / 2**30:.1f}"
        )


def _groups(sizes: Sizes, vocabulary: int, step: int) -> tuple[list[MixedGroup], list[int]]:
    """A step's groups of random tokens, half of whose samples are right, and the tokens of each row that a
    forward pass reads. The same for each way."""
    rng = np.random.default_rng(step)
    made, read = [], []
    for number in range(sizes.groups):
        prompt = rng.integers(3, vocabulary, sizes.prompt).astype(np.int32)
        samples = []
        for place in range(sizes.group_size):
            # Log-normal, as responses of models are; see the plan's own lengths.
            drawn = rng.lognormal(math.log(sizes.response / 2), 0.5)
            length = int(np.clip(drawn, 2, sizes.response))
            right = place % 2 == 0
            samples.append(
                Sample(
                    tokens=rng.integers(3, vocabulary, length).astype(np.int32),
                    source=np.zeros(length, np.uint8),
                    # What a model of random weights gives every token.
                    logprobs=np.full(length, -math.log(vocabulary), np.float32),
                    spans=(VersionSpan(term=1, step=step - 1, start=0, end=length),),
                    finish_reason=FinishReason.STOP,
                    sampling=SamplingParams(
                        temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=sizes.response
                    ),
                    text="",
                    reward=float(right),
                    verdict=Verdict.CORRECT if right else Verdict.WRONG,
                    components={"accuracy": float(right)},
                    extracted=None,
                    grader=None,
                )
            )
            read.append(len(prompt) + length - 1)
        made.append(
            MixedGroup(
                group=Group(
                    group_id=f"{step}-{number}",
                    attempt=1,
                    worker="rollout-0",
                    problem_id=f"a/{number}",
                    prompt_tokens=prompt,
                    prompt_text="",
                    gold="",
                    data_source="",
                    samples=tuple(samples),
                    trace_ids=(),
                    extra={},
                )
            )
        )
    return made, read
