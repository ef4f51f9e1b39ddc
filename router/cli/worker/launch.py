"""Launch options of Dynamo's worker and of trtllm-serve: taken, or answered with what to use here.

`configs/launch_options.yaml` says which is which. Each may also be an environment variable, over which the
command line counts.
"""

import json
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from importlib import resources
from itertools import pairwise, takewhile
from typing import Any

import typer
import yaml
from typer.core import TyperCommand
from typing_extensions import override

from slagate.router.cli.command import EXIT_USAGE, check_choice, errors, fail
from slagate.workers.engine_args.model.merge import VARIABLES, Layer

DOTTED = "trtllm."
_OFF = ("false", "0", "no", "off")
_UNNEEDED = ("note", "slagate worker check does not need it")


class LaunchCommand(TyperCommand):
    """A command that takes options as Dynamo's worker and trtllm-serve have them, too, and as variables."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        launch = ctx.obj = LaunchOptions()
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            for option in (*parameter.opts, *parameter.secondary_opts):
                launch.own.add(option)
                variable = VARIABLES + option[2:].upper().replace("-", "_")
                if option[2:] in launch.table["variables"] and variable in os.environ:
                    parameter.envvar, parameter.show_envvar = variable, True
        of_worker = ctx.parent.command.get_command(ctx, "trtllm").params if ctx.parent else ()
        for parameter in of_worker:
            options = {*parameter.opts, *parameter.secondary_opts} - launch.own
            launch.unneeded |= dict.fromkeys(options, parameter.is_flag)
        # Of an option given twice the last counts.
        given = [*launch.read_variables(os.environ), *launch.read_command_line(args)]
        launch.print_answers()
        ctx.allow_extra_args = True
        if (rest := super().parse_args(ctx, given)) and not ctx.resilient_parsing:
            fail(f"{rest[0]} is no option; the model is --model, and flags have no value")
        for parameter in parameters:
            if ctx.get_parameter_source(parameter.name).name == "ENVIRONMENT":
                launch.variable_of[parameter.name] = parameter.envvar
        return rest


class LaunchOptions:
    """The launch options of one command line, and of its environment, and what became of them."""

    def __init__(self) -> None:
        file = resources.files("slagate.configs").joinpath("launch_options.yaml")
        self.table: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
        self.own: set[str] = set()  # the options that the command has
        self.unneeded: dict[str, bool] = {}  # those that only the worker has, and which are flags
        self.variable_of: dict[str, str] = {}  # of a parameter that has its value from a variable
        self.values: dict[str, Any] = {}  # by dotted key, of the command line, and not of `own`
        self.variables: list[Layer] = []  # and what variables set, which counts less
        self.overrides: list[Layer] = []  # and what dotted options set, which counts over a file
        self._answers = defaultdict[tuple[str, str], list[str]](list)

    def read_command_line(self, args: Iterable[str]) -> list[str]:
        """The arguments with each launch option translated, or taken out. A wrong one ends the command."""
        rest, kept = deque(args), list[str]()
        while rest and rest[0] != "--":
            word = rest.popleft()
            option, equals, text = word.partition("=")
            name = option[2:] if option[2:].startswith(DOTTED) else option[2:].replace("_", "-")
            if option.startswith("--") and f"--{name}" in self.own:
                kept.append(f"--{name}{equals}{text}")
            elif f"--{name}" in self.unneeded:
                if not equals and not self.unneeded[f"--{name}"]:
                    rest.popleft() if rest else fail(f"{option} requires a value")
                self._answers[_UNNEEDED].append(option)
            elif option.startswith("--") and self._knows(name):
                kept += self._translated(name, text if equals else self._value(name, rest), option)
            else:
                kept.append(word)
        words = " ".join(kept).replace("--role=", "--role ").split()
        roles = sorted({role for option, role in pairwise(words) if option == "--role"})
        if len(roles) > 1:
            fail(f"--role, or --disaggregation-mode, is given twice: {' and '.join(roles)}")
        return [*kept, *rest]

    def read_variables(self, environ: Mapping[str, str]) -> list[str]:
        """The arguments that variables stand for, but for those of the command's own options."""
        arguments: list[str] = []
        for variable, text in sorted(environ.items()):
            name = variable.removeprefix(VARIABLES).lower().replace("_", "-")
            if variable.isupper() and self._knows(variable):
                name = "" if text.lower() in _OFF else variable
            elif not variable.startswith(VARIABLES):
                continue
            if not text or not name or name in self.table["variables"]:
                continue
            if name in self.table["flags"] and text.lower() not in ("true", "1", "yes", "on"):
                name = f"no-{name}"
            if self._knows(name):
                arguments += self._translated(name, text, variable)
            else:
                self._answers["warning", "slagate knows no option of that name"].append(variable)
        return arguments

    def print_answers(self) -> None:
        """Print on stderr what is to be said of the options; one that cannot be taken ends the command."""
        for (kind, say), options in self._answers.items():
            errors.print(f"slagate: {kind}: {', '.join(options)}: {say}")
        if any(kind == "error" for kind, _ in self._answers):
            raise typer.Exit(EXIT_USAGE)

    def _knows(self, name: str) -> bool:
        known = [of.partition("=")[0] for each in self.table["entries"] for of in each["options"]]
        is_flag = name.removeprefix("no-") in self.table["flags"]
        return is_flag or name.startswith(DOTTED) or any(fnmatchcase(name, of) for of in known)

    def _value(self, name: str, rest: deque[str]) -> str:
        """Take the value of an option out of the words after it; empty for an option that has none."""
        if name.removeprefix("no-") in self.table["flags"]:
            return ""
        if not any(fnmatchcase(name, of) for of in self.table["lists"]):
            return rest.popleft() if rest else fail(f"--{name} requires a value")
        return " ".join(rest.popleft() for _ in tuple(takewhile(_is_value, rest)))

    def _translated(self, name: str, text: str, written: str) -> list[str]:
        """The arguments in place of an option, if there are; otherwise its value, or its answer, is noted.

        `written` is the option or the variable as it was given.
        """
        if name.startswith(DOTTED):
            if not all(name.split(".")):
                fail(f"{written}: an engine argument is KEY or SECTION.KEY")
            self.overrides.append(Layer(written, nested({name[len(DOTTED) :]: _read(text)})))
            return []
        plain = name.removeprefix("no-")
        is_flag = plain in self.table["flags"]
        is_list = any(fnmatchcase(name, of) for of in self.table["lists"])
        if not (text or is_flag or is_list):
            return []  # empty, as where a script's variable is: not given
        for entry in self.table["entries"]:
            of = entry["options"]
            if "role" in entry and name in of:
                check_choice(written, text.lower(), entry["role"])
                return ["--role", entry["role"][text.lower()]]
            if "option" in entry and name in of:
                return [f"--{entry['option']}", text]
            if "argument" in entry and plain in of:
                value = {entry["argument"]: name == plain if is_flag else _read(text)}
                if written.startswith("--"):
                    self.values |= value
                else:
                    self.variables.append(Layer(written, nested(value)))
                return []
            if f"{name}={text}" in of or any(fnmatchcase(name, each) for each in of):
                kind, say = answer = entry["kind"], entry["say"]
                # What only a worker needs in another form, as where it listens, keeps nobody from a check.
                instead = self.unneeded.keys() & set(re.findall("--[a-z-]+", say))
                self._answers[_UNNEEDED if kind == "error" and instead else answer].append(written)
                return []
        return []


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key, in sections."""
    whole: dict[str, Any] = {}
    for dotted, value in values.items():
        *sections, key = dotted.split(".")
        into = whole
        for section in sections:
            into = into.setdefault(section, {})
        into[key] = value
    return whole


def _is_value(word: str) -> bool:
    return not word.startswith("-")


def _read(text: str) -> Any:
    """A value as JSON has it, booleans in any case; other text as it is."""
    try:
        return json.loads(text.lower() if text.lower() in ("true", "false") else text)
    except (ValueError, RecursionError):
        return text
