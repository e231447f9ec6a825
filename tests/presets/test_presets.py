"""The schema of presets, and `ddp-scaffold presets list`, `show`, `check` and `schema`."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from cross_section import every
from preset_helpers import fact, preset, run

from ddp_scaffold.cli import app
from ddp_scaffold.presets import fields, load, schema

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "templates/presets").glob("*.yml"), key=lambda path: path.stem)


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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_preset_is_valid(path: Path) -> None:
    assert load.load_preset(path).name == path.stem


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_starts_a_container_is_told_to_mount_the_project(path: Path) -> None:
    """Home directories are mounted by all of them; projects are kept elsewhere on clusters."""
    container = load.load_preset(path).container
    known = container.value if container else None
    if known is None:
        return
    words = " ".join((*(known.command or ()), *(known.srun_flags or ())))
    by_itself = words.startswith("shifter ") or "--environment=" in words  # mounts the site's file systems; an EDF
    assert by_itself or "--bind" in words or "-mounts=" in words or "bindings" in " ".join(known.modules or ())


def test_every_preset_can_be_chosen() -> None:
    choices = yaml.safe_load((ROOT / "templates/questions/presets.yml").read_text()).values()
    assert sorted(set(choices) - {"own"}) == [path.stem for path in FILES] == [path.stem for path in load.files()]


def test_keywords_are_read_without_the_rest(installed: Path) -> None:
    (installed / "generic-slurm.yml").write_text("keywords: {\n")
    (installed / "local.yml").write_text("keywords: 5\n")
    preset(installed, "block", keywords=["Alps", "two words", "8"])
    assert load.keywords() == {"block": ["Alps", "two words", "8"]}


def test_keywords_are_those_of_the_files() -> None:
    read = {path.stem: yaml.safe_load(path.read_text()).get("keywords", []) for path in FILES}
    assert load.keywords() == read


def test_unknown_is_not_unset(tmp_path: Path) -> None:
    local, slurm = (load.load_preset(ROOT / "templates/presets" / f"{name}.yml") for name in ("local", "generic-slurm"))
    assert local.master_addr is None  # unknown, or of no meaning
    assert slurm.nccl_socket_ifname is not None
    assert slurm.nccl_socket_ifname.value is None  # left open on purpose, and the source says why
    text = (ROOT / "templates/presets/local.yml").read_text()
    path = tmp_path / "local.yml"
    path.write_text(text.replace("value: none", "value:"))  # a scheduler cannot be left open
    with pytest.raises(load.PresetError, match=r"scheduler\.value"):
        load.load_preset(path)


def test_all_problems_at_once(broken: Path) -> None:
    with pytest.raises(load.PresetError) as caught:
        load.load_preset(broken)
    assert {(problem.field, problem.reason) for problem in caught.value.problems} == {
        ("scheduler.value", "must be 'none', 'slurm', 'pbs', 'kubernetes' or 'skypilot'"),
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
    with pytest.raises(load.PresetError) as caught:
        load.load_preset(path)
    assert reason in str(caught.value)


def test_list() -> None:
    code, text = run("list")
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["preset", *(path.stem for path in FILES)]
    code, text = run("list", "--json")
    entries = json.loads(text)["presets"]
    assert [preset["name"] for preset in entries] == [path.stem for path in FILES]
    slurm = next(preset for preset in entries if preset["name"] == "generic-slurm")
    assert (slurm["launcher"], slurm["gpus_per_node"], slurm["status"]) == ("srun", None, "documented")


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ACME"], ["acme-two"]),  # the name, whatever the case
        (["second"], ["acme-two"]),  # the title
        (["alps"], ["acme-two"]),  # a keyword
        (["a100"], ["one"]),  # the GPU
        (["cluster"], ["acme-two", "generic-slurm", "one"]),
        (["cluster", "alps"], ["acme-two"]),  # every word
        (["cluster", "nowhere"], []),
    ],
)
def test_list_searches(installed: Path, words: list[str], found: list[str]) -> None:
    preset(installed, "one", title="First cluster", gpu=fact("A100 40 GB"))
    preset(installed, "acme-two", title="Second cluster", keywords=["Alps"])
    code, text = run("list", *words)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines() if "note:" not in line] == ["preset", *found]
    assert ("presets init" in text) == (not found)
    entries = json.loads(run("list", *words, "--json")[1])["presets"]
    assert [entry["name"] for entry in entries] == found


def test_a_list_says_what_a_node_has(installed: Path) -> None:
    preset(installed, "one", gpu=fact("A100 40 GB"), gpus_per_node=fact(4))
    preset(installed, "two", gpus_per_node=fact(8))
    rows = [line.split("  ") for line in run("list")[1].splitlines()]
    cells = {row[0]: [cell.strip() for cell in row[1:] if cell] for row in rows}
    assert cells["one"][:3] == ["4x A100 40 GB", "slurm", "srun"]
    assert [cells[name][0] for name in ("two", "local")] == ["8", "-"]


def test_show() -> None:
    code, text = run("show", "generic-slurm")
    assert code == 0
    assert "gpu_request  gpus-per-node  inferred    an option of Slurm that many sites document" in text
    assert "taken from" not in text
    code, text = run("show", "local", "--json")
    preset = json.loads(text)["preset"]
    assert preset["gpus_per_node"]["value"] is None
    assert "master_addr" not in preset
    code, text = run("show", "nowhere")
    assert code == 2
    assert "there is no preset 'nowhere'" in text
    assert "Did you mean generic-slurm?" in run("show", "generic-slrum")[1]
    assert "the preset `local`" in run("show", "laptop")[1]


def test_show_has_every_field_in_a_group() -> None:
    grouped = [name for names in fields.GROUPS.values() for name in names]
    assert sorted([*grouped, *fields.TITLE]) == sorted(schema.Preset.model_fields)


def test_show_of_a_full_preset(installed: Path) -> None:
    line = {"name": "NCCL_NET", "value": "OFI", "read_by": "NCCL", "since": "2.4", "why": "the fast one", "source": "s"}
    path = preset(
        installed,
        "full",
        verified_on=datetime.date.today() - datetime.timedelta(days=400),
        gpu=fact("A100", verified_on=datetime.date(2025, 3, 31)),
        account=fact({"required": True, "pattern": "p[0-9]+", "example": "p12"}),
        container=fact({"srun_flags": ["--container-image={image}"], "image": "img.sqsh"}),
        preemption=fact({"grace_s": 30, "requeued": True}),
        requeue=fact(False),
        limits=[fact({"name": "debug", "max_nodes": 2, "max_walltime": "00:30:00", "preemptible": True})],
        env=[
            line | {"confidence": "seen", "min_nodes": 2, "instead": "AWS Libfabric before 1.17"},
            line | {"confidence": "seen", "name": "NCCL_X", "gpu": "A100", "max_plugin": "1.5"},
            line | {"confidence": "seen", "name": "NCCL_Y", "min_plugin": "1.6", "max_plugin": "1.9"},
        ],
        recovery=[line | {"confidence": "seen", "name": "FI_CXI"}],
        env_scripts=[fact({"path": "/opt/site/env.sh", "min_nodes": 2})],
        hangs=[fact("it hangs")],
        storage=[fact("HOME: small")],
        not_found=["the interface"],
    )
    code, text = run("show", "full")
    assert code == 0
    assert "WARNING: verified more than a year ago" in text.splitlines()[2]
    for words in (
        "documented, 2025-03-31  a page",
        "account      required; looks like p[0-9]+; for example p12",
        "container  srun --container-image={image}; image: img.sqsh",
        "30 s from the signal to the end; requeued",
        "requeue             no ",
        "debug  partition  1 to 2  00:30:00  yes",
        "NCCL_NET=OFI  read by NCCL since 2.4, on 2 or more nodes: the fast one; instead AWS Libfabric before 1.17",
        "NCCL_X=OFI    read by NCCL since 2.4, with A100, with aws-ofi-nccl to 1.5: the fast one",
        "NCCL_Y=OFI    read by NCCL since 2.4, with aws-ofi-nccl from 1.6 to 1.9: the fast one",
        "off, for a hang; read by NCCL since 2.4: the fast one",
        "/opt/site/env.sh; on 2 or more nodes",
        "it hangs",
        "HOME: small",
        "the interface",
        "(taken from generic-slurm)",
    ):
        assert words in text
    shown = json.loads(run("show", str(path), "--json")[1])
    assert shown["preset"]["launcher"]["value"] == "srun"
    assert shown["taken_from"]["launcher"] == "generic-slurm"
    assert "gpu" not in shown["taken_from"]
    assert shown["file"] == str(path)


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


@pytest.mark.parametrize(("columns", "shown"), every(2, [(80, False), (120, True)]))
def test_a_narrow_terminal_keeps_names_and_leaves_columns_out(columns: int, shown: bool) -> None:
    pexpect = pytest.importorskip("pexpect")
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "-m", "ddp_scaffold", "presets", "list"]
    text = pexpect.run(
        " ".join(command), cwd=ROOT / "scaffold", timeout=60, dimensions=(50, columns), env=environment
    ).decode()
    assert all(path.stem in text for path in FILES)
    assert ("launcher" in text) == shown


def test_schema(tmp_path: Path) -> None:
    code, text = run("schema")
    found = json.loads(text)
    assert code == 0
    assert found["additionalProperties"] is False
    assert set(found["required"]) == {"name", "title", "verified_on", "status"}
    assert set(found["properties"]) == set(schema.Preset.model_fields)
    assert [branch["required"] for branch in found["anyOf"]] == [
        ["extends"],
        ["scheduler", "launcher", "gpus_per_node", "cpus_per_task"],
    ]


# A change here is a change of the public interface: it belongs into the changelog.
OPTIONS = {
    "list": {"WORD", "--json"},
    "show": {"P", "--json"},
    "check": {"FILE...", "--json"},
    "schema": set(),
    "diff": {"NAME", "--from", "--to", "--json"},
    "probe": {"NAME", "--json"},
    "init": {"NAME", "--probe", "--yes", "-y", "--output", "--json"},
}


def test_option_set_is_frozen() -> None:
    group = typer.main.get_command(app)
    found = {}
    for name, command in group.commands["presets"].commands.items():  # type: ignore[attr-defined]
        found[name] = {
            option
            for parameter in command.params
            for option in (parameter.opts if parameter.param_type_name == "option" else [parameter.metavar])
        }
    assert found == OPTIONS


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, ddp_scaffold.cli; print({'yaml', 'pydantic', 'rich', 'copier'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "scaffold", check=True, capture_output=True, text=True
    )
    assert done.stdout == "set()\n"


def test_special_and_huge_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yml")
    (tmp_path / "huge.yml").write_text("#" * (1 << 20) + "\n")
    for path in (tmp_path / "fifo.yml", tmp_path / "huge.yml", tmp_path, Path("/dev/zero")):
        with pytest.raises(load.PresetError, match="no file, or one of more than 128 kB"):
            load.load_preset(path)


@pytest.mark.parametrize("hidden", ["\\0", "\\a", "\\u202e", "\\u200b", "\\n"])
def test_characters_that_hide_what_stands_there_are_refused(tmp_path: Path, hidden: str) -> None:
    text = (ROOT / "templates/presets/local.yml").read_text()
    path = tmp_path / "local.yml"
    path.write_text(text.replace("title: ", f'title: "a{hidden}b" # ', 1))
    with pytest.raises(load.PresetError, match="title: "):
        load.load_preset(path)
