"""``tandem export``: any kept step as a whole folder, from any number of ranks and any ZeRO stage, while a run goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.common.config import to_yaml
from tandem.common.errors import DataError
from tandem.common.records import Version
from tandem.common.run_folder import RunFolder
from tandem.launch.evaluation.plan import find_model
from tandem.learner.adapters import identity
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.engine.model_folder import adapter_folder, write_folder
from tandem.learner.exporting import export
from tandem.learner.loop.best import Best, best_of
from tandem.learner.resume.checkpoints import Checkpoints

pytestmark = [pytest.mark.usefixtures("group"), pytest.mark.timeout(300)]
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FURTHER = "additional_chat_templates"
"""Where transformers keeps the chat templates of a tokenizer that has several."""


class Kept:
    """A run's folder with checkpoints of an engine that trains."""

    def __init__(self, folder: Path, engine: DeepSpeedEngine, states: ModuleType) -> None:
        self.folder = RunFolder(folder)
        self.config = engine.config
        self.engine = engine
        self.checkpoints = Checkpoints(self.folder.checkpoints)
        self._train = states.train

    def save(self, step: int, *, export: bool = False) -> None:
        """Trains once, saves it as a step, and exports the step's model from the engine to ``STEP`` if wanted."""
        self._train(self.engine, 1)
        self.checkpoints.save(
            Version(term=1, step=step),
            self.engine.save,
            ranks=1,
            state=identity(self.config),
        )
        if export:
            self.engine.export(self.folder.path / str(step), Path(self.config.model.path))

    def measured(self, values: dict[int, float], name: str = "eval/held/accuracy") -> None:
        lines = [json.dumps({"step": step, name: value}) for step, value in values.items()]
        self.folder.metrics.write_text("\n".join(lines) + "\n", encoding="utf-8")


Make = Callable[..., Kept]


@pytest.fixture
def kept(tmp_path: Path, base: Path, states: ModuleType) -> Make:
    def make(stage: int = 0, dtype: str = "float32", **learner: Any) -> Kept:
        run = tmp_path / "run"
        return Kept(run, states.engine_at(stage, dtype, base, **learner), states)

    return make


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "bfloat16"), (3, "bfloat16")])
def test_a_step_is_exported_as_the_engine_would_have_written_it(
    stage: int, dtype: str, lora: dict[str, Any] | None, kept: Make
) -> None:
    run = kept(stage, dtype, lora=lora)
    run.save(3, export=True)
    run.save(4)
    found = export(run.folder, run.config, step=3)
    assert found.place == run.folder.path / "model-of-step-3"
    expected = content(run.folder.path / "3")
    assert content(found.place) == expected
    assert {*SIDE_FILES, "config.json", "generation_config.json"} < expected.keys()
    assert json.loads(expected["config.json"])["dtype"] == dtype
    if lora is not None:
        adapters = content(adapter_folder(run.folder.path / "3"))
        assert content(adapter_folder(found.place)) == adapters
    newest = export(run.folder, run.config)
    assert newest.step == 4
    assert content(newest.place)["model.safetensors"] != expected["model.safetensors"]


def test_in_several_files_it_has_an_index_and_tied_weights_once(kept: Make, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = kept(1, "bfloat16")
    run.save(1, export=True)
    place = export(run.folder, run.config, tmp_path / "model", shard=8_000).place
    parts = sorted(place.glob("model-*.safetensors"))
    assert len(parts) > 3
    index = json.loads((place / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in parts}
    tensors = {name: one for path in parts for name, one in load_file(path).items()}
    assert tensors.keys() == index["weight_map"].keys()
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    whole = load_file(run.folder.path / "1" / "model.safetensors")
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
    loaded = AutoModelForCausalLM.from_pretrained(place)
    assert loaded.dtype == torch.bfloat16
    for (name, ours), theirs in zip(run.engine.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    tokenizer = AutoTokenizer.from_pretrained(place)
    assert tokenizer.chat_template == {
        "default": (place / "chat_template.jinja").read_text(),
        "tools": "{{ tools }}",
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


@pytest.mark.parametrize(
    ("generation", "model"),
    [
        ({"temperature": 0.9, "top_p": 0.6, "eos_token_id": [1, 2]}, {}),
        ({"pad_token_id": -1}, {}),
        # As in older folders, whose readers take these from config.json.
        (None, {"temperature": 0.9}),
    ],
    ids=["temperature without sampling", "negative pad", "in config.json"],
)
def test_a_generation_config_is_the_bases_also_if_transformers_refuses_to_write_it(
    generation: dict[str, Any] | None,
    model: dict[str, Any],
    base: Path,
    tmp_path: Path,
    states: ModuleType,
) -> None:
    from transformers import AutoModelForCausalLM

    own = tmp_path / "base"
    shutil.copytree(base, own)
    file = own / "generation_config.json"
    if generation is None:
        file.unlink()
    else:
        file.write_text(json.dumps(generation))
    config = own / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | model))
    loaded = AutoModelForCausalLM.from_pretrained(own).generation_config
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        loaded.save_pretrained(tmp_path)
    run = Kept(tmp_path / "run", states.engine_at(0, "float32", own), states)
    run.engine.model.generation_config = loaded
    run.save(1, export=True)
    assert run.engine.model.generation_config is loaded
    for place in (run.folder.path / "1", export(run.folder, run.config).place):
        found = place / file.name
        assert found.exists() == file.exists()
        if generation is not None:
            assert found.read_bytes() == file.read_bytes()
        again = AutoModelForCausalLM.from_pretrained(place).generation_config
        assert again.to_dict() == loaded.to_dict()


def test_what_transformers_refuses_to_write_is_told_in_one_message(kept: Make) -> None:
    run = kept()
    run.save(1)
    with pytest.raises(
        DataError, match=r"can't be written: transformers refuses the model: .*Got 'lots'"
    ):
        export(run.folder, run.config, shard="lots")
    assert not list(run.folder.path.glob("model-*"))


def test_a_step_that_is_not_kept_is_refused_with_those_that_are(kept: Make) -> None:
    run = kept()
    for step in (2, 4, 6):
        run.save(step)
    with pytest.raises(
        DataError, match=r"no whole checkpoint of step 2; there are those of step 4, 6\. .*_every"
    ):
        export(run.folder, run.config, step=2)
    with pytest.raises(DataError, match=r"no whole checkpoint of step 5"):
        export(run.folder, run.config, step=5)
    assert not list(run.folder.path.glob("model-*"))


def test_a_damaged_step_is_not_exported(kept: Make) -> None:
    run = kept()
    for step in (2, 4):
        run.save(step)
    (path,) = (run.folder.checkpoints / "step-00000004" / "policy").iterdir()
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"no whole checkpoint of step 4"):
        export(run.folder, run.config, step=4)
    assert export(run.folder, run.config).step == 2


def test_a_checkpoint_of_another_model_than_the_base_is_not_exported(kept: Make) -> None:
    from transformers import AutoModelForCausalLM

    run = kept()
    run.save(1)
    path = Path(run.config.model.path)
    other = AutoModelForCausalLM.from_pretrained(path)

    def refused(changed: dict[str, Any]) -> str:
        config = type(other.config).from_dict(other.config.to_dict() | changed)
        place = run.folder.path / "-".join(changed)
        shutil.copytree(path, place)
        type(other)(config).save_pretrained(place)
        model = run.config.model.model_copy(update={"path": str(place)})
        with pytest.raises(
            DataError, match=r"doesn't belong to the model in model.path="
        ) as caught:
            export(run.folder, run.config.model_copy(update={"model": model}))
        assert not list(run.folder.path.glob("model-*"))
        return str(caught.value)

    layers = other.config.num_hidden_layers
    more = refused({"num_hidden_layers": layers + 1, "layer_types": None})
    assert f"such as model.layers.{layers}." in more
    wider = refused({"intermediate_size": 2 * other.config.intermediate_size})
    assert "parameters differ, such as model.layers.0.mlp.down_proj.weight: restore" in wider


def test_what_is_there_already_stays(kept: Make, tmp_path: Path) -> None:
    run = kept(lora={"rank": 2, "alpha": 4.0})
    run.save(1)
    place = tmp_path / "model"
    adapter_folder(place).mkdir()
    with pytest.raises(DataError, match=r"adapter already exists: name another folder"):
        export(run.folder, run.config, place)
    assert not place.exists()


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}])
def test_a_full_disk_is_told_and_nothing_is_left(
    lora: dict[str, Any] | None, kept: Make, small_disk: Callable[[int], Any]
) -> None:
    run, disk = kept(lora=lora), small_disk(1)
    run.save(1)
    disk.fill()
    place = disk.folder / "model"
    with pytest.raises(DataError, match=r"model can't be written: No space .* twice its size"):
        export(run.folder, run.config, place)
    assert [path.name for path in disk.folder.iterdir()] == ["filler"]
    disk.empty()
    assert export(run.folder, run.config, place).place == place


def test_a_model_without_its_adapters_is_not_left(kept: Make, tmp_path: Path) -> None:
    run = kept(lora={"rank": 2, "alpha": 4.0})
    run.save(1)
    place = tmp_path / "out" / "model"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tandem.learner.exporting.write_adapters", full)
        with pytest.raises(DataError, match="can't be written"):
            export(run.folder, run.config, place)
    assert not list(place.parent.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from tandem.learner.engine.model_folder import write_folder
write_folder(Path(sys.argv[1]), lambda staging: os.kill(os.getpid(), signal.SIGKILL))
"""


def test_what_a_killed_writer_has_left_goes_with_the_next_one(tmp_path: Path) -> None:
    place = tmp_path / "model"
    done = subprocess.run([sys.executable, "-c", KILLED, str(place)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    # What somebody is still writing stays.
    write_folder(place, lambda staging: write_folder(place, lambda _: None))
    assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_everybody_may_read_what_is_written(tmp_path: Path) -> None:
    def fill(staging: Path) -> None:
        (staging / FURTHER).mkdir(mode=0o700)
        for name in ("config.json", f"{FURTHER}/tools.jinja"):
            (staging / name).touch(mode=0o600)

    write_folder(tmp_path / "model", fill)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert found == {"model": 0o755, FURTHER: 0o755, "config.json": 0o644, "tools.jinja": 0o644}


def test_the_run_goes_on_while_a_checkpoint_is_read(
    kept: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader keeps what it reads, the run's saves don't wait for it, and later it goes as all do."""
    import tandem.learner.exporting as exporting

    run = kept()
    run.save(1, export=True)
    run.save(2)
    learners = Checkpoints(run.folder.checkpoints)
    load = exporting.load_model

    def while_it_is_read(*words: Any, **more: Any) -> Any:
        run.checkpoints = learners
        for step in (3, 4):
            run.save(step)
        return load(*words, **more)

    monkeypatch.setattr(exporting, "load_model", while_it_is_read)
    found = export(run.folder, run.config, step=1)
    assert content(found.place) == content(run.folder.path / "1")
    assert [c.version.step for c in learners.all()] == [1, 3, 4]
    run.save(5)
    assert [c.version.step for c in learners.all()] == [4, 5]


def test_a_checkpoint_that_goes_before_it_is_read_is_none(
    kept: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = kept()
    run.save(1)
    run.save(2)
    everything = Checkpoints.all
    seen = []

    def late(self: Checkpoints) -> Any:
        found = everything(self)
        if not seen:
            seen.append(found)
            run.checkpoints = Checkpoints(run.folder.checkpoints)
            run.save(3)
            run.save(4)
        return found

    monkeypatch.setattr(Checkpoints, "all", late)
    assert export(run.folder, run.config).step == 4
    # Nor is it taken for a damaged one.
    assert not [line for line in caplog.messages if "left out" in line]


def test_each_run_of_a_name_has_its_own_export(kept: Make, tmp_path: Path) -> None:
    run, exports = kept(), tmp_path / "exports"
    digests = []
    # Another folder of this name, and then another run in the place of the second one.
    for number, name in enumerate(("a", "b", "b")):
        run.folder = RunFolder(tmp_path / name / "run")
        shutil.rmtree(run.folder.path, ignore_errors=True)
        run.checkpoints = Checkpoints(run.folder.checkpoints)
        run.save(1)
        run.folder.write_config(to_yaml(run.config))
        run.folder.write_run({"run_id": f"run-{number}"})
        found = find_model(f"{run.folder.path}@1", exports)
        assert found.name == f"{run.folder.path}@1"
        # It isn't made twice.
        assert find_model(f"{run.folder.path}@newest", exports) == found
        digests.append(found.digest)
    assert len(set(digests)) == len(list(exports.iterdir())) == 3


# -- by a metric ----------------------------------------------------------------------------------


def test_the_best_kept_step_is_named_with_its_value(kept: Make) -> None:
    run = kept()
    for step in (2, 4, 6):
        run.save(step, export=True)
    run.measured({0: 0.1, 2: 0.8, 4: 0.5, 5: 0.6, 6: 0.3})
    found = export(run.folder, run.config, best="held/accuracy")
    assert found.step == 4
    assert content(found.place) == content(run.folder.path / "4")
    assert found.note.startswith("held/accuracy is 0.5 there. Step 2 had 0.8, and its checkpoint")
    smallest = export(run.folder, run.config, best="eval/held/accuracy:min")
    assert smallest.step == 6
    assert smallest.note.startswith("held/accuracy is 0.3 there. Step 0 had 0.1")
    run.measured({4: 2.5, 6: 3.5}, "train/loss")
    found = export(run.folder, run.config, run.folder.path / "by-loss", best="train/loss:min")
    assert (found.step, found.note) == (4, "train/loss is 2.5 there.")


def test_kept_steps_are_compared_by_evaluations_of_the_same_problems(kept: Make) -> None:
    run = kept()
    for step in (4, 6):
        run.save(step)
    # As with evaluate.limit: the first and the last evaluation are of the whole set.
    measured = [(0, 0.95, 50), (2, 0.8, 10), (4, 0.4, 10), (6, 0.7, 10), (6, 0.3, 50)]
    lines = (
        json.dumps({"step": step, "eval/held/accuracy": value, "eval/held/problems": problems})
        for step, value, problems in measured
    )
    run.folder.metrics.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = export(run.folder, run.config, best="held/accuracy")
    assert found.step == 6
    assert found.note.startswith("held/accuracy of 10 problems is 0.7 there. Step 2 had 0.8, and")


def test_a_metric_that_no_kept_step_has_is_refused(kept: Make) -> None:
    run = kept()
    run.save(2)
    run.measured({1: 0.5, 3: 0.7})
    with pytest.raises(
        DataError,
        match=r"measured at step 1, 3, and there are checkpoints of step 2.*evaluate\.best",
    ):
        export(run.folder, run.config, best="held/accuracy")
    with pytest.raises(DataError, match=r"no step has it"):
        export(run.folder, run.config, best="speed")
    for mistyped in ("held/acuracy", "accuracy"):
        with pytest.raises(DataError, match=r"did you mean held/accuracy\?"):
            export(run.folder, run.config, best=mistyped)
    with pytest.raises(DataError, match=r"--best held/accuracy:most: name a metric"):
        export(run.folder, run.config, best="held/accuracy:most")


def test_the_runs_own_best_model_is_the_answer_to_its_own_metric(
    kept: Make, tmp_path: Path
) -> None:
    run = kept(lora={"rank": 2, "alpha": 4.0})
    run.config = run.config.model_copy(
        update={"evaluate": run.config.evaluate.model_copy(update={"best": "held/accuracy"})}
    )
    values = {1: 0.25, 2: 0.75, 3: 0.5}
    best = Best(run.folder, "held/accuracy", lambda place: run.engine.export(place, None))
    for step, value in values.items():
        run.save(step)
        best.saw({"step": step, "eval/held/accuracy": value})
    run.measured(values)
    found = export(run.folder, run.config, best="held/accuracy")
    assert (found.step, found.place) == (2, run.folder.best)
    assert found.note == "held/accuracy is 0.75 there."
    copied = export(run.folder, run.config, tmp_path / "copy", best="held/accuracy")
    assert content(copied.place) == content(run.folder.best)
    assert content(adapter_folder(copied.place)) == content(adapter_folder(run.folder.best))
    # The smallest is another question.
    assert export(run.folder, run.config, best="held/accuracy:min").step == 3


def test_what_is_told_of_a_best_model_is_not_told_of_those_trained_from_it(
    base: Path, tmp_path: Path, states: ModuleType
) -> None:
    own = tmp_path / "base"
    shutil.copytree(base, own)
    (own / "best.json").write_text(json.dumps({"step": 70, "value": 0.9}))
    run = Kept(tmp_path / "run", states.engine_at(0, "float32", own), states)
    run.save(1, export=True)
    for place in (run.folder.path / "1", export(run.folder, run.config).place):
        assert best_of(place) is None
        assert (place / "tokenizer.json").exists()


def test_only_evaluations_of_the_same_problems_are_compared(
    kept: Make, caplog: pytest.LogCaptureFixture
) -> None:
    run = kept()
    run.folder.metrics.write_text(json.dumps({"step": 0}) + "\n", encoding="utf-8")
    caplog.set_level(logging.INFO, "tandem.learner")

    def started(limit: int | None) -> Best:
        best = Best(run.folder, "held/accuracy", lambda place: place.mkdir(exist_ok=True), limit)
        best.begin(0)
        return best

    def best_after(best: Best, step: int, value: float, problems: int) -> int | None:
        best.saw({"step": step, "eval/held/accuracy": value, "eval/held/problems": problems})
        found = best_of(run.folder.best)
        return None if found is None else found["step"]

    best = started(10)
    # The base model, by the whole set.
    assert best_after(best, 0, 0.9, 50) is None
    assert "of step 0 is of 50 problems: the best model is chosen among" in caplog.text
    assert best_after(best, 1, 0.6, 10) == 1
    assert best_after(best, 2, 0.5, 10) == 1
    assert best_after(started(10), 3, 0.5, 10) == 1
    # Resumed with another limit, and with none.
    best = started(20)
    assert best_after(best, 4, 0.4, 20) == 4
    assert "was of 10 problems: it begins anew, of 20" in caplog.text
    assert best_after(best, 5, 0.3, 20) == 4
    best = started(None)
    assert best_after(best, 6, 0.35, 50) == 6
    assert best_after(best, 7, 0.38, 50) == 7
    # A set that is smaller than the limit is whole in every evaluation.
    best = started(60)
    assert best_after(best, 8, 0.36, 50) == 7
    assert best_after(best, 9, 0.39, 50) == 9


def test_what_is_told_of_the_best_model_is_of_the_same_problems(kept: Make) -> None:
    run = kept()
    run.config = run.config.model_copy(
        update={"evaluate": run.config.evaluate.model_copy(update={"best": "held/accuracy"})}
    )
    best = Best(run.folder, "held/accuracy", lambda place: run.engine.export(place, None), 10)
    measured = [(1, 0.5, 10), (2, 0.4, 10), (3, 0.45, 50)]
    records = [
        {"step": step, "eval/held/accuracy": value, "eval/held/problems": problems}
        for step, value, problems in [(0, 0.9, 50), *measured]
    ]
    for record in records:
        best.saw(record)
    text = "".join(json.dumps(record) + "\n" for record in records)
    run.folder.metrics.write_text(text, encoding="utf-8")
    found = export(run.folder, run.config, best="held/accuracy")
    assert (found.step, found.note) == (1, "held/accuracy is 0.5 there.")


def test_a_model_that_was_best_by_another_figure_gives_way(kept: Make) -> None:
    run = kept()
    run.save(1, export=True)
    record = {"step": 1, "eval/held/length": 40.0, "eval/held/accuracy": 0.5}
    run.folder.metrics.write_text(json.dumps({"step": 0}) + "\n", encoding="utf-8")
    places: list[Path] = []

    def export_to(place: Path) -> None:
        place.mkdir(exist_ok=True)
        places.append(place)

    def kept_by(metric: str) -> list[Path]:
        """The folders that a learner with this setting exports to."""
        places.clear()
        best = Best(run.folder, metric, export_to)
        best.begin(1)
        best.saw(record)
        return places

    assert kept_by("-held/length") == [run.folder.best]
    assert kept_by("-held/length") == []
    run.config = run.config.model_copy(
        update={"evaluate": run.config.evaluate.model_copy(update={"best": "held/accuracy"})}
    )
    run.measured({1: 0.5})
    # Nothing was measured with the new setting: best/ is no answer to it.
    assert export(run.folder, run.config, best="held/accuracy").place != run.folder.best
    run.measured({0: 0.0})
    assert kept_by("held/accuracy") == [run.folder.best]
    assert kept_by("held/accuracy") == []
    # The greatest is another figure than the smallest.
    assert kept_by("held/length") == [run.folder.best]
    assert kept_by("-held/length") == [run.folder.best]


def test_a_kept_step_that_was_better_before_the_setting_is_taken(kept: Make) -> None:
    """The setting came with a resume, so that the run's best model is only the best since then."""
    run = kept()
    run.save(4)
    run.config = run.config.model_copy(
        update={"evaluate": run.config.evaluate.model_copy(update={"best": "held/accuracy"})}
    )
    best = Best(run.folder, "held/accuracy", lambda place: run.engine.export(place, None))
    best.saw({"step": 6, "eval/held/accuracy": 0.5})
    values = {2: 0.7, 4: 0.9, 6: 0.5}
    run.measured(values)
    found = export(run.folder, run.config, best="held/accuracy")
    assert (found.step, found.place) == (4, run.folder.path / "model-of-step-4")
    assert found.note == "held/accuracy is 0.9 there."
    # Equal ones are as good, and the run's own model is there already.
    run.measured(values | {4: 0.5})
    found = export(run.folder, run.config, best="held/accuracy")
    assert (found.step, found.place) == (6, run.folder.best)
    assert found.note.startswith("held/accuracy is 0.5 there. Step 2 had 0.7, and its checkpoint")


def test_a_file_systems_root_is_no_place_for_a_model(kept: Make) -> None:
    run = kept()
    run.save(2)
    with pytest.raises(DataError, match=r"^/ already exists: name another folder with --out$"):
        export(run.folder, run.config, Path("/"))
