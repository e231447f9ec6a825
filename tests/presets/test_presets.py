"""The schema of presets, and `ddp-scaffold presets`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ddp_scaffold import presets
from ddp_scaffold.cli import app

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "templates/presets").glob("*.yml"))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A preset with four mistakes."""
    data = yaml.safe_load((ROOT / "templates/presets/generic-slurm.yml").read_text())
    data["scheduler"]["value"] = "lsf"
    data["gpus_per_node"]["value"] = "4"
    data["colour"] = "blue"
    del data["launcher"]["source"]
    path = tmp_path / "generic-slurm.yml"
    path.write_text(yaml.safe_dump(data))
    return path


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["presets", *args])
    return result.exit_code, result.output


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_preset_is_valid(path: Path) -> None:
    assert presets.load(path).name == path.stem


def test_every_preset_can_be_chosen() -> None:
    choices = yaml.safe_load((ROOT / "copier.yml").read_text())["preset"]["choices"].values()
    assert sorted(choices) == [path.stem for path in FILES] == [path.stem for path in presets.files()]


def test_unknown_is_not_unset(tmp_path: Path) -> None:
    local, slurm = (presets.load(ROOT / "templates/presets" / f"{name}.yml") for name in ("local", "generic-slurm"))
    assert local.master_addr is None  # unknown, or of no meaning
    assert slurm.nccl_socket_ifname is not None
    assert slurm.nccl_socket_ifname.value is None  # left open on purpose, and the source says why
    text = (ROOT / "templates/presets/local.yml").read_text()
    path = tmp_path / "local.yml"
    path.write_text(text.replace("value: none", "value:"))  # a scheduler cannot be left open
    with pytest.raises(presets.PresetError, match=r"scheduler\.value"):
        presets.load(path)


def test_all_problems_at_once(broken: Path) -> None:
    with pytest.raises(presets.PresetError) as caught:
        presets.load(broken)
    assert {(problem.field, problem.reason) for problem in caught.value.problems} == {
        ("scheduler.value", "must be 'none' or 'slurm'"),
        ("gpus_per_node.value", "must be a valid integer"),
        ("launcher.source", "is missing"),
        ("colour", "is not a known field"),
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a\n", "must be a mapping of fields"),
        ("a: [\n", "x.yml:2: is not YAML"),
        ("name: x\nname: y\n", "x.yml:2: is not YAML: 'name' stands here twice"),
        ("name: '{{ 1 }}'\n", "x.yml:1: holds '{{', which Jinja would evaluate"),
        ("scheduler: slurm\n", "x.yml: scheduler: must be a mapping of value, source and confidence"),
        ("name: y\n", "x.yml: name: must be 'x', like the file"),
        ("verified_on: 2024-13-45\n", "x.yml: is not YAML: ValueError: month must be in 1..12"),
        ("a: !!bool maybe\n", "x.yml: is not YAML: KeyError: 'maybe'"),
        ("a: !!timestamp soon\n", "x.yml: is not YAML: AttributeError"),
        ("a: 1" + "0" * 5000, "x.yml: is not YAML: ValueError"),
        ("? [a]\n: b\n", "x.yml:1: is not YAML: found unhashable key"),
        ("a: " + "[" * 5000, "x.yml: is not YAML: RecursionError"),
        ("a: &x {<<: *x}\n", "x.yml"),
        ("1: 2\n", "x.yml"),
    ],
)
def test_files_that_are_no_presets(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "x.yml"
    path.write_text(text)
    with pytest.raises(presets.PresetError) as caught:
        presets.load(path)
    assert reason in str(caught.value)


def test_list() -> None:
    code, text = run("list")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["preset", *(path.stem for path in FILES)]
    code, text = run("list", "--json")
    assert [preset["name"] for preset in json.loads(text)["presets"]] == [path.stem for path in FILES]


def test_show() -> None:
    code, text = run("show", "generic-slurm")
    assert code == 0
    assert "gpu_request         gpus-per-node  documented  stas00/ml-engineering" in text
    code, text = run("show", "local", "--json")
    preset = json.loads(text)["preset"]
    assert preset["gpus_per_node"]["value"] is None
    assert "master_addr" not in preset
    code, text = run("show", "nowhere")
    assert code == 2
    assert "there is no preset 'nowhere'" in text
    assert "generic-slurm, local" in text


def test_check(broken: Path) -> None:
    good = str(FILES[0])
    assert run("check", good) == (0, f"{good}: ok\n")
    code, text = run("check", good, str(broken), str(broken.with_name("absent.yml")))
    assert code == 1
    assert len(text.splitlines()) == 1 + 4 + 1
    assert f"{broken}: colour: is not a known field" in text
    assert "absent.yml: cannot be read: No such file or directory" in text
    code, text = run("check", good, str(broken), "--json")
    assert code == 1
    assert [(file["ok"], len(file["problems"])) for file in json.loads(text)["files"]] == [(True, 0), (False, 4)]


@pytest.mark.parametrize("name", ["a\0b.yml", "a\nb.yml", "a" * 300])
def test_check_goes_on_after_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    good, odd = str(FILES[0]), tmp_path / "odd.yml"
    odd.write_text('? [a]\n: b\n"x\\n\\ud800": 1\n')
    code, text = run("check", name, str(odd), good)
    assert code == 1
    assert "cannot be read" in text
    assert len(text.splitlines()) == 3  # one a file, whatever the names
    assert text.splitlines()[-1] == f"{good}: ok"


def test_unprintable_fields_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_text('"a\\nb\\e[2J": 1\n')
    code, text = run("check", str(path))
    assert code == 1
    assert "a\\nb\\x1b[2J: is not a known field" in text


def test_a_broken_preset_is_not_shown(broken: Path) -> None:
    code, text = run("show", str(broken))
    assert code == 1
    assert "(and 3 more)" in text


def test_a_table_on_a_terminal() -> None:
    pexpect = pytest.importorskip("pexpect")
    command = [sys.executable, "-m", "ddp_scaffold", "presets", "list"]
    shown = pexpect.run(" ".join(command), cwd=ROOT / "scaffold", timeout=60).decode()
    assert "┃" in shown
    assert "generic-slurm" in shown


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, ddp_scaffold.cli; print({'yaml', 'pydantic', 'rich', 'copier'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scaffold", check=True, capture_output=True, text=True
    )
    assert done.stdout == "set()\n"
