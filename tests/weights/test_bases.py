"""Adapters travel like whole models, and only to workers with the same base model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from served import wait_served
from weight_processes import FlippedByte, Named, as_bytes, specs_of

from tandem.common.adapters import AdaptedLayer, adapter_tensors, base_digest, base_of
from tandem.common.config import Config, ModelConfig, build
from tandem.common.config.learner import LoraConfig
from tandem.common.errors import DataError
from tandem.common.records import Version
from tandem.common.weights.snapshot import MODEL
from tandem.common.weights.ways import WAYS, Way

RANK = 4
LAYERS = [
    AdaptedLayer(name=f"model.layers.{number}.self_attn.{kind}_proj", inputs=24, outputs=outputs)
    for number in range(2)
    for kind, outputs in (("q", 24), ("v", 7))
]


def adapters(seed: int) -> Named:
    """Random ones, as they travel."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (name, torch.randn(shape, generator=generator))
        for name, shape in adapter_tensors(LAYERS, RANK)
    ]


def v(step: int) -> Version:
    return Version(term=1, step=step)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a base model in two files."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in (1, 2):
        save_file({"w": torch.full((50, 3), float(number))}, folder / f"m-{number}.safetensors")
    return folder


@pytest.fixture
def other(base: Path, tmp_path: Path) -> Path:
    """The same but for one number."""
    folder = tmp_path / "other"
    shutil.copytree(base, folder)
    weights = torch.full((50, 3), 2.0)
    weights[7, 1] = 2.5
    save_file({"w": weights}, folder / "m-2.safetensors")
    return folder


def settings(folder: Path, **weights: Any) -> Config:
    """A config with adapters, short deadlines and small buckets."""
    short = {"open_seconds": 10, "stage_seconds": 20, "commit_seconds": 20, "bucket_mb": 1}
    return build(
        {
            "run": {"steps": 1},
            "data": {"train": [{"path": "unused"}]},
            "model": {"path": str(folder)},
            "learner": {"lora": {"rank": RANK}},
            "weights": {"transport": "gloo", **short, **weights},
        }
    )


def worker(run: Any, config: Config, **options: Any) -> Any:
    """A worker of these adapters."""
    specs = specs_of(adapters(0))
    values = {"base": base_of(config.model, config.learner.lora), **options}
    return run.worker(config=config, specs=specs, **values)


@pytest.mark.parametrize("transport", ["gloo", "shared_memory", "snapshot"])
def test_adapters_arrive_bit_for_bit_at_workers_that_join_at_any_time(
    run: Any, base: Path, tmp_path: Path, transport: str
) -> None:
    snapshots = tmp_path / "snapshots"
    config = settings(base, transport=transport, snapshot_folder=str(snapshots))
    publisher = run.publisher(config=config)
    workers = [worker(run, config)]
    for step in (1, 2, 3):
        publisher.publish(v(step), adapters(step))
        assert workers[0].next() == (v(step), as_bytes(adapters(step)))
    late = worker(run, config, member="rollout-1")
    assert late.next() == (v(3), as_bytes(adapters(3)))
    publisher.restamp(v(4))
    for one in (workers[0], late):
        assert one.next() == (v(4), {})
    wait_served(publisher, v(4), 10)
    if transport == "snapshot":
        snapshots = snapshots / run.join.run_id
        newest = snapshots / (snapshots / "LATEST").read_text()
        stored = load_file(newest / MODEL)
        assert {name: t.numpy().tobytes() for name, t in stored.items()} == as_bytes(adapters(3))


def test_damaged_adapters_are_refused_and_sent_again(
    run: Any, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FlippedByte, "damaged", 0)
    monkeypatch.setitem(WAYS, "gloo", Way(channel=FlippedByte))
    config = settings(base)
    publisher = run.publisher(config=config)
    one = worker(run, config)
    publisher.publish(v(1), adapters(1))
    run.lines.wait_for("rollout-0 stays on no version", "refused at verify", "was damaged")
    assert one.next() == (v(1), as_bytes(adapters(1)))


def test_a_worker_with_another_base_is_refused_with_both_digests(
    run: Any, base: Path, other: Path
) -> None:
    ours, theirs = base_digest(base), base_digest(other)
    assert ours != theirs
    publisher = run.publisher(config=settings(base))
    wrong = worker(run, settings(other))
    right = worker(run, settings(base), member="rollout-1")
    publisher.publish(v(1), adapters(1))
    assert right.next() == (v(1), as_bytes(adapters(1)))
    line = run.lines.wait_for("rollout-0 stays on no version", ours, theirs)
    assert f"its digest is {ours}, and this worker's is {theirs}" in line
    assert "give learner and workers the same weights files under model.path" in line
    assert publisher.stats()["members"]["rollout-0"] is None
    assert not wrong.pipe.poll(0)


def test_a_worker_without_adapters_is_refused(run: Any, base: Path) -> None:
    publisher = run.publisher(config=settings(base))
    worker(run, settings(base), base="")
    publisher.publish(v(1), adapters(1))
    run.lines.wait_for("this worker's is none, for a whole model", "the same learner.lora")
    assert publisher.stats()["members"] == {"rollout-0": None}


def test_the_digest_is_of_the_names_and_bytes_of_the_weights_alone(
    base: Path, other: Path, tmp_path: Path
) -> None:
    digest = base_digest(base)
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    (copy / "tokenizer.json").write_text("{}")
    assert base_digest(copy) == digest
    (copy / "m-2.safetensors").rename(copy / "m-3.safetensors")
    assert len({digest, base_digest(other), base_digest(copy)}) == 3
    for file in copy.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(DataError, match="has no weights"):
        base_digest(copy)


def test_only_adapters_have_a_base(base: Path) -> None:
    model, lora = ModelConfig(path=str(base)), LoraConfig()
    assert base_of(model, None) == ""
    assert base_of(model, lora) == base_digest(base)
    assert base_of(ModelConfig(), lora) == base_of(ModelConfig(path="miniature"), lora) != ""
    with pytest.raises(DataError, match="tandem get model nobody/has-this"):
        base_of(ModelConfig(path="nobody/has-this"), lora)
