"""Kubernetes manifests of `configs/kubernetes`: read, checked against schemas, and looked into."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import typer.main
import yaml

from slagate.router.commands import cli

FOLDER = Path(__file__).parents[3] / "configs" / "kubernetes"
CRDS = Path(__file__).parent / "crds"
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the oldest that has all we use (the sleep of preStop), and the newest of the schemas."""

MODELS = ("qwen3", "deepseek-r1")
"""What is one model's is in a folder of this name, or in a file that ends with it; a fleet has one."""

NAMESPACE = "slagate"

Object = Mapping[str, Any]


class Pod(NamedTuple):
    """The template of a pod, and whose it is."""

    owner: Object
    template: Object

    @property
    def name(self) -> str:
        """Kind and name of the owner, for messages."""
        return f"{self.owner['kind']} {self.owner['metadata']['name']}"

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def container(self) -> Object:
        (only,) = self.spec["containers"]
        container: Object = only
        return container

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container.get("ports", ())}


@cache
def objects(path: Path) -> tuple[Object, ...]:
    """The objects of one file."""
    return tuple(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def files() -> list[Path]:
    return sorted(FOLDER.rglob("*.yaml"))


def fleet(model: str) -> list[Object]:
    """All that is applied for a fleet of this model, with either model cache."""
    others = [other for other in MODELS if other != model]
    return [
        one
        for path in files()
        if not any(path.parent.name == other or path.stem.endswith(other) for other in others)
        for one in objects(path)
    ]


def named(of: list[Object], kind: str, name: str) -> Object:
    found = [one for one in of if one["kind"] == kind and one["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} of {kind} {name}"
    return found[0]


def pods(of: list[Object]) -> Iterator[Pod]:
    """The pods of these objects' templates; a group of several nodes has two."""
    for one in of:
        if one["kind"] in ("Deployment", "Job"):
            yield Pod(one, one["spec"]["template"])
        elif one["kind"] == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            yield Pod(one, group["leaderTemplate"])
            yield Pod(one, group["workerTemplate"])


def check_schema(one: Object) -> None:
    """Raise the validator's error where an object is not of its kind; unknown fields are errors too."""
    crd = CRDS / f"{one['kind']}.json"
    if crd.exists():
        jsonschema.Draft202012Validator(json.loads(crd.read_text())).validate(one)
        checked = [
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod.spec}
            for pod in pods([one])
        ]
    else:
        checked = [dict(one)]
    for each in checked:
        for version in VERSIONS:
            kubernetes_validate.validate(each, version, strict=True)


def parsed(arguments: list[str]) -> dict[str, Any]:
    """What the real command line makes of `slagate ARGUMENTS`. Raises its usage errors."""
    command: Any = typer.main.get_command(cli)
    options = list(arguments)
    while hasattr(command, "get_command"):
        name = options.pop(0)
        command = command.get_command(None, name)
    values: dict[str, Any] = command.make_context(name, options).params
    return values


def command_of(pod: Pod) -> list[str] | None:
    """The `slagate` command that a pod's container runs, less its first word; None: another program."""
    command, arguments = pod.container.get("command", []), pod.container.get("args", [])
    if command[:1] == ["slagate"]:
        return [*command[1:], *arguments]
    if command[:1] == ["bash"] and str(command[1]).endswith("/leader.sh"):
        return ["worker", *arguments]  # what leader.sh and rank0.sh make of it
    return None
