"""doctor: machine and project in one table, also with nothing installed, and where versions do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ddp_scaffold import __version__
from ddp_scaffold.cli import app
from ddp_scaffold.doctor.line import Line
from ddp_scaffold.doctor.machine import machine
from ddp_scaffold.doctor.python import torch_lines


def doctor(*words: str) -> dict[str, dict[str, str]]:
    """The lines of --json, by their names."""
    result = CliRunner().invoke(app, ["doctor", "--json", *words])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["version"] == 1
    assert all(set(line) == {"section", "name", "value", "source", "note", "level"} for line in found["lines"])
    return {line["name"]: line for line in found["lines"]}


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_an_empty_folder_with_nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VENV", "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    lines = doctor(str(tmp_path))
    assert lines["GPUs"]["value"] == "none"
    assert lines["Python"]["value"] == "none found"
    assert lines["release"]["value"] == "no project of ddp-scaffold"
    assert lines["check"]["value"] == "no findings in 0 files"
    text = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert text.exit_code == 0
    assert "open files" in text.stdout
    assert CliRunner().invoke(app, ["doctor", str(tmp_path / "nowhere")]).exit_code == 2


def test_gpus_and_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = """case "$*" in
-L) printf 'GPU 0: NVIDIA H100 (UUID: GPU-1)\\nGPU 1: NVIDIA H100 (UUID: GPU-2)\\n' ;;
'topo -m') printf '\\tGPU0\\tGPU1\\tCPU\\nGPU0\\t X \\tSYS\\t0-7\\nGPU1\\tSYS\\t X \\t0-7\\n' ;;
'topo -p2p r') printf ' \\tGPU0\\tGPU1\\nGPU0\\tX\\tCNS\\nGPU1\\tCNS\\tX\\n' ;;
*) echo 570.86 ;;
esac"""
    program(tmp_path / "bin", "nvidia-smi", answers)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    lines = {line.name: line for line in machine({"SLURM_JOB_ID": "7", "GLOO_SOCKET_IFNAME": "lo,none9"})}
    assert lines["GPUs"].value == "2 x NVIDIA H100"
    assert lines["driver"].value
    assert (lines["links"].value, lines["links"].level) == ("1 pairs by SYS", "info")
    assert (lines["peer access"].value, lines["peer access"].level) == ("1 pairs without", "warning")
    assert lines["started by"].value == "a Slurm job, outside of srun"
    assert "none9" in lines["gloo's interface"].note


def installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, cuda: str, nccl: str, driver: str
) -> dict[str, Line]:
    """The lines of an environment whose Python only says where its packages are."""
    packages = tmp_path / "packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "version.py").write_text(
        f"__version__ = '{version}'\ncuda: Optional[str] = {cuda!r}\nhip = None\n"
    )
    (packages / f"torch-{version}.dist-info").mkdir()
    if nccl:
        (packages / f"{nccl}.dist-info").mkdir()
    program(tmp_path / "venv" / "bin", "python", f"echo 3.12.1; echo {packages}")
    monkeypatch.setenv("VENV", str(tmp_path / "venv"))
    monkeypatch.setattr("ddp_scaffold.doctor.python.driver", lambda: driver)
    return {line.name: line for line in torch_lines(tmp_path)}


def test_versions_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = installed(tmp_path, monkeypatch, "2.11.0+cu130", "13.0", "nvidia_nccl_cu13-2.30.7", "580.65")
    assert [lines[name].value for name in ("torch", "CUDA", "NCCL")] == ["2.11.0+cu130", "13.0", "2.30.7"]
    assert {line.level for line in lines.values()} == {"ok"}


def test_a_driver_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = installed(tmp_path, monkeypatch, "2.11.0+cu130", "13.0", "nvidia_nccl_cu12-2.26.2", "535.54")
    assert "needs driver 580.0 or newer" in lines["CUDA"].note
    assert "built for CUDA 12, and torch for 13.0" in lines["NCCL"].note


def test_a_build_for_cpus_beside_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = installed(tmp_path, monkeypatch, "2.13.0+cpu", "", "", "580.65")
    assert lines["CUDA"].level == "warning"


def test_release_clocks_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".copier-answers.yml").write_text("_commit: v0.1.0\n_src_path: x\n")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/train.yaml").write_text(
        "run:\n  seed: 1\nclocks:\n  collective_s: 600 # ten minutes\n  init_s: 300\n"
    )
    (tmp_path / "launch/env").mkdir(parents=True)
    (tmp_path / "launch/env/nccl.env").write_text("NCCL_DEBUG=WARN\nNCCL_P2P_DISABLE=0\n")
    monkeypatch.setenv("DDP_CLOCKS__INIT_S", "100")
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    lines = doctor(str(tmp_path))
    assert f"v{__version__} is out" in lines["release"]["note"]
    assert (lines["clocks.collective_s"]["value"], lines["clocks.collective_s"]["source"]) == (
        "600",
        "configs/train.yaml",
    )
    assert (lines["clocks.init_s"]["value"], lines["clocks.init_s"]["source"]) == (
        "100",
        "DDP_CLOCKS__INIT_S in the environment",
    )
    assert lines["NCCL_DEBUG"]["source"].endswith("nccl.env")
    assert "Nothing reads NCCL_TIMEOUT" in lines["NCCL_TIMEOUT"]["note"]
    assert (lines["NCCL_P2P_DISABLE"]["value"], lines["NCCL_P2P_DISABLE"]["source"]) == ("1", "the environment")
    (tmp_path / ".copier-answers.yml").write_text(f"_commit: v{__version__}\n")
    assert doctor(str(tmp_path))["release"]["note"] == ""
