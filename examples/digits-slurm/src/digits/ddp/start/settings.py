"""Settings from file, environment and command line, in that order of strength, with a record of who set what."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError
from pydantic_settings import BaseSettings, CliSettingsSource, EnvSettingsSource, SettingsError

from ..errors import CONFIG, ConfigError
from ..kinds import Verdict
from ..report import outcome
from .elastic import tell_torchrun
from .launcher import attempt
from .logs import TypedRows, say_last
from .owner import held_by_another
from .shortened import FLAG, shortened

# Read by the plumbing, but no settings: they describe one start, not the run.
OTHER_VARIABLES = {"DDP_FAULTS", "DDP_ATTEMPT", "DDP_WALLTIME_END"}

# Other spellings on the command line: option -> the setting, and its value where none is given (if it needs none).
SPELLINGS = {FLAG: ("--train.fast_dev_run", ["4"]), "--profile": ("--log.profile", [])}

S = TypeVar("S", bound=BaseSettings)


class RunSettings(BaseModel, extra="forbid"):
    """Which run this is, and on what."""

    id: str = Field(
        "",
        pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$",
        description="name of the run directory; empty makes one from the date",
    )
    dir: Path = Field(Path("runs"), description="where run directories are; all nodes must share this file system")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 0
    deterministic: bool = Field(False, description="on GPUs, too, a run repeats to the bit; some operations are slower")
    compare_replicas: bool = Field(
        True,
        description="end a run whose ranks train different models (false for local SGD, which lets them)",
    )
    resume: bool = Field(True, description="go on from the newest good checkpoint of this run, if there is one")


def load_settings(
    settings_class: type[S], argv: Sequence[str] | None = None, strict_variables: bool = True
) -> tuple[S, dict[str, str]]:
    """The validated settings, and who set each 'section.key': default, the file, the variable or the command line.

    Exits with code 78 and one line for each problem when something is wrong; with code 0 after `--help`.
    """
    try:
        if strict_variables:
            _refuse_unknown_variables(settings_class)
        return read_settings(settings_class, sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        say_last(f"error: {error}")
        verdict = Verdict(CONFIG, "bad_settings", str(error), phase="init", step=0)
        tell_torchrun(verdict)
        if run_id := os.environ.get("DDP_RUN__ID"):  # set by the launch scripts, which go by outcome.json
            directory = Path(os.environ.get("DDP_RUN__DIR") or "runs", run_id)
            if not held_by_another(directory):
                outcome.write(directory, verdict, attempt(), replace=True)
        raise SystemExit(CONFIG) from None


def settings_over(
    settings_class: type[S], below: Mapping[str, Any], where: str, argv: Sequence[str]
) -> tuple[S, dict[str, str]]:
    """Variables and command line over the values `below`, by section, in the place of a file; `where` they are from.

    Returns: as `load_settings`.

    Raises:
        ConfigError: something is wrong. Nothing is written anywhere.
    """
    _refuse_unknown_variables(settings_class)
    return _merge(settings_class, (where, below), argv)


def read_settings(settings_class: type[S], argv: Sequence[str]) -> tuple[S, dict[str, str]]:
    """What `load_settings` returns.

    Raises:
        ConfigError: something is wrong. Nothing is written anywhere.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default="configs/train.yaml")
    first, rest = parser.parse_known_args(_spelled_out(argv))
    file = first.config if first.config != parser.get_default("config") else _default_file(settings_class, first.config)
    return _merge(settings_class, (file or "no file", {} if file is None else _read_yaml(Path(file))), rest)


def _merge(
    settings_class: type[S], lowest: tuple[str, Mapping[str, Any]], argv: Sequence[str]
) -> tuple[S, dict[str, str]]:
    layers = [
        lowest,
        ("environment", EnvSettingsSource(settings_class)()),
        ("command line", _read_command_line(settings_class, argv)),
    ]
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for layer, values in layers:
        for path, value in leaves(values, empty=layer not in ("environment", "command line")):
            origin[_dotted(path)] = variable(settings_class, path[:2]) if layer == "environment" else layer
            target = merged
            for key in path[:-1]:
                target = target.setdefault(key, {})
            target[path[-1]] = value
    try:
        settings = settings_class(**merged)
        small = getattr(sys.modules[settings_class.__module__], "FAST_DEV_RUN", {})
        for (section, key), value in shortened(settings.model_dump(), small).items():
            merged.setdefault(section, {})[key] = value
            origin[f"{section}.{key}"] = FLAG
            settings = settings_class(**merged)
    except ValidationError as error:
        raise _refusal(error, origin, settings_class) from None
    _refuse_steps_that_never_come(settings)
    return settings, origin


def _spelled_out(arguments: Sequence[str]) -> list[str]:
    """`--fast-dev-run` and `--profile 100:110` as the settings that they stand for."""
    found = list[str]()
    for word, following in zip_longest(arguments, arguments[1:], fillvalue="--"):
        option, equals, value = word.partition("=")
        setting, default = SPELLINGS.get(option, (option, list[str]()))
        found.append(f"{setting}{equals}{value}")
        if not equals and following.startswith("--"):
            found += default
    return found


def _refuse_steps_that_never_come(settings: BaseSettings) -> None:
    """A profile of steps behind the last one: it would be missed only hours later."""
    steps = getattr(getattr(settings, "train", None), "steps", None)
    last = getattr(getattr(settings, "log", None), "profile_steps", (0, 0))[1]
    if isinstance(steps, int) and last > steps:
        problem = f"log.profile: the run has {steps} steps (train.steps), and the profile ends after {last}"
        raise ConfigError(problem, f"give a range that ends at {steps} at the latest: --profile FIRST:LAST")


def settings_table(settings: BaseSettings, origin: Mapping[str, str]) -> TypedRows:
    """Rows of (section.key, value, who set it), in the order of the classes."""
    values = settings.model_dump(mode="json")
    rows = [(_dotted(path), str(value), origin.get(_dotted(path), "default")) for path, value in leaves(values)]
    return TypedRows(rows, values)


# The names that train.py of older releases calls.
load, effective = load_settings, settings_table


def variable(settings_class: type[BaseSettings], path: Sequence[str]) -> str:
    """The environment variable of a setting: ('clocks', 'stall_s') is DDP_CLOCKS__STALL_S."""
    delimiter = settings_class.model_config.get("env_nested_delimiter") or "__"
    return (settings_class.model_config.get("env_prefix", "") + delimiter.join(map(str, path))).upper()


def leaves(
    values: Mapping[Any, Any], above: tuple[Any, ...] = (), *, empty: bool = False
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Path and value of each setting in nested sections; keys of a mapping may be numbers.

    Args:
        empty: whether an empty mapping is a value, too: in a file somebody has written that.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and (value or not empty):
            yield from leaves(value, (*above, key), empty=empty)
        else:
            yield (*above, key), value


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))


def _default_file(settings_class: type[BaseSettings], name: str) -> str | None:
    """The settings file here, else that of the project, wherever it is started from; None if there is neither."""
    if Path(name).exists():
        return name
    package = Path(getattr(sys.modules[settings_class.__module__], "__file__", None) or name).absolute().parent
    for folder in (package, *list(package.parents)[:2]):  # beside the package, or beside the folder that it is in
        if (folder / name).exists():
            return str(folder / name)
    if os.environ.get("RANK", "0") == "0":
        print(f"there is no {name} here, nor in the project: its settings have their defaults", file=sys.stderr)
    return None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "give --config the path of a YAML file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}", "correct the file") from None
    how = "write 'section:' and indented 'key: value' lines"
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a mapping of sections", how)
    for section, values in content.items():
        if not isinstance(section, str) or not isinstance(values, dict | None):
            raise ConfigError(f"{path}: {section!r} is not a section with keys", how)
    return {section: values for section, values in content.items() if values}  # a section may be commented out


def _read_command_line(settings_class: type[BaseSettings], arguments: Sequence[str]) -> dict[str, Any]:
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            settings_class,
            cli_parse_args=list(arguments),
            cli_exit_on_error=False,
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_prog_name="python -m <package>.train",
            case_sensitive=True,
        )
        return source()
    except SettingsError as error:
        problem = str(error.__cause__ or error).removeprefix("error parsing CLI: ")
        options = re.findall(r"--([\w.-]+)", problem.partition("unrecognized arguments:")[2])
        raise ConfigError(f"command line: {problem}", _meant(options, settings_class, "--{}")) from None


def _refuse_unknown_variables(settings_class: type[BaseSettings]) -> None:
    """A misspelt DDP_ variable would otherwise be ignored, and the user would believe that it works."""
    known = {variable(settings_class, path) for path in _fields(settings_class)} | OTHER_VARIABLES
    prefix = settings_class.model_config.get("env_prefix", "")
    ours = [name for name in os.environ if name.startswith(prefix) and not name.startswith("DDP_SCAFFOLD_")]
    unknown = sorted(name for name in ours if name.upper() not in known)  # DDP_SCAFFOLD_ is the generator's
    if unknown:
        names = [name[len(prefix) :].replace("__", ".").lower() for name in unknown]
        remedy = _meant(names, settings_class, f"{prefix}{{}}", "__")
        raise ConfigError(f"nothing reads the variable {', '.join(unknown)}", remedy)


def _meant(names: Iterable[str], settings_class: type[BaseSettings], form: str = "{}", between: str = ".") -> str:
    """What to do about names that are no settings: those that look like them, or have the same key."""
    known, alike = [".".join(path) for path in _fields(settings_class)], []
    for name in names:
        alike += _alike(name, known)[:1]
    if not alike:
        return "run with --help to see every setting"
    meant = [form.format(each if between == "." else each.replace(".", between).upper()) for each in alike]
    return f"did you mean {' and '.join(meant)}? --help shows every setting"


def _alike(name: str, known: Sequence[str]) -> list[str]:
    """What may be meant: the same key in another section, `lr` for learning_rate, one that begins so or looks alike."""
    keys, key = {each: each.rpartition(".")[2] for each in known}, name.rpartition(".")[2]
    found = [each for each in known if keys[each] == key]
    short = [each for each in known if "".join(word[:1] for word in keys[each].split("_")) == key]
    found += sorted(short, key=lambda each: each.partition(".")[0] != (name.rpartition(".")[0] or "train"))
    found += [each for each in known if each.startswith(name)]
    close = difflib.get_close_matches(name, known, 3)  # a long section makes all of its keys look alike
    return found + [each for each in close if difflib.SequenceMatcher(None, key, keys[each]).ratio() > 0.35]


def _fields(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, (*above, name))
        else:
            yield (*above, name)


def _refusal(error: ValidationError, origin: Mapping[str, str], settings_class: type[BaseSettings]) -> ConfigError:
    """A line for each problem, then what to do: a validator's ValueError may say that in a second line of its own."""
    problems, remedies = [], []
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        message, _, remedy = problem["msg"].removeprefix("Value error, ").partition("\n")
        if problem["type"] == "extra_forbidden":
            message, remedy = "is not a known setting", _meant([name], settings_class)
        where = f" (from {origin[name]})" if name in origin else ""
        # A validator that has looked at a whole section names the setting itself. The name is empty for a default.
        problems.append(message if not name or message.startswith(f"{name}.") else f"{name}{where}: {message}")
        remedies.append(remedy or "run with --help to see every setting")
    return ConfigError("\n       ".join(problems), "; ".join(dict.fromkeys(remedies)))
