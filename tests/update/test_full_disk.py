"""A disk that is full, before an update writes and while it does: a tmpfs in a mount namespace, which ends with it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cross_section import every
from update_helpers import make

INSIDE = """
set -eu
said=$PWD; mkdir disk; mount -t tmpfs -o size=24m tmpfs disk
cp -r demo disk/demo; cd disk/demo; git status >/dev/null
fill() { dd if=/dev/zero of=../fill bs=1k 2>/dev/null || true; truncate --size=-"$1"k ../fill; }
update() { code=0; %(command)s update -y >"$said/$1" 2>&1 || code=$?; echo "$1: $code"; }
changed() { git --no-optional-locks status --porcelain; }
%(script)s
"""


@pytest.fixture
def on_a_small_disk(now: Path, history_of_now: Path, tmp_path: Path):
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("needs root, for a file system of its own")
    make(history_of_now, "0.1.0", tmp_path / "demo", {"model": "custom"})

    def run(script: str, **environment: str) -> list[str]:
        command = shlex.join([sys.executable, "-m", "ddp_scaffold"])
        variables = {**os.environ, "PYTHONPATH": str(now / "scaffold"), **environment}
        inside = INSIDE % {"command": command, "script": script}
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", inside], cwd=tmp_path, env=variables, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("spare", every(3, [40, 0, 140], others=pytest.mark.long))
def test_a_disk_that_is_full_from_the_beginning(on_a_small_disk, tmp_path, spare):
    told = on_a_small_disk(f"fill {spare}; update one; changed; rm ../fill; update two")
    assert told == ["one: 3", "two: 0"]
    said = (tmp_path / "one").read_text()
    assert "error: " in said
    assert "No space left on device" in said
    assert "hint: Nothing was changed. Make room, and run it again." in said


@pytest.mark.parametrize("spare", every(3, [100, 0, 300], others=pytest.mark.long))
def test_a_disk_that_becomes_full_meanwhile(on_a_small_disk, tmp_path, spare):
    """Others fill it just before git writes, and again before git takes back what it has written."""
    real = subprocess.run(["which", "git"], capture_output=True, text=True, check=True).stdout.strip()
    wrapper = tmp_path / "bin" / "git"
    wrapper.parent.mkdir()
    wrapper.write_text(
        '#!/bin/sh\ncase "$1 $2 $3" in "read-tree -m -u") [ -e ../enough ] || { dd if=/dev/zero of=../fill bs=1k;'
        f' truncate --size=-{spare}k ../fill; }} 2>/dev/null;; esac\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    script = "update one; rm ../fill; >../enough; update two; changed | grep -c '^M'"
    told = on_a_small_disk(script, PATH=f"{wrapper.parent}:{os.environ['PATH']}")
    assert told[:2] == ["one: 3", "two: 0"]
    assert int(told[2]) > 10
    said = (tmp_path / "one").read_text()
    assert "Make room, " in said
    assert "a GIT_ variable" not in said
