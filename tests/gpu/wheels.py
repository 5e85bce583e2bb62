"""Fills a folder with the wheels that a GPU machine without network lacks to run Tandem.

    .venv/bin/python tests/gpu/wheels.py --out wheels
    .venv/bin/python tests/gpu/wheels.py --out wheels --carry pyarrow --most-mb 100

Run it where a package index is in reach, in the environment that ``launch/setup.sh --dev`` made. What is
needed is read from the metadata of the packages that are installed here, and each is fetched in
the version of ``constraints.txt``, as a wheel for CPython 3.12 on Linux x86-64. Large packages that the
machine has (``PRESENT``) are left out unless ``--carry`` names them. DeepSpeed has no wheel, and
is built: of Python files alone, since Tandem uses none of its compiled operations. Ends with status 1 if
the folder becomes larger than ``--most-mb``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PRESENT = ("torch", "transformers", "peft", "tensorboard", "pyarrow", "matplotlib")
"""What the GPU machine has."""
THEIRS = ("numpy", "pillow", "safetensors", "setuptools", "sympy", "tokenizers")
"""What torch, transformers and tensorboard bring in every version."""
EXTRAS = ("reward", "rollout", "learner", "liger", "redis-server")
"""Tandem's extras whose packages are fetched."""
TESTS = ("hypothesis", "msgpack", "pytest", "pytest-timeout")
"""What the tests marked ``gpu`` need beside them."""
BUILD = ("hatchling", "editables")
"""What pip needs to install Tandem itself from its checkout."""
ENVIRONMENT = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "platform_machine": "x86_64",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "implementation_name": "cpython",
    "platform_python_implementation": "CPython",
}
"""The GPU machine, in the words of environment markers."""
# pip takes a glibc version literally, so that every usual one must be named.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
NOT_INSTALLED = ("editables", "liger-kernel")
"""Fetched though they aren't in this environment: they need nothing that isn't there."""


def needed(roots: Iterable[Requirement], there: frozenset[str]) -> set[str]:
    """Names of everything that these requirements bring, themselves included, less what is there.

    Raises:
        SystemExit: one of them isn't installed here.
    """
    found: set[tuple[str, str]] = set()
    left = list(roots)
    while left:
        requirement = left.pop()
        for extra in ("", *requirement.extras):
            key = canonicalize_name(requirement.name), extra
            if key in found or key[0] in there:
                continue
            found.add(key)
            if key[0] in NOT_INSTALLED:
                continue
            try:
                brings = requires(requirement.name) or []
            except PackageNotFoundError:
                raise SystemExit(
                    f"{requirement.name} isn't installed here, so that nobody knows what it needs: "
                    f"bash launch/setup.sh --dev"
                ) from None
            for text in brings:
                one = Requirement(text)
                if one.marker is None or one.marker.evaluate({**ENVIRONMENT, "extra": extra}):
                    left.append(one)
    return {name for name, _ in found}


def own_requirements() -> list[Requirement]:
    """What ``pyproject.toml`` asks for: the core, the extras of :data:`EXTRAS`, and what tests need."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*project["dependencies"], *TESTS, *BUILD]
    for extra in EXTRAS:
        texts += project["optional-dependencies"][extra]
    wanted = [Requirement(text) for text in texts]
    return [one for one in wanted if one.marker is None or one.marker.evaluate(dict(ENVIRONMENT))]


def pins() -> dict[str, str]:
    """Each package's version in ``constraints.txt``."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    found = (re.fullmatch(r"([A-Za-z0-9_.-]+)==(\S+)", line.strip()) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def pip(*words: str, **environment: str) -> None:
    """Runs pip; ends the program if it fails."""
    command = [sys.executable, "-m", "pip", *words]
    if subprocess.run(command, env={**os.environ, **environment}).returncode:
        raise SystemExit(f"pip {words[0]} failed: its last lines say why")


def fetch(names: Iterable[str], folder: Path) -> None:
    """Downloads or builds the wheel of every package."""
    known = pins()
    pinned = {name: f"{name}=={known[name]}" if name in known else name for name in names}
    built = pinned.pop("deepspeed", None)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip(
        *("download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)),
        *("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"),
        *("--abi", "abi3", "--abi", "none", *platforms),
        *sorted(pinned.values()),
    )
    if built is not None:
        # Its set-up looks for torch and a GPU, and takes what it finds for the machine that runs it.
        with tempfile.TemporaryDirectory() as extensions:
            pip(
                *("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), built),
                DS_BUILD_OPS="0",
                DS_ACCELERATOR="cpu",
                TORCH_EXTENSIONS_DIR=extensions,
            )


def main() -> int:
    """Fills the folder and prints its size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder, which may exist")
    parser.add_argument("--most-mb", type=float, default=60.0, help="greatest size (default 60)")
    parser.add_argument(
        "--carry",
        nargs="*",
        default=[],
        choices=PRESENT,
        help="fetch these too: the machine lacks them",
    )
    parser.add_argument("--list", action="store_true", help="print the names, and fetch nothing")
    given = parser.parse_args()
    there = frozenset({*PRESENT, *THEIRS} - set(given.carry))
    names = needed(own_requirements(), there)
    if given.list:
        print("\n".join(sorted(names)))
        return 0
    if given.out is None:
        parser.error("name the folder: --out DIR")
    given.out.mkdir(parents=True, exist_ok=True)
    for old in given.out.glob("*.whl"):
        old.unlink()
    fetch(names, given.out)
    wheels = sorted(given.out.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    size = sum(wheel.stat().st_size for wheel in wheels) / 1e6
    for wheel in wheels[:8]:
        print(f"{wheel.stat().st_size / 1e6:6.1f} MB  {wheel.name}")
    print(f"{size:6.1f} MB  in {len(wheels)} wheels in {given.out}")
    if size > given.most_mb:
        print(
            f"that is over {given.most_mb:g} MB: carry less, or raise --most-mb",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
