"""What is looked for in an installed `tensorrt_llm`, and what is said where it is not there."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slagate.workers.runtime.usage import UsageError
from slagate.workers.trtllm import package as trtllm_package
from slagate.workers.trtllm.package import (
    NO_TELEMETRY,
    EnginePackage,
    check_installed,
    handoff_ids,
    load_package,
    set_engine_log_level,
    with_telemetry_choice,
)

COMPLETE = {
    "": ("LLM",),
    "llmapi": ("DisaggregatedParams",),
    "llmapi.llm": ("SamplingParams",),
    "scheduling_params": ("SchedulingParams",),
    "executor": (),
    "executor.utils": ("RequestError",),
}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    """Puts modules of these names below `tensorrt_llm`."""

    def installed(modules: dict[str, Any]) -> None:
        for path, names in modules.items():
            module = ModuleType(f"tensorrt_llm.{path}" if path else "tensorrt_llm")
            module.__path__ = []
            module.__spec__ = SimpleNamespace()  # type: ignore[assignment]
            vars(module).update({name: f"{path}:{name}" for name in names})
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return installed


def test_a_package_that_is_not_there_is_not_imported() -> None:
    with pytest.raises(UsageError, match="which is not installed: pip install"):
        check_installed()
    with pytest.raises(UsageError, match="which is not installed"):
        load_package()


def test_what_a_version_lacks_is_none(install: Callable[[dict[str, Any]], None]) -> None:
    install(COMPLETE)
    package = load_package()
    assert (package.LLM, package.RequestError) == (":LLM", "executor.utils:RequestError")
    assert package.version == "unknown"
    assert package.MetricsCollector is package.MultimodalEncoder is None
    assert handoff_ids(package, "i") is None


def test_a_name_may_have_moved(install: Callable[[dict[str, Any]], None]) -> None:
    moved = COMPLETE | {"llmapi.llm": (), "sampling_params": ("SamplingParams",)}
    install(moved)
    assert load_package().SamplingParams == "sampling_params:SamplingParams"


def test_a_name_that_is_needed_and_missing_is_named(
    install: Callable[[dict[str, Any]], None],
) -> None:
    install(COMPLETE | {"executor.utils": (), "scheduling_params": ()})
    with pytest.raises(UsageError, match="has no SchedulingParams, RequestError; "):
        load_package()


@pytest.mark.parametrize("error", [ImportError("libcuda.so.1"), OSError("libmpi.so")])
def test_an_installation_that_is_broken_is_told_from_none(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(name: str) -> None:
        raise error

    monkeypatch.setattr(trtllm_package, "check_installed", lambda: None)
    monkeypatch.setattr("importlib.import_module", fails)
    with pytest.raises(UsageError, match=f"is installed, and cannot be imported: {error}"):
        load_package()


def made(get_global_disagg_request_id: Callable[..., int]) -> EnginePackage:
    return EnginePackage(
        "v", None, None, None, None, None, get_global_disagg_request_id=get_global_disagg_request_id
    )


def test_ids_are_of_a_place_that_the_version_can_hold() -> None:
    machines, places = set(), set()

    def old(machine_id: int) -> int:
        machines.add(machine_id)
        return 1

    def new(node_id: int, process_id: int = 0) -> int:
        places.add((node_id, process_id))
        return 2

    for worker in range(2000):
        for make, expected in ((old, 1), (new, 2)):
            new_id = handoff_ids(made(make), f"worker-{worker}")
            assert new_id is not None
            assert new_id() == new_id() == expected
    assert max(machines) < 1021 < len(machines) + 200
    assert max(node for node, _ in places) < 256
    assert max(process for _, process in places) < 64
    assert len(places) > 1800


@pytest.mark.parametrize(
    ("level", "given", "engine"),
    [
        ("debug", None, "DEBUG"),
        ("warning", None, "WARNING"),
        ("ERROR", None, "ERROR"),
        ("other", None, "INFO"),
        ("debug", "TRACE", "TRACE"),
    ],
)
def test_the_engine_logs_from_the_workers_level_on(
    level: str, given: str | None, engine: str
) -> None:
    environ = {} if given is None else {"TLLM_LOG_LEVEL": given}
    set_engine_log_level(level, environ)
    assert environ == {"TLLM_LOG_LEVEL": engine}


OFF, ON = {"telemetry_config": {"disabled": True}}, {"telemetry_config": {"disabled": False}}


@pytest.mark.parametrize(
    ("values", "has_argument", "taken", "environ"),
    [
        (OFF, True, OFF, {}),
        (OFF, False, {}, {NO_TELEMETRY: "1"}),
        ({}, True, {}, {NO_TELEMETRY: "1"}),
        (ON, True, ON, {}),
        (ON, False, {}, {}),
    ],
)
def test_reports_to_nvidia_are_off_by_the_argument_where_there_is_one_else_by_the_variable(
    install: Callable[[dict[str, Any]], None],
    values: dict[str, Any],
    *,
    has_argument: bool,
    taken: dict[str, Any],
    environ: dict[str, str],
) -> None:
    install(COMPLETE)
    package = load_package()
    fields = {"telemetry_config": None} if has_argument else {}
    package.TorchLlmArgs = SimpleNamespace(model_fields=fields)
    given: dict[str, str] = {}
    assert with_telemetry_choice({**values, "tp": 2}, package, given) == {**taken, "tp": 2}
    assert given == environ
    asked = {NO_TELEMETRY: "0"}
    with_telemetry_choice(values, package, asked)
    assert asked == {NO_TELEMETRY: "0"}
