"""The interface itself: options, help, exit codes, and what `--help` may import."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from cli_helpers import SCAFFOLD, refused

from ddp_scaffold import __version__
from ddp_scaffold._errors import EdgeCommand
from ddp_scaffold.cli import app

# A change here is a change of the public interface: it belongs into the changelog.
OPTIONS = {
    "": {"--version", "--debug"},
    "new": {
        "DEST",
        "--preset",
        "--model",
        "--set",
        "--answers",
        "--yes",
        "-y",
        "--dry-run",
        "--json",
        "--template",
        "--into-existing",
    },
    "check": {"[PATH]...", "--format", "--json", "--select", "--ignore", "--fix", "--variables"},
    "doctor": {"[DIR]", "--json"},
    "update": {
        "[DIR]",
        "--to",
        "--preset",
        "--set",
        "--cluster",
        "--add",
        "--dry-run",
        "--test",
        "--yes",
        "-y",
        "--json",
        "--template",
    },
    "explain": {"PATH...", "--html", "--json", "--redact"},
}


def test_option_set_is_frozen():
    root = typer.main.get_command(app)
    assert {"check", "doctor", "explain", "new", "presets", "update"} == set(root.commands)
    found = {name: command for name, command in {"": root, **root.commands}.items() if name in OPTIONS}
    for name, command in found.items():
        options = set()
        for parameter in command.params:
            options |= set(parameter.opts) if parameter.param_type_name == "option" else {parameter.metavar}
        assert options == OPTIONS[name], name


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_documents_exit_codes_and_commands(cli, flag):
    result = cli(flag)
    assert result.exit_code == 0
    assert "Exit codes: 0 done; 1 error; 2 wrong usage or answer; 130" in result.stdout
    assert "new" in result.stdout


def test_help_of_new_names_every_option(cli):
    text = cli("new", "--help").stdout
    for option in OPTIONS["new"]:
        assert option in text
    assert "Exit codes: 0 done; 1 error or declined; 2" in text
    assert "ddp-scaffold new denoiser -y --preset generic-slurm" in text


def test_no_arguments_show_help(cli):
    assert "Usage: ddp-scaffold" in cli().output


def test_version(cli):
    assert cli("--version").stdout == f"ddp-scaffold {__version__}\n"


def test_module_runs():
    done = subprocess.run([*SCAFFOLD, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"ddp-scaffold {__version__}\n"


def test_help_imports_nothing_heavy():
    """It takes a tenth of a second only because these stay out; benchmarks/cli.py measures it."""
    code = (
        "import sys\nfrom ddp_scaffold.cli import app\n"
        "try:\n    app(['new', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'copier', 'questionary', 'yaml', 'rich', 'jinja2', 'plumbum', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


WRONG_USAGE = {
    "no DEST": ["new"],
    "option": ["new", "x", "--nope"],
    "command": ["nope"],
    "subcommand": ["presets", "nope"],
    "no subcommand": ["presets"],
    "no value": ["new", "x", "--set"],
    "empty path": ["presets", "check", ""],
}


@pytest.mark.parametrize("args", WRONG_USAGE.values(), ids=WRONG_USAGE)
def test_wrong_usage_is_two_lines(cli, work, args):
    refused(cli(*args), work, 2, "--help`.")


WITH_JSON = {
    "no DEST": ["new", "--json"],
    "option": ["new", "x", "--json", "--nope"],
    "option before": ["new", "--nope", "x", "--json"],
    "no value": ["new", "x", "--json", "--set"],
    "option of the root": ["--nope", "new", "x", "--json"],
    "command": ["nope", "--json"],
    "subcommand": ["presets", "nope", "--json"],
    "no subcommand": ["presets", "--json"],
}


@pytest.mark.parametrize("args", WITH_JSON.values(), ids=WITH_JSON)
def test_wrong_usage_is_an_object_with_json(cli, work, args):
    result = cli(*args)
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["exit_code"], result.stderr) == (2, 2, "")
    assert "--help`" in error["hint"]


@pytest.mark.parametrize("args", [["new", "x", "--nope", "--", "--json"], ["new", "x", "--nope", "--model", "--json"]])
def test_json_as_an_argument_or_a_value_is_no_option(cli, work, args):
    refused(cli(*args), work, 2, "--help`.")


@pytest.mark.parametrize("args", [["update", "--nope"], ["--nope", "update"], ["update", ".", "--json", "--nope"]])
def test_wrong_usage_of_update_is_not_taken_for_conflicts(cli, work, args):
    assert cli(*args).exit_code == 3


def test_every_command_with_json_tells_it_to_the_edge():
    root = typer.main.get_command(app)
    commands = [*root.commands.values(), *root.commands["presets"].commands.values()]
    with_json = [command for command in commands if any("--json" in parameter.opts for parameter in command.params)]
    assert len(with_json) == 11
    assert all(isinstance(command, EdgeCommand) for command in with_json)


def test_unexpected_error_is_two_lines_and_debug_shows_the_traceback(cli, work, monkeypatch):
    monkeypatch.setattr("ddp_scaffold.creating.create.from_options", lambda *_: 1 / 0)
    plain = cli("new", "demo", "-y")
    assert plain.exit_code == 1
    assert "error: unexpected ZeroDivisionError" in plain.stderr
    assert "Traceback" not in plain.stderr
    debug = cli("--debug", "new", "demo", "-y")
    assert debug.exit_code == 1
    assert "Traceback" in debug.stderr
