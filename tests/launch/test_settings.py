"""launch/settings.py: a name that is no setting is refused before anything starts, and one that is never is."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cross_section import every
from launch_helpers import environment

FAMILIES = (
    "custom causal-lm classifier masked-lm diffusion rectified-flow adversarial-diffusion retrieval".split()  # noqa: SIM905
)
REAL = """
from demo.config import Settings
from demo.ddp.start.settings import _fields
print(*(".".join(path) for path in _fields(Settings)))
"""


def check(project: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "launch/settings.py", "check", "src/demo/train.py", *arguments]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    done = subprocess.run(command, cwd=project, env=clean | variables, capture_output=True, text=True, check=False)
    assert not done.stdout
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "demo", "model": "custom"}, name="names")


@pytest.mark.parametrize("family", every(8, FAMILIES))
def test_the_source_tells_the_same_names_as_training(render: Callable[..., Path], family: str) -> None:
    pytest.importorskip("torch", reason="imports the project")
    project = render({"package": "demo", "model": family}, name=f"names-{family}")
    real = subprocess.run(
        [sys.executable, "-c", REAL], cwd=project / "src", capture_output=True, text=True, check=True
    ).stdout.split()
    settings = runpy.run_path(str(project / "launch" / "settings.py"))
    names = settings["names_of"](project / "src" / "demo" / "train.py")
    assert names == real
    for name in real:
        assert settings["problem"](names, [f"--{name}", "1"], [f"DDP_{name}".replace(".", "__").upper()]) is None
        assert settings["problem"](names, [f"--{name}x=1"], [])[1] == f"did you mean --{name}?"


@pytest.mark.parametrize(
    ("argument", "meant"),
    [
        ("--train.setps", "--train.steps"),
        ("--steps=3", "--train.steps"),
        ("--optim.learning_rate", "--train.learning_rate"),
        ("--tarin.steps", "--train.steps"),
        ("--train.batch-size", "--train.batch_size"),
        ("--train.lr", "--train.learning_rate"),
        ("--lr", "--train.learning_rate"),
        ("--bs", "--train.batch_size"),
        ("--train.max_epochs", "--train.steps"),
    ],
)
def test_what_is_meant(project: Path, argument: str, meant: str) -> None:
    code, said = check(project, argument, "3")
    assert code == 78
    assert said.splitlines() == [
        f"[launch] error: {argument.partition('=')[0]} is not a setting",
        f"[launch]        did you mean {meant}?",
    ]


def test_other_spellings_of_settings(project: Path) -> None:
    assert check(project, "--fast-dev-run", "--profile", "3:5") == (0, "")
    assert check(project, "--fast-dev-runs")[0] == 78


def test_nothing_alike(project: Path) -> None:
    assert "launch/torchrun.sh --help lists all settings" in check(project, "--qqq.zzz", "3")[1]


def test_a_key_that_only_shares_its_section_is_not_suggested(project: Path) -> None:
    assert "launch/torchrun.sh --help lists all settings" in check(project, "--train.foo", "3")[1]


def test_a_word_that_is_no_option(project: Path) -> None:
    """As launch/sweep.py takes settings, and Hydra."""
    code, said = check(project, "--train.steps", "3", "train.batch_size=8")
    assert code == 78
    assert said.splitlines() == [
        "[launch] error: train.batch_size=8 is not an option",
        "[launch]        did you mean --train.batch_size 8?",
    ]
    assert "settings are options: --section.key value" in check(project, "--train.steps=3", "fast")[1]
    assert check(project, "--train.steps=3", "--fast-dev-run", "2", "--model.width", "8") == (0, "")


def test_a_variable_that_nothing_reads(project: Path) -> None:
    code, said = check(project, DDP_TRAIN__STEP="3")
    assert code == 78
    assert "nothing reads the variable DDP_TRAIN__STEP\n" in said
    assert "did you mean DDP_TRAIN__STEPS?" in said
    ours = {"DDP_ATTEMPT": "1", "DDP_FAULTS": "", "DDP_WALLTIME_END": "1", "DDP_SCAFFOLD_TEMPLATE": "x"}
    assert check(project, **ours) == (0, "")


@pytest.mark.parametrize("how", [["--config", "{}"], ["--config={}"]])
def test_a_key_in_a_settings_file(project: Path, tmp_path: Path, how: list[str]) -> None:
    file = tmp_path / "mine.yaml"
    arguments = [each.format(file) for each in how]
    assert check(project, *arguments)[1].startswith(f"[launch] error: --config {file}: there is no such file\n")
    file.write_text("train:\n  steps: 3\n  larning_rate: 1\nmodel:\n")
    code, said = check(project, *arguments)
    assert code == 78
    assert f"{file}: train.larning_rate is not a setting" in said
    assert "did you mean train.learning_rate?" in said
    file.write_text("a: [broken")
    assert check(project, *arguments) == (0, ""), "training says that better"


@pytest.mark.slow
def test_settings_that_users_add_in_their_own_ways(project: Path, tmp_path: Path) -> None:
    """A field, a section from another module, a section of a section, a mapping, and a class from a library."""
    own = tmp_path / "own"
    shutil.copytree(project, own)
    package = own / "src" / "demo"
    (package / "sizes.py").write_text(
        "from pydantic import BaseModel\nclass Inner(BaseModel, extra='forbid'):\n    deep: int = 1\n"
        "class Sizes(BaseModel, extra='forbid'):\n    wide: int = 1\n    inner: Inner = Inner()\n"
        "    by_name: dict[str, int] = {}\n"
    )
    (package / "library.py").write_text("from elsewhere import Base\nclass Foreign(Base):\n    known: int = 1\n")
    config = package / "config.py"
    text = config.read_text().replace("from pydantic import", "from .library import Foreign\nfrom pydantic import")
    text = text.replace("from .data import", "from .sizes import Sizes as Big\nfrom .data import")
    config.write_text(text + "    big: Big = Big()\n    foreign: Foreign = Foreign()\n")
    for name in ("big.wide", "big.inner.deep", "big.by_name.anything", "foreign.known", "foreign.anything", "train"):
        assert check(own, f"--{name}", "1") == (0, ""), name
    assert "did you mean --big.inner.deep?" in check(own, "--big.inner.dep", "1")[1]
    (package / "train.py").write_text("import argparse\n")
    assert check(own, "--anything", "1") == (0, ""), "a train.py with arguments of its own"
    (package / "train.py").write_text("def broken(:\n")
    assert check(own, "--anything", "1") == (0, ""), "training says that better"


# What takes the place of a line in config.py or train.py, and a setting that training then accepts.
STEPS, SETTINGS = "    steps: int = Field", "class Settings(SessionSettings):"
TRAIN, FROM, CALL = 'class TrainSettings(BaseModel, extra="forbid"):', "from .data import", "load_settings(Settings)"
ACCEPTED = {
    "extra keys": (TRAIN, 'class TrainSettings(BaseModel, extra="allow"):', "train.any"),
    "ignored keys": (SETTINGS, 'class Settings(SessionSettings, extra="ignore"):', "any.thing"),
    "a configuration": (STEPS, '    model_config = {"extra": "allow"}\n' + STEPS, "train.any"),
    "an alias": (STEPS, '    rate: float = Field(1.0, alias="lr")\n' + STEPS, "train.lr"),
    "a validator before": (
        STEPS,
        '    @model_validator(mode="before")\n    def old(cls, value):\n        return value\n\n' + STEPS,
        "train.old_name",
    ),
    "an own BaseModel": (FROM, "from .base import BaseModel\n" + FROM, "train.own"),
    "a later import": (SETTINGS, "from .more import TrainSettings\n" + SETTINGS, "train.own"),
    "a class that takes its own name": (
        SETTINGS,
        "class TrainSettings(TrainSettings):\n    own: int = 1\n\n" + SETTINGS,
        "train.own",
    ),
    "a class made in an if": (
        SETTINGS,
        "if True:\n    class TrainSettings(TrainSettings):\n        own: int = 1\n\n" + SETTINGS,
        "train.own",
    ),
    "another name": (SETTINGS, "TrainSettings = globals()['TrainSettings']\n\n" + SETTINGS, "train.own"),
    "a field in an if": (STEPS, "    if True:\n        own: int = 1\n" + STEPS, "train.own"),
    "a made base": (
        SETTINGS,
        "class Opt(create_model('Made')):\n    x: int = 1\n\n" + SETTINGS + "\n    o: Opt",
        "o.y",
    ),
    "flags": (SETTINGS, "class Settings(SessionSettings, cli_implicit_flags=True):", "no-train.compile"),
    "short names": (SETTINGS, "class Settings(SessionSettings, cli_shortcuts={'train.steps': 'n'}):", "n"),
    "an optional section": (SETTINGS, SETTINGS + "\n    opt: TrainSettings | None = None", "opt.steps"),
    "a decorator": (TRAIN, "@decorated\n" + TRAIN, "train.own"),
    "own arguments": (CALL, "load_settings(Settings, own())", "note"),
    "variables of one's own": (CALL, "load_settings(Settings, strict_variables=False)", "note"),
    "another class": (CALL, "load_settings(Mine)", "note"),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_training_may_accept_is_not_refused(project: Path, tmp_path: Path, what: str) -> None:
    """Whatever is not written as this project writes it is training's to refuse."""
    line, other, name = ACCEPTED[what]
    package = tmp_path / "demo"
    shutil.copytree(project / "src" / "demo", package)
    file = package / ("train.py" if line == CALL else "config.py")
    assert line in file.read_text()
    file.write_text(file.read_text().replace(line, other, 1))
    settings = runpy.run_path(str(project / "launch" / "settings.py"))
    names = settings["names_of"](package / "train.py")
    assert names is None or settings["problem"](names, [f"--{name}", "1"], []) is None, names


def launch(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(project / "launch" / "torchrun.sh"), *arguments]
    return subprocess.run(
        command, cwd="/", env=environment(**variables), capture_output=True, text=True, check=False, timeout=60
    )


def test_a_typo_starts_nothing_and_leaves_nothing(project: Path) -> None:
    done = launch(project, "--train.setps", "3")
    assert done.returncode == 78
    assert (
        done.stderr == "[launch] error: --train.setps is not a setting\n[launch]        did you mean --train.steps?\n"
    )
    assert not (project / "runs").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--train.steps", "3", "--help"]])
def test_help_is_a_page(project: Path, arguments: list[str]) -> None:
    done = launch(project, *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) < 50, "a page"
    assert max(map(len, lines)) <= 160
    for needed in ("NPROC", "Exit codes:", "--train.  steps batch_size", "python -m demo.train --help"):
        assert needed in done.stdout, needed
    assert not (project / "runs").exists()


def test_a_python_without_yaml_is_told_in_a_line(project: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "yaml.py"
    blocked.write_text("raise ImportError('no yaml')\n")
    done = launch(project, PYTHONPATH=str(tmp_path))
    assert done.returncode == 78, done.stderr
    assert "has no PyYAML" in done.stderr
    assert "Traceback" not in done.stderr


LOADED = """
import os, sys
from demo.config import Settings
from demo.ddp.start.settings import load_settings

def tell(*arguments, **variables):
    os.environ.update(variables)
    try:
        settings, origin = load_settings(Settings, arguments)
        print(settings.train.steps, origin.get("train.steps", "default"))
    except SystemExit as end:
        print("exit code", end.code)
    for name in variables:
        del os.environ[name]

tell("--train.setps", "3")
tell("--larning_rate=3")
tell("--train.lr", "3")
tell(DDP_TRAIN__STEP="3")
tell("--config", sys.argv[1])
tell()
os.rename(sys.argv[2], sys.argv[2] + ".aside")
tell()
"""


MAPPING = """
import sys
from demo.config import Settings
from demo.ddp.start.settings import load_settings
for file in sys.argv[1:]:
    print(load_settings(Settings, ["--config", file])[0].train.names)
"""


@pytest.mark.slow
def test_a_mapping_in_the_settings_file_is_taken_as_it_stands(project: Path, tmp_path: Path) -> None:
    """Numbers as keys, and an empty one in the place of a default that is not."""
    pytest.importorskip("torch", reason="imports the project")
    own, files = tmp_path / "own", [tmp_path / "numbers.yaml", tmp_path / "empty.yaml"]
    shutil.copytree(project, own)
    config = own / "src" / "demo" / "config.py"
    config.write_text(config.read_text().replace(STEPS, "    names: dict[int, str] = {7: 'default'}\n" + STEPS, 1))
    files[0].write_text("train:\n  names: {0: cat, 1: dog}\n")
    files[1].write_text("train:\n  names: {}\n")
    command = [sys.executable, "-c", MAPPING, *map(str, files)]
    variables = environment(PYTHONPATH=str(own / "src"))
    done = subprocess.run(command, cwd=own, env=variables, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["{0: 'cat', 1: 'dog'}", "{}"], done.stderr


def test_training_started_without_our_scripts(project: Path, tmp_path: Path) -> None:
    """The same advice; and the settings file is found from everywhere, or said not to be there."""
    pytest.importorskip("torch", reason="imports the project")
    own, bad, elsewhere = tmp_path / "own", tmp_path / "bad.yaml", tmp_path / "elsewhere"
    shutil.copytree(project, own)
    elsewhere.mkdir()
    bad.write_text("train:\n  stepz: 3\n")
    file = own / "configs" / "train.yaml"
    command = [sys.executable, "-c", LOADED, str(bad), str(file)]
    variables = environment(PYTHONPATH=str(own / "src"))
    done = subprocess.run(command, cwd=elsewhere, env=variables, capture_output=True, text=True, check=False)
    meant = [line for line in done.stderr.splitlines() if "->" in line]
    options = ["--train.steps", "--train.learning_rate", "--train.learning_rate", "DDP_TRAIN__STEPS", "train.steps"]
    assert meant == [f"  -> did you mean {option}? --help shows every setting" for option in options], done.stderr
    refused, found, missing = done.stdout.splitlines()[:5], *done.stdout.splitlines()[5:]
    assert refused == ["exit code 78"] * 5
    assert found.endswith(str(file))
    assert missing.endswith(" default")
    assert done.stderr.count("there is no configs/train.yaml here, nor in the project") == 1
