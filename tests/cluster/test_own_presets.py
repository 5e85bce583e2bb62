"""A preset of the user's own reaches head and pods with all that it is made of."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.config import Config
from tandem.launch.cli import dispatch
from tandem.launch.run.opened.presets import load

FILES = {
    "below.yaml": "base: miniature\nlearner: {optimizer: {lr: 3e-4}}\n",
    "mine.yaml": "base: below.yaml\nreplay: {redis_url: 'redis://me:marker@redis.example:6380/2'}\n",
    "a b+é.yaml": "base: below.yaml\nrun: {seed: 5}\n",
    "data": "",
}
NAMED = ["mine.yaml", "miniature-easy+mine.yaml", "mine.yaml+miniature", "a b+é.yaml"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cluster(*words: str) -> None:
    assert dispatch(["cluster", *words, "--out", "made"]) == 0


def settings(words: list[str]) -> Config:
    """What ``tandem start`` makes of its words, save what a cluster sets."""
    preset, *overrides = words
    config = load(preset).resolve([word for word in overrides if "=" in word])
    launch = type(config.launch)()
    return config.model_copy(update={"launch": launch})


def named(preset: str) -> Config:
    """The settings of a preset as it is given here, without the password."""
    config = settings([preset, "learner.checkpoint_every=7"])
    url = config.replay.redis_url
    shown = None if url is None else url.replace(":marker@", "@")
    return config.model_copy(
        update={"replay": config.replay.model_copy(update={"redis_url": shown})}
    )


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("preset", NAMED)
def test_pods_get_it_as_one_file(here: Path, preset: str) -> None:
    cluster("kubernetes", preset, "learner.checkpoint_every=7")
    (config_map,) = documents(here / "made" / "preset.yaml")
    ((key, text),) = config_map["data"].items()
    assert re.fullmatch(r"[-._a-zA-Z0-9]+", key)
    _, head = documents(here / "made" / "head.yaml")
    args = head["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:3] == ["start", f"/etc/tandem/preset/{key}", "--head"]
    assert "marker" not in text
    elsewhere = here / "elsewhere" / key
    elsewhere.parent.mkdir()
    elsewhere.write_text(text)
    run = named(preset).run.model_copy(update={"dir": f"/runs/{Path(key).stem}"})
    there = settings([str(elsewhere), *args[3:]])
    assert there == named(preset).model_copy(update={"run": run})


@pytest.mark.parametrize("preset", NAMED)
def test_rented_machines_get_it_as_one_file(here: Path, preset: str) -> None:
    cluster("skypilot", preset, "learner.checkpoint_every=7")
    (task,) = documents(here / "made" / "task.yaml")
    read = subprocess.run(["bash", "-n"], input=task["run"], text=True, capture_output=True)
    assert read.returncode == 0, read.stderr
    (start,) = re.findall(r'exec "\$tandem" (start .*)', task["run"])
    _, place, _, *words = shlex.split(start)
    file = Path(task["file_mounts"][place.replace("$HOME", "~")])
    assert "marker" not in file.read_text()
    # Its name is another one there, and the run's folder isn't.
    elsewhere = here / "elsewhere.yaml"
    elsewhere.write_text(file.read_text())
    assert settings([str(elsewhere), *words]) == named(preset)


@pytest.mark.parametrize("preset", ["below.yaml", "miniature-easy+below.yaml", "a b+é.yaml"])
def test_nodes_that_share_the_file_system_find_it(here: Path, preset: str) -> None:
    cluster("slurm", preset, "learner.checkpoint_every=7")
    text = (here / "made" / "head.sbatch").read_text()
    assert f"#SBATCH --chdir={here}\n" in text
    (start,) = re.findall(r'^"\$\{tandem\[@\]\}" start (.*) &$', text, re.MULTILINE)
    found, *words = shlex.split(start)
    there = settings([found, *words])
    run = there.run.model_copy(update={"dir": named(preset).run.dir})
    assert there.model_copy(update={"run": run}) == named(preset)


@pytest.mark.parametrize(
    ("form", "script"),
    [
        (["tandem.sqsh"], "head.sbatch"),
        (["tandem.sif"], "head.sbatch"),
        (["tandem.sif", "--hetjob"], "gang.sbatch"),
    ],
    ids=str,
)
def test_a_container_of_slurms_gets_it_as_one_file_that_it_sees(
    here: Path, form: list[str], script: str
) -> None:
    cluster("slurm", "below.yaml", "learner.checkpoint_every=7", "--container", *form)
    text = (here / "made" / script).read_text()
    (start,) = re.findall(r'"\$\{tandem\[@\]\}" start (.*) &$', text, re.MULTILINE)
    found, *words = shlex.split(start)
    assert Path(found) == here / "made" / "preset.yaml"
    assert "marker" not in Path(found).read_text()
    elsewhere = here / "elsewhere" / "below.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(Path(found).read_text())
    # The job's shell puts the address in.
    there = settings([str(elsewhere), *(word for word in words if "$address" not in word)])
    run = there.run.model_copy(update={"dir": named("below.yaml").run.dir})
    assert there.model_copy(update={"run": run}) == named("below.yaml")


def test_presets_of_tandems_own_are_named(here: Path) -> None:
    cluster("kubernetes", "miniature+miniature-easy")
    assert not (here / "made" / "preset.yaml").exists()
    _, head = documents(here / "made" / "head.yaml")
    args = head["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[:2] == ["start", "miniature+miniature-easy"]


@pytest.mark.parametrize("kind", ["kubernetes", "skypilot"])
def test_other_hosts_get_the_settings_of_a_file_of_deepspeeds(here: Path, kind: str) -> None:
    (here / "ds.json").write_text('{"zero_optimization": {"reduce_bucket_size": 1000}}')
    (here / "with.yaml").write_text("base: miniature\nlearner: {deepspeed: ds.json}\n")
    cluster(kind, "with.yaml", "learner.deepspeed=ds.json")
    (document,) = documents(here / "made" / "preset.yaml")
    tree = yaml.safe_load(*document["data"].values()) if kind == "kubernetes" else document
    (here / "ds.json").unlink()
    expected = {"zero_optimization": {"reduce_bucket_size": 1000}}
    assert tree["learner"]["deepspeed"] == expected
    made = (here / "made" / ("head.yaml" if kind == "kubernetes" else "task.yaml")).read_text()
    assert made.count("reduce_bucket_size") == 1


def test_a_line_break_in_a_setting_reaches_rented_machines(here: Path) -> None:
    prompt = "Think.\nThen answer, it's due."
    cluster("skypilot", "miniature", f"data.system_prompt={prompt}")
    (task,) = documents(here / "made" / "task.yaml")
    (start,) = re.findall(r'exec "\$tandem" (start .*)', task["run"])
    said = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {start}"], capture_output=True, text=True, check=True
    )
    assert f"data.system_prompt={prompt}" in said.stdout.split("\0")
