"""Manifests: what Kubernetes' own schemas say of them, and whether their parts fit together."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from crossing import findings
from msgspec import structs

from tandem.common.errors import ConfigError, DataError
from tandem.common.run_folder import JoinInfo, read_join
from tandem.launch.cli import dispatch, main
from tandem.launch.cluster.rendering import fill, quoted
from tandem.launch.plan import hardware

HERE = Path(__file__).parent
STORM = str(HERE.parent / "faults" / "storm.yaml")
HOSTS = ["learner.ranks=2", "learner.hosts=2"]
KINDS: dict[str, list[str]] = {
    "one host": ["miniature"],
    "GPUs": ["qwen2.5-math-7b-luffy-8gpu", "--storage-class", "fast", "--nodes", "4"],
    "hosts": ["miniature", *HOSTS, "--workers-per-node", "2"],
    "own preset": [STORM, "weights.transport=snapshot"],
    "jobset": ["miniature", *HOSTS, "--jobset", "--name", "My_Run"],
    "existing Redis": ["miniature", "replay.redis_url=redis://me@redis.example:6380/2"],
}
SCHEMA = json.loads((HERE / "jobset.schema.json").read_text())


def made(folder: Path, words: list[str]) -> Path:
    assert main(["cluster", "kubernetes", *words, "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("manifests"), request.param)


def objects_of(folder: Path) -> list[dict[str, Any]]:
    files = [path for path in sorted(folder.glob("*.yaml")) if path.name != "kustomization.yaml"]
    return [one for path in files for one in yaml.safe_load_all(path.read_text())]


def differing(folder: Path) -> set[str]:
    """Files that only one of the kustomization and the folder has."""
    listed = set(yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"])
    there = {path.name for path in folder.glob("*.yaml")}
    return listed ^ (there - {"kustomization.yaml", "results.yaml"})


def schema_faults(objects: list[dict[str, Any]]) -> list[str]:
    """What the schemas say, unknown fields included; JobSets by their own, and the Jobs within by Kubernetes'."""
    found = []
    for one in objects:
        if one["kind"] == "JobSet":
            errors = jsonschema.Draft202012Validator(SCHEMA).iter_errors(one)
            found += [f"{error.json_path}: {error.message}" for error in errors]
            for job in one["spec"].get("replicatedJobs", ()):
                as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
                found += schema_faults([{**as_job, "spec": job["template"]["spec"]}])
            continue
        try:
            kubernetes_validate.validate(one, "1.37", strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as e:
            found.append(str(e))
    return found


def test_kubernetes_own_schemas_know_every_field(manifests: Path):
    assert schema_faults(objects_of(manifests)) == []


def test_what_one_object_names_is_there_in_another(manifests: Path):
    assert findings(objects_of(manifests), differing(manifests)) == []


def test_the_run_has_a_volume_that_deleting_its_objects_leaves(manifests: Path):
    # Claims among the objects are deleted with them; those that a StatefulSet made aren't.
    objects = objects_of(manifests)
    assert "PersistentVolumeClaim" not in {one["kind"] for one in objects}
    # The head's comes before the learner's.
    (claim,) = _kind(objects, "StatefulSet")["spec"]["volumeClaimTemplates"]
    shared = any(one["metadata"]["name"].endswith("-learner") for one in objects)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany" if shared else "ReadWriteOnce"]


def test_what_is_downloaded_outlives_a_container(manifests: Path):
    found = 0
    for one in objects_of(manifests):
        spec = one.get("spec", {})
        if one["kind"] == "JobSet":
            spec = spec["replicatedJobs"][0]["template"]["spec"]
        if one["kind"] not in ("StatefulSet", "Deployment", "JobSet"):
            continue
        (container,) = spec["template"]["spec"]["containers"]
        (home,) = [e["value"] for e in container["env"] if e["name"] == "HF_HOME"]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert any(Path(home).is_relative_to(mount) for mount in mounts)
        found += 1
    assert found >= 2


def test_names_are_asked_of_any_resolver(manifests: Path):
    policies = [one for one in objects_of(manifests) if one["kind"] == "NetworkPolicy"]
    rules = [rule for one in policies for rule in one["spec"].get("egress", ())]
    asked = {"protocol": "UDP", "port": 53}
    (rule,) = [rule for rule in rules if asked in rule.get("ports", ())]
    assert "to" not in rule
    assert {"protocol": "TCP", "port": 53} in rule["ports"]


def test_texts_of_any_script_are_written_as_every_reader_of_yaml_reads_them():
    text = 'Denk nach \U0001f642 \u0085 \u2028 é \\ud83d "x"\n\x7f'
    for value in (text, ["a", text], {text: 1}):
        written = quoted(value)
        assert written.isascii()
        assert written.isprintable()
        assert not re.search(r"(?<!\\)\\ud[89a-f]", written)
        assert yaml.safe_load(written) == value


def test_the_validators_own_command_has_nothing_to_say(tmp_path: Path):
    folder = made(tmp_path / "k8s", ["miniature", *HOSTS])
    files = [str(p) for p in folder.glob("*.yaml") if p.name != "kustomization.yaml"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("kubernetes-validate")), "--strict", *files],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warn" not in (done.stdout + done.stderr).lower()


# --- each check finds the fault that it is for ---------------------------------------------

Fault = Callable[[dict[str, Any]], Any]


def _kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next(one for one in objects if one["kind"] == kind)


def _container(one: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = one["spec"]["template"]["spec"]["containers"][0]
    return found


CROSSED: dict[str, tuple[str, Fault, str]] = {
    "selector": (
        "Deployment",
        lambda one: one["spec"]["selector"]["matchLabels"].update(a="b"),
        "the selector of Deployment tandem-miniature-rollout isn't among",
    ),
    "mount": (
        "Deployment",
        lambda one: _container(one)["volumeMounts"].append({"name": "data", "mountPath": "/d"}),
        "mounts data, which is no volume",
    ),
    "volume": (
        "StatefulSet",
        lambda one: _container(one)["volumeMounts"].pop(1),
        "has the volume join, which is mounted nowhere",
    ),
    "secret": (
        "Secret",
        lambda one: one["metadata"].update(name="other"),
        "mounts the secret tandem-miniature-join, which isn't there",
    ),
    "port": (
        "Service",
        lambda one: one["spec"]["ports"][0].update(port=6379),
        "port 6379 of the service tandem-miniature-head is {29500}",
    ),
    "policy's port": (
        "NetworkPolicy",
        lambda one: one["spec"]["ingress"][0]["ports"][0].update(port=29501),
        "keeps others from port 29500",
    ),
    "policy's way to Redis": (
        "Secret",
        lambda one: one["stringData"].update({"join.json": '{"host": "a.example", "port": 6380}'}),
        "keeps pods from Redis at a.example:6380",
    ),
    "policy's selector": (
        "NetworkPolicy",
        lambda one: one["spec"]["podSelector"]["matchLabels"].update({"x": "y"}),
        "the policy tandem-miniature selects no pod",
    ),
    "quantity": (
        "Deployment",
        lambda one: _container(one)["resources"]["requests"].update(cpu="banana"),
        "asks for cpu: banana",
    ),
    "grace": (
        "Deployment",
        lambda one: one["spec"]["template"]["spec"].update(terminationGracePeriodSeconds=30),
        "drains for longer than its grace of 30 s",
    ),
    "variable": (
        "StatefulSet",
        lambda one: _container(one).pop("env"),
        "uses $(POD_IP), which isn't in its environment",
    ),
    "claim": (
        "StatefulSet",
        lambda one: one["spec"]["volumeClaimTemplates"][0]["metadata"].update(name="other"),
        "mounts runs, which is no volume",
    ),
    "service": (
        "StatefulSet",
        lambda one: one["spec"].update(serviceName="other"),
        "names the service other, which isn't there",
    ),
}


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = made(tmp_path_factory.mktemp("crossed"), ["miniature"])
    found = objects_of(folder)
    # The policy of the data's ports comes first by its file's name.
    return sorted(found, key=lambda one: one["metadata"]["name"].endswith("-data"))


@pytest.fixture(scope="module")
def jobset(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = made(tmp_path_factory.mktemp("jobset"), ["miniature", *HOSTS, "--jobset"])
    return _kind(objects_of(folder), "JobSet")


@pytest.mark.parametrize(("kind", "plant", "says"), CROSSED.values(), ids=list(CROSSED))
def test_a_planted_fault_is_found(
    miniature: list[dict[str, Any]], kind: str, plant: Fault, says: str
):
    objects = copy.deepcopy(miniature)
    plant(_kind(objects, kind))
    assert any(says in one for one in findings(objects)), findings(objects)


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("Deployment", lambda one: one["spec"].update(replica=2)),
        ("StatefulSet", lambda one: _container(one).update(arguments=[])),
        ("Secret", lambda one: one["stringData"].update(number=1)),
        ("NetworkPolicy", lambda one: one["spec"].update(podselector={})),
    ],
)
def test_the_schemas_find_a_misspelt_field_and_a_wrong_type(
    miniature: list[dict[str, Any]], kind: str, plant: Fault
):
    # The others of its kind, and the other kinds, are faultless (above), and each takes the schemas a while.
    planted = copy.deepcopy(_kind(miniature, kind))
    plant(planted)
    assert len(schema_faults([planted])) == 1


@pytest.mark.parametrize(
    "plant",
    [
        lambda spec: spec.update(failurepolicy={}),
        lambda spec: spec["failurePolicy"].update(restartStrategy="Never"),
        lambda spec: spec["network"].update(dns=True),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(parallel=2),
    ],
)
def test_the_schema_of_jobsets_finds_a_field_that_it_does_not_know(
    jobset: dict[str, Any], plant: Fault
):
    planted = copy.deepcopy(jobset)
    plant(planted["spec"])
    assert len(schema_faults([planted])) == 1


def test_a_file_that_the_kustomization_lacks_is_found(tmp_path: Path):
    folder = made(tmp_path, ["miniature"])
    (folder / "more.yaml").write_text("{}")
    assert differing(folder) == {"more.yaml"}


# --- what is written ------------------------------------------------------------------------


def test_the_join_file_is_in_a_secret_and_stays_when_manifests_are_made_again(tmp_path: Path):
    folder = made(tmp_path / "k8s", ["miniature"])
    secret = folder / "secret.yaml"
    assert secret.stat().st_mode & 0o777 == 0o600
    text = yaml.safe_load(secret.read_text())["stringData"]["join.json"]
    file = tmp_path / "join.json"
    file.write_text(text)
    join = read_join(file)
    assert (join.host, join.port) == ("tandem-miniature-head.default.svc", 29500)
    made(folder, ["miniature", "run.steps=20"])
    assert yaml.safe_load(secret.read_text())["stringData"]["join.json"] == text
    secret.write_text("stringData: {join.json: '{}'}")
    with pytest.raises(DataError, match=r"secret\.yaml"):
        dispatch(["cluster", "kubernetes", "miniature", "--out", str(folder)])


def test_commands_in_comments_are_for_the_runs_namespace(tmp_path: Path):
    folder = made(tmp_path, ["miniature", "--namespace", "research"])
    found = [
        line[line.index("kubectl") :]
        for path in folder.glob("*.yaml")
        for line in path.read_text().splitlines()
        # What is applied names the namespace itself.
        if "kubectl" in line and not re.search(r"kubectl (apply|delete) -[fk]", line)
    ]
    assert len(found) == 3
    for line in found:
        assert shlex.split(line.partition("`")[0])[1:3] == ["-n", "research"]


@pytest.mark.parametrize(
    ("more", "address"),
    [
        (["--namespace", "research"], ("tandem-miniature-head.research.svc", 29500)),
        (["--name", "other"], ("tandem-other-head.default.svc", 29500)),
        (["launch.ports=31000-31063"], ("tandem-miniature-head.default.svc", 31000)),
    ],
)
def test_manifests_that_are_made_again_have_the_new_address_and_the_old_password(
    tmp_path: Path, more: list[str], address: tuple[str, int]
):
    def join() -> JoinInfo:
        (secret,) = yaml.safe_load_all((tmp_path / "secret.yaml").read_text())
        file = tmp_path / "join.json"
        file.write_text(secret["stringData"]["join.json"])
        return read_join(file)

    made(tmp_path, ["miniature"])
    before = join()
    made(tmp_path, ["miniature", *more])
    assert join() == structs.replace(before, host=address[0], port=address[1])


def test_long_names_that_differ_in_their_ends_alone_name_different_objects(tmp_path: Path):
    names = [f"qwen2.5-math-7b-luffy-lr1e-6-seed{seed}" for seed in (1, 2)]
    objects = [
        {
            one["metadata"]["name"]
            for one in objects_of(made(tmp_path / name, ["miniature", "--name", name]))
        }
        for name in names
    ]
    assert objects[0].isdisjoint(objects[1])
    # A service's name has 63 characters at most.
    assert all(len(name) < 60 for name in objects[0])
    again = objects_of(made(tmp_path / "again", ["miniature", "--name", names[0]]))
    assert {one["metadata"]["name"] for one in again} == objects[0]


def test_a_folder_that_is_named_in_vain_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    made(tmp_path, ["miniature", "run.dir=runs/mine"])
    assert "run.dir=runs/mine isn't used: the volume has the run's folder, /runs/miniature" in (
        capsys.readouterr().err
    )
    made(tmp_path, ["miniature"])
    assert "run.dir" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("urls", "ports"),
    [
        ([], []),
        (["https://judge.example/v1"], []),
        (["http://judge.research.svc:8000", "http://scores"], [80, 8000]),
    ],
)
def test_servers_that_the_reward_asks_can_be_reached(
    tmp_path: Path, urls: list[str], ports: list[int]
):
    judges = [{"name": "judge", "params": {"url": url, "model": "m"}} for url in urls[:1]]
    judges += [{"name": "classifier", "params": {"url": url}} for url in urls[1:]]
    words = [f"reward.components={json.dumps([{'name': 'accuracy'}, *judges])}"] if urls else []
    folder = made(tmp_path, ["miniature", *words])
    (policy,) = yaml.safe_load_all((folder / "network.yaml").read_text())
    assert schema_faults([policy]) == []
    anywhere = [rule["ports"] for rule in policy["spec"]["egress"] if "to" not in rule]
    opened = sorted(port["port"] for rule in anywhere for port in rule if port["protocol"] == "TCP")
    assert opened == sorted([53, 443, *ports])


@pytest.mark.parametrize(
    ("url", "of_this_cluster"),
    [
        ("http://judge.research.svc:8000", True),
        ("https://judge.research.svc.cluster.local", True),
        ("http://judge:8000", True),
        ("http://judge.example.org:8000", False),
        ("http://judge.research:8000", True),
        ("http://localhost:8000", False),
        ("http://10.1.2.3:8000", False),
        ("http://[fd00::3]:8000", False),
    ],
)
def test_of_a_service_of_this_cluster_the_port_of_its_pods_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, of_this_cluster: bool
):
    judge = {"name": "judge", "params": {"url": url, "model": "m"}}
    made(tmp_path, ["miniature", f"reward.components={json.dumps([judge])}"])
    notes = [line for line in capsys.readouterr().err.splitlines() if "targetPort" in line]
    assert len(notes) == of_this_cluster
    assert all(note.startswith("note: ") and url in note for note in notes)


def as_kubernetes_starts(word: str, environment: dict[str, str]) -> str:
    """A word of ``args`` as the container gets it."""

    def replaced(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replaced, word)


@pytest.mark.parametrize("prompt", ["In $$x$$, $(POD_IP) is $(x)$.", "$$(POD_IP)", "for 5$", "$$$"])
def test_dollars_reach_the_run_as_they_were_given(tmp_path: Path, prompt: str):
    folder = made(tmp_path, ["miniature", f"data.system_prompt={prompt}"])
    args = _container(_kind(objects_of(folder), "StatefulSet"))["args"]
    started = [as_kubernetes_starts(word, {"POD_IP": "10.1.2.3"}) for word in args]
    assert f"data.system_prompt={prompt}" in started
    assert "launch.bind=10.1.2.3" in started


def test_files_of_tls_that_are_here_have_to_be_put_where_pods_find_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "ca.pem").touch()
    words = ["replay.redis_url=rediss://redis.example", f"replay.redis_ca={tmp_path}/ca.pem"]
    words.append("replay.redis_cert=/elsewhere/client.pem")
    assert dispatch(["cluster", "kubernetes", "miniature", *words]) == 0
    said = capsys.readouterr().err
    assert f"{tmp_path}/ca.pem is on this machine" in said
    assert "the Secret tandem-miniature-env, as TANDEM_REDIS_CA" in said
    assert "client.pem" not in said


@pytest.mark.parametrize(
    ("engine", "way"),
    [
        (
            "kubernetes",
            ("put it into the image or on the volume", "the Secret tandem-miniature-env"),
        ),
        ("skypilot", ("copy it by file_mounts in task.yaml", "envs in task.yaml")),
    ],
)
def test_files_that_are_here_alone_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    way: tuple[str, str],
):
    monkeypatch.setenv("TANDEM_BENCHMARKS", str(tmp_path / "benchmarks"))
    monkeypatch.setenv("HOME", str(tmp_path))
    # A known set that was fetched here is fetched there, too.
    (tmp_path / "benchmarks" / "aime24").mkdir(parents=True)
    for name in ("train.jsonl", "heldout.jsonl", "ca.pem"):
        (tmp_path / name).touch()
    # Of paths that can't be looked at, nothing is known.
    elsewhere = ["/volume/more.jsonl", "~nobody-of-this-name/x.jsonl", f"/{'x' * 300}.jsonl"]
    train = [{"path": path} for path in ("~/train.jsonl", *elsewhere)]
    evaluate = ["aime24", {"path": f"{tmp_path}/heldout.jsonl"}]
    words = [f"data.train={json.dumps(train)}", f"data.evaluate={json.dumps(evaluate)}"]
    words += ["replay.redis_url=rediss://redis.example", f"replay.redis_ca={tmp_path}/ca.pem"]
    assert dispatch(["cluster", engine, "miniature", *words]) == 0
    notes = [one for one in capsys.readouterr().err.splitlines() if "on this machine" in one]
    here = ["~/train.jsonl", f"{tmp_path}/heldout.jsonl", f"{tmp_path}/ca.pem"]
    told = [note.removeprefix("note: ").partition(" is on this machine: ") for note in notes]
    assert [path for path, _, _ in told] == here
    assert told[0][2].startswith(way[0])
    assert notes[2].endswith(f"and its path there into {way[1]}, as TANDEM_REDIS_CA")


def test_names_that_yaml_could_take_for_numbers_stay_names(tmp_path: Path):
    words = ["--namespace", "2024", "--storage-class", "1e3", "--storage", "100"]
    folder = made(tmp_path, ["miniature", *words])
    objects = objects_of(folder)
    assert schema_faults(objects) == []
    assert yaml.safe_load((folder / "kustomization.yaml").read_text())["namespace"] == "2024"
    assert _kind(objects, "Pod")["metadata"]["namespace"] == "2024"
    (claim,) = _kind(objects, "StatefulSet")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "1e3"
    assert claim["spec"]["resources"]["requests"]["storage"] == "100"


def test_no_password_is_printed(capsys: pytest.CaptureFixture[str]):
    assert main(["cluster", "kubernetes", "miniature"]) == 0
    printed = capsys.readouterr().out
    assert "password: --out DIR writes it" in printed
    assert "join.json: " not in printed
    kinds = [one["kind"] for one in yaml.safe_load_all(printed)]
    assert kinds.count("NetworkPolicy") == 2
    assert "Secret" not in kinds


def test_resources_are_the_plans(tmp_path: Path):
    folder = made(tmp_path, ["qwen2.5-math-7b-luffy-8gpu", "--workers-per-node", "2"])
    by_name = {one["metadata"]["name"]: one for one in objects_of(folder)}
    name = "tandem-qwen2-5-math-7b-luffy-8gpu"
    worker = _container(by_name[f"{name}-rollout"])
    head = _container(by_name[f"{name}-head"])
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert head["resources"]["limits"]["nvidia.com/gpu"] == 6
    assert worker["args"][worker["args"].index("--workers") + 1] == "2"


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "skypilot"])
def test_how_many_gpus_this_machine_has_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: str
):
    words = ["cluster", engine, "qwen2.5-math-7b-luffy-8gpu"]
    assert dispatch(words) == 0
    before = capsys.readouterr().out
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "0, NVIDIA H100 80GB HBM3, 81559, GPU-7f57f032"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(hardware.gpus()) == 1
    assert dispatch(words) == 0
    assert capsys.readouterr().out == before


def test_a_place_without_a_value_is_named():
    with pytest.raises(DataError, match="example line 2 has @three@, which is none of one, two"):
        fill("@one@\n@three@\n", {"one": 1, "two": 2}, "example")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["miniature", "--jobset"], "learner.hosts=1"),
        (["miniature", "--partition", "gpu"], "--partition is an option of slurm"),
        (
            ["miniature", "--namespace", "My_NS"],
            "--namespace My_NS: Kubernetes wants small letters",
        ),
        (["miniature", "--storage", "lots"], "--storage lots: Kubernetes wants a quantity"),
        (["miniature", "--storage-class", "Fast!"], "--storage-class Fast!"),
        (["miniature", "--image", "a b"], "--image a b"),
        (["miniature-sft-rl"], "several runs"),
        (["miniature-sft"], "tandem offline"),
        (["miniature", "learner.hosts=2"], "doesn't divide learner.ranks=1"),
        (["miniature", "learner.train=false"], "set log.archive=true"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        dispatch(["cluster", "kubernetes", *words])


def test_the_address_that_a_preset_binds_does_not_matter(tmp_path: Path):
    folder = made(tmp_path, ["miniature", "launch.bind=0.0.0.0"])
    head = _kind(objects_of(folder), "StatefulSet")
    binds = [word for word in _container(head)["args"] if word.startswith("launch.bind=")]
    assert binds[-1] == "launch.bind=$(POD_IP)"
