"""Manifests for Kubernetes: a head with its volume, workers that are scaled, and the learner's other hosts."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ...common.errors import ConfigError
from .demand import Demand, Job, notes_on_files
from .join import FIRST_SECONDS, new_join, note_on_password, port_range, read_kept, text_of
from .rendering import Values, quoted, render

if TYPE_CHECKING:
    from ...common.config import RewardConfig
    from ...common.run_folder import JoinInfo

MARGIN = 30.0
"""Seconds by which the grace of a pod is longer than its drain."""
SECRET = "secret.yaml"
JOIN = "/etc/tandem/join/join.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What the command line says about the cluster."""

    out: Path | None
    """Folder of the manifests; None = they are printed, without the Secret."""
    command: str
    """The command line, for the first lines of ``kustomization.yaml``."""
    image: str
    namespace: str
    nodes: int
    """Pods of rollout workers to begin with."""
    workers: int
    """Rollout workers in each of them."""
    storage: str
    """Size of the volume, as a quantity of Kubernetes."""
    storage_class: str | None = None
    """None = the cluster's default."""
    jobset: bool = False
    """The learner's other hosts as a JobSet in place of a StatefulSet."""
    templates: Path | None = None
    """A folder of templates that go before Tandem's."""


_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){_LABEL.pattern}(\.{_LABEL.pattern})*")
_QUANTITY = re.compile(
    r"[+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+|Ki|Mi|Gi|Ti|Pi|Ei|m|k|M|G|T|P|E)?"
)


def _check_names(site: Site) -> None:
    """Refuses what the cluster would refuse when the manifests are applied."""
    for option, value, pattern, example in (
        (
            "--namespace",
            site.namespace,
            _LABEL,
            "small letters, digits and hyphens, such as my-team",
        ),
        ("--storage", site.storage, _QUANTITY, "a quantity such as 500Gi"),
        ("--storage-class", site.storage_class, _SUBDOMAIN, "a name such as fast-ssd"),
        ("--image", site.image, re.compile(r"\S+"), "a name such as registry.example.org/tandem:1"),
    ):
        # An empty class asks for a volume that is there.
        if value and not pattern.fullmatch(value):
            raise ConfigError(f"{option} {value}: Kubernetes wants {example}")


def manifests(job: Job, site: Site) -> dict[str, str]:
    """File name to content; :data:`SECRET` holds a password.

    Raises:
        ConfigError: an option makes no sense.
        DataError: a template can't be read, or the Secret of an earlier call is damaged.
    """
    if site.nodes < 0 or site.workers < 1:
        raise ConfigError("--nodes is a number from 0, and --workers-per-node one from 1")
    if site.jobset and job.demands.hosts == 1:
        raise ConfigError(
            "--jobset is for the learner's other hosts, and learner.hosts=1: leave it out"
        )
    _check_names(site)
    demands, hosts, config = job.demands, job.demands.hosts, job.config
    ports = port_range(config)
    drain = config.launch.drain_seconds
    host = f"{job.name}-head.{site.namespace}.svc"
    join = new_join(config, host, _kept(site))
    is_own = job.preset_text is not None
    run = _run(job)
    # A key of a ConfigMap can't have every name that a file can.
    preset_file = f"{run}.yaml"
    preset = f"/etc/tandem/preset/{preset_file}" if is_own else job.preset
    head = [
        *("start", preset, "--head"),
        *(_literal(word) for word in job.overrides),
        f"run.dir=/runs/{run}",
        f"launch.ports={ports[0]}-{ports[-1]}",
        "launch.bind=$(POD_IP)",
        f"launch.join={JOIN}",
    ]
    members = ["--wait", str(FIRST_SECONDS), "--drain", f"{drain:g}"]
    values: Values = {
        "name": job.name,
        "run": run,
        "command": site.command,
        "here": "DIR" if site.out is None else shlex.quote(str(site.out)),
        "namespace": quoted(site.namespace),
        "image": quoted(site.image),
        "nodes": site.nodes,
        "others": hosts - 1,
        "redis_port": ports[0],
        "last_port": ports[-1],
        "server_port": None if config.replay.redis_url is None else join.port,
        "scorer_ports": _scorer_ports(config.reward),
        "drain": f"{drain:g}",
        "grace": int(drain + MARGIN),
        "storage": quoted(site.storage),
        "access": "ReadWriteMany" if hosts > 1 else "ReadWriteOnce",
        "storage_class": None if site.storage_class is None else quoted(site.storage_class),
        "head_args": quoted(head),
        "rollout_args": quoted(
            ["join", JOIN, "--role", "rollout", "--workers", str(site.workers), *members]
        ),
        "learner_args": quoted(["join", JOIN, "--role", "learner", *members]),
        **_resources("head", demands.head),
        **_resources("rollout", demands.rollout, site.workers),
        **_resources("learner", demands.learner),
        "join_json": quoted(text_of(join)),
        "preset_file": preset_file,
        "preset_text": quoted(job.preset_text) if is_own else None,
        "if_preset": "" if is_own else None,
    }
    names = ["head.yaml", "rollout.yaml", "network.yaml", SECRET]
    if is_own:
        names.append("preset.yaml")
    if hosts > 1:
        names.append("jobset.yaml" if site.jobset else "learner.yaml")
    if hosts > 1 or config.weights.transport != "snapshot":
        names.append("network-data.yaml")
    values = {**values, "resources": quoted(names)}
    names = ["kustomization.yaml", *names, "results.yaml"]
    return {name: render(f"kubernetes/{name}", values, site.templates) for name in names}


def _kept(site: Site) -> JoinInfo | None:
    return None if site.out is None else read_kept(site.out / SECRET, in_secret=True)


def notes(job: Job, site: Site) -> list[str]:
    """What the user should know, a sentence each."""
    found = [*job.notes, *note_on_password(job.config, _kept(site), SECRET)]
    if any(word.startswith("run.dir=") for word in job.overrides):
        found.append(
            f"run.dir={job.config.run.dir} isn't used: the volume has the run's folder, /runs/{_run(job)}; --name NAME "
            f"names another one"
        )
    found += notes_on_files(
        job.config,
        copied="put it into the image or on the volume",
        certificate="put it into the image",
        environment=f"the Secret {job.name}-env",
    )
    # A policy is applied once the Service's address is translated, and no URL tells the port that it becomes.
    found += [
        f"{url}: if {urlsplit(url).hostname} is a Service of this cluster whose pods listen at another port "
        f"(targetPort), write that one into network.yaml"
        for url in _scorer_urls(job.config.reward)
        if _may_be_service(urlsplit(url).hostname or "")
    ]
    return found


def _scorer_ports(reward: RewardConfig) -> str | None:
    """The ports of a policy for the servers that components of the reward ask; None if HTTPS' is all that they need."""
    urls = map(urlsplit, _scorer_urls(reward))
    ports = {url.port or (443 if url.scheme == "https" else 80) for url in urls} - {443}
    return quoted([{"protocol": "TCP", "port": port} for port in sorted(ports)]) if ports else None


def _scorer_urls(reward: RewardConfig) -> list[str]:
    """The addresses of the servers that components of the reward ask."""
    from ...reward.components.scoring import Scorer

    return list(dict.fromkeys(part.function.address.url for part in Scorer(reward).remote))


def _may_be_service(host: str) -> bool:
    """Whether a host's name can be that of a Service of the cluster, alone or with its namespace. A colon is an IPv6
    address's."""
    short = host.count(".") <= 1 and ":" not in host and host != "localhost"
    return short or ".svc." in f"{host}."


def _run(job: Job) -> str:
    """Name of the run's folder on the volume."""
    return job.name.removeprefix("tandem-")


def _literal(word: str) -> str:
    """A word in which Kubernetes replaces nothing: it reads ``$(NAME)``, and ``$$`` as one ``$``."""
    return word.replace("$", "$$")


def _resources(kind: str, demand: Demand, count: int = 1) -> dict[str, str | int | None]:
    gibibytes = demand.gibibytes
    memory = {} if gibibytes is None else {"memory": f"{gibibytes * count}Gi"}
    gpus = {"nvidia.com/gpu": demand.gpus * count} if demand.gpus else {}
    shm = 8 if gibibytes is None else max(1, gibibytes * count // 4)
    return {
        f"{kind}_requests": quoted({"cpu": demand.cpus * count, **memory, **gpus}),
        f"{kind}_limits": quoted({**memory, **gpus}),
        f"{kind}_shm": f"{shm}Gi",
    }
