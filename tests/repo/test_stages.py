"""Stages that a caller requires fail where others are only listed as not run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: a stage reaps all children of its process.
ONE_STAGE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import stages
stage, required = json.loads(sys.argv[2]), json.loads(sys.argv[3])
tally = stages.Tally()
stages.run_stage(
    stages.Stage(**stage), dict(stages.os.environ), stages.Path(sys.argv[4]), tally, required=required
)
print("flaky:", *tally.flaky)
print(json.dumps([tally.passed, tally.failed, tally.not_run]))
"""
RUNS = "def test_it():\n    pass\n"
SKIPS = RUNS + "\nimport pytest\n\ndef test_other():\n    pytest.skip('no such thing here')\n"


def tallied(folder: Path, required: bool, **stage: object) -> tuple[int, int, list[str], str]:
    """Passed, failed and not run of one stage, and what it printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-c", ONE_STAGE, str(ROOT / "tests")),
            *(json.dumps({"name": "made-up", **stage}), json.dumps(required), str(folder)),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    passed, failed, not_run = json.loads(done.stdout.splitlines()[-1])
    return passed, failed, not_run, done.stdout


def test_a_stage_whose_package_is_missing_is_listed_unless_it_is_required(tmp_path: Path) -> None:
    stage = {"args": [str(tmp_path)], "package": "tandem_no_such_package", "get": "get it"}
    _, failed, not_run, _ = tallied(tmp_path, False, **stage)
    assert failed == 0
    assert not_run == ["stage made-up: tandem_no_such_package is not installed (get it)"]
    _, failed, not_run, said = tallied(tmp_path, True, **stage)
    assert failed == 1
    assert "tandem_no_such_package is not installed (get it)" in said


@pytest.mark.parametrize(
    ("content", "required", "failed", "skipped"),
    [
        (RUNS, True, 0, 0),
        (SKIPS, False, 0, 1),
        (SKIPS, True, 1, 1),
        ("", False, 0, 1),
        ("", True, 1, 0),
    ],
)
def test_of_a_required_stage_no_test_may_be_skipped_or_lacking(
    tmp_path: Path, content: str, required: bool, failed: int, skipped: int
) -> None:
    tests = tmp_path / "test_made_up.py"
    tests.write_text(content)
    found = tallied(tmp_path, required, args=[str(tests), "-p", "no:cacheprovider"])
    # The second check is of the processes that it leaves behind.
    assert found[:2] == ((1 if content else 0) + 1, failed)
    assert len(found[2]) == skipped


@pytest.mark.parametrize(
    ("fails", "passed", "failed", "flaky"),
    [("not again.exists()", 3, 0, "flaky: test_made_up::test_other"), ("True", 2, 1, "flaky:")],
)
def test_what_fails_once_is_run_again_alone_and_named(
    tmp_path: Path, fails: str, passed: int, failed: int, flaky: str
) -> None:
    tests = tmp_path / "test_made_up.py"
    again = tmp_path / "again"
    tests.write_text(
        f"{RUNS}\nfrom pathlib import Path\n\ndef test_other():\n"
        f"    again = Path({str(again)!r})\n    fails = {fails}\n    again.touch()\n    assert not fails\n"
    )
    cache = f"cache_dir={tmp_path / 'cache'}"
    args = [str(tests), f"--rootdir={tmp_path}", "-o", cache, "--numprocesses=1"]
    found = tallied(tmp_path, True, args=args)
    assert found[:2] == (passed, failed)  # one of those that passed is the check of processes
    assert flaky in found[3].splitlines()
    assert "2 failed" not in found[3]


def test_ci_requires_the_stages_that_need_more_than_a_bare_machine(tmp_path: Path) -> None:
    for folder in (".ci", "launch", "tests/shared_redis"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / "launch" / "setup.sh").write_text('echo "setup $*"\n')
    (tmp_path / "tests" / "shared_redis" / "get.sh").write_text('echo "get"; exit 1\n')
    (tmp_path / "tests" / "run.sh").write_text('echo "run $*"\n')
    said = subprocess.run(
        ["bash", str(tmp_path / ".ci" / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    required = "run --all --require e2e --require vllm --require hosts"
    assert said.stdout.splitlines() == ["setup --dev --vllm", "get", required]


def test_a_stage_that_does_not_exist_cannot_be_required() -> None:
    said = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "stages.py"), "--require", "vlm"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert said.returncode == 2
    assert "invalid choice: 'vlm'" in said.stderr


def test_long_stages_are_listed_as_not_run_unless_they_are_asked_for() -> None:
    asked = """
import sys
sys.path.insert(0, sys.argv[1])
import stages
stages.checks = lambda: []
stages.run_stage = lambda stage, *args, required: print("ran", stage.name)
stages.run_stages(frozenset(sys.argv[3:]), every=sys.argv[2] == "all")
"""

    def ran(*words: str) -> tuple[set[str], set[str]]:
        said = subprocess.run(
            [sys.executable, "-c", asked, str(ROOT / "tests"), *words],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.splitlines()
        left = {line.split(":")[1].split()[1] for line in said if "--all runs it" in line}
        return {line.split()[1] for line in said if line.startswith("ran ")}, left

    always = {"unit"}
    long = {"slow", "updates", "processes", "e2e", "hosts", "vllm"}
    assert ran("some") == (always, long)
    assert ran("some", "vllm") == (always | {"vllm"}, long - {"vllm"})
    assert ran("all") == (always | long, set())


def test_coverage_is_that_of_every_process(tmp_path: Path) -> None:
    asked = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
import stages
env = dict(stages.os.environ)
settings = stages.measure_coverage(stages.Path(sys.argv[2]), env, "reward")
program = "from tandem.reward import alarm; import os; os._exit(0)"
other = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
subprocess.run([sys.executable, "-c", other, program], env=env, check=True)
stages.report_coverage(settings, stages.Path(sys.argv[2], "html"))
"""
    done = subprocess.run(
        [sys.executable, "-c", asked, str(ROOT / "tests"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shares = {line.split()[0]: line.split()[-1] for line in done.stdout.splitlines() if "%" in line}
    assert shares["reward/alarm.py"] not in ("0%", "100%")
    assert shares["reward/pool.py"] == "0%"
    assert (tmp_path / "html" / "index.html").exists()


COLLECT = """
import json, sys
import pytest
sys.path.insert(0, "tests")
import stages

class Collected:
    def pytest_collection_finish(self, session):
        self.tests = [item.nodeid for item in session.items]

def collected(*args):
    found = Collected()
    assert pytest.main([*args, "--collect-only", "-qq", "-p", "no:cacheprovider"], [found]) == 0
    return sorted(found.tests)

of_stages = [test for stage in stages.STAGES for test in collected(*stage.args)]
print(json.dumps([sorted(of_stages), collected("tests", "-m", "not byhand")]))
"""


@pytest.mark.timeout(400)
def test_every_test_is_run_by_one_stage() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    of_stages, everything = json.loads(done.stdout.splitlines()[-1])
    assert of_stages == everything
