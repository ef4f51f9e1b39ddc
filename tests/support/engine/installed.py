"""The package double as the `tensorrt_llm` of this process, as worker processes have it."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from slagate.workers.engine_args.build import EngineArgs
from slagate.workers.serving.start import Started, TrtllmOptions, identity_of
from slagate.workers.trtllm.package import (
    constructor_values,
    judge_arguments,
    load_package,
    with_telemetry_choice,
)
from support.engine.double import ENVIRONMENT, install

NAME = "tensorrt_llm"


@contextmanager
def installed(version: str, **settings: Any) -> Iterator[None]:
    """Have this version installed for the time of the block; `settings` are the double's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, json.dumps({"api": version, **settings}))
        before = dict(sys.modules)
        package = ModuleType(NAME)
        package.__path__ = []
        package.__spec__ = ModuleSpec(NAME, None)
        sys.modules[NAME] = package
        install(package)
        try:
            yield
        finally:
            for name in sys.modules.keys() - before.keys():
                if name.partition(".")[0] == NAME:
                    del sys.modules[name]


def options_of(args: EngineArgs, **options: Any) -> TrtllmOptions:
    """The options of a worker with these engine arguments, which have no errors."""
    args.refuse_errors()
    return TrtllmOptions(args=args, served_name=str(args.values["model"]), **options)


def started(options: TrtllmOptions) -> Started:
    """What `start_engine` gives, without its threads: for virtual time."""
    package = load_package()
    values = with_telemetry_choice(options.args.values, package, dict(os.environ))
    taken = constructor_values(package, values)
    judge_arguments(package, taken)
    llm = package.LLM(**taken)
    return Started(package, llm, identity_of(llm, package, options, instance_id="self"))
