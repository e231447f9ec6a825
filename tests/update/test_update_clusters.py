"""A project that moves to another place, and one that trains in several."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from update_helpers import commit, copier, git, make, state, update


@pytest.fixture
def project(history_of_two: Path, tmp_path: Path) -> Path:
    return make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom", "preset": "workstation"})


def answers(project: Path, name: str = ".copier-answers.yml") -> str:
    return (project / name).read_text()


def test_from_a_workstation_to_a_cluster(two, project):
    with (project / "src/demo/model.py").open("a") as file:
        file.write("# Mine.\n")
    commit(project)
    done = update(two, project, "--preset", "nersc-perlmutter", "--set", "account=m1234")
    assert done.returncode == 0, done.stderr
    script = (project / "launch" / "train.sbatch").read_text()
    assert "#SBATCH --account=m1234" in script
    assert "# Mine." in (project / "src/demo/model.py").read_text()
    assert "preset: nersc-perlmutter" in answers(project)
    assert "nproc" not in answers(project)  # a question of machines without a scheduler
    assert subprocess.run(["bash", "-n", project / "launch/train.sbatch"], check=False).returncode == 0


def test_what_the_old_place_decided_does_not_stay(two, history_of_two, tmp_path):
    given = {"model": "custom", "preset": "generic-slurm", "nodes": 7, "cpus_per_task": 8}
    project = make(history_of_two, "98.0.0", tmp_path / "demo", given)
    assert "gpus_per_node: 4" in answers(project)
    assert update(two, project, "--set", "preset=lumi-g", "--set", "account=project_465000000").returncode == 0
    assert "gpus_per_node: 8" in answers(project)  # the preset's
    assert "nodes: 7" in answers(project)  # the user's


def test_an_edit_in_a_script_that_the_new_place_has_not(two, history_of_two, tmp_path):
    project = make(history_of_two, "98.0.0", tmp_path / "demo", {"model": "custom", "preset": "generic-slurm"})
    with (project / "launch" / "train.sbatch").open("a") as file:
        file.write("# Mine.\n")
    commit(project)
    before = state(project)
    done = update(two, project, "--preset", "generic-pbs")
    assert done.returncode == 3
    assert "launch/train.sbatch" in done.stderr
    assert state(project) == before


def test_a_place_that_needs_an_account(two, project):
    done = update(two, project, "--preset", "lumi-g", "--dry-run")
    assert done.returncode == 0
    assert "a job there needs an account" in done.stderr
    before = state(project)
    done = update(two, project, "--preset", "lumi-g", "--set", "account=m1234")
    assert done.returncode == 3
    assert "account" in done.stderr
    assert state(project) == before


def test_a_second_cluster(two, history_of_two, project):
    before = {path: path.read_bytes() for path in project.glob("launch/**/*") if path.is_file()}
    done = update(two, project, "--add", "lumi-g", "--set", "account=project_465000000", "--set", "nodes=3")
    assert done.returncode == 0, done.stderr
    assert {path: path.read_bytes() for path in project.glob("launch/**/*") if path.is_file()} == before
    script = (project / "launch-lumi-g" / "train.sbatch").read_text()
    assert "#SBATCH --nodes=3" in script
    assert "launch/" not in script
    assert {line[3:].split("/")[0] for line in git(project, "status", "--porcelain").splitlines()} == {
        ".copier-answers.lumi-g.yml",
        "launch-lumi-g",
    }
    # It stays at the project's release: one update then brings all of them on.
    assert "_commit: v98.0.0" in answers(project, ".copier-answers.lumi-g.yml")
    commit(project)
    assert update(two, project, "--add", "lumi-g").returncode == 3
    done = update(two, project)
    assert done.returncode == 0, done.stderr
    for folder in ("launch", "launch-lumi-g"):
        assert '"""Fixed. ' in (project / folder / "outcome.py").read_text()
    assert "_commit: v98.1.0" in answers(project, ".copier-answers.lumi-g.yml")
    commit(project)
    done = update(two, project, "--cluster", "lumi-g", "--set", "nodes=5")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=5" in (project / "launch-lumi-g" / "train.sbatch").read_text()
    assert git(project, "status", "--porcelain", "launch").strip() == ""
    commit(project)
    done = copier(
        *("update", "--defaults", "--answers-file", ".copier-answers.lumi-g.yml", "--data", "nodes=6"), project,
        repository=history_of_two, cwd=project.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=6" in (project / "launch-lumi-g" / "train.sbatch").read_text()


def test_a_second_cluster_of_ones_own(two, project, tmp_path):
    preset = tmp_path / "ourcluster.yml"
    preset.write_text(
        "name: ourcluster\ntitle: Ours\nextends: generic-slurm\nverified_on: 2026-11-01\nstatus: community\n"
        "gpus_per_node: {value: 6, source: a test, confidence: seen}\n"
    )
    done = update(two, project, "--add", str(preset))
    assert done.returncode == 0, done.stderr
    assert "6" in (project / "launch-ourcluster" / "train.sbatch").read_text()


def test_clusters_that_are_not_there(two, project):
    done = update(two, project, "--cluster", "lumi-g", "--set", "nodes=5")
    assert done.returncode == 3
    assert "no launch-lumi-g/" in done.stderr
    done = update(two, project, "--add", "nosuch")
    assert done.returncode == 3
    assert "nosuch" in done.stderr


def test_a_second_cluster_of_a_release_that_had_one_only(now, history_of_now, tmp_path):
    project = make(history_of_now, "0.1.0", tmp_path / "demo", {"model": "custom"})
    before = state(project)
    done = update(now, project, "--add", "lumi-g")
    assert done.returncode == 3
    assert "Update it first" in done.stderr
    assert state(project) == before
