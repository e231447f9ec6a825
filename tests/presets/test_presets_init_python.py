"""`ddp-scaffold presets init`: who provides Python and torch. Stand-ins for python3, conda and module answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from preset_helpers import Tool, run
from test_presets_init import CONFIG, PARTITIONS, SINFO, made

from ddp_scaffold.presets import probe, probe_python

ROOT = Path(__file__).parents[2]
NEW, OLD = "python 3.12 site venv\ntorch none\n", "python 3.6 site venv\ntorch none\n"
# `module -t avail` of Lmod: headings, names without a version before those with one.
LMOD = """/apps/modules/all:
GCC/13.3.0
PyTorch/
PyTorch/2.6.0-foss-2023b-CUDA-12.4.0
PyTorch/2.9.1-foss-2024a-CUDA-12.6.0
Python/2.7.18-GCCcore-12.2.0
Python/3.9.6-GCCcore-11.2.0
Python/3.11.5-GCCcore-13.2.0
Python/3.12.3-GCCcore-13.3.0
Python-bundle-PyPI/2024.06-GCCcore-13.3.0
cray-python/3.11.7
pythonlibs
"""
# The same of Tcl modules, as IDRIS and CINECA have them.
TCL = """-------- /gpfs/modulefiles --------
cuda/12.8.0(default)
python/3.12.7(default)
python/3.8.8
miniforge/24.9.0
pytorch-gpu/py3/2.8.0
pytorch-gpu/py3/2.10.0
"""


@pytest.fixture
def cluster(tool: Tool) -> Tool:
    """A login node of Slurm, whose Python is too old."""
    tool("sinfo", SINFO)
    tool("scontrol", **{"show config": CONFIG, "show partition -o": PARTITIONS})
    tool("python3", OLD)
    return tool


@pytest.fixture
def modules(cluster: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`modules(text, code)`: what `module -t avail` prints, to stderr as both kinds do."""

    def make(text: str, code: int = 0) -> None:
        (tmp_path / "avail.txt").write_text(text)
        (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
        monkeypatch.setenv("BASH_FUNC_module%%", f"() {{ /bin/cat '{tmp_path}/avail.txt' >&2; return {code}; }}")

    return make


def needed(data: dict[str, Any], what: str) -> list[dict[str, str]]:
    return [
        {k: v for k, v in need["value"].items() if k != "what"}
        for need in data["needs"]
        if need["value"]["what"] == what
    ]


def python_line(data: dict[str, Any]) -> str:
    return next(line for line in data["not_found"] if line.startswith("python: "))


def test_the_least_python_is_the_projects() -> None:
    least = ".".join(map(str, probe_python.LEAST_PYTHON))
    for path in (ROOT / "templates" / "project" / "pyproject.toml.jinja", ROOT / "pyproject.toml"):
        assert f'requires-python = ">={least}"' in path.read_text()


def test_a_python_that_is_too_old_and_modules_that_have_one(modules: Any) -> None:
    modules(LMOD)
    data = made()
    python = needed(data, "python")
    assert [need["by"] for need in python] == ["module"]
    assert python[0]["add"].endswith(". Here: modules: Python/3.12.3-GCCcore-13.3.0, cray-python/3.11.7")
    assert python_line(data) == (
        "python: python3 on the login node is 3.6, and projects need 3.10;"
        " modules: Python/3.12.3-GCCcore-13.3.0, cray-python/3.11.7"
    )
    assert needed(data, "torch") == [
        {"by": "module", "name": "PyTorch", "add": "--set modules='PyTorch/2.9.1-foss-2024a-CUDA-12.6.0'"},
        {"by": "pip"},
    ]
    assert [need["value"]["what"] for need in data["needs"]][-2:] == ["interface", "queue"]  # of generic-slurm


def test_tcl_modules_whose_list_ends_with_an_error(modules: Any) -> None:
    modules(TCL, code=1)
    data = made()
    assert needed(data, "python")[0]["add"].endswith(". Here: modules: python/3.12.7, miniforge/24.9.0")
    assert needed(data, "torch")[0] == {
        "by": "module",
        "name": "pytorch-gpu/py3",
        "add": "--set modules='pytorch-gpu/py3/2.10.0'",
    }


def test_conda_and_no_modules(cluster: Tool) -> None:
    cluster("conda", "conda 24.9.2\n")
    assert python_line(made()).endswith("projects need 3.10; no module of Python was seen; conda is there")


def test_new_says_what_is_missing_and_is_content_with_a_module(cluster: Tool) -> None:
    from ddp_scaffold.presets.facts import needs

    data = made()
    answers = {"known": {"scheduler": "slurm"}, "preset_data": data, "partition": "gpu"}
    assert re.match("python: a module with Python 3.10 or later: --set modules=NAME", needs(answers)[0])
    assert needs({**answers, "modules": "python/3.12"}) == []


def test_a_python_that_is_new_enough(cluster: Tool) -> None:
    cluster("python3", NEW)
    data = made()
    assert needed(data, "python") == [{"by": "site", "name": "python3"}]
    assert next(need for need in data["needs"])["source"] == "python3 on the login node is 3.12"
    assert not [line for line in data["not_found"] if line.startswith("python: ")]


def test_a_python_that_makes_no_venv(cluster: Tool) -> None:
    cluster("python3", NEW.replace("venv", "bare"))
    assert "it has no ensurepip" in python_line(made())


@pytest.mark.parametrize(("whose", "by"), [("site", ["site"]), ("venv", []), ("conda", [])])
def test_torch_of_the_machine_and_of_an_environment(
    cluster: Tool, monkeypatch: pytest.MonkeyPatch, whose: str, by: list[str]
) -> None:
    """A job has the packages of an environment only if it is activated there; what generic-slurm says of pip stays."""
    monkeypatch.setenv("CONDA_PREFIX", "/home/jdoe/env")
    cluster("python3", f"python 3.12 {whose} venv\ntorch 2.9.0+cu128\n")
    data = made()
    probed = [need for need in data["needs"] if need["value"]["what"] == "torch" and need["confidence"] == "probed"]
    assert [need["value"]["by"] for need in probed] == by
    assert by or [need["by"] for need in needed(data, "torch")] == ["pip"]
    told = [line for line in data["not_found"] if line.startswith("torch: ")]
    assert len(told) == (0 if by else 1)
    assert "jdoe" not in Path("acme.yml").read_text()


@pytest.mark.parametrize(
    ("loaded", "whose", "active", "by"),
    [
        ("craype/2.7:pytorch/2.11.0", "conda", False, ["module pytorch"]),
        ("craype/2.7:pytorch/2.11.0", "venv", True, ["module pytorch"]),
        ("Python/3.12.3", "site", False, ["module Python"]),
        ("Python/3.12.3", "venv", True, ["pip "]),
        ("miniforge3/24.9", "conda", True, ["pip "]),
        ("miniforge3/24.9", "conda", False, ["module miniforge3"]),
    ],
)
def test_modules_that_are_loaded_become_the_presets(
    cluster: Tool, monkeypatch: pytest.MonkeyPatch, loaded: str, whose: str, active: bool, by: list[str]
) -> None:
    """Torch of an environment on top of them is not theirs."""
    monkeypatch.setenv("LOADEDMODULES", loaded)
    monkeypatch.setenv("CONDA_PREFIX", "/home/jdoe/env" if active else "")
    cluster("python3", f"python 3.12 {whose} venv\ntorch 2.11.0\n")
    data = made()
    assert data["modules"]["value"] == loaded.split(":")
    family = loaded.rpartition(":")[2].partition("/")[0]
    assert needed(data, "python") == [{"by": "module", "name": family}]
    assert [f"{need['by']} {need.get('name', '')}" for need in needed(data, "torch")] == by


def test_modules_of_unknown_form_are_left_out(cluster: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADEDMODULES", "$(reboot):pytorch/2.11.0")
    cluster("python3", "python 3.12 conda venv\ntorch 2.11.0\n")
    assert "modules" not in made()


@pytest.mark.parametrize(
    "text",
    [
        *("", "python 3", "Python 3.12 est là\n", "python 3.12 site venv\n"),
        *("python $(x).12 site venv\ntorch none\n", "\x00\x1b[2J" * 99),
    ],
    ids=["empty", "cut off", "another language", "half", "hostile", "binary"],
)
def test_a_python_whose_answer_cannot_be_read(cluster: Tool, text: str) -> None:
    cluster("python3", text)
    data = made()
    assert python_line(data).startswith("python: what python3 on the login node prints cannot be read, and projects")
    assert "\x1b" not in Path("acme.yml").read_text()


def test_a_python_that_fails_and_one_that_hangs(cluster: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster("python3", script="exit 1")
    assert "python: python3: failed here (exit code 1)" in python_line(made())
    monkeypatch.setattr(probe, "TIMEOUT_S", 1)
    cluster("python3", script="exec /bin/sleep 600")
    assert "python: python3: no answer within 1 s" in python_line(made("other"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "/apps/modules", "Aucun module trouvé\n", "python/\x1b[2J3.12\n", "p" * 200_000),
        "$(reboot)/3.12\npython/{{ 7 }}\npython/`x`\n",
    ],
    ids=["empty", "cut off", "another language", "binary", "long", "hostile"],
)
def test_a_list_of_modules_that_cannot_be_read(modules: Any, text: str) -> None:
    modules(text)
    assert python_line(made()).endswith("projects need 3.10; no module of Python was seen")
    written = Path("acme.yml").read_text()
    assert not [mark for mark in ("reboot", "{{", "`x", "\x1b", "ppp", "trouv") if mark in written]


def test_the_question_itself(cluster: Tool) -> None:
    """This Python answers; a torch.py in the current directory is nobody's torch."""
    cluster("python3", script=f'exec {sys.executable} -S -E "$@"')
    Path("torch.py").write_text("raise SystemExit('imported')\n")
    data = made()
    source = next(need for need in data["needs"])["source"]
    assert source == f"python3 on the login node is 3.{sys.version_info[1]}"
    assert [need["by"] for need in needed(data, "torch")] == ["pip"]
    cluster("python3", script=f'exec {sys.executable} "$@"')
    assert any(line.startswith("torch: ") for line in made("other")["not_found"])  # of the virtual environment


def test_json_and_text(modules: Any) -> None:
    modules(LMOD)
    result = json.loads(run("init", "acme", "--json")[1])
    assert [need["value"]["what"] for need in result["needs"]] == ["python", "torch", "torch"]
    text = run("init", "other", "-y")[1]
    assert re.search(
        r"^needs torch +a module: PyTorch +probed +module avail on the login node shows", text, re.MULTILINE
    )


def test_a_machine_without_a_scheduler_is_not_asked_for_modules(tool: Tool, tmp_path: Path) -> None:
    tool("python3", OLD)
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    data = made("desk")
    assert needed(data, "python") == [
        {"by": "user", "add": "Python 3.10 or later"},
    ]
    assert yaml.safe_load(Path("desk.yml").read_text())["extends"] == "local"


@pytest.mark.parametrize(("missing", "makes"), [("", "venv"), ("ensurepip", "bare"), ("venv", "bare")])
def test_a_python_that_can_make_no_environment_says_so(missing: str, makes: str) -> None:
    """Debian's python3 without python3-venv, which has no ensurepip."""
    finds = f"lambda name: None if name == {missing!r} else real(name)"
    without = f"import importlib.util as util; real = util.find_spec; util.find_spec = {finds}"
    program = f"{without}\n{probe_python._ASK_PYTHON}"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told.splitlines()[0].split()[-1] == makes
