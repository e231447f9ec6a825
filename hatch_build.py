"""Build hook: packs the template of every release into the package, as one git bundle (see releases/history.py).

A bundle, not plain files: pip would byte-compile the template's modules, and copier needs commits to record and to
update from. The template in the package is that of the release which the version names, whatever the checkout holds.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TemplateHistory(BuildHookInterface):
    """Adds template.bundle and the newest presets to the wheel. An editable install reads the checkout instead."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable" or self.target_name != "wheel":
            return
        root = Path(self.root)
        sys.path.insert(0, str(root / "releases"))
        import history

        release = self.metadata.version
        if history.versions()[-1:] != [release]:
            known = ", ".join(history.versions()) or "none"
            raise RuntimeError(
                f"the newest release in releases/ must be {release} (`make release`); there are: {known}"
            )
        build = Path(tempfile.mkdtemp(prefix="ddp-scaffold-build-"))
        self._remove = build
        bundle = build / "template.bundle"
        history.join(bundle)
        _extract_presets(bundle, f"v{release}", build)
        build_data["force_include"][str(bundle)] = "ddp_scaffold/template.bundle"
        # Read by `ddp-scaffold presets`; plain data, which pip does not compile.
        build_data["force_include"][str(build / "templates" / "presets")] = "ddp_scaffold/presets/files"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        import shutil

        if remove := getattr(self, "_remove", None):
            shutil.rmtree(remove, ignore_errors=True)


def _extract_presets(bundle: Path, tag: str, destination: Path) -> None:
    repository = destination / "history.git"
    subprocess.run(["git", "clone", "--quiet", "--bare", str(bundle), str(repository)], check=True)
    command = ["git", "archive", "--format=tar", tag, "templates/presets"]
    packed = subprocess.run(command, cwd=repository, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(destination, filter="data") if sys.version_info >= (3, 12) else archive.extractall(
            destination
        )
