"""lm-eval, Inspect and its viewer themselves, against ``tandem serve`` and on our logs: by hand, since each is dozens of packages.

Each in an environment of its own::

    python3 -m venv /tmp/lm && /tmp/lm/bin/pip install 'lm-eval[api]==0.4.13' transformers
    python3 -m venv /tmp/ins && /tmp/ins/bin/pip install inspect-ai==0.3.285 openai
    TANDEM_LM_EVAL=/tmp/lm/bin/lm_eval TANDEM_INSPECT=/tmp/ins/bin/inspect \\
      .venv/bin/python -m pytest tests/e2e/test_harnesses.py -m byhand
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.launch.miniature import harnesses

TASKS = Path(next(iter(harnesses.__path__)))
LM_EVAL, INSPECT = os.environ.get("TANDEM_LM_EVAL", ""), os.environ.get("TANDEM_INSPECT", "")
TOKENS = 54
SECONDS = 900

pytestmark = [
    pytest.mark.byhand,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (LM_EVAL and INSPECT), reason="TANDEM_LM_EVAL, TANDEM_INSPECT"),
]


def ran(*command: str, place: Path, **environment: str) -> str:
    """Runs a command and returns what it has printed."""
    done = subprocess.run(
        command,
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def place(
    finished_run: Path, tmp_path_factory: pytest.TempPathFactory, tandem_command: str
) -> Path:
    """A folder with the 500 problems, and an evaluation of the run's model on them."""
    folder = tmp_path_factory.mktemp("harnesses")
    problems = str(finished_run / "data" / "heldout.parquet")
    written = ("--write", "problems.jsonl", "--as", "question_answer")
    ran(tandem_command, "ingest", problems, *written, place=folder)
    ran(
        *(tandem_command, "evaluate", "--model", str(finished_run / "model")),
        *("--data", problems, "--temperature", "0", "--to", "evaluated"),
        f"rollout.max_new_tokens={TOKENS}",
        place=folder,
    )
    shutil.copy(TASKS / "inspect_miniature.py", folder)
    return folder


@pytest.fixture(scope="module")
def right(place: Path) -> dict[str, bool]:
    """Which problems our own evaluation finds right, by their questions."""
    (file,) = (place / "evaluated" / "cells").glob("*/samples.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    found = {row["prompt"]: row["verdict"] == "correct" for row in rows}
    assert len(found) == 500
    assert 0 < sum(found.values()) < 500
    return found


@pytest.fixture(scope="module")
def url(finished_run: Path, tandem_command: str, place: Path) -> Iterator[str]:
    with (place / "serve.log").open("w+") as log:
        process = subprocess.Popen(
            [tandem_command, "serve", str(finished_run / "model"), "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            end = time.monotonic() + 120
            while "/v1" not in (said := (place / "serve.log").read_text()):
                assert process.poll() is None, said
                assert time.monotonic() < end, said
                time.sleep(0.1)
            yield said.split()[-1]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0


def test_lm_eval_finds_the_same_answers_right_and_log_likelihoods_work(
    url: str, place: Path, right: dict[str, bool]
) -> None:
    where = f"model=m,base_url={url}/completions,num_concurrent=16,max_length=256"
    ran(
        *(LM_EVAL, "--model", "local-completions", "--model_args", where),
        *("--include_path", str(TASKS), "--tasks", "tandem_miniature,tandem_miniature_choices"),
        *("--log_samples", "--output_path", "lm"),
        place=place,
    )
    (results,) = (place / "lm").rglob("results_*.json")
    figures = json.loads(results.read_text())["results"]
    accuracy = figures["tandem_miniature"]["accuracy,none"]
    assert accuracy == sum(right.values()) / 500
    (samples,) = (place / "lm").rglob("samples_tandem_miniature_2*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert {row["doc"]["question"]: bool(row["accuracy"]) for row in rows} == right
    # Right solutions are likelier than wrong ones for most problems.
    assert 0.6 < figures["tandem_miniature_choices"]["acc,none"] <= 1.0
    print(f"lm-eval: {accuracy}, choices {figures['tandem_miniature_choices']['acc,none']}")


def test_inspect_finds_the_same_answers_right(
    url: str, place: Path, right: dict[str, bool]
) -> None:
    said = ran(
        *(INSPECT, "eval", "inspect_miniature.py", "--model", "openai-api/tandem/m"),
        *("--log-dir", "inspect", "--display", "plain", "--max-connections", "16"),
        place=place,
        TANDEM_BASE_URL=url,
        TANDEM_API_KEY="none",
    )
    found = re.search(r"^accuracy\s+([0-9.]+)", said, re.MULTILINE)
    assert found is not None, said[-2000:]
    assert float(found[1]) == pytest.approx(sum(right.values()) / 500, abs=6e-4)


READ = """
import json, sys
from inspect_ai.log import read_eval_log, recompute_metrics
log = read_eval_log(sys.argv[1])
given = log.results.scores[0].metrics["accuracy"].value
recompute_metrics(log)
print(json.dumps({
    "samples": len(log.samples),
    "accuracy": given,
    "again": log.results.scores[0].metrics["accuracy"].value,
    "right": {one.messages[0].text: one.scores["answer"].value == "C" for one in log.samples},
}))
"""


def test_inspect_reads_and_lists_our_logs(
    place: Path, right: dict[str, bool], tandem_command: str, finished_run: Path
) -> None:
    ran(tandem_command, "view", "evaluated", "--write", place=place)
    (log,) = (place / "evaluated").rglob("*.eval")
    python = str(Path(INSPECT).with_name("python"))
    read: dict[str, Any] = json.loads(
        ran(python, "-c", READ, str(log), place=place).splitlines()[-1]
    )
    assert read["samples"] == 500
    assert read["accuracy"] == read["again"] == sum(right.values()) / 500
    assert read["right"] == right
    run = place / "run"
    run.mkdir()
    for name in ("run.json", "config.yaml", "samples.jsonl"):
        shutil.copy(finished_run / name, run)
    for folder, count in (("evaluated", 1), ("run", 13)):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        viewer = subprocess.Popen(
            [tandem_command, "view", folder, "--inspect", INSPECT, "--port", str(port)],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert len(listed(port, viewer)) == count
        finally:
            viewer.terminate()
            viewer.wait(30)


def listed(port: int, viewer: subprocess.Popen[bytes]) -> list[Any]:
    """The logs that the viewer lists, once it is up."""
    end = time.monotonic() + 120
    while True:
        assert viewer.poll() is None
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/logs", timeout=10) as answer:
                files: list[Any] = json.loads(answer.read())["files"]
                return files
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)
