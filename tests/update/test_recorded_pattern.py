"""A preset of the user's own with an account pattern that an earlier release took, and `presets check` would not."""

from __future__ import annotations

import json

from update_helpers import git, make, update

PRESET = {
    "name": "acme",
    "title": "The Acme cluster",
    "extends": "generic-slurm",
    "verified_on": "2026-11-28",
    "status": "documented",
    "account": {
        "value": {"required": True, "pattern": "(def|rrg)-[a-z]+(_gpu)?"},
        "source": "docs.acme.org",
        "confidence": "documented",
    },
}


def test_a_project_with_a_recorded_pattern_goes_on(now, history_of_now, tmp_path):
    answers = {"preset": "own", "preset_file": json.dumps(PRESET), "account": "def-abc_gpu"}
    project = make(history_of_now, "0.3.1", tmp_path / "demo", answers)
    done = update(now, project, "--yes")
    assert done.returncode == 0, done.stderr
    git(project, "commit", "--quiet", "--message", "Update")
    recorded = (project / ".copier-answers.yml").read_text()
    assert "pattern: (def|rrg)-[a-z]+(_gpu)?" in recorded
    assert "#SBATCH --account=def-abc_gpu" in (project / "launch/train.sbatch").read_text()
    done = update(now, project, "--yes", "--set", "account=rrg-abc")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --account=rrg-abc" in (project / "launch/train.sbatch").read_text()
