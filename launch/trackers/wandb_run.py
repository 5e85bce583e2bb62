"""A Weights & Biases run: the same one when the run is resumed, offline where there is no key."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from .tracker import Tracker

Mode = Literal["online", "offline"]
SERVER = "https://api.wandb.ai"
"""Unless ``WANDB_BASE_URL`` names another."""
INIT_SECONDS = 30.0
"""Longest wait for the server at the start."""
FINISH_SECONDS = 30.0
"""Longest wait for the last uploads at the end."""


class WandbRun(Tracker):
    """Rows with a ``step`` of their own, which every metric is drawn over.

    W&B's own step only ever grows, and an evaluation belongs to weights of an earlier step.

    Args:
        folder: W&B makes its ``wandb/`` in it.
        run_id: Of the run; also W&B's id, so that a resumed run goes on in the same one.
        project: There.
        name: Shown there.
        config: The run's settings.
        mode: ``online`` or ``offline``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        project: str,
        name: str,
        config: Mapping[str, Any],
        mode: Mode,
    ) -> None:
        import wandb

        self._run: Any = wandb.init(
            id=run_id,
            resume="allow",
            project=project,
            name=name,
            config=dict(config),
            dir=str(folder),
            mode=mode,
            settings=wandb.Settings(
                init_timeout=INIT_SECONDS,
                finish_timeout=FINISH_SECONDS,
                # Only what is logged leaves this machine: no code, no git state, no output.
                console="off",
                disable_git=True,
                disable_code=True,
                silent=True,
            ),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="step", summary="last,max")

    def log(self, row: int, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """One row."""
        self._run.log({"step": step, **metrics}, step=row)

    def flush(self) -> None:
        """W&B sends by itself."""

    def close(self) -> None:
        """Waits for the uploads, at most :data:`FINISH_SECONDS`."""
        self._run.finish()


def has_key() -> bool:
    """Whether W&B would find an API key: in ``WANDB_API_KEY`` or in a netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or SERVER).hostname or ""
    named = os.environ.get("NETRC")
    for place in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(os.path.expanduser(place)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def mode_of(wanted: Mode) -> tuple[Mode, str | None]:
    """``online`` or ``offline``, and why it isn't what was wanted."""
    told = os.environ.get("WANDB_MODE", "")
    if wanted == "online" and told in ("offline", "dryrun", "disabled"):
        return "offline", f"WANDB_MODE={told}"
    if wanted == "online" and not has_key():
        return "offline", "there is no API key (WANDB_API_KEY, or `wandb login`)"
    return wanted, None
