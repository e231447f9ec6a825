"""The template of every release, as git bundles: one file a release, which holds what it adds to the one before.

They are committed, so the history is complete in a clone without tags, in a shallow clone and in an archive without
git. A release is one commit of copier.yml, templates/ and CHANGELOG.md, under an annotated tag; identity and dates are
fixed, so the same source gives the same commit everywhere.

    python releases/history.py list          the releases, and what their bundles take
    python releases/history.py join FILE     all of them in one bundle, which is what the package carries
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RELEASES = Path(__file__).parent
CONTENT = ("copier.yml", "templates", "CHANGELOG.md")
IDENTITY = {"NAME": "ddp-scaffold", "EMAIL": "ddp-scaffold@localhost"}


def versions() -> list[str]:
    """Return the released versions, oldest first."""
    found = [path.stem.removeprefix("v") for path in RELEASES.glob("v*.bundle")]
    return sorted((v for v in found if re.fullmatch(r"\d+\.\d+\.\d+", v)), key=lambda v: [int(n) for n in v.split(".")])


def bundle_of(version: str) -> Path:
    """Return the file of a release."""
    return RELEASES / f"v{version}.bundle"


def unpack(repository: Path) -> None:
    """Make `repository` a bare git repository with a tag for each release; `main` is the newest."""
    git("init", "--quiet", "--bare", str(repository), cwd=RELEASES)
    git("symbolic-ref", "HEAD", "refs/heads/main", cwd=repository)
    for version in versions():
        git("fetch", "--quiet", str(bundle_of(version)), "refs/tags/*:refs/tags/*", cwd=repository)
    if versions():
        git("update-ref", "refs/heads/main", f"v{versions()[-1]}^{{commit}}", cwd=repository)


def join(bundle: Path) -> None:
    """Write all releases into one bundle; twice the same bytes."""
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-history-") as name:
        repository = Path(name, "history.git")
        unpack(repository)
        tags = [f"v{version}" for version in versions()]
        # One thread, and no delta reused from the bundles as they came: both would depend on the machine.
        settings = ["-c", "pack.threads=1", "-c", "pack.writeReverseIndex=false"]
        git("repack", "-adfq", "--threads=1", cwd=repository)
        git(*settings, "bundle", "create", "--quiet", str(bundle), "HEAD", "main", *tags, cwd=repository)


def add(root: Path, version: str, date: str) -> Path:
    """Write the bundle of a new release from the index of the checkout `root`; return its path.

    `date` is an ISO day. The tree is that of the index, so a release can be made before its commit, which holds the
    bundle. Raises RuntimeError with git's own words.
    """
    when = f"{date}T00:00:00+00:00"
    fixed = {f"GIT_{role}_DATE": when for role in ("AUTHOR", "COMMITTER")}
    fixed |= {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in IDENTITY.items()}
    fixed["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = str(root / git("rev-parse", "--git-path", "objects", cwd=root))
    before = versions()
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-history-") as name:
        repository = Path(name, "history.git")
        unpack(repository)
        whole = git("write-tree", cwd=root)
        listing = git("ls-tree", whole, "--", *CONTENT, cwd=root)
        tree = git("mktree", cwd=repository, text=listing + "\n", **fixed)
        parent = ["-p", f"v{before[-1]}^{{commit}}"] if before else []
        commit = git("commit-tree", tree, *parent, "-m", f"ddp-scaffold {version}", cwd=repository, **fixed)
        tag = f"v{version}"
        git("-c", "tag.gpgSign=false", "tag", "-m", f"ddp-scaffold {version}", tag, commit, cwd=repository, **fixed)
        wanted = [tag, f"^v{before[-1]}"] if before else [tag]
        # A wide window finds what presets have in common: everybody who clones the repository gets this file.
        settings = ["-c", "pack.threads=1", "-c", "pack.window=250"]
        git(*settings, "bundle", "create", "--quiet", str(bundle_of(version)), *wanted, cwd=repository, **fixed)
    return bundle_of(version)


def git(*args: str, cwd: Path, text: str | None = None, **environment: str) -> str:
    """Run git and return its output. Raises RuntimeError with git's own words."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", *args]
    done = subprocess.run(
        command, cwd=cwd, env=ours | environment, input=text, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(args)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


def main(words: list[str]) -> None:
    """Run the command line above."""
    if words == ["list"]:
        for version in versions():
            print(f"v{version}  {bundle_of(version).stat().st_size / 1024:.0f} kB")
    elif len(words) == 2 and words[0] == "join":
        join(Path(words[1]).absolute())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
