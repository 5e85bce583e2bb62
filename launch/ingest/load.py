"""Puts what was read into Redis and creates the ledger, or joins the ledger of a resumed run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...common import models
from ...common.config import Config, of_set, to_yaml
from ...common.config.groups import own_rows
from ...common.errors import StoreError
from ...common.templates import OWN
from ...replay.ledger import Ledger
from ...replay.ledger_records import LedgerSettings
from ...replay.store import RunStore
from ..plan.placement import workers_of
from .prepare import Prepared


def role_config(config: Config) -> Config:
    """The config as roles read it.

    The model's folder is an absolute path. If there is no worker to evaluate (offline), the learner
    must not wait for one: the job runs the evaluations itself.
    """
    if not workers_of(config):
        evaluate = config.evaluate.model_copy(update={"at_start": False, "at_end": False})
        if config.learner.source == "offline":
            config = config.model_copy(update={"evaluate": evaluate})
    # A template may be a file of this host, and the prompts are rendered already.
    sets = [
        held.model_copy(update={"stop": of_set(config, held).data.stops, "template": None})
        if held.template is not None
        else held
        for held in config.data.evaluate
    ]
    own: dict[str, Any] = {"stop": config.data.stops, "template": OWN, "evaluate": tuple(sets)}
    if config.data.archive is not None:
        own["archive"] = str(Path(config.data.archive).expanduser().absolute())
    data = config.data.model_copy(update=own)
    config = config.model_copy(update={"data": data})
    folder = Path(config.model.path).expanduser()
    if config.model.path in models.SHIPPED or not folder.is_dir():
        return config
    model = config.model.model_copy(update={"path": str(folder.absolute())})
    return config.model_copy(update={"model": model})


def load(ledger: Ledger, runs: RunStore, config: Config, prepared: Prepared) -> None:
    """Puts everything into Redis, then creates the ledger, whose existence means that all data are there.

    Raises:
        StoreError: Redis holds a ledger of this run with other frozen settings.
    """
    runs.put_problems(prepared.problems)
    runs.put_traces(prepared.traces)
    for name, problems in prepared.evaluate.items():
        runs.put_eval_set(name, problems)
    runs.curve_client()
    runs.put_config(to_yaml(role_config(config)))
    ledger.create(
        LedgerSettings.of(config, prepared.sources, prepared.data_digest, prepared.problem_bytes)
    )


def reload(
    ledger: Ledger,
    runs: RunStore,
    config: Config,
    sources: Sequence[tuple[str, int, int]],
    data_digest: str,
    problem_bytes: int = 0,
) -> None:
    """Joins the ledger of a resumed run, whose data Redis holds, and updates what may change.

    Runs that older versions began don't know the bytes of their largest problem (0).

    Raises:
        StoreError: Redis holds no ledger of this run, or one with other frozen settings.
    """
    if not ledger.store.holds_run():
        raise StoreError(
            f"Redis at {ledger.store.address} holds no ledger of run {ledger.store.run_id}: its "
            f"append-only file is gone. Restore the run's redis/ folder, or start over with "
            f"--fresh (the old folder is moved aside)"
        )
    runs.put_config(to_yaml(role_config(config)))
    ledger.create(LedgerSettings.of(config, sources, data_digest, problem_bytes))
    least = ledger.settings.least_verdicts
    if own_rows(config) < least and config.learner.source == "ledger":
        raise StoreError(
            f"run {ledger.store.run_id} was begun by an older version, whose ledger rejects every "
            f"group of fewer than {least} own samples, and it asks for {own_rows(config)}: start "
            f"over with --fresh (the old folder is moved aside)"
        )
