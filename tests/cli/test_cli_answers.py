"""Answers are hostile: every wrong key, value or name is refused by name, and leaves nothing behind."""

from __future__ import annotations

import sys

import pytest
import reserved_names
import yaml
from cli_helpers import refused
from cross_section import every

LONG = "a" * 300
BAD_NAMES = {
    "parent": "../x",
    "keyword": "class",
    "space": "a b",
    "jinja": "{{7*7}}",
    "shell": 'x"; rm -rf ~',
    "newline": "x\ny",
    "trailing newline": "x\n",
    "long": LONG,
    "unicode": "naïve",
    "unicode digits": "x\u0663",
    "upper case": "Demo",
    "leading digit": "3d",
    "leading hyphen": "-x",
    "stdlib": "json",
    "torch": "torch",
    "imported": "pydantic",
    "own": "ddp",
    "empty": "",
}


@pytest.mark.parametrize("name", every(4, BAD_NAMES.values(), BAD_NAMES))
@pytest.mark.parametrize("question", ["project_name", "package"])
def test_bad_name_by_set(cli, work, question, name):
    refused(cli("new", "demo", "-y", "--set", f"{question}={name}"), work, 2, f"--set {question}: ")


# `../x` is a fine destination (its name is x), and `-x` is an option.
OTHERWISE_BAD = ("parent", "leading hyphen", "empty", "long", "newline", "trailing newline")


@pytest.mark.parametrize("name", every(4, [name for key, name in BAD_NAMES.items() if key not in OTHERWISE_BAD]))
def test_bad_name_by_destination(cli, work, name):
    refused(cli("new", name, "-y"), work, 2, "DEST: project name", "Pass --set project_name=")


@pytest.mark.parametrize(
    ("name", "code"), [("", 2), (LONG, 1), ("a" * 61, 2), ("a\0b", 2), ("x\ny", 2), ("\x1b[2J", 2), (f"{LONG}/x", 1)]
)
def test_impossible_destination(cli, work, name, code):
    refused(cli("new", name, "-y"), work, code)


@pytest.mark.parametrize("question", ["project_name", "package"])
def test_bad_name_by_answers_file(cli, work, tmp_path, question):
    file = tmp_path / "answers.yml"
    file.write_text(f"preset: local\n{question}: class\n")
    refused(cli("new", "demo", "-y", "--answers", str(file)), work, 2, f"{file}:2", "'class' is a Python keyword")


@pytest.mark.parametrize(
    "name", every(9, ["My Model", "torch", "class", "3d", "PIL", "typing-extensions", "a" * 61, "\u03b1", "_-1"])
)
def test_hint_offers_a_valid_name(cli, work, name):
    result = cli("new", name, "-y")
    refused(result, work, 2, "DEST: project name")
    offered = result.stderr.split()[-1].removesuffix(".")
    assert offered.endswith("-project")
    assert cli("new", name, "-y", "--dry-run", "--set", offered).exit_code == 0


@pytest.mark.parametrize(
    "name", every(3, ["typing_extensions", "typing-extensions", "scikit-learn", "pil", "conftest", "nvidia"])
)
def test_names_that_dependencies_bring_are_reserved(cli, work, name):
    refused(cli("new", "demo", "-y", "--set", f"project_name={name}"), work, 2, f"'{name}' is a Python keyword or the")


def test_reserved_names_are_those_of_this_python_and_of_the_installed_dependencies():
    pytest.importorskip("torch")
    listed = set(yaml.safe_load(reserved_names.FILE.read_text()))
    found = reserved_names.standard_library(sys.executable) | reserved_names.brought_by_dependencies()
    assert set(filter(None, map(reserved_names.can_be_asked_for, found))) - listed == set()
    assert all(isinstance(name, str) for name in listed)


def test_bad_destination_name_is_fine_with_a_project_name(cli, work):
    result = cli("new", "My Model", "-y", "--set", "project_name=my-model")
    assert result.exit_code == 0, result.output
    assert (work / "My Model" / "src" / "my_model").is_dir()


WRONG = {
    "unknown key": ("nodse=2", "there is no question 'nodse'", "Did you mean nodes?"),
    "computed key": (
        "guard_deadline_s=5",
        "'guard_deadline_s' follows from other answers",
        "`ddp-scaffold new --help`",
    ),
    "hidden data": ("preset_data={}", "'preset_data' follows from other answers", "ddp-scaffold new --help"),
    "copier setting": ("_src_path=/tmp", "there is no question '_src_path'", "ddp-scaffold new --help"),
    "not asked": ("nodes=2", "'nodes' is not asked with preset local", "new --help"),
    "choice": ("tracker=tensorbord", "'tensorbord' is none of tensorboard, wandb, none", "Did you mean tensorboard?"),
    "type": ("max_restarts=abc", "'abc' is not a whole number", "max_restarts=3"),
    "float": ("max_restarts=1.5", "'1.5' is not a whole number", "max_restarts=3"),
    "empty number": ("max_restarts=", "'' is not a whole number", "max_restarts=3"),
    "range": ("collective_timeout_s=5", "'5' must be from 20 to 7200 seconds", "collective_timeout_s"),
    "huge": (f"max_restarts={'9' * 5000}", "is not a whole number", "(5000 characters)"),
    "no value": ("nproc", "'nproc' is not KEY=VALUE", "--set nodes=4"),
    "no key": ("=4", "'=4' is not KEY=VALUE", "--set nodes=4"),
}


@pytest.mark.parametrize(("pair", "message", "hint"), WRONG.values(), ids=WRONG)
def test_wrong_set(cli, work, pair, message, hint):
    refused(cli("new", "demo", "-y", "--set", pair), work, 2, message, hint, "--set")


SLURM_INJECTIONS = [
    "partition=$(id)",
    "partition=a\n#SBATCH --wrap=id",
    "account=a;id",
    "account=`id`",
    "modules=cuda; rm -rf ~",
    "modules=-rf",
    "walltime=soon",
    "walltime=04:00:00\nexit",
    "walltime=00:00:00",  # for Slurm: no limit
    "walltime=0-00:00:00",
    "walltime=000:04:59",  # the signal to stop comes up to 3 minutes before the end
    "partition=-p",
    "partition=,",
    "partition=a,,b",
    "partition=a,",
    "partition=a,-b",
    f"partition={'a,' * 40}a",
    "account=-A",
    "account=.a",
    "account=a,b",
]


@pytest.mark.parametrize("pair", every(3, SLURM_INJECTIONS))
def test_injection_into_scripts(cli, work, pair):
    refused(
        cli("new", "demo", "-y", "--preset", "generic-slurm", "--set", pair), work, 2, f"--set {pair.split('=')[0]}"
    )


@pytest.mark.parametrize("walltime", ["00:05:00", "1-00:00:00"])
def test_answers_that_slurm_takes(cli, work, walltime):
    given = [f"--set={pair}" for pair in (f"walltime={walltime}", "partition=a,b_2,c.d-e", "account=a@b.c")]
    assert cli("new", "demo", "--json", "--dry-run", "--preset", "generic-slurm", *given).exit_code == 0


def test_key_not_asked_with_slurm(cli, work):
    result = cli("new", "demo", "-y", "--preset", "generic-slurm", "--set", "nproc=2")
    refused(result, work, 2, "'nproc' is not asked with preset generic-slurm")


@pytest.mark.parametrize("option", ["--preset", "--model"])
def test_wrong_choice_by_option(cli, work, option):
    refused(cli("new", "demo", "-y", option, "nope"), work, 2, f"{option}: 'nope' is none of")


def test_key_given_twice(cli, work):
    refused(cli("new", "demo", "-y", "--preset", "local", "--set", "preset=local"), work, 2, "'preset' is given twice")
    twice = cli("new", "demo", "-y", "--set", "nproc=1", "--set", "nproc=2")
    refused(twice, work, 2, "'nproc' is given twice", "hint: Keep one of them.")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("laptop", "One machine without a scheduler is the preset `local`."),
        ("PC", "One machine without a scheduler is the preset `local`."),
        ("none", "One machine without a scheduler is the preset `local`."),
        ("snellius", "Did you mean surf-snellius-a100 or surf-snellius-h100?"),
        ("derecho", "Did you mean ncar-derecho?"),
        ("drac", "`ddp-scaffold presets list drac` lists those that have it in their names."),
    ],
)
def test_a_word_for_a_place_leads_to_its_preset(cli, work, word, meant):
    for option in (("--preset", word), ("--set", f"preset={word}")):
        refused(cli("new", "demo", "-y", *option), work, 2, f"{word!r} is none of the", f"hint: {meant}")


def test_hints_have_no_loose_ends(cli, work):
    assert cli("new", "demo", "-y", "--preset", "locl").stderr.endswith("hint: Did you mean local?\n")


BROKEN_FILES = {
    "unknown key": ("preset: local\nnodse: 2\n", ":2: there is no question 'nodse'"),
    "computed key": ("stall_limit_s: 2\n", ":1: 'stall_limit_s' follows from other answers"),
    "not asked": ("nodes: 2\n", ":1: 'nodes' is not asked with preset local"),
    "type": ("max_restarts: many\n", ":1: 'many' is not a whole number"),
    "nested": ("nproc:\n  - 2\n", ":1: 'nproc' must have one plain value"),
    "list": ("- nproc\n", "is not a mapping"),
    "scalar": ("nproc\n", "is not a mapping"),
    "empty": ("", "is not a mapping"),
    "twice": ("nproc: 2\nnproc: 4\n", ":2: 'nproc' is given twice"),
    "syntax": ("nproc: [2\n", "not valid YAML"),
    "key that is a list": ("? [a, b]\n: 2\n", ":1: a key must be plain text"),
    "nested deeply": ("a: " + "[" * 5000, "is nested too deeply"),
    "tag": ("nproc: !!python/object/apply:os.system [id]\n", ":1: 'nproc' must have one plain value"),
    "control": ("nproc: \x07\n", "not valid YAML"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_FILES.values(), ids=BROKEN_FILES)
def test_broken_answers_file(cli, work, tmp_path, text, message):
    file = tmp_path / "answers.yml"
    file.write_text(text)
    refused(cli("new", "demo", "-y", "--answers", str(file)), work, 2, str(file), message)


def test_answers_file_that_cannot_be_read(cli, work, tmp_path):
    refused(cli("new", "demo", "-y", "--answers", "absent.yml"), work, 2, "absent.yml: cannot be read: No such file")
    refused(cli("new", "demo", "-y", "--answers", str(tmp_path)), work, 2, "cannot be read")
    refused(cli("new", "demo", "-y", "--answers", ""), work, 2, "'--answers': the path is empty")
    refused(cli("new", "demo", "-y", "--answers", "a\nb"), work, 2, "a\\nb: cannot be read: No such file")
    binary = tmp_path / "answers.yml"
    binary.write_bytes(b"\xff\xfe\x00")
    refused(cli("new", "demo", "-y", "--answers", str(binary)), work, 2, "not UTF-8 text")


def test_answers_file_is_read_without_yaml_guesses(cli, work, tmp_path):
    """YAML 1.1 would make 43200 of the time limit, and False of the partition."""
    file = tmp_path / "answers.yml"
    file.write_text("preset: generic-slurm\nwalltime: 12:00:00\npartition: no\naccount: null\n")
    result = cli("new", "demo", "--json", "--answers", str(file), "--set", "nodes=3")
    assert result.exit_code == 0, result.output
    assert '"walltime": "12:00:00"' in result.stdout
    assert '"partition": "no"' in result.stdout
    assert '"account": ""' in result.stdout
    assert '"nodes": 3' in result.stdout


def test_recorded_answers_of_a_project_serve_as_answers_file(cli, work):
    assert cli("new", "one", "-y", "--set", "max_restarts=7").exit_code == 0
    result = cli("new", "two", "-y", "--answers", "one/.copier-answers.yml", "--set", "project_name=two", "--json")
    assert result.exit_code == 0, result.output
    assert '"max_restarts": 7' in result.stdout
