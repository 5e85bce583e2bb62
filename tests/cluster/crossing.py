"""What a schema can't see in manifests: whether what one object names is there in another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]
WORKLOADS = ("StatefulSet", "Deployment", "Pod", "JobSet")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")


def findings(objects: list[Object], kustomized: set[str] | None = None) -> list[str]:
    """Everything that doesn't fit together, a sentence each.

    Args:
        objects: all objects of a folder.
        kustomized: files that the kustomization lists, and those that are there, as ``(listed, there)`` names
            that differ; None = not looked at.
    """
    found = [f"the kustomization and the folder differ in {name}" for name in kustomized or ()]
    by_kind: dict[str, dict[str, Object]] = {}
    for one in objects:
        names = by_kind.setdefault(one["kind"], {})
        name = one["metadata"]["name"]
        if name in names:
            found.append(f"there are two of {one['kind']} {name}")
        names[name] = one
    pods = [(one, pod) for one in objects for pod in _pods(one)]
    for one, pod in pods:
        found += _in_pod(one, pod, by_kind)
    for name, service in by_kind.get("Service", {}).items():
        found += _service(name, service, pods)
    for name, policy in by_kind.get("NetworkPolicy", {}).items():
        found += _policy(name, policy, pods, by_kind)
    return found


def _pods(one: Object) -> Iterator[Object]:
    """Pod templates of an object, with ``metadata`` and ``spec``."""
    if one["kind"] == "Pod":
        yield one
    elif one["kind"] == "JobSet":
        for job in one["spec"]["replicatedJobs"]:
            yield job["template"]["spec"]["template"]
    elif one["kind"] in WORKLOADS:
        yield one["spec"]["template"]


def _in_pod(one: Object, pod: Object, by_kind: dict[str, dict[str, Object]]) -> Iterator[str]:
    who = f"{one['kind']} {one['metadata']['name']}"
    labels, spec = pod["metadata"].get("labels", {}), pod["spec"]
    wanted = one["spec"].get("selector", {}).get("matchLabels")
    if wanted is not None and not _within(wanted, labels):
        yield f"the selector of {who} isn't among its pods' labels"
    service = one["spec"].get("serviceName")
    if service is not None and service not in by_kind.get("Service", {}):
        yield f"{who} names the service {service}, which isn't there"
    claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
    for claim in one["spec"].get("volumeClaimTemplates", ()):
        yield from _quantities(who, claim["spec"]["resources"])
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    for volume in spec.get("volumes", ()):
        yield from _volume(who, volume, by_kind)
    grace = spec["terminationGracePeriodSeconds"]
    for container in spec["containers"]:
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        for name in mounted - volumes - claims:
            yield f"{who} mounts {name}, which is no volume"
        for name in volumes - mounted:
            yield f"{who} has the volume {name}, which is mounted nowhere"
        yield from _quantities(who, container["resources"])
        for source in container.get("envFrom", ()):
            secret = source["secretRef"]
            if not secret.get("optional") and secret["name"] not in by_kind.get("Secret", {}):
                yield f"{who} wants the secret {secret['name']}, which isn't there"
        words = container.get("args", [])
        if "--drain" in words and float(words[words.index("--drain") + 1]) >= grace:
            yield f"{who} drains for longer than its grace of {grace} s"
        defined = {entry["name"] for entry in container.get("env", ())}
        for name in re.findall(r"(?<!\$)\$\((\w+)\)", " ".join(words)):
            if name not in defined:
                yield f"{who} uses $({name}), which isn't in its environment"


def _volume(who: str, volume: Object, by_kind: dict[str, dict[str, Object]]) -> Iterator[str]:
    if "secret" in volume and volume["secret"]["secretName"] not in by_kind.get("Secret", {}):
        yield f"{who} mounts the secret {volume['secret']['secretName']}, which isn't there"
    if "configMap" in volume and volume["configMap"]["name"] not in by_kind.get("ConfigMap", {}):
        yield f"{who} mounts the config map {volume['configMap']['name']}, which isn't there"
    if "persistentVolumeClaim" in volume:
        name = volume["persistentVolumeClaim"]["claimName"]
        own = {
            f"{claim['metadata']['name']}-{stateful['metadata']['name']}-{number}"
            for stateful in by_kind.get("StatefulSet", {}).values()
            for claim in stateful["spec"].get("volumeClaimTemplates", ())
            for number in range(stateful["spec"]["replicas"])
        }
        if name not in own:
            yield f"{who} mounts the claim {name}, which isn't there"
    if "emptyDir" in volume and "sizeLimit" in volume["emptyDir"]:
        yield from _quantities(who, {"sizeLimit": {"size": volume["emptyDir"]["sizeLimit"]}})


def _service(name: str, service: Object, pods: list[tuple[Object, Object]]) -> Iterator[str]:
    spec = service["spec"]
    chosen = [pod for _, pod in pods if _within(spec["selector"], _labels(pod))]
    if not chosen:
        yield f"the service {name} selects no pod"
    for port in spec.get("ports", ()):
        ports = [p for pod in chosen for c in pod["spec"]["containers"] for p in c.get("ports", ())]
        numbers = {p["containerPort"] for p in ports if p["name"] == port["targetPort"]}
        if numbers != {port["port"]}:
            yield f"port {port['port']} of the service {name} is {numbers or 'none'} of its pods"


def _policy(
    name: str,
    policy: Object,
    pods: list[tuple[Object, Object]],
    by_kind: dict[str, dict[str, Object]],
) -> Iterator[str]:
    selectors = [policy["spec"]["podSelector"]]
    for rule in (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ())):
        peers = (*rule.get("from", ()), *rule.get("to", ()))
        selectors += [peer["podSelector"] for peer in peers if "podSelector" in peer]
        for port in rule.get("ports", ()):
            if port.get("endPort", port["port"]) < port["port"]:
                yield f"the policy {name} has a range of ports that ends before it begins"
    for selector in selectors:
        if not any(_selects(selector, _labels(pod)) for _, pod in pods):
            yield f"the policy {name} selects no pod"
    if name.endswith("-data"):
        return
    for secret in by_kind.get("Secret", {}).values():
        join = json.loads(secret["stringData"]["join.json"])
        if join["host"].partition(".")[0] in by_kind.get("Service", {}):
            continue  # The head's own.
        anywhere = [
            p for rule in policy["spec"]["egress"] if "to" not in rule for p in rule["ports"]
        ]
        if not any(p["port"] <= join["port"] <= p.get("endPort", p["port"]) for p in anywhere):
            yield f"the policy {name} keeps pods from Redis at {join['host']}:{join['port']}"
    for one, pod in pods:
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                if not any(
                    allowed["port"] <= port["containerPort"] <= allowed.get("endPort", 0)
                    for rule in policy["spec"]["ingress"]
                    for allowed in rule["ports"]
                ):
                    yield f"the policy {name} keeps others from port {port['containerPort']} of {one['metadata']['name']}"


def _selects(selector: Object, labels: dict[str, str]) -> bool:
    if not _within(selector.get("matchLabels", {}), labels):
        return False
    return all(
        labels.get(expression["key"]) in expression["values"]
        for expression in selector.get("matchExpressions", ())
    )


def _labels(pod: Object) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"].get("labels", {})
    return found


def _within(wanted: dict[str, str], labels: dict[str, str]) -> bool:
    return wanted.items() <= labels.items()


def _quantities(who: str, resources: Object) -> Iterator[str]:
    for kind in resources.values():
        for name, quantity in kind.items():
            if not QUANTITY.fullmatch(str(quantity)):
                yield f"{who} asks for {name}: {quantity}, which is no quantity"
    wanted, most = resources.get("requests", {}), resources.get("limits", {})
    for name in ("memory", "nvidia.com/gpu"):
        if name in most and most[name] != wanted.get(name):
            yield f"{who} asks for {wanted.get(name)} of {name} and is limited to {most[name]}"
