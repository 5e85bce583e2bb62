"""Virtual environments of the projects that benchmarks race against, with the torch that Tandem has here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment(place: Path, name: str, *packages: Sequence[str]) -> Path:
    """Python of an environment; makes it in ``place`` where it isn't there or holds something else.

    Args:
        place: its folder.
        name: the project with its version, which the user is told.
        packages: arguments of one ``pip install`` each, in this order, behind torch's.
    """
    import torch

    python, stamp = place / "bin" / "python", place / "made-of.txt"
    # torch first: what depends on it must not choose another build.
    installs = [[f"torch=={torch.__version__.partition('+')[0]}"], *map(list, packages)]
    wanted = "\n".join(map(" ".join, installs))
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return python
    print(f"making an environment for {name} in {place} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    for words in installs:
        command = [str(python), "-m", "pip", "install", "--quiet", *words]
        subprocess.run(command, check=True, timeout=1200)
    stamp.write_text(wanted, encoding="utf-8")
    return python
