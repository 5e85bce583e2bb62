"""Slurm's scripts: what they ask for, and how their shell answers signals and exit codes."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tandem.common.config.reading.loading import parse_override
from tandem.common.errors import ConfigError, DataError
from tandem.common.run_folder import RunFolder, read_join, write_private
from tandem.launch.cli import dispatch
from tandem.launch.cluster import slurm
from tandem.launch.host.head_term import HeadTerm
from tandem.launch.run.opened.presets import load

BIN = Path(sys.executable).parent
CONFIGS = Path(__file__).parents[2] / "launch" / "configs"
HOSTS = ["learner.ranks=4", "learner.hosts=2"]
FORMS: dict[str, list[str]] = {
    "plain": [],
    "hosts": HOSTS,
    "site": ["--partition", "gpu", "--account", "me", "--qos", "high", "--time", "2-00:00:00"],
    "apptainer": ["--container", "tandem image.sif", "learner.optimizer.lr=3e-4"],
    "pyxis": ["--container", "/images/tandem.sqsh"],
    "hetjob": ["--hetjob", "--nodes", "3"],
    "loopback": ["launch.bind=127.0.0.1"],
    "words": ["--partition", "two words", "--account", 'lab #1 "x"'],
}


def scripts(out: Path, *words: str) -> dict[str, str]:
    assert dispatch(["cluster", "slurm", "miniature", *words, "--out", str(out)]) == 0
    return {path.name: path.read_text() for path in out.glob("*.sbatch")}


def asked(script: str) -> dict[str, str]:
    """The ``#SBATCH`` options."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", script, re.MULTILINE)
    return dict(lines)


def as_slurm_reads(script: str) -> dict[str, str]:
    """The ``#SBATCH`` options as sbatch takes them apart: quotes, backslashes and comments are a shell's there."""
    lines = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    words = [word for line in lines for word in shlex.split(line, comments=True)]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


@pytest.mark.parametrize("words", FORMS.values(), ids=list(FORMS))
def test_bash_reads_what_is_printed(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert dispatch(["cluster", "slurm", "miniature", *words]) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH" in printed
    read = subprocess.run(["bash", "-n"], input=printed, capture_output=True, text=True, timeout=20)
    assert read.returncode == 0, read.stderr


@pytest.mark.parametrize("words", FORMS.values(), ids=list(FORMS))
def test_shellcheck_finds_nothing(tmp_path: Path, words: list[str]):
    scripts(tmp_path, *words)
    files = sorted(map(str, tmp_path.glob("*.sbatch")))
    done = subprocess.run(
        [str(BIN / "shellcheck"), "--shell=bash", *files],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_jobs_get_nothing_of_the_submitters_environment_and_are_requeued(tmp_path: Path):
    made = scripts(tmp_path, *HOSTS)
    assert made.keys() == {"head.sbatch", "rollout.sbatch", "learner.sbatch"}
    for text in made.values():
        assert asked(text)["export"] == "NONE"
        assert "#SBATCH --requeue\n" in text
        assert "partition" not in asked(text)
    assert asked(made["rollout.sbatch"])["array"] == "1-2"
    assert asked(made["learner.sbatch"])["array"] == "1-1"
    assert asked(made["head.sbatch"])["dependency"] == "singleton"
    # Two of the four ranks, a reward pool with one grader, and Redis.
    assert asked(made["head.sbatch"])["cpus-per-task"] == "5"
    assert asked(made["learner.sbatch"])["cpus-per-task"] == "2"


def test_a_site_is_asked_for_what_the_user_says(tmp_path: Path):
    made = scripts(tmp_path, *FORMS["site"], "--workers-per-node", "3")
    for text in made.values():
        found = asked(text)
        assert (found["partition"], found["account"], found["qos"]) == ("gpu", "me", "high")
        assert found["time"] == "2-00:00:00"
    assert asked(made["rollout.sbatch"])["cpus-per-task"] == "3"
    assert "--workers 3" in made["rollout.sbatch"]


ODD = """it's $(touch bad) `id` $HOME \\ "x" 50%j #1"""


@pytest.mark.parametrize("form", [[], ["--hetjob"]])
def test_slurm_reads_names_as_they_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: list[str]
):
    (tmp_path / ODD).mkdir()
    monkeypatch.chdir(tmp_path / ODD)
    named = ["--partition", "two words", "--account", "lab #1", "--qos", 'a"b\\c']
    for text in scripts(Path("out"), *named, *form).values():
        found = as_slurm_reads(text)
        assert found["chdir"] == f"{tmp_path}/{ODD}"
        assert (found["partition"], found["account"], found["qos"]) == tuple(named[1::2])
        # %% is Slurm's way of writing %.
        assert found["output"].startswith(f"{tmp_path}/{ODD}/out/".replace("%", "%%"))
        assert re.search(r"-(%j|%A_%a)\.log$", found["output"])


def test_gpus_are_asked_for_as_the_plan_places_them(tmp_path: Path):
    preset = "qwen2.5-math-7b-luffy-8gpu"
    assert dispatch(["cluster", "slurm", preset, "--out", str(tmp_path)]) == 0
    assert asked((tmp_path / "head.sbatch").read_text())["gpus-per-node"] == "6"
    assert asked((tmp_path / "rollout.sbatch").read_text())["gpus-per-node"] == "1"


@pytest.mark.parametrize(("grace", "drain"), [([], "25"), (["--grace", "120"], "115")])
def test_draining_fits_into_the_grace_and_begins_long_before_the_time_limit(
    tmp_path: Path, grace: list[str], drain: str
):
    made = scripts(tmp_path, *grace)
    assert f" launch.drain_seconds={drain} " in made["head.sbatch"]
    assert f" --drain {drain} " in made["rollout.sbatch"]
    for text in made.values():
        assert int(asked(text)["signal"].removeprefix("B:USR1@")) >= int(drain) + 60


def test_the_runs_folder_reaches_the_head_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("plain", "a: b", "a #b", 'two "words"', "é"):
        here = tmp_path / name
        here.mkdir()
        monkeypatch.chdir(here)
        lines = scripts(here / "out")["head.sbatch"].splitlines()
        words = shlex.split(next(line for line in lines if line.startswith('"${tandem[@]}"')))
        given = next(word for word in words if word.startswith("run.dir="))
        assert parse_override(given) == ("run.dir", f"{here}/runs/miniature")


def test_only_the_heads_of_one_run_wait_for_one_another(tmp_path: Path):
    def name(*words: str) -> str:
        return asked(scripts(tmp_path, *words)["head.sbatch"])["job-name"]

    assert name() == name("run.dir=runs/miniature") == "tandem-miniature"
    folders = ("/s/a", "/t/a", "/s/数学", "/s/物理", "/s/miniature", "/s/miniature-lora")
    names = [name(f"run.dir={folder}") for folder in folders]
    assert all(re.fullmatch("tandem-miniature-[0-9a-f]{6}", found) for found in names)
    assert len(set(names)) == len(folders)
    assert name("run.dir=/shared/a", "--name", "mine") == "tandem-mine"


@pytest.mark.parametrize("time", ["0", "3", "2:30", "0:03:00", "0-1", "1-0:0:0"])
def test_a_time_limit_may_be_none_or_long_enough_to_drain(tmp_path: Path, time: str):
    assert asked(scripts(tmp_path, "--time", time)["head.sbatch"])["time"] == time


def test_a_container_gets_the_folders_that_the_run_uses(tmp_path: Path):
    apptainer = scripts(tmp_path / "a", *FORMS["apptainer"], "run.dir=/shared/runs/mine")
    assert "tandem=(apptainer exec --nv " in apptainer["head.sbatch"]
    assert f"--bind={Path.cwd()} --bind=/shared/runs " in apptainer["head.sbatch"]
    assert "'tandem image.sif' tandem)" in apptainer["rollout.sbatch"]
    pyxis = scripts(tmp_path / "p", *FORMS["pyxis"])
    assert "tandem=(srun --ntasks=1 --container-image=/images/tandem.sqsh" in pyxis["head.sbatch"]


def test_own_templates_go_before_tandems(tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "head.sbatch").write_text("#!/bin/bash\n# @name@ on @partition@\n# mine: @time@\n")
    made = scripts(tmp_path / "out", "--templates", str(own))
    assert made["head.sbatch"] == "#!/bin/bash\n# mine: 1-00:00:00\n"
    assert "Rollout workers of tandem-miniature" in made["rollout.sbatch"]
    (own / "head.sbatch").write_text("@nothing@\n")
    with pytest.raises(DataError, match=r"own/head\.sbatch line 1 has @nothing@"):
        scripts(tmp_path / "out", "--templates", str(own))


def test_it_says_which_own_templates_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    # What is made of workers.sbatch is no template itself.
    (own / "rollout.sbatch").write_text("#!/bin/bash\n")
    with pytest.raises(DataError, match=r"own has none of slurm's templates \(.*workers\.sbatch\)"):
        scripts(tmp_path / "out", "--templates", str(own))
    (own / "workers.sbatch").write_text("#!/bin/bash\n# mine\n")
    assert scripts(tmp_path / "out", "--templates", str(own))["rollout.sbatch"].endswith("mine\n")
    assert "own: workers.sbatch, and no other file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--grace", "5"], "draining needs 10 s at least"),
        (["--grace", "nan"], "draining needs 10 s at least"),
        (["--grace", "inf"], "give at most 65475"),
        (["--grace", "65476"], "give at most 65475"),
        (["--time", "soon"], "--time soon"),
        (["--time", "1"], "--time 1 is 60 s, .* give 3 minutes at least"),
        (["--time", "2:29"], "--time 2:29 is 149 s"),
        (["--time", "0:02:00"], "--time 0:02:00 is 120 s"),
        (["--time", "0-1", "--grace", "7200"], "give 122 minutes at least"),
        (["--nodes", "0"], "numbers from 1"),
        (["--hetjob", *HOSTS], "no place for learner.hosts=2"),
        (["--hetjob", "--container", "x.sqsh"], "so does pyxis"),
        (["--namespace", "x"], "option of kubernetes, not of slurm"),
        (["learner.hsots=2"], "hsots"),
        (["learner.train=false"], "set log.archive=true"),
        (["launch.bind=0.0.0.0"], "one private address of the head"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], says: str):
    with pytest.raises(ConfigError, match=says):
        dispatch(["cluster", "slurm", "miniature", *words])


# --- the shell of the scripts, with a program in the place of tandem and one of scontrol --------

PROGRAM = """#!/bin/bash
echo "$@" >> "$STAGE/called"
echo "${SRUN_CPUS_PER_TASK-none}" >> "$STAGE/cpus"
[ "$1" = join ] && [ -n "$STAGE_JOINED" ] && [ "${SLURM_PROCID:-0}" = 0 ] && exit "$STAGE_JOINED"
trap 'echo told >> "$STAGE/told"; sleep 0.3; exit "$STAGE_DRAINED"' TERM
echo up >> "$STAGE/up"
for ((i = 0; i < 600; i++)); do
    # No process of its own reads it, since Slurm's signal would end that one too.
    [ -e "$STAGE/end" ] && { read -r code < "$STAGE/end"; exit "$code"; }
    sleep 0.05
done
"""
SCONTROL = '#!/bin/bash\necho "$@" >> "$STAGE/asked"\n'
SLEEP = """#!/bin/bash
case $1 in
2) touch "$STAGE/waits" ;;
5) set -- 0.1 ;;
esac
exec /bin/sleep "$1"
"""
SRUN = """#!/bin/bash
tasks=1
while [[ $1 == --* ]]; do
    [[ $1 == --cpus-per-task=* ]] && export SRUN_CPUS_PER_TASK=${1#*=}
    [[ $1 == --het-group=1 ]] && tasks=$STAGE_TASKS
    shift
done
[ "$tasks" = 1 ] && exec "$@"
# It ends with its tasks, and has the greatest of their exit codes.
trap : TERM
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task "$@" &
    started[task]=$!
done
greatest=0
for task in "${started[@]}"; do
    while wait "$task"; code=$?; kill -0 "$task" 2>/dev/null; do :; done
    echo "$code" >> "$STAGE/tasks"
    ((code > greatest)) && greatest=$code
done
exit "$greatest"
"""


class Staged:
    """A script that runs."""

    def __init__(
        self,
        tmp_path: Path,
        file: str,
        drained: int,
        out: str = "out",
        *,
        joins: bool = True,
        joined: str = "",
        starts: int = 0,
        tasks: int = 1,
        cpus: str | None = "16",
    ) -> None:
        self.here = tmp_path
        programs = {"tandem-program": PROGRAM, "scontrol": SCONTROL, "srun": SRUN, "sleep": SLEEP}
        for name, text in programs.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        form = ["--hetjob", "--workers-per-node", "3"] if file == "gang.sbatch" else []
        scripts(tmp_path / out, f"run.dir={tmp_path}/run", *form)
        script = tmp_path / out / file
        program = f"tandem=({tmp_path}/tandem-program)"
        script.write_text(re.sub(r"^tandem=\(.*\)$", program, script.read_text(), flags=re.M))
        (tmp_path / "run").mkdir(exist_ok=True)
        if joins:
            self.join()
        self.process = subprocess.Popen(
            ["bash", str(script)],
            env={
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "STAGE": str(tmp_path),
                "STAGE_DRAINED": str(drained),
                "STAGE_JOINED": joined,
                "STAGE_TASKS": str(tasks),
                "SLURM_JOB_ID": "7",
                "SLURM_ARRAY_JOB_ID": "7",
                "SLURM_ARRAY_TASK_ID": "2",
                "SLURM_RESTART_COUNT": str(starts),
                **({} if cpus is None else {"SLURM_CPUS_PER_TASK": cpus}),
            },
            start_new_session=True,
        )
        if joins and not joined:
            self.until((tmp_path / "up").exists)

    def join(self) -> None:
        """What the head does once it has read its data."""
        write_private(self.here / "run" / "join.json", "{}")

    def called(self) -> list[str]:
        """The command lines of the program."""
        path = self.here / "called"
        return path.read_text().splitlines() if path.exists() else []

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end, "it did not come about"
            time.sleep(0.01)

    def end(self, code: int) -> int:
        (self.here / "end.new").write_text(str(code))
        (self.here / "end.new").rename(self.here / "end")
        return self.process.wait(20)

    def end_steps(self) -> None:
        """Tells what the script has left, as Slurm does, and waits for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.wait_for_steps()

    def wait_for_steps(self) -> None:
        """Waits for the end of what the script has left."""

        def is_gone() -> bool:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return True
            return False

        self.until(is_gone)

    @property
    def requeued(self) -> list[str]:
        path = self.here / "asked"
        return path.read_text().splitlines() if path.exists() else []


BOTH = [("head.sbatch", "7", 143), ("rollout.sbatch", "7_2", 75)]


@pytest.mark.parametrize(
    ("place", "code"), list(itertools.product(BOTH, [0, 1, 2, 3, 64, 75, 78])), ids=str
)
def test_a_job_ends_as_its_program_does_and_is_requeued_for_75_alone(
    tmp_path: Path, place: tuple[str, str, int], code: int
):
    file, job, drained = place
    staged = Staged(tmp_path, file, drained)
    assert staged.end(code) == code
    assert staged.requeued == ([f"requeue {job}"] if code == 75 else [])


@pytest.mark.parametrize("place", BOTH, ids=str)
def test_before_the_time_limit_it_drains_and_is_requeued(
    tmp_path: Path, place: tuple[str, str, int]
):
    file, job, drained = place
    staged = Staged(tmp_path, file, drained)
    staged.process.send_signal(signal.SIGUSR1)
    assert staged.process.wait(20) == drained
    assert (staged.here / "told").read_text() == "told\n"
    assert staged.requeued == [f"requeue {job}"]


@pytest.mark.parametrize("place", BOTH, ids=str)
def test_what_slurm_ends_is_told_once_and_does_not_requeue_itself(
    tmp_path: Path, place: tuple[str, str, int]
):
    file, _, drained = place
    staged = Staged(tmp_path, file, drained)
    # As Slurm does: to every process of the job.
    os.killpg(staged.process.pid, signal.SIGTERM)
    assert staged.process.wait(20) == drained
    assert (staged.here / "told").read_text() == "told\n"
    assert staged.requeued == []


@pytest.mark.parametrize("place", BOTH, ids=str)
def test_a_run_that_ends_while_its_time_limit_nears_is_not_requeued(
    tmp_path: Path, place: tuple[str, str, int]
):
    staged = Staged(tmp_path, place[0], 0)
    staged.process.send_signal(signal.SIGUSR1)
    assert staged.process.wait(20) == 0
    assert staged.requeued == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "PATIENCE", 0)


@pytest.mark.usefixtures("impatient")
def test_a_worker_whose_head_has_yet_to_read_its_data_is_requeued(tmp_path: Path):
    staged = Staged(tmp_path, "rollout.sbatch", 0, joins=False)
    assert staged.process.wait(20) == 75
    assert staged.called() == []
    assert staged.requeued == ["requeue 7_2"]


def left(folder: Path, state: str, *, in_order: bool = True) -> None:
    """A run's folder as a head leaves it."""
    folder.mkdir()
    run = RunFolder(folder)
    run.write_run({"ingest": {"state": "finished"}, "state": state})
    term = HeadTerm(run)
    term.take()
    (held,) = (folder / "head").glob("*.json")
    content = held.read_text()
    term.release()
    if not in_order:
        held.write_text(content)


@pytest.mark.parametrize(
    ("state", "starts", "code"),
    [
        ("finished", 0, 75),
        ("finished", 1, 0),
        ("stopped", 0, 75),
        ("stopped", 24, 75),
        ("failed", 23, 75),
        ("failed", 24, 2),
        ("running", 24, 75),
    ],
)
def test_a_worker_that_cannot_reach_its_run_looks_what_has_become_of_it(
    tmp_path: Path, state: str, starts: int, code: int
):
    left(tmp_path / "run", state)
    staged = Staged(tmp_path, "rollout.sbatch", 0, joined="75", starts=starts)
    assert staged.process.wait(20) == code
    assert staged.requeued == (["requeue 7_2"] if code == 75 else [])


def test_a_worker_waits_for_the_head_that_goes_on_with_a_finished_run(tmp_path: Path):
    left(tmp_path / "run", "finished", in_order=False)
    staged = Staged(tmp_path, "rollout.sbatch", 0, joined="75")
    assert staged.process.wait(20) == 75
    assert staged.requeued == ["requeue 7_2"]


@pytest.mark.parametrize(
    ("state", "starts", "in_order", "code"),
    [
        ("stopped", 23, True, 75),
        ("stopped", 24, True, 2),
        ("finished", 0, True, 75),
        ("finished", 1, True, 0),
        ("running", 0, False, 2),
    ],
)
def test_a_worker_that_is_refused_where_its_head_was_comes_again(
    tmp_path: Path, state: str, starts: int, in_order: bool, code: int
):
    left(tmp_path / "run", state, in_order=in_order)
    staged = Staged(tmp_path, "rollout.sbatch", 0, joined="2", starts=starts)
    assert staged.process.wait(20) == code
    assert staged.requeued == (["requeue 7_2"] if code == 75 else [])


@pytest.mark.usefixtures("impatient")
def test_workers_of_one_job_wait_for_as_long_as_its_head_reads_data(tmp_path: Path):
    staged = Staged(tmp_path, "gang.sbatch", 0, joins=False)
    staged.until((tmp_path / "up").exists)
    staged.join()
    staged.until(lambda: len(staged.called()) == 2)
    assert [line.split()[0] for line in staged.called()] == ["start", "join"]
    assert staged.end(0) == 0
    assert staged.requeued == []


def test_workers_of_one_job_wait_for_the_file_of_this_starts_head(tmp_path: Path):
    (tmp_path / "run").mkdir()
    write_private(tmp_path / "run" / "join.json", "{}")
    staged = Staged(tmp_path, "gang.sbatch", 0, joins=False)
    staged.until((tmp_path / "up").exists)
    staged.until(lambda: (tmp_path / "waits").exists() or len(staged.called()) > 1)
    assert [line.split()[0] for line in staged.called()] == ["start"]
    staged.join()
    staged.until(lambda: len(staged.called()) == 2)
    assert staged.end(0) == 0


def test_workers_of_one_job_that_lose_its_head_join_again(tmp_path: Path):
    # One of two has lost the head, whatever the other does.
    staged = Staged(tmp_path, "gang.sbatch", 0, joins=False, joined="75", tasks=2)
    staged.until((tmp_path / "up").exists)
    staged.join()
    staged.until(lambda: len(staged.called()) >= 6)
    assert {line.split()[0] for line in staged.called()[1:]} == {"join"}
    assert staged.end(0) == 0
    staged.end_steps()


def test_workers_of_one_job_that_end_with_its_run_do_not_join_again(tmp_path: Path):
    staged = Staged(tmp_path, "gang.sbatch", 0, joins=False, tasks=2)
    staged.until((tmp_path / "up").exists)
    staged.join()
    staged.until(lambda: len(staged.called()) == 3)
    assert staged.end(0) == 0
    staged.until((tmp_path / "tasks").exists)
    staged.end_steps()
    assert (tmp_path / "tasks").read_text().split() == ["0", "0"]
    assert [line.split()[0] for line in staged.called()] == ["start", "join", "join"]


def test_workers_of_one_job_that_slurm_ends_drain_and_do_not_join_again(tmp_path: Path):
    staged = Staged(tmp_path, "gang.sbatch", 75, joins=False, tasks=2)
    staged.until((tmp_path / "up").exists)
    staged.join()
    staged.until(lambda: (tmp_path / "up").read_text().split() == ["up"] * 3)
    os.killpg(staged.process.pid, signal.SIGTERM)
    assert staged.process.wait(20) == 75
    # They have been told already, and may still drain.
    staged.wait_for_steps()
    # A task that ended before its worker would cut off the drain.
    assert (tmp_path / "tasks").read_text().split() == ["75", "75"]
    assert (tmp_path / "told").read_text().split() == ["told"] * 3
    assert [line.split()[0] for line in staged.called()] == ["start", "join", "join"]


@pytest.mark.parametrize(("code", "requeued"), [(1, []), (75, ["requeue 7"])])
def test_one_job_whose_head_ends_before_it_has_read_its_data_starts_no_workers(
    tmp_path: Path, code: int, requeued: list[str]
):
    staged = Staged(tmp_path, "gang.sbatch", 0, joins=False)
    staged.until((tmp_path / "up").exists)
    assert staged.end(code) == code
    assert [line.split()[0] for line in staged.called()] == ["start"]
    assert staged.requeued == requeued


@pytest.mark.parametrize("file", ["head.sbatch", "rollout.sbatch"])
@pytest.mark.parametrize("cpus", ["16", None])
def test_a_step_of_a_job_gets_its_cpus(tmp_path: Path, file: str, cpus: str | None):
    # pyxis is a plug-in of srun, which asks for one CPU by itself. A job that asks for no number has none.
    staged = Staged(tmp_path, file, 0, cpus=cpus)
    assert staged.end(0) == 0
    assert (tmp_path / "cpus").read_text() == f"{cpus or 'none'}\n"


def test_each_step_of_one_job_gets_the_cpus_of_its_part(tmp_path: Path):
    staged = Staged(tmp_path, "gang.sbatch", 0, joins=False)
    staged.until((tmp_path / "up").exists)
    staged.join()
    staged.until(lambda: len(staged.called()) == 2)
    assert staged.end(0) == 0
    script = (tmp_path / "out" / "gang.sbatch").read_text()
    asked_for = re.findall("^#SBATCH --cpus-per-task=(.*)$", script, re.MULTILINE)
    assert len(set(asked_for)) == 2
    assert (tmp_path / "cpus").read_text().split() == asked_for


def test_only_the_jobs_own_variables_are_replaced_in_the_folder_of_logs(tmp_path: Path):
    staged = Staged(tmp_path, "rollout.sbatch", 0, out=ODD)
    assert staged.end(0) == 0
    called = (tmp_path / "called").read_text()
    assert called.endswith(f" --folder {tmp_path}/{ODD}/hosts/rollout-7_2\n")


# --- SkyPilot ------------------------------------------------------------------------------------


def test_a_task_for_skypilot_branches_on_the_node(tmp_path: Path):
    preset = "qwen2.5-math-7b-luffy-8gpu"
    words = ["cluster", "skypilot", preset, "--nodes", "3", "--gpu", "A100-80GB"]
    assert dispatch([*words, "--out", str(tmp_path)]) == 0
    task = yaml.safe_load((tmp_path / "task.yaml").read_text())
    assert task["num_nodes"] == 4
    assert task["resources"]["accelerators"] == "A100-80GB:8"
    assert task["resources"].keys() == {"accelerators", "cpus", "memory"}
    for script in (task["setup"], task["run"]):
        read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert read.returncode == 0, read.stderr
    file = Path(task["file_mounts"]["~/tandem-join.json"])
    assert file.stat().st_mode & 0o777 == 0o600
    # What the other nodes do with it.
    assert (
        dispatch(["join-file", "--from", str(file), "--host", "10.1.2.3", str(tmp_path / "joined")])
        == 0
    )
    made, joined = read_join(file), read_join(tmp_path / "joined")
    assert (joined.host, joined.password, joined.port) == ("10.1.2.3", made.password, 29500)


@pytest.mark.parametrize("preset", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_skypilot_is_asked_for_gpus_as_clouds_rent_them(tmp_path: Path, preset: str):
    whole = load(preset)
    if whole.stages or whole.resolve([]).learner.source == "offline":
        pytest.skip("it isn't one run that has workers")
    assert dispatch(["cluster", "skypilot", preset, "--out", str(tmp_path)]) == 0
    task = yaml.safe_load((tmp_path / "task.yaml").read_text())
    accelerators = task["resources"].get("accelerators", "none:1")
    assert int(accelerators.partition(":")[2]) in {1, 2, 4, 8}
    assert "--workers" not in task["run"]
    shutil.rmtree(tmp_path)
    words = ["cluster", "skypilot", preset, "--workers-per-node", "1", "--out", str(tmp_path)]
    assert dispatch(words) == 0
    assert "--role rollout --workers 1 --drain" in (tmp_path / "task.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "host"),
    [([], "10.1.2.3"), (["replay.redis_url=redis://me@redis.example:6380"], "redis.example")],
)
def test_other_nodes_look_for_the_runs_redis_where_it_is(
    tmp_path: Path, words: list[str], host: str
):
    made = tmp_path / "made"
    assert dispatch(["cluster", "skypilot", "miniature", *words, "--out", str(made)]) == 0
    task = yaml.safe_load((made / "task.yaml").read_text())
    (line,) = [line for line in task["run"].splitlines() if " join-file " in line]
    (made / "join.json").rename(tmp_path / "tandem-join.json")
    env = {"HOME": str(tmp_path), "tandem": str(BIN / "tandem"), "head": "10.1.2.3"}
    done = subprocess.run(
        ["bash", "-euc", line],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert read_join(tmp_path / "join.json").host == host


@pytest.mark.parametrize(("codes", "calls"), [("75 75 0", 3), ("1", 1), ("75 75 75 75 75 75", 5)])
def test_a_worker_of_skypilots_joins_again_and_never_fails_the_run(
    tmp_path: Path, codes: str, calls: int
):
    made = tmp_path / "made"
    assert dispatch(["cluster", "skypilot", "miniature", "--out", str(made)]) == 0
    task = yaml.safe_load((made / "task.yaml").read_text())
    log = tmp_path / "calls"
    stubs = {
        ".venv/bin/tandem": f"""
            [ "$1" = join ] || exit 0
            echo "$*" >>{log}
            set -- {codes}
            shift $(($(wc -l <{log}) - 1))
            exit "$1"
            """,
        "bin/sleep": "exit 0",
    }
    for name, body in stubs.items():
        stub = tmp_path / name
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(f"#!/bin/sh\n{body}\n")
        stub.chmod(0o755)
    env = {
        "HOME": str(tmp_path),
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SKYPILOT_NODE_IPS": "10.1.2.3\n10.1.2.4",
        "SKYPILOT_NODE_RANK": "1",
    }
    done = subprocess.run(
        ["bash", "-c", task["run"]],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    asked = log.read_text().splitlines()
    assert len(asked) == calls
    assert all("--role rollout" in line and "--wait 1800" in line for line in asked)
    assert f"exit code {codes.split()[calls - 1]}" in done.stdout
