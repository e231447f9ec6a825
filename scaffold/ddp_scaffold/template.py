"""Where the template comes from.

A project always records the public URL, so that plain `copier update` works for everybody, everywhere. While the
command line renders, git is told to fetch that URL from this machine: from the bundle inside the installed package,
or from the source checkout that the package runs from. Nothing then needs the network.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import __version__
from ._errors import ScaffoldError, UsageError
from ._git import LOCAL_VARIABLES, git, run_git, wait_for_git

PUBLIC_URL = "https://github.com/ddp-scaffold/ddp-scaffold.git"
BUNDLE = Path(__file__).with_name("template.bundle")  # built by hatch_build.py
CHECKOUT = Path(__file__).parents[2]  # of the repository, if the package runs from one


@dataclass(frozen=True)
class Template:
    """A template to render from."""

    source: str  # what the project records: a URL, or the absolute path given with --template
    ref: str  # tag, or HEAD
    repository: Path  # the git repository or checkout on this machine that holds it
    work_tree: bool = False  # take uncommitted changes, too

    def read(self, path: str) -> str:
        """Return the text of one of its files."""
        if self.work_tree:
            return (self.repository / path).read_text(encoding="utf-8")
        return git("show", f"{self.ref}:{path}", cwd=self.repository)

    def has_uncommitted_changes(self) -> bool:
        """Tell whether a checkout differs from its last commit in what a project is made of."""
        status = run_git("status", "--porcelain", "--", "copier.yml", "templates", cwd=self.repository)
        return bool(status.stdout.strip())


@contextmanager
def open_template(override: str | None) -> Iterator[Template]:
    """Yield the template: of `override` (path or URL), else the package's own.

    While inside, git and copier find it on this machine. Raises ScaffoldError if there is none.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-template-") as scratch:
        template = _override(override, Path(scratch)) if override else _own(Path(scratch))
        # The cache is private: what a redirected URL leads to must not enter the mirrors that plain copier keeps.
        with _environment({"COPIER_CACHE_DIR": str(Path(scratch, "cache")), **_settings(template)}):
            _require_redirect(template)
            try:
                yield template
            except KeyboardInterrupt:
                wait_for_git()
                raise


def _own(scratch: Path) -> Template:
    if (CHECKOUT / "copier.yml").is_file() and (CHECKOUT / ".git").exists():
        _require_commit(CHECKOUT)
        return Template(PUBLIC_URL, "HEAD", CHECKOUT)
    if BUNDLE.is_file():
        return Template(PUBLIC_URL, f"v{__version__}", _clone(str(BUNDLE), scratch))
    raise ScaffoldError(
        "this installation of ddp-scaffold holds no template",
        "Install it again (pip install --force-reinstall ddp-scaffold), or pass --template PATH_OR_URL.",
    )


def _override(wanted: str, scratch: Path) -> Template:
    path = Path(wanted).expanduser().absolute()
    if path.is_dir():
        if run_git("rev-parse", "--show-prefix", cwd=path).stdout != "\n" or not (path / "copier.yml").is_file():
            raise UsageError(
                f"--template {wanted}: is not the root of a git repository with a copier.yml",
                "A project made from it could never be updated; run git init and git commit in it first.",
            )
        _require_commit(path)
        return Template(str(path), "HEAD", path, work_tree=True)
    if path.is_file():
        clone = _clone(str(path), scratch)
        return Template(str(path), _latest_tag(clone), clone)
    if not wanted.endswith(".git") or ":" not in wanted:
        raise UsageError(
            f"--template {wanted}: there is no such directory, and it is no URL that ends in .git",
            f"Pass a path, or a URL like {PUBLIC_URL}.",
        )
    clone = _clone(wanted, scratch)
    return Template(wanted, _latest_tag(clone), clone)


def _require_commit(repository: Path) -> None:
    if run_git("rev-parse", "--verify", "--quiet", "HEAD", cwd=repository).returncode:
        raise ScaffoldError(
            f"the template in {repository} cannot be read by git, or has no commit yet",
            f"See what `git -C {repository} log` says; a template needs at least one commit.",
        )


def _clone(source: str, scratch: Path) -> Path:
    clone = scratch / "template.git"
    git("clone", "--quiet", "--bare", "--", source, str(clone), cwd=scratch)
    return clone


def _latest_tag(repository: Path) -> str:
    """Return the newest release tag (PEP 440, no pre-release), as copier chooses it, or HEAD if there is none."""
    from packaging.version import InvalidVersion, Version

    releases = {}
    for tag in git("tag", "--list", cwd=repository).splitlines():
        try:
            version = Version(tag)
        except InvalidVersion:
            continue
        if not version.is_prerelease:
            releases[version] = tag
    return releases[max(releases)] if releases else "HEAD"


def _settings(template: Template) -> dict[str, str]:
    """Return the environment that tells git where the template is on this machine, and to spell hashes out.

    Copier records what `git describe` says; of a commit without tags that is a hash. A short one can be all digits, or
    mean two commits once the repository has grown.
    """
    settings = {"core.abbrev": "40"}
    if ":" in template.source:
        settings[f"url.{template.repository}.insteadOf"] = template.source
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)  # others use these too: append
    environment = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for number, (key, value) in enumerate(settings.items(), first):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return environment


def _require_redirect(template: Template) -> None:
    """Raise ScaffoldError if the user's own insteadOf wins over ours: of equally long ones, git takes the first."""
    leads_to = git("ls-remote", "--get-url", template.source, cwd=Path("/")).strip()
    if leads_to not in (template.source, str(template.repository)):
        raise ScaffoldError(
            f"your git configuration replaces {template.source} by {leads_to}",
            "Remove that insteadOf; `git config --show-origin --get-regexp insteadof` shows where it stands.",
        )


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change the environment for this process and for plumbum, which copies it when first imported."""
    before = dict(os.environ)
    os.environ.update(changes)
    for name in LOCAL_VARIABLES:
        os.environ.pop(name, None)
    try:
        from plumbum import local

        with local.env(**os.environ):
            for name in LOCAL_VARIABLES:
                local.env.pop(name, "")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
