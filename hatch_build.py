"""Build hook: packs the template (copier.yml and templates/ of HEAD) into the package, as a git bundle.

A bundle, not plain files: pip would byte-compile the template's modules, and copier needs a commit to record. The
bundle holds one commit, tagged with the version; identity and dates are fixed, so the same source gives the same bytes.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

IDENTITY = {"NAME": "ddp-scaffold", "EMAIL": "ddp-scaffold@localhost"}


class TemplateBundle(BuildHookInterface):
    """Adds ddp_scaffold/template.bundle to the wheel and the sdist. An editable install reads the checkout instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        if self.target_name == "wheel":  # read by `ddp-scaffold presets`; plain data, which pip does not compile
            build_data["force_include"][str(root / "templates" / "presets")] = "ddp_scaffold/presets"
        if not (root / ".git").exists():  # unpacked from an sdist, which brings the bundle along
            if not (root / "scaffold/ddp_scaffold/template.bundle").is_file():
                raise RuntimeError("no template.bundle: build from a git checkout, or from an sdist")
            return
        bundle = root / "build" / "template.bundle"
        bundle.parent.mkdir(exist_ok=True)
        make_bundle(root, f"v{self.metadata.version}", bundle)
        folder = "ddp_scaffold" if self.target_name == "wheel" else "scaffold/ddp_scaffold"
        build_data["force_include"][str(bundle)] = f"{folder}/template.bundle"


def make_bundle(root: Path, tag: str, bundle: Path) -> None:
    """Write the template of HEAD in `root` as one commit under `tag` (annotated) and `main`."""
    date = _git(root, "log", "-1", "--format=%cI")
    fixed = {f"GIT_{role}_DATE": date for role in ("AUTHOR", "COMMITTER")}
    fixed |= {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in IDENTITY.items()}
    # New objects go to a scratch repository; the checkout's own database is only read.
    fixed["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(root / _git(root, "rev-parse", "--git-path", "objects"))
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-bundle-") as name:
        scratch = Path(name)
        _git(scratch, "init", "--quiet", "--bare")
        _git(scratch, "symbolic-ref", "HEAD", "refs/heads/main")
        listing = _git(root, "ls-tree", "HEAD", "copier.yml", "templates")
        tree = _git(scratch, "mktree", text=listing + "\n", **fixed)
        commit = _git(scratch, "commit-tree", tree, "-m", f"ddp-scaffold {tag}", **fixed)
        _git(scratch, "update-ref", "refs/heads/main", commit, **fixed)
        _git(scratch, "-c", "tag.gpgSign=false", "tag", "-m", f"ddp-scaffold {tag}", tag, commit, **fixed)
        _git(scratch, "-c", "pack.threads=1", "bundle", "create", str(bundle), "HEAD", "main", tag, **fixed)


def _git(directory: Path, *args: str, text: str | None = None, **environment: str) -> str:
    done = subprocess.run(
        ["git", *args],
        cwd=directory,
        env=os.environ | environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(args)} failed: {done.stderr.strip()}")
    return done.stdout.strip()
