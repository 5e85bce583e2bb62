"""How large the kit's parts are: for a GPU, and small for the same code on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engines import Case

from tandem.launch.plan.sizes import ModelShape, known


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of all parts."""

    half: ModelShape
    """The smaller model."""
    large: ModelShape
    """The larger one."""
    large_ways: tuple[str, ...]
    """Ways in which the larger one is trained."""
    groups: int
    """Groups of an update of the learner."""
    group_size: int
    """Samples of a group."""
    prompt: int
    """Tokens of a prompt."""
    response: int
    """Most tokens of a response; the mean is about half of it."""
    micro_batch: int
    """``learner.micro_batch_tokens`` of the smaller model; half of it for the larger one."""
    updates: int
    """Updates that are measured."""
    matrix: int
    """Rows and columns of the matrices whose product is the measure of the device."""
    engine: Case
    """What the engine and ``generate`` sample, from the smaller model."""
    logprobs: tuple[str, ...]
    """Arguments of ``tests/benchmarks/logprobs.py``."""
    run_steps: int
    """Steps of the miniature."""
    half_steps: int
    """Steps of the miniature with engines in bfloat16."""
    model_steps: int
    """Steps of the run with the smaller model."""
    run_settings: tuple[str, ...] = field(default=())
    """Further settings of the runs."""
    presets: tuple[str, ...] | None = None
    """Presets whose twins are run; None for all of them."""


def case_of(shape: ModelShape, *, rows: int, batches: int, prompt: int, new: int) -> Case:
    """A model of these sizes in the words of ``tests/benchmarks/engines.py``."""
    return Case(
        name=shape.name,
        layers=shape.layers,
        hidden=shape.hidden,
        inner=shape.intermediate,
        vocabulary=shape.vocabulary,
        group=4,
        rows=rows,
        batches=batches,
        prompt=prompt,
        new=new,
        head_dim=shape.head_dim,
        per_kv=shape.heads // shape.kv_heads,
    )


def _known(name: str) -> ModelShape:
    shape = known(f"Qwen/Qwen2.5-{name}")
    assert shape is not None
    return replace(shape, name=name)


_TINY = ModelShape(
    name="tiny",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=96,
    vocabulary=512,
    tied=True,
    qkv_bias=True,
)

GPU = Sizes(
    half=_known("0.5B"),
    large=_known("1.5B"),
    large_ways=("auto", "plain", "checkpointing", "lora"),
    groups=16,
    group_size=8,
    prompt=128,
    response=1024,
    micro_batch=16384,
    updates=3,
    matrix=8192,
    engine=case_of(_known("0.5B"), rows=128, batches=3, prompt=128, new=192),
    logprobs=("--tokens", "8192", "--repeats", "3", "--rounds", "1"),
    run_steps=250,
    half_steps=80,
    model_steps=12,
)
"""For one GPU with 24 GB or more, within ten minutes."""

TINY = Sizes(
    half=_TINY,
    large=replace(_TINY, name="tiny, three layers", layers=3),
    large_ways=("auto",),
    groups=2,
    group_size=4,
    prompt=8,
    response=24,
    micro_batch=256,
    updates=1,
    matrix=128,
    engine=case_of(_TINY, rows=8, batches=3, prompt=8, new=16),
    logprobs=(
        *("--tokens", "64", "--hidden", "32", "--vocabulary", "9000"),
        *("--repeats", "1", "--rounds", "1"),
    ),
    run_steps=3,
    half_steps=3,
    model_steps=2,
    run_settings=("evaluate.limit=4", "data.miniature_fresh=64", "replay.groups_per_step=2"),
    presets=("qwen2.5-math-1.5b-sft-correct-1gpu",),
)
"""For two CPU cores, within a minute."""

SIZES = {"gpu": GPU, "tiny": TINY}
