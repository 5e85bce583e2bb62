"""A checkpoint goes on at any number of ranks and any ZeRO stage, with every parameter and state equal in all bits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.common.errors import DataError
from tandem.common.records import Version
from tandem.common.run_folder import RunFolder
from tandem.learner.exporting import export
from tandem.learner.resume import state_files
from tandem.learner.resume.checkpoints import Checkpoints
from tandem.learner.resume.state_files import PARAMETER, POLICY, Piece, StateFiles, write_pieces

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.timeout(300)]


def content(folder: Path) -> dict[str, Any]:
    """All parameters and states of a checkpoint, whole, and the optimizer's count of each."""
    files = StateFiles(folder / POLICY)
    found: dict[str, Any] = {}
    for name in files.names:
        count = files.whole(name).numel()
        found[f"{name}:step"] = files.step(name)
        found |= {f"{name}:{k}": files.read(name, k, 0, count) for k in files.kinds(name)}
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[key]) if isinstance(value, torch.Tensor) else value == other[key]
        for key, value in one.items()
    )


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_stage_goes_on_from_every_other_one(
    before: int, after: int, dtype: str, written: Path, states: ModuleType
) -> None:
    for stage in states.STAGES:
        source = written / f"{before}-{stage}-{dtype}"
        expected = content(source)
        kinds = {key.rpartition(":")[2] for key in expected}
        assert kinds == {PARAMETER, "exp_avg", "exp_avg_sq", "step"}
        for later in states.STAGES:
            found = content(Path(f"{source}-at-{after}-{later}"))
            assert same(found, expected), f"ZeRO-{stage} to ZeRO-{later}"
        other = content(written / f"{after}-{stage}-{dtype}")
        # Or everything would be equal because nothing had been trained.
        assert not same(other, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_export_joins_the_parts_of_all_ranks_at_every_stage(
    ranks: int, dtype: str, written: Path, base: Path, states: ModuleType, tmp_path: Path
) -> None:
    for stage in states.STAGES:
        source = written / f"{ranks}-{stage}-{dtype}"
        config = states.made_up.config_of(model={"dtype": dtype, "path": str(base)})
        folder = RunFolder(tmp_path / str(stage))
        Checkpoints(folder.checkpoints).save(
            Version(term=1, step=2),
            lambda place, source=source: shutil.copytree(source, place, dirs_exist_ok=True),
            ranks=ranks,
            state={},
        )
        found = export(folder, config).place / "model.safetensors"
        ours = Path(f"{source}-model") / "model.safetensors"
        assert found.read_bytes() == ours.read_bytes(), f"ZeRO-{stage}"


def piece(name: str, values: torch.Tensor, begin: int, total: int, **changed: Any) -> Piece:
    made = Piece(
        name=name,
        shape=(total,),
        start=begin,
        count=len(values),
        step=3.0,
        tensors={PARAMETER: values, "exp_avg": -values},
    )
    return replace(made, **changed)


def test_any_part_is_read_from_the_pieces_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_files, "FILE_BYTES", 40)
    values = torch.arange(10.0)
    write_pieces(tmp_path, 0, [piece("b", values[:2], 0, 2), piece("a", values[:4], 0, 10)])
    write_pieces(tmp_path, 1, [piece("a", values[4:5], 4, 10)])
    write_pieces(tmp_path, 2, [piece("a", values[5:], 5, 10)])
    assert len(list(tmp_path.iterdir())) == 4  # the first rank has begun a second file
    files = StateFiles(tmp_path)
    assert sorted(files.names) == ["a", "b"]
    assert files.step("a") == 3.0
    for start in range(10):
        for end in range(start + 1, 11):
            found = files.read("a", "exp_avg", start, end - start)
            assert torch.equal(found, -values[start:end])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"start": 5}, r"lacks a part of a, which begins at element 4"),
        ({"start": 3}, r"lacks a part of a, which begins at element 4"),
        ({"tensors": {PARAMETER: torch.zeros(6)}}, r"don't belong together"),
        ({"step": 2.0}, r"don't belong together"),
        ({"shape": (11,)}, r"don't belong together"),
    ],
)
def test_pieces_that_make_no_whole_are_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_pieces(tmp_path, 0, [piece("a", torch.zeros(4), 0, 10)])
    write_pieces(tmp_path, 1, [piece("a", torch.zeros(6), 4, 10, **changed)])
    with pytest.raises(DataError, match=message):
        StateFiles(tmp_path)


def test_a_file_that_is_cut_or_missing_is_refused(tmp_path: Path) -> None:
    write_pieces(tmp_path, 0, [piece("a", torch.zeros(1000), 0, 1000)])
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"can't be read"):
        StateFiles(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"holds no parameters"):
        StateFiles(tmp_path)


@pytest.mark.parametrize("stage", [0, 1])
def test_before_the_first_step_there_are_no_states_to_go_on_with(
    stage: int, states: ModuleType, tmp_path: Path
) -> None:
    states.engine_at(stage, "float32").save(tmp_path)
    assert {key.rpartition(":")[2] for key in content(tmp_path)} == {PARAMETER, "step"}
    expected = states.train(states.engine_at(stage, "float32"), 2)
    engine = states.engine_at(stage, "float32")
    states.train(engine, 3)
    engine.load(tmp_path)
    assert states.train(engine, 2) == expected


def test_what_is_not_trained_is_not_gone_on_with(states: ModuleType, tmp_path: Path) -> None:
    states.engine_at(0, "float32").save(tmp_path)
    other = states.engine_at(1, "float32", lora={"rank": 2, "alpha": 4.0})
    with pytest.raises(DataError, match=r"aren't those that these settings train"):
        other.load(tmp_path)


@pytest.mark.parametrize(("stage", "offload"), [(2, "optimizer"), (3, "parameters")])
def test_it_goes_on_with_offload_and_without(
    stage: int, offload: str, states: ModuleType, tmp_path: Path
) -> None:
    for before, after in (("none", offload), (offload, "none")):
        first, second = tmp_path / f"{before}-1", tmp_path / f"{before}-2"
        engine = states.engine_at(stage, "bfloat16", offload=before)
        states.train(engine, 2)
        states.save(engine, first)
        other = states.engine_at(stage, "bfloat16", offload=after)
        other.load(first)
        states.require_rounded(other, first)
        states.save(other, second)
        assert same(content(second), content(first))
        assert states.train(other, 2) == pytest.approx(states.train(engine, 2), rel=1e-3)
