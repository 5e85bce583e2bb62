"""A run by the words of the manifests: their probes, drains and ports, with the real processes that they call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from audit import examine, gather
from processes import TANDEM, gone
from storm import journalled

from tandem.launch.cli import dispatch

STORM = Path(__file__).resolve().parent.parent / "faults" / "storm.yaml"
DEADLINE = 120.0


class Pods:
    """Containers of the manifests as processes here, where their folders are other ones."""

    def __init__(self, here: Path, first: int) -> None:
        self.here = here
        self.runs, self.join = here / "runs", here / "join.json"
        self.runs.mkdir()
        self.ports = range(first, first + 32)
        words = [
            "rollout.engine=torch",
            "data.miniature_fresh=641",
            "evaluate.every=0",
            f"launch.ports={first}-{first + 31}",
        ]
        command = ["cluster", "kubernetes", str(STORM), *words, "--name", "probed"]
        assert dispatch([*command, "--out", str(here / "manifests")]) == 0
        self.objects: dict[str, dict[str, Any]] = {}
        for file in (here / "manifests").glob("*.yaml"):
            for one in yaml.safe_load_all(file.read_text()):
                if "metadata" in one:
                    self.objects[f"{one['kind']} {one['metadata']['name']}"] = one
        text = self.objects["Secret tandem-probed-join"]["stringData"]["join.json"]
        (here / "given.json").write_text(text)
        # The name of the head's service stands for its pod's address.
        words = ["join-file", "--from", str(here / "given.json"), "--host", "127.0.0.1"]
        assert dispatch([*words, str(self.join)]) == 0
        self.started: list[subprocess.Popen[bytes]] = []

    def _here(self, word: str) -> str:
        for there, path in (
            ("/etc/tandem/join/join.json", self.join),
            ("/etc/tandem/preset/storm.yaml", STORM),
            ("/runs", self.runs),
            ("$(POD_IP)", "127.0.0.1"),
        ):
            word = word.replace(there, str(path))
        return word

    def spec(self, workload: str) -> dict[str, Any]:
        found: dict[str, Any] = self.objects[workload]["spec"]["template"]["spec"]
        return found

    def start(self, workload: str) -> subprocess.Popen[bytes]:
        """What a pod's container runs."""
        words = [self._here(word) for word in self.spec(workload)["containers"][0]["args"]]
        name = workload.replace(" ", "-")
        with open(self.here / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [*TANDEM, *words],
                cwd=self.here,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def probe(self, workload: str, kind: str) -> tuple[int, str]:
        """Exit code and words of a probe of a pod's container, within its own deadline."""
        probe = self.spec(workload)["containers"][0][f"{kind}Probe"]
        first, *words = [self._here(word) for word in probe["exec"]["command"]]
        assert first == "tandem"
        done = subprocess.run(
            [*TANDEM, *words],
            cwd=self.here,
            capture_output=True,
            text=True,
            timeout=probe["timeoutSeconds"],
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"no {what}: {self.said()}"
            time.sleep(0.2)

    def said(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-2000:]}" for p in self.here.glob("*.log"))

    def listening(self) -> dict[int, str]:
        """Ports at which the containers' processes listen, and the words with which those were started."""
        found = {}
        for process in self.started:
            if process.poll() is not None:
                continue
            tree = psutil.Process(process.pid)
            for one in (tree, *tree.children(recursive=True)):
                try:
                    words, connections = " ".join(one.cmdline()), one.net_connections("tcp")
                except psutil.Error:
                    continue
                for connection in connections:
                    if connection.status == psutil.CONN_LISTEN:
                        found[connection.laddr.port] = words
        return found

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()


HEAD, ROLLOUT = "StatefulSet tandem-probed-head", "Deployment tandem-probed-rollout"


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path, 24_000 + os.getpid() % 100 * 40)
    yield made
    made.close()


@pytest.mark.timeout(400)
@pytest.mark.byhand  # Two minutes.
def test_probes_drains_and_ports_are_those_of_the_real_processes(pods: Pods):
    # Nothing runs: nobody is ready, and nothing is to be started again for it.
    assert [pods.probe(HEAD, kind)[0] for kind in ("startup", "readiness", "liveness")] == [1, 1, 0]
    assert [pods.probe(ROLLOUT, kind)[0] for kind in ("startup", "readiness", "liveness")] == [
        *(1, 1, 0)
    ]
    head = pods.start(HEAD)
    pods.until(lambda: pods.probe(HEAD, "startup")[0] == 0, "startup of the head")
    pods.until(lambda: pods.probe(HEAD, "readiness")[0] == 0, "readiness of the head")
    # The head can't do a worker's part: there is none on this host.
    code, said = pods.probe(ROLLOUT, "startup")
    assert (code, "no rollout process" in said) == (1, True)

    worker = pods.start(ROLLOUT)
    pods.until(lambda: pods.probe(ROLLOUT, "startup")[0] == 0, "startup of the worker")
    pods.until(lambda: pods.probe(ROLLOUT, "readiness")[0] == 0, "readiness of the worker")
    listening = pods.listening()
    assert "redis-server" in listening[pods.ports[0]]
    assert len(listening.keys() & set(pods.ports)) >= 3
    # gloo's own, of the learner's ranks, which a policy of their own lets through.
    outside = {words for port, words in listening.items() if port not in pods.ports}
    assert all("lifeline" in words and " learner " in words for words in outside), outside
    folder = pods.runs / "probed"
    pods.until(lambda: journalled(folder) > 2, "rows")

    # What Kubernetes does when a pod is to go.
    grace = pods.spec(ROLLOUT)["terminationGracePeriodSeconds"]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(grace) == 75
    # The run can't end now.
    assert pods.probe(HEAD, "liveness")[0] == 0
    pods.until(lambda: pods.probe(ROLLOUT, "readiness")[0] == 1, "loss of readiness")
    children = [child.pid for child in psutil.Process(head.pid).children(recursive=True)]
    head.send_signal(signal.SIGTERM)
    assert head.wait(pods.spec(HEAD)["terminationGracePeriodSeconds"]) == 143
    assert gone(children, 5.0)
    # Redis is away: not ready, and no reason to start a worker again.
    assert pods.probe(ROLLOUT, "readiness")[0] == 1
    code, said = pods.probe(ROLLOUT, "liveness")
    assert (code, str(pods.ports[0]) in said) == (0, True)

    assert pods.probe(HEAD, "readiness")[0] == 1
    # The same pods again resume the run, with the Secret's password.
    head = pods.start(HEAD)
    pods.until(lambda: pods.probe(HEAD, "readiness")[0] == 0, "readiness after the restart")
    worker = pods.start(ROLLOUT)
    pods.until(lambda: pods.probe(ROLLOUT, "startup")[0] == 0, "the worker's startup")
    assert pods.probe(ROLLOUT, "liveness")[0] == 0
    assert head.wait(DEADLINE) == 0, pods.said()
    assert worker.wait(DEADLINE) == 0, pods.said()
    found = examine(gather(folder))
    assert found.breaches == []
    assert found.figures["learner's resumptions"] == 1


def test_a_hung_supervisor_is_not_live_and_one_that_waits_for_space_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from tandem.common.run_folder import RunFolder
    from tandem.launch.host import health as probes

    folder = RunFolder(tmp_path / "run")
    folder.make()
    assert probes.health("liveness", "head", None, folder).ok
    folder.write_run({"run_id": "r", "alive": time.time() - 60})
    assert probes.health("liveness", "head", None, folder).ok
    folder.write_run({"run_id": "r", "alive": time.time() - 600})
    found = probes.health("liveness", "head", None, folder)
    assert (found.ok, "no sign of life for 600 s" in found.why) == (False, True)
    monkeypatch.setattr(probes, "free_bytes", lambda path: 0)
    assert probes.health("liveness", "head", None, folder).ok


def test_a_probe_loads_no_torch(tmp_path: Path):
    code = (
        "import sys\nfrom tandem.launch.cli import main\n"
        f"main(['health', '--join', {str(tmp_path / 'none')!r}])\n"
        "import tandem.replay.connection, tandem.replay.members, tandem.replay.store\n"
        "print([m for m in ('torch', 'transformers', 'vllm', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout.splitlines()[-1].replace("'", '"')) == []
