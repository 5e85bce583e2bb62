"""Runs lint, types and the tests in stages, looks for what they left behind, and counts it all."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # not resolved: a virtual environment's python is a link
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

CHECK_DEADLINE_S = 300.0
"""For one linter or type checker; mypy without its cache is the slowest, at about a minute."""
MOST_FLAKY = 5
"""A stage's failed tests are run again, alone, where there are no more than this."""
LEFTOVER_GRACE_S = 10.0
"""How long a process that a stage started may take to end after the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One call of pytest."""

    name: str
    """What the report calls it."""
    args: tuple[str, ...]
    """Which tests: pytest arguments, relative to the repository."""
    needs: str | None = None
    """A folder; where it has no tests yet the stage is listed as not run."""
    package: str | None = None
    """A module; where it cannot be imported the stage is listed as not run."""
    get: str = ""
    """How to get the package."""
    long: bool = False
    """Run with ``--all`` or where it is required; listed as not run otherwise."""
    byhand: str = ""
    """How to run what is left out of it, because it takes long."""
    deadline_s: float = 1200.0
    """The stage is killed and counted as failed after this long."""


WHOLE_UPDATES = (
    "tests/gpu",
    "tests/learner/forward/test_packed.py",
    "tests/learner/objectives/test_on_archives.py",
    "tests/learner/resume/test_partitions.py",
    "tests/learner/forward/test_logprobs.py",
    "tests/learner/test_adamw_8bit.py",
    "tests/learner/test_adapters.py",
    "tests/learner/test_critic.py",
    "tests/learner/test_engine.py",
    "tests/learner/test_exporting.py",
    "tests/learner/test_loss_scale.py",
    "tests/learner/test_parity.py",
    "tests/learner/test_passes.py",
    "tests/learner/test_ranks.py",
    "tests/learner/test_reference.py",
    "tests/learner/test_trainer.py",
    "tests/learner/test_updates.py",
    "tests/rollout/test_adapters.py",
    "tests/rollout/test_engine_contract.py",
    "tests/rollout/test_live_updates.py",
    "tests/weights/test_faults.py",
    "tests/weights/test_transfer.py",
)
"""Whole updates of a learner at every ZeRO stage, and of the weights of running engines; the GPU kit on a CPU."""

WHOLE_PROCESSES = (
    "tests/launch/board/test_terminal.py",
    "tests/launch/commands/test_evaluate.py",
    "tests/launch/commands/test_get.py",
    "tests/launch/commands/test_grade.py",
    "tests/launch/commands/test_serve.py",
    "tests/launch/host/test_doctor.py",
    "tests/launch/notebook/test_handle.py",
    "tests/launch/plan/test_measure.py",
    "tests/launch/run/test_flipped_files.py",
    "tests/learner/test_devices.py",
    "tests/repo/test_benchmarks.py",
    "tests/repo/test_package.py",
    "tests/repo/test_stages.py",
    "tests/reward/answers/test_security.py",
    "tests/reward/graders/test_hangs.py",
    "tests/reward/sandbox/test_code.py",
    "tests/reward/servers/test_judges.py",
    "tests/reward/test_pool.py",
    "tests/rollout/environments/test_containment.py",
    "tests/rollout/environments/test_own_server.py",
    "tests/rollout/environments/test_servers.py",
    "tests/rollout/test_evaluation.py",
    "tests/rollout/test_following.py",
    "tests/rollout/test_out_of_memory.py",
    "tests/rollout/test_worker.py",
)
"""Commands, workers, pools, servers and installations that are started as processes, each test with new ones."""

SLOW = (
    "tests/cluster/test_manifests.py",
    "tests/cluster/test_password.py",
    "tests/fuzz/test_fuzz.py",
    "tests/launch/commands/test_failing_ranks.py",
    "tests/launch/commands/test_roles.py",
    "tests/launch/ingest/test_ingest.py",
    "tests/launch/plan/test_gpu_presets.py",
    "tests/launch/plan/test_simulation.py",
    "tests/launch/run/test_dry_run.py",
    "tests/launch/run/test_forked.py",
    "tests/launch/run/test_offline_evaluation.py",
    "tests/launch/run/test_supervision.py",
    "tests/launch/run/test_sweep.py",
    "tests/launch/test_cli.py",
    "tests/launch/trackers/test_trackers.py",
    "tests/learner/forward/test_families.py",
    "tests/learner/metrics/test_ratio_figures.py",
    "tests/learner/objectives/test_objective_rules.py",
    "tests/learner/test_distillation.py",
    "tests/learner/test_waits.py",
    "tests/replay/test_model.py",
    "tests/repo/test_docs.py",
    "tests/reward/components/test_conversations.py",
    "tests/reward/components/test_functions.py",
    "tests/reward/graders/test_grading.py",
    "tests/rollout/test_commit_check.py",
    "tests/rollout/test_families.py",
)
"""Files that take longer than about twelve seconds, among them the commands that the pages of docs/ show."""

PROBES = "tests/cluster/test_probes.py"
"""Whole runs by the words of manifests."""

WHOLE_RUNS = ("tests/e2e", "tests/faults")
"""Runs from their start to their end, some with kills and full disks on the way."""

ELSEWHERE = (
    *(*WHOLE_RUNS, *WHOLE_UPDATES, *WHOLE_PROCESSES, *SLOW),
    *("tests/hosts", "tests/shared_redis", PROBES),
)
"""What is no light test: other stages have it."""


def light() -> tuple[str, ...]:
    """What the light tests are in, no part of which is in another: pytest would forget the order.

    First the README's main job, which is the finished run that other tests read, most of them in the last folder.
    """
    first, last = "tests/repo/test_readme.py", "tests/launch"
    found = {path.relative_to(ROOT).parts[1] for path in (ROOT / "tests").rglob("test_*.py")}
    folders = {f"tests/{name}" for name in found} - {"tests/repo", last}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/repo").glob("test_*.py")}
    return (first, *sorted((files | folders) - {first, *ELSEWHERE}), last)


def longest_first(files: Sequence[Path | str], *longest: str) -> tuple[str, ...]:
    """Test files, those named first; else one of two processes ends long after the other."""
    rest = sorted(str((ROOT / path).relative_to(ROOT)) for path in files)
    return (*longest, *(path for path in rest if path not in longest))


STAGES = (
    Stage(
        name="unit",
        args=(
            *light(),
            "--no-loadscope-reorder",
            # Two at a time, a file's tests together: many start further processes.
            "--numprocesses=2",
            "--dist=loadfile",
            "-m",
            "not vllm and not byhand",
            *(f"--ignore={path}" for path in ELSEWHERE),
        ),
        byhand="bash tests/run.sh tests --ignore=tests/faults -m byhand (an hour)",
    ),
    Stage(
        name="slow",
        args=(*SLOW, "--numprocesses=2", "--dist=loadfile", "-m", "not vllm and not byhand"),
        long=True,
    ),
    Stage(
        name="updates",
        args=(
            *WHOLE_UPDATES,
            "--numprocesses=2",
            "--dist=loadfile",
            "-m",
            "not vllm and not byhand",
        ),
        long=True,
    ),
    Stage(
        name="processes",
        args=(
            *longest_first(
                WHOLE_PROCESSES,
                *("tests/rollout/test_worker.py", "tests/reward/sandbox/test_code.py"),
                *("tests/rollout/environments/test_servers.py", "tests/repo/test_package.py"),
                *("tests/launch/notebook/test_handle.py", "tests/reward/test_pool.py"),
                *("tests/launch/board/test_terminal.py", "tests/launch/plan/test_measure.py"),
                *("tests/rollout/environments/test_containment.py", "tests/repo/test_stages.py"),
                *("tests/launch/commands/test_get.py", "tests/learner/test_devices.py"),
            ),
            "--numprocesses=2",
            "--dist=loadfile",
            "--no-loadscope-reorder",
            "-m",
            "not vllm and not byhand",
        ),
        long=True,
    ),
    Stage(
        name="e2e",
        # Two whole runs at a time: each waits for its own processes for half of its time.
        args=(
            *longest_first(
                [path for folder in WHOLE_RUNS for path in (ROOT / folder).glob("test_*.py")],
                *("tests/e2e/test_main_job.py", "tests/e2e/test_twins.py"),
                *("tests/faults/test_determinism.py", "tests/e2e/test_archive.py"),
                *("tests/faults/test_storm.py", "tests/e2e/test_trackers.py"),
                *("tests/e2e/test_distillation.py", "tests/e2e/test_going_on.py"),
                *("tests/faults/test_full_disk.py", "tests/e2e/test_sweep.py"),
            ),
            "--numprocesses=2",
            "--dist=loadfile",
            "--no-loadscope-reorder",
            "-m",
            "not vllm and not byhand",
        ),
        needs="tests/e2e",
        long=True,
        byhand="bash tests/run.sh tests/e2e tests/faults -m byhand (half an hour)",
    ),
    Stage(
        name="hosts",
        # Two at a time: each waits for deadlines for half of its time. By "load" one process would get both long tests.
        args=(
            *("tests/hosts", "tests/shared_redis", PROBES),
            *("--numprocesses=2", "--dist=loadgroup", "-m", "not byhand"),
        ),
        needs="tests/hosts",
        long=True,
        byhand="bash tests/run.sh tests/hosts tests/shared_redis tests/cluster -m byhand (twenty minutes)",
    ),
    Stage(
        name="vllm",
        args=(
            "tests/rollout",
            "tests/e2e",
            "tests/launch/commands/test_evaluate.py",
            "--numprocesses=2",
            "--dist=loadfile",
            "-m",
            "vllm and not byhand",
        ),
        package="vllm",
        get="bash launch/setup.sh --dev --vllm",
        long=True,
        byhand="bash tests/run.sh tests/rollout -m 'vllm and byhand' (ten minutes)",
        deadline_s=600.0,
    ),
)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What has been counted so far."""

    passed: int = 0
    """Tests and checks that passed."""
    failed: int = 0
    """Tests and checks that failed."""
    flaky: list[str] = field(default_factory=list)
    """Tests that failed among others and passed when they were run again alone: each has a defect."""
    not_run: list[str] = field(default_factory=list)
    """One line for each thing that this machine could not run, with the reason."""

    def check(self, name: str, ok: bool, took_s: float, detail: str = "") -> None:
        """Count one check and say how it went; its output is shown only where it failed."""
        print(f"{'ok    ' if ok else 'FAILED'}  {name}  ({took_s:.1f} s)", flush=True)
        if ok:
            self.passed += 1
            return
        self.failed += 1
        if detail.strip():
            print(detail.rstrip(), flush=True)


def shell_files() -> list[str]:
    """Every shell script of the repository, relative to its root."""
    found = [*ROOT.glob("launch/**/*.sh"), *ROOT.glob("tests/**/*.sh"), ROOT / ".ci/run"]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def checks() -> list[tuple[str, list[str]]]:
    """The static checks: a name and a command each."""
    return [
        ("ruff check", [str(BIN / "ruff"), "check", "."]),
        ("ruff format", [str(BIN / "ruff"), "format", "--check", "."]),
        ("mypy", [str(BIN / "mypy"), "-p", "tandem"]),
        ("lint-imports", [str(BIN / "lint-imports")]),
        ("shellcheck", [str(BIN / "shellcheck"), *shell_files()]),
    ]


def run_check(name: str, command: list[str], env: dict[str, str], tally: Tally) -> None:
    """Run one static check under its deadline."""
    since = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=CHECK_DEADLINE_S,
            check=False,
        )
        ok, detail = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired:
        ok, detail = False, f"{name} was still running after {CHECK_DEADLINE_S:.0f} s"
    except FileNotFoundError as error:
        ok, detail = False, f"{error}: run bash launch/setup.sh --dev"
    tally.check(name, ok, time.monotonic() - since, detail)


@dataclass(slots=True, kw_only=True)
class Report:
    """What one call of pytest did, by names of tests."""

    passed: set[str] = field(default_factory=set)
    """Tests that passed."""
    failed: set[str] = field(default_factory=set)
    """Tests that failed, or whose set-up or clean-up did."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Tests that this machine could not run, with the reason."""


def read_report(path: Path) -> Report:
    """Read pytest's junit report; an empty one where pytest wrote none."""
    report = Report()
    if not path.exists():
        return report
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            report.failed.add(name)
        elif skipped is not None:
            report.skipped[name] = skipped.get("message", "")
        else:
            report.passed.add(name)
    report.passed -= report.failed  # a test whose clean-up failed stands twice
    return report


def run_pytest(
    args: tuple[str, ...], report: Path, env: dict[str, str], deadline: float
) -> tuple[int, Report]:
    """Run pytest until a time of the monotonic clock; its exit code, -1 if it was killed, and its report."""
    tests = subprocess.Popen(
        [sys.executable, "-m", "pytest", *args, "-q", "--durations=5", f"--junitxml={report}"],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # A shell has its background jobs ignore Ctrl-C, and tests send it to what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    code = wait_as_init(tests, deadline)
    if code is None:
        os.killpg(tests.pid, signal.SIGKILL)
        wait_as_init(tests, time.monotonic() + 30)
        code = -1
        print("pytest was still running at the stage's deadline: killed")
    return code, read_report(report)


def run_stage(
    stage: Stage, env: dict[str, str], scratch: Path, tally: Tally, *, required: bool = False
) -> None:
    """Run one stage of tests, then see that no process of it is left.

    Of a required stage nothing may be skipped: what can't be run is a failure.
    """
    lacking = ""
    if stage.needs is not None and not list((ROOT / stage.needs).glob("**/test_*.py")):
        lacking = f"{stage.needs} has no tests"
    elif stage.package is not None and importlib.util.find_spec(stage.package) is None:
        lacking = f"{stage.package} is not installed ({stage.get})"
    if lacking:
        if required:
            tally.check(f"stage {stage.name} is required", False, 0.0, lacking)
        else:
            tally.not_run.append(f"stage {stage.name}: {lacking}")
        return
    if stage.byhand:
        tally.not_run.append(f"stage {stage.name}, its long tests, by hand: {stage.byhand}")
    print(f"\n== {stage.name}", flush=True)
    since = time.monotonic()
    deadline = since + stage.deadline_s
    code, report = run_pytest(stage.args, scratch / f"{stage.name}.xml", env, deadline)
    if 0 < len(report.failed) <= MOST_FLAKY and code == 1:
        print("\nthose that failed, again, and alone:", flush=True)
        alone = [
            arg
            for arg in stage.args
            if not arg.startswith(("--numprocesses", "--dist", "--no-loadscope"))
        ]
        again_file = scratch / f"{stage.name}-again.xml"
        _, again = run_pytest((*alone, "--last-failed"), again_file, env, deadline)
        flaky = report.failed & again.passed
        tally.flaky += sorted(flaky)
        report.failed -= flaky
        report.passed |= flaky
        code = 1 if report.failed else 0
    took_s = time.monotonic() - since
    passed, failed = len(report.passed), len(report.failed)
    tally.passed += passed
    tally.failed += failed
    skipped = [f"{name}: {reason}" for name, reason in report.skipped.items()]
    tally.not_run += skipped
    if required and (skipped or passed + failed == 0):
        failed += 1
        tally.check(
            f"stage {stage.name} is required",
            False,
            0.0,
            "\n".join(skipped) or f"it ran no test of {' '.join(stage.args)}",
        )
    elif code == 5 and passed + failed == 0:  # pytest's code for "no tests collected"
        tally.not_run.append(f"stage {stage.name}: no tests in {' '.join(stage.args)}")
    elif code != 0 and failed == 0:
        # It crashed, was killed or could not start: no test says so, so the stage counts itself.
        failed += 1
        tally.failed += 1
    print(f"== {stage.name}: {passed} passed, {failed} failed in {took_s:.0f} s", flush=True)
    since = time.monotonic()
    leftovers = reap_leftovers()
    tally.check(
        f"{stage.name} left no process behind",
        not leftovers,
        time.monotonic() - since,
        "\n".join(leftovers),
    )


def become_subreaper() -> bool:
    """Make orphans of our descendants our own children (Linux), so that none can hide; did it work?"""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def reap_ended() -> dict[int, int]:
    """Reap every child that has ended; its exit code by its id."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def wait_as_init(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Wait for a process, reaping orphans meanwhile as init would; None where it outlasts the deadline.

    Tests wait for orphans to be gone, and an orphan that nobody reaps never goes.
    """
    while time.monotonic() < deadline:
        ended = reap_ended()
        if process.pid in ended:
            process.returncode = ended[process.pid]  # Popen must not wait for it again
            return process.returncode
        time.sleep(0.05)
    return None


def reap_leftovers() -> list[str]:
    """Wait for every descendant to end; kill and name those that do not in time."""
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while True:
        reap_ended()
        children = psutil.Process().children(recursive=True)
        if not children or time.monotonic() > deadline:
            break
        psutil.wait_procs(children, timeout=0.2)
    lines = []
    for child in children:
        try:
            line = f"  process {child.pid}: {' '.join(child.cmdline())[:160]}"
            child.kill()
            lines.append(line)
        except psutil.NoSuchProcess:
            continue
    return lines


def tree_state() -> str | None:
    """What `git status` says, or None outside a git checkout."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    done = subprocess.run(
        ["git", "status", "--porcelain"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def test_environment(scratch: Path) -> dict[str, str]:
    """The environment of every check and stage: offline, one thread a process, own caches."""
    env = dict(os.environ)
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
    env["MYPYPATH"] = ".import"
    env["TANDEM_TEST_RUNS"] = str(scratch / "runs")
    env["TORCH_EXTENSIONS_DIR"] = str(scratch / "torch-extensions")
    # Else each of the hundreds of processes that tests start compiles what it imports, which is half of a start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


COVERAGE = """[run]
source = {source}
data_file = {folder}/data
parallel = true
sigterm = true
patch = _exit
[report]
skip_covered = true
sort = cover
"""


def measure_coverage(scratch: Path, env: dict[str, str], only: str = "*") -> Path:
    """Have every Python process with this environment record its lines; returns the settings' file.

    What a killed process ran isn't recorded. ``only`` is a pattern for the rooms that are measured.
    """
    folder = scratch / "coverage"
    folder.mkdir()
    settings = folder / "settings"
    rooms = (ROOT / ".import" / "tandem").glob(only)
    source = ", ".join(sorted(str(room.resolve()) for room in rooms))
    settings.write_text(COVERAGE.format(source=source, folder=folder))
    env["COVERAGE_PROCESS_START"] = str(settings)
    return settings


def report_coverage(settings: Path, html: Path = ROOT / ".coverage-html") -> None:
    """Print the share of lines that ran, by file, and write the lines themselves as HTML."""
    for words in (["combine", "-q"], ["report"], ["html", "-q", "-d", str(html)]):
        command = [str(BIN / "coverage"), *words, f"--rcfile={settings}"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=CHECK_DEADLINE_S)
    print(f"line by line: {html / 'index.html'}")


def run_stages(
    required: frozenset[str] = frozenset(), *, every: bool = False, coverage: bool = False
) -> int:
    """The checks and stages, long ones only where asked for; returns the exit code.

    Of the required stages nothing is skipped.
    """
    began = time.monotonic()
    tally = Tally()
    before = tree_state()
    sees_orphans = become_subreaper()
    if not sees_orphans:
        tally.not_run.append(f"processes that detach themselves: cannot be seen on {sys.platform}")
    scratch = Path(tempfile.mkdtemp(prefix="tandem-tests-"))
    env = test_environment(scratch)
    print("== checks", flush=True)
    for name, command in checks():
        run_check(name, command, env, tally)
    settings = measure_coverage(scratch, env) if coverage else None
    for stage in STAGES:
        if stage.long and not every and stage.name not in required:
            tally.not_run.append(f"stage {stage.name}: bash tests/run.sh --all runs it as well")
            continue
        run_stage(stage, env, scratch, tally, required=stage.name in required)
    print()
    if before is None:
        tally.not_run.append("the working tree is unchanged: not a git checkout")
    else:
        after = tree_state()
        changed = sorted(set((after or "").splitlines()) ^ set(before.splitlines()))
        tally.check("the working tree is unchanged", not changed, 0.0, "\n".join(changed))
    if settings is not None:
        report_coverage(settings)
    if tally.failed:
        print(f"the runs of these tests are kept in {scratch}")
    else:
        shutil.rmtree(scratch, ignore_errors=True)
    for line in tally.not_run:
        print(f"not run: {line}")
    for line in tally.flaky:
        print(f"flaky, failed once and passed alone: {line}")
    print(f"all stages took {time.monotonic() - began:.0f} s")
    print(f"{tally.passed} passed, {tally.failed} failed", flush=True)
    return 1 if tally.failed else 0


def main() -> int:
    """With pytest's arguments, pytest alone; without, the checks and stages."""
    if len(sys.argv) > 1 and not sys.argv[1].startswith(("--require", "--all", "--coverage")):
        os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        choices=[stage.name for stage in STAGES],
        help="a stage that fails where it, or a test of it, would be listed as not run",
    )
    parser.add_argument("--all", action="store_true", help="the long stages as well")
    parser.add_argument("--coverage", action="store_true", help="tell which lines ran")
    asked = parser.parse_args()
    return run_stages(frozenset(asked.require), every=asked.all, coverage=asked.coverage)


if __name__ == "__main__":
    sys.exit(main())
