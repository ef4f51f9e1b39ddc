"""Kubernetes manifests: of their kinds, of one piece, and true to what our commands really do."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from slagate.pools.fleet_file.load import FleetConfig, load_config
from slagate.proto.rpc.address import Address
from slagate.router.commands import cli
from support.repository.manifests import (
    CRDS,
    FOLDER,
    MODELS,
    NAMESPACE,
    Object,
    Pod,
    check_schema,
    command_of,
    files,
    fleet,
    named,
    objects,
    parsed,
    pods,
)

ALL = [one for path in files() for one in objects(path)]
WORKER, GATEWAY = "slagate-worker", "slagate-gateway"
APP, POOL = "app.kubernetes.io/name", "slagate/pool"
LISTENERS = {
    "listen": "grpc",
    "admin": "admin",
    "http": "http-metrics",
    "metrics_listen": "http-metrics",
}
"""Options that listen, and the ports of the container that they are."""

GOODBYE_S = 10
"""For what a process does after its drain: streams cut, receipts and logs written."""


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of engine arguments read these, and other tests of the process leave them set."""
    for name in ("UCX_TLS", "TRTLLM_USE_UCX_KVCACHE"):
        monkeypatch.delenv(name, raising=False)


def label(one: Object) -> str:
    return f"{one['kind']}-{one['metadata']['name']}"


def commands(of: list[Object]) -> Iterator[tuple[Pod, dict[str, Any]]]:
    """Pods that run a command of ours, with what it makes of its options."""
    for pod in pods(of):
        command = command_of(pod)
        if command is not None:
            yield pod, parsed(command)


def workers(of: list[Object]) -> list[tuple[Pod, dict[str, Any]]]:
    return [(pod, given) for pod, given in commands(of) if pod.labels[APP] == WORKER]


# --- schemas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", ALL, ids=label)
def test_each_object_is_of_its_kind(one: Object) -> None:
    check_schema(one)


def test_each_schema_of_ours_is_used() -> None:
    assert {path.stem for path in CRDS.iterdir()} < {one["kind"] for one in ALL}


@pytest.mark.parametrize("one", {one["kind"]: one for one in ALL}.values(), ids=label)
def test_a_field_that_does_not_exist_is_refused(one: Object) -> None:
    """A schema that lets everything pass would make the test above one of nothing."""
    wrong = copy.deepcopy(dict(one))
    wrong.setdefault("spec", wrong)["replica"] = 3
    with pytest.raises(Exception, match=r"replica"):
        check_schema(wrong)


def test_a_pod_within_a_group_is_checked_as_one() -> None:
    (group, *_) = (one for one in ALL if one["kind"] == "LeaderWorkerSet")
    wrong = copy.deepcopy(dict(group))
    template = wrong["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    template["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(Exception, match="imagePullPolice"):
        check_schema(wrong)


def test_everything_is_in_one_namespace_and_named_once() -> None:
    assert {one["metadata"].get("namespace") for one in ALL if one["kind"] != "Namespace"} == {
        NAMESPACE
    }
    for model in MODELS:
        names = [(one["kind"], one["metadata"]["name"]) for one in fleet(model)]
        assert sorted(set(names)) == sorted(names)


# --- commands --------------------------------------------------------------------------------------


def test_each_of_our_commands_is_somewhere() -> None:
    found = {command_of(pod)[0] for pod in pods(ALL) if command_of(pod)}  # type: ignore[index]
    assert found == {"serve", "worker", "bench"}


@pytest.mark.parametrize(
    "pod", [pod for pod in pods(ALL) if command_of(pod)], ids=lambda pod: pod.name
)
def test_options_exist_and_listeners_are_ports_of_the_container(pod: Pod) -> None:
    command = command_of(pod)
    assert command is not None
    listening = {
        LISTENERS[name]: value
        for name, value in parsed(command).items()
        if isinstance(value, Address)
    }
    assert {port: address.port for port, address in listening.items()} == pod.ports
    assert all(address.host == "0.0.0.0" for address in listening.values())


def test_an_option_that_does_not_exist_is_found() -> None:
    with pytest.raises(Exception, match="--no-such"):
        parsed(["serve", "--no-such=1"])


PATHS = {"http-metrics": {"/healthz", "/readyz"}}
"""What `serve --http` and `worker --metrics-listen` answer; tests/e2e and tests/long ask them."""


@pytest.mark.parametrize("pod", list(pods(ALL)), ids=lambda pod: pod.name)
def test_probes_ask_for_what_is_served(pod: Pod) -> None:
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    probes = {kind: pod.container[kind] for kind in kinds if kind in pod.container}
    if pod.owner["kind"] == "Job":
        assert probes == {}
        return
    if command_of(pod) is None:
        assert probes["readinessProbe"]["tcpSocket"]["port"] in pod.ports
        return
    assert set(probes) == set(kinds)
    for probe in probes.values():
        asked = probe["httpGet"]
        assert asked["port"] in pod.ports
        assert asked["path"] in PATHS[asked["port"]]
    assert probes["readinessProbe"]["httpGet"]["path"] == "/readyz"
    # What is not ready, because it loads or all of its workers are away, must not be killed for it.
    assert probes["livenessProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize(
    ("pod", "given"),
    list(commands(ALL)),
    ids=lambda value: value.name if isinstance(value, Pod) else "",
)
def test_the_grace_period_holds_the_whole_end(pod: Pod, given: dict[str, Any]) -> None:
    if "drain" not in given:
        return
    hook = pod.container.get("lifecycle", {}).get("preStop", {})
    before_s = hook["sleep"]["seconds"] if "sleep" in hook else 0
    needed_s = before_s + given["drain"] + given.get("shutdown_timeout", 0.0) + GOODBYE_S
    assert pod.spec["terminationGracePeriodSeconds"] >= needed_s
    if pod.owner["kind"] == "LeaderWorkerSet":
        _, others = pods([pod.owner])
        assert others.spec["terminationGracePeriodSeconds"] >= needed_s


def test_a_rollout_has_the_time_that_a_start_may_take() -> None:
    """`kubectl rollout status` fails at the deadline, 600 s unless it is given."""
    deployments = [pod for pod in pods(ALL) if pod.owner["kind"] == "Deployment"]
    assert deployments
    for pod in deployments:
        probe = pod.container["startupProbe"]
        allowed_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert pod.owner["spec"].get("progressDeadlineSeconds", 600) > allowed_s, pod.name


def given_file(pod: Pod, path: Path, of: list[Object]) -> str | None:
    """The content of a file that a ConfigMap has, "" of one in a Secret; None where there is none."""
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in pod.container["volumeMounts"]}
    (volume,) = (one for one in pod.spec["volumes"] if path.is_relative_to(mounts[one["name"]]))
    if "configMap" in volume:
        content: str | None = named(of, "ConfigMap", volume["configMap"]["name"])["data"].get(
            path.name
        )
        return content
    return "" if {"secret", "persistentVolumeClaim"} & set(volume) else None


@pytest.mark.parametrize("model", MODELS)
def test_files_of_options_are_mounted(model: str) -> None:
    for pod, given in commands(fleet(model)):
        paths = [value for value in given.values() if isinstance(value, Path)]
        assert len(paths) >= 4
        for path in paths:
            assert given_file(pod, path, fleet(model)) is not None, f"{pod.name}: {path}"


@pytest.mark.parametrize("model", MODELS)
def test_volumes_are_mounted_and_their_sources_exist(model: str) -> None:
    of = fleet(model)
    certificates = {one["spec"]["secretName"] for one in of if one["kind"] == "Certificate"}
    by_hand = set(re.findall(r"create secret \w+ ([\w-]+)", deploy_page()))
    for pod in pods(of):
        mounted = {mount["name"] for mount in pod.container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod.spec["volumes"]}, pod.name
        for volume in pod.spec["volumes"]:
            if "configMap" in volume:
                named(of, "ConfigMap", volume["configMap"]["name"])
            elif "secret" in volume:
                assert volume["secret"]["secretName"] in certificates | by_hand
            elif "persistentVolumeClaim" in volume:
                claims = [one["metadata"]["name"] for one in of if one["kind"] in CLAIMS]
                assert volume["persistentVolumeClaim"]["claimName"] in claims
            else:
                assert "emptyDir" in volume


CLAIMS = ("PersistentVolumeClaim", "Dataset")
"""Kinds that make a claim of their own name."""


def deploy_page() -> str:
    return (FOLDER.parents[1] / "docs" / "deploy.md").read_text(encoding="utf-8")


def test_both_model_caches_make_the_claim_that_workers_mount() -> None:
    for name in ("pvc", "fluid"):
        kinds = {one["kind"] for one in objects(FOLDER / "model-cache" / f"{name}.yaml") if
                 one["metadata"]["name"] == "models"}  # fmt: skip
        assert len(kinds & set(CLAIMS)) == 1
    fluid = list(objects(FOLDER / "model-cache" / "fluid.yaml"))
    dataset = named(fluid, "Dataset", "models")
    named(fluid, "AlluxioRuntime", dataset["metadata"]["name"])
    for one in ALL:
        if one["kind"] == "DataLoad":
            assert one["spec"]["dataset"]["name"] == "models"


@pytest.mark.parametrize("model", MODELS)
def test_both_model_caches_load_what_workers_open(model: str) -> None:
    cache = FOLDER / "model-cache"
    (job,) = objects(cache / f"pvc-{model}.yaml")
    (fill,) = pods([job])
    (load,) = objects(cache / f"fluid-{model}.yaml")
    mounts = {one["name"]: one["mountPath"] for one in fill.container["volumeMounts"]}
    repository = fill.container["env"][0]["value"]
    opened = {(given["model"], given["served_model_name"]) for _, given in workers(fleet(model))}
    ((path, served),) = opened
    assert served == repository
    assert path == f"{mounts['models']}/{repository.partition('/')[2]}"
    for pod, _ in workers(fleet(model)):
        (at,) = (m["mountPath"] for m in pod.container["volumeMounts"] if m["name"] == "models")
        assert [f"{at}{one['path']}" for one in load["spec"]["target"]] == [path]


# --- what pods may do ------------------------------------------------------------------------------


@pytest.mark.parametrize("pod", list(pods(ALL)), ids=lambda pod: pod.name)
def test_a_pod_has_no_rights_that_it_does_not_need(pod: Pod) -> None:
    assert pod.spec["automountServiceAccountToken"] is False
    assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    allowed = pod.container["securityContext"]
    assert allowed["allowPrivilegeEscalation"] is False
    assert allowed["capabilities"]["drop"] == ["ALL"]
    needed: set[str] = set()
    if "nvidia.com/gpu" in pod.container["resources"]["limits"]:
        needed |= {"IPC_LOCK", "SYS_NICE", "SYS_PTRACE"}
    if "ssh" in pod.ports:
        needed |= {"SETUID", "SETGID", "SYS_CHROOT", "AUDIT_WRITE"}
    assert set(allowed["capabilities"].get("add", ())) == needed


# --- services, selectors, addresses ----------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_selectors_find_pods_and_services_their_ports(model: str) -> None:
    of = fleet(model)
    everyone = list(pods(of))
    for one in of:
        spec = one.get("spec", {})
        selector = (
            spec.get("selector", {}) if one["kind"] != "NetworkPolicy" else spec["podSelector"]
        )
        selector = selector.get("matchLabels", selector)
        if not selector or one["kind"] == "ServiceMonitor":
            continue
        chosen = [pod for pod in everyone if selector.items() <= pod.labels.items()]
        assert chosen, label(one)
        if one["kind"] == "Deployment":
            assert [pod.owner for pod in chosen] == [one]
        if one["kind"] == "Service":
            (only,) = chosen
            # A worker's address is its Service's name, which the fleet file has.
            assert (
                only.labels[APP] != WORKER
                or only.owner["metadata"]["name"] == one["metadata"]["name"]
            )
            for port in spec["ports"]:
                assert only.ports[port["targetPort"]] == port["port"], label(one)
        if one["kind"] == "PodMonitor":
            serving = [pod for pod in chosen if command_of(pod)]
            assert serving
            assert {end["port"] for end in spec["podMetricsEndpoints"]} <= set(serving[0].ports)


def test_scrapes_find_the_metrics_of_the_gateway() -> None:
    (monitor,) = (one for one in ALL if one["kind"] == "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    services = [
        one
        for one in ALL
        if one["kind"] == "Service" and wanted <= one["metadata"]["labels"].items()
    ]
    ports = [port["name"] for one in services for port in one["spec"]["ports"]]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert ports.count(endpoint["port"]) == 1
    assert endpoint["path"] == "/metrics"


def test_every_pool_has_a_disruption_budget() -> None:
    pools = {pod.labels[POOL] for pod, _ in workers(ALL)}
    budgets = [one for one in ALL if one["kind"] == "PodDisruptionBudget"]
    covered = {one["spec"]["selector"]["matchLabels"].get(POOL) for one in budgets}
    assert covered == pools | {None}  # and the gateway's


def addresses(of: list[Object]) -> dict[str, tuple[Pod, dict[str, Any]]]:
    """Every worker, by the address that the fleet file must have for it."""
    found = {}
    for pod, given in workers(of):
        name = pod.owner["metadata"]["name"]
        port = given["listen"].port
        if pod.owner["kind"] == "LeaderWorkerSet":
            assert pod.owner["spec"]["networkConfig"]["subdomainPolicy"] == "Shared"
            for index in range(pod.owner["spec"]["replicas"]):
                found[f"{name}-{index}.{name}.{NAMESPACE}.svc:{port}"] = (pod, given)
        else:
            service = named(of, "Service", name)
            assert service["spec"]["clusterIP"] == "None"
            assert pod.owner["spec"]["replicas"] == 1
            found[f"{name}.{NAMESPACE}.svc:{port}"] = (pod, given)
    return found


def fleet_file(model: str, folder: Path) -> Path:
    path = folder / "fleet.json"
    path.write_text(named(fleet(model), "ConfigMap", "slagate-fleet")["data"]["fleet.json"])
    return path


def engine_arguments(pod: Pod, given: dict[str, Any], of: list[Object], folder: Path) -> Any:
    """What the engine of a worker would get, as the command itself prints it."""
    path = given["extra_engine_args"]
    content = given_file(pod, path, of)
    assert content
    (folder / path.name).write_text(content)
    command = command_of(pod)
    assert command is not None
    here = [word.replace(str(path), str(folder / path.name)) for word in command]
    printed = CliRunner().invoke(cli, [*here, "--print-engine-args"])
    assert (printed.exit_code, printed.stderr) == (0, "")
    return yaml.safe_load(printed.stdout)


@pytest.mark.parametrize("model", MODELS)
def test_the_fleet_file_has_all_workers_where_they_are(model: str, tmp_path: Path) -> None:
    of = fleet(model)
    config: FleetConfig = load_config(fleet_file(model, tmp_path), serving=True)
    assert config.warnings == ()
    raw = json.loads((tmp_path / "fleet.json").read_text())
    roles = {name: stage for stage, grid in config.stages.items() for name in grid.pool_names}
    running = addresses(of)
    listed = {address: name for name, pool in raw["pools"].items() for address in pool["workers"]}
    assert set(listed) == set(running)
    served = set()
    for address, name in listed.items():
        pod, given = running[address]
        assert (pod.labels[POOL], given["role"]) == (name, roles[name])
        arguments = engine_arguments(pod, given, of, tmp_path)
        n_gpus = pod.container["resources"]["limits"]["nvidia.com/gpu"]
        n_nodes = pod.owner["spec"].get("leaderWorkerTemplate", {}).get("size", 1)
        assert arguments["tensor_parallel_size"] == n_gpus * n_nodes
        assert raw["pools"][name].get("tp", arguments["tensor_parallel_size"]) == n_gpus * n_nodes
        served.add(given["served_model_name"])
    assert len(served) == 1


@pytest.mark.parametrize("model", MODELS)
def test_the_fleet_file_lints_clean(model: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["grid", "lint", str(fleet_file(model, tmp_path))])
    assert (done.exit_code, done.stdout) == (0, "no findings\n")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engine_arguments_check_clean_alone_and_as_a_pair(
    model: str, role: str, tmp_path: Path
) -> None:
    data = named(fleet(model), "ConfigMap", f"engines-{model}")["data"]
    for name, content in data.items():
        (tmp_path / name).write_text(content)
    (peer,) = set(data) - {f"{role}.yaml"}
    options = ["--role", role, "--extra-engine-args", str(tmp_path / f"{role}.yaml"), "--strict"]
    done = CliRunner().invoke(
        cli, ["worker", "check", *options, "--peer-engine-args", str(tmp_path / peer)]
    )
    assert (done.exit_code, done.stdout) == (0, "no findings\n")


@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_the_grid_fit_the_engines(model: str, tmp_path: Path) -> None:
    raw = json.loads(fleet_file(model, tmp_path).read_text())
    of = fleet(model)
    longest = {
        "prefill": raw["prefill_pool_selection_strategy"]["isl_max"],
        "decode": raw["decode_pool_selection_strategy"]["context_length_max"],
    }
    for pod, given in workers(of):
        arguments = engine_arguments(pod, given, of, tmp_path)
        assert arguments["max_seq_len"] >= longest[given["role"]]
        assert arguments["cache_transceiver_config"]["max_tokens_in_buffer"] >= longest["prefill"]


# --- names in certificates -------------------------------------------------------------------------


def names_in(secret: str) -> set[str]:
    (one,) = (
        one for one in ALL if one["kind"] == "Certificate" and one["spec"]["secretName"] == secret
    )
    return set(one["spec"].get("dnsNames", ()))


def secret_of(pod: Pod, path: Path) -> str:
    mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
    name = mounts[str(path.parent)]
    (volume,) = (one for one in pod.spec["volumes"] if one["name"] == name)
    secret: str = volume["secret"]["secretName"]
    return secret


def issuer_of(secret: str) -> str:
    (one,) = (
        one for one in ALL if one["kind"] == "Certificate" and one["spec"]["secretName"] == secret
    )
    issuer: str = one["spec"]["issuerRef"]["name"]
    return issuer


def test_who_dials_asks_for_a_name_that_the_certificate_has() -> None:
    (gateway,) = ((pod, given) for pod, given in commands(ALL) if pod.labels[APP] == GATEWAY)
    (bench,) = ((pod, given) for pod, given in commands(ALL) if pod.owner["kind"] == "Job")
    server = secret_of(gateway[0], gateway[1]["tls_cert"])
    for option in ("target", "admin"):
        host = bench[1][option].rpartition(":")[0]
        assert host in names_in(server)
        named(ALL, "Service", host.partition(".")[0])
    for pod, given in workers(ALL):
        assert gateway[1]["worker_tls_name"] in names_in(secret_of(pod, given["tls_cert"]))


def test_certificates_come_from_the_ca_that_the_other_side_trusts() -> None:
    (gateway,) = ((pod, given) for pod, given in commands(ALL) if pod.labels[APP] == GATEWAY)
    (bench,) = ((pod, given) for pod, given in commands(ALL) if pod.owner["kind"] == "Job")
    clients = issuer_of(secret_of(gateway[0], gateway[1]["tls_client_ca"]))
    assert issuer_of(secret_of(bench[0], bench[1]["tls_cert"])) == clients
    to_workers = issuer_of(secret_of(gateway[0], gateway[1]["worker_tls_cert"]))
    assert to_workers != clients
    for pod, given in workers(ALL):
        assert issuer_of(secret_of(pod, given["tls_client_ca"])) == to_workers


def test_issuers_exist() -> None:
    issuers = {one["metadata"]["name"]: one["spec"] for one in ALL if one["kind"] == "Issuer"}
    made = {one["spec"]["secretName"] for one in ALL if one["kind"] == "Certificate"}
    for one in ALL:
        if one["kind"] == "Certificate":
            assert one["spec"]["issuerRef"]["name"] in issuers
    assert all(spec["ca"]["secretName"] in made for spec in issuers.values() if "ca" in spec)


# --- a group of nodes ------------------------------------------------------------------------------


def test_a_group_starts_as_many_ranks_as_it_has_gpus() -> None:
    for pod in pods(ALL):
        if pod.owner["kind"] == "LeaderWorkerSet" and command_of(pod):
            _, others = pods([pod.owner])
            env = {one["name"]: one["value"] for one in pod.container["env"]}
            assert (
                int(env["GPUS_PER_NODE"]) == pod.container["resources"]["limits"]["nvidia.com/gpu"]
            )
            assert others.container["resources"] == pod.container["resources"]
            ssh = {one["name"]: one["value"] for one in others.container["env"]}["SSH_PORT"]
            assert env["SSH_PORT"] == ssh == str(others.ports["ssh"])
            assert pod.container["image"] == others.container["image"]
