"""A Weights & Biases run: the same one when the run is resumed, offline if there is no key."""

from __future__ import annotations

import hashlib
import json
import netrc
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from ...common.errors import DeadlineError
from ..wording import shown, shown_tandem
from .tracker import Tracker

Mode = Literal["online", "offline"]
SERVER = "api.wandb.ai"
"""The host under which `wandb login` has always written the key of W&B's own server; newer versions contact it by another
name."""
INIT_SECONDS = 30.0
"""Longest wait for the server at the start."""
FINISH_SECONDS = 30.0
"""Longest wait for the last uploads at the end."""
ALERT_SECONDS = 600
"""Least time between two alerts."""


def place_of(folder: Path) -> dict[str, Any]:
    """What distinguishes a run's folder from a copy of it; stored in ``run.json``."""
    return {"folder": os.path.realpath(folder), "inode": folder.stat().st_ino}


def wandb_id_of(record: Mapping[str, Any], folder: Path) -> str:
    """W&B's id of the run in a folder: the run's own id, and for a copy a new one.

    A folder that was renamed keeps its id. Without an id of its own, a copy that goes on beside its
    original would write into the same charts.

    Args:
        record: content of ``run.json``.
        folder: where the folder is now.
    """
    kept = str(record.get("wandb_id") or record["run_id"])
    place = place_of(folder)
    if record.get("folder") in (None, place["folder"]) or record.get("inode") == place["inode"]:
        return kept
    digest = hashlib.blake2b(json.dumps(place).encode(), digest_size=4).hexdigest()
    return f"{record['run_id']}-{digest}"


def kept_here(folder: Path, since: float) -> str:
    """The command that uploads what W&B has kept offline in a run's folder since a time; empty if there is nothing.

    Args:
        folder: the run's folder.
        since: in seconds since the epoch.
    """
    made = (folder / "wandb").glob("offline-run-*")
    new = sorted(shown(one) for one in made if one.stat().st_mtime >= since)
    return shlex.join(["wandb", "sync", *new]) if new else ""


class WandbRun(Tracker):
    """A run whose rows have a ``step`` of their own, which is the x-axis of every metric.

    W&B's own step only ever grows, but an evaluation belongs to the weights of an earlier step.

    Args:
        folder: W&B makes its ``wandb/`` folder in it.
        run_id: W&B's id, so that a resumed run continues the same one.
        project: W&B's project.
        name: the name shown there.
        config: the run's settings.
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
                finish_timeout_raises=True,
                # Only what is logged leaves this machine: no code, no git state, no output.
                console="off",
                disable_git=True,
                disable_code=True,
                silent=True,
            ),
        )
        self._folder = folder
        if mode == "online":
            # Of the records that an earlier process logged, W&B may have lost those that weren't uploaded at its death.
            self.rows = int(self._run.step)
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="step", summary="last,max")

    def log(self, row: int, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics}, step=row)

    def alarm(self, step: int, time: float, text: str) -> None:
        """Sends an alert, which W&B forwards as the user has set; at most one in :data:`ALERT_SECONDS`."""
        self._run.alert(
            title="What is sampled isn't what is learned from",
            text=f"Step {step}: {text}",
            level="WARN",
            wait_duration=ALERT_SECONDS,
        )

    def flush(self) -> None:
        """Does nothing, since W&B sends by itself."""

    def close(self) -> None:
        """Waits for the uploads, at most :data:`FINISH_SECONDS`."""
        try:
            self._run.finish()
        except TimeoutError:
            raise DeadlineError(
                f"W&B's server hasn't got all records in {FINISH_SECONDS:.0f} s: "
                f"`{shown_tandem()} track {shlex.quote(shown(self._folder))} --to wandb` sends what it lacks"
            ) from None


def has_key() -> bool:
    """Whether W&B would find a key for its server: in the environment (an API key, or a file with an identity token), in
    its settings or in a netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb
    from wandb.sdk import wandb_setup

    # They are also in files, where `wandb login --host` writes the server.
    settings = wandb_setup.singleton().settings
    if settings.api_key:
        return True
    server = urlsplit(settings.base_url)
    # W&B writes the port too, if there is one.
    hosts = {server.netloc, server.hostname or ""}
    if settings.base_url == wandb.Settings().base_url:
        hosts.add(SERVER)
    named = os.environ.get("NETRC")
    for place in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            found = netrc.netrc(os.path.expanduser(place))
            if any(found.authenticators(host) for host in hosts):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def mode_of(wanted: Mode) -> tuple[Mode, str | None]:
    """``online`` or ``offline``, and why the wanted mode isn't possible."""
    requested = os.environ.get("WANDB_MODE", "")
    if wanted == "online" and requested in ("offline", "dryrun", "disabled"):
        return "offline", f"WANDB_MODE={requested}"
    if wanted == "online" and not has_key():
        return "offline", "there is no API key (WANDB_API_KEY, or `wandb login`)"
    return wanted, None
