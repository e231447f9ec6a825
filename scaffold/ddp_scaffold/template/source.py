"""Where the template comes from.

A project always records the public URL, so that plain `copier update` works for everybody, everywhere. While the
command line renders, git is told to fetch that URL from this machine: from the bundle inside the installed package,
or from the source checkout that the package runs from. Nothing then needs the network.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .. import __version__, _output
from .._errors import ScaffoldError, UsageError
from .._git import git, run_git, wait_for_git
from .redirect import WHERE, environment, git_settings, mirror_of, require_redirect

PUBLIC_URL = "https://github.com/ddp-scaffold/ddp-scaffold.git"
ALIASES = {"gh:": "https://github.com/", "gl:": "https://gitlab.com/"}  # of copier
BUNDLE = Path(__file__).parents[1] / "template.bundle"  # built by hatch_build.py
CHECKOUT = Path(__file__).parents[3]  # of the repository, if the package runs from one


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

    def has(self, path: str) -> bool:
        """Tell whether it has this file."""
        return run_git("cat-file", "-e", f"{self.ref}:{path}", cwd=self.repository).returncode == 0

    def has_uncommitted_changes(self) -> bool:
        """Tell whether a checkout differs from its last commit in what a project is made of."""
        status = run_git("status", "--porcelain", "--", "copier.yml", "templates", cwd=self.repository)
        return bool(status.stdout.strip())


@contextmanager
def open_template(override: str | None, recorded: str | None = None) -> Iterator[Template]:
    """Yield the template: of `override` (path or URL), else the package's own, for a new project.

    With `recorded`, for the update of a project that recorded this source: the newest release, with all releases
    before it; `override` then says where to take them from, and the project goes on recording what it did. So does a
    mirror that the user's git puts in the place of exactly this URL, as plain copier needs it without a network. While
    inside, git and copier find the template on this machine. Raises ScaffoldError if there is none.
    """
    address = _address(recorded or PUBLIC_URL)
    mirror = None if override else mirror_of(address)
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-template-") as scratch:
        if mirror is not None:
            template = _mirrored(recorded or PUBLIC_URL, mirror, Path(scratch))
            _output.note(f"releases are taken from {mirror}: git's configuration puts it in the place of {address}")
        elif recorded is not None:
            template = _releases(recorded, override, Path(scratch))
        else:
            template = _override(override, Path(scratch)) if override else _own(Path(scratch))
        # The cache is private: what a redirected URL leads to must not enter the mirrors that plain copier keeps.
        # Copier records what `git describe` says: of no tag, a hash, and all of it. Hooks are for the user's own work.
        # Nor does a monitor of files take part: a template's own configuration would name a program of its choice.
        settings = {"core.abbrev": "40", "core.hooksPath": os.devnull, "core.fsmonitor": "false"}
        if not _is_path(template.source):
            _require_no_directory_of_that_name(_address(template.source))
            settings[f"url.{template.repository}.insteadOf"] = _address(template.source)
        with environment({"COPIER_CACHE_DIR": str(Path(scratch, "cache")), **git_settings(settings)}):
            require_redirect(_address(template.source), [str(template.repository), *filter(None, [mirror])])
            try:
                yield template
            except KeyboardInterrupt:
                wait_for_git()
                raise


@contextmanager
def carried_releases() -> Iterator[Path]:
    """Yield a bare repository with a tag for every release that this installation carries. Needs no network.

    Raises ScaffoldError if it carries none, or if git cannot read them.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-releases-") as scratch:
        if (CHECKOUT / "copier.yml").is_file() and (CHECKOUT / ".git").exists():
            yield _releases_of_checkout(Path(scratch))
        elif BUNDLE.is_file():
            yield _clone(str(BUNDLE), Path(scratch))
        else:
            raise ScaffoldError("this installation carries no releases", "Install it again from a wheel or a checkout.")


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


def _releases(recorded: str, override: str | None, scratch: Path) -> Template:
    if override and _is_path(recorded) and not _is_same_path(recorded, override):
        raise UsageError(
            f"--template {override}: the project was made from the path {recorded}, which git cannot redirect",
            f"Pass --template {shlex.quote(recorded)}, or correct _src_path in .copier-answers.yml and commit it.",
        )
    if override and not _is_path(recorded):
        path = Path(override).expanduser().absolute()
        clone = _clone(str(path) if path.exists() else _address(override), scratch)
        return Template(recorded, _latest_tag(clone), clone)
    if is_public(recorded):
        if (CHECKOUT / "copier.yml").is_file() and (CHECKOUT / ".git").exists():
            clone = _releases_of_checkout(scratch)
            return Template(recorded, _latest_tag(clone), clone)
        return replace(_own(scratch), source=recorded)
    path = Path(recorded).expanduser()
    if _is_path(recorded) and not path.exists():
        raise ScaffoldError(
            f"the template that this project was made from, {recorded}, is not there",
            "Put it back, or correct _src_path in .copier-answers.yml, commit that, and pass it as --template.",
        )
    clone = _clone(str(path) if path.exists() else _address(recorded), scratch)
    return Template(recorded, _latest_tag(clone), path if path.is_dir() else clone)


def _is_path(source: str) -> bool:
    return ":" not in source or source.startswith(("/", "~", "."))


def _require_no_directory_of_that_name(address: str) -> None:
    """Raise ScaffoldError if there is something below the working directory that git would take for the URL."""
    if os.path.lexists(address):
        raise ScaffoldError(
            f"there is a directory {Path(address)} here, which git would take for the template",
            "Remove it, or run the command from another directory.",
        )


def _is_same_path(one: str, other: str) -> bool:
    return Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def _mirrored(source: str, mirror: str, scratch: Path) -> Template:
    """Return the template that git, by the user's own configuration, fetches from `mirror`."""
    try:
        clone = _clone(_address(source), scratch)
    except ScaffoldError as error:
        raise ScaffoldError(
            f"your git configuration replaces {_address(source)} by {mirror}: {error.message}",
            f"Correct or remove that insteadOf; {WHERE}.",
        ) from error
    return Template(source, _latest_tag(clone), clone)


def _releases_of_checkout(scratch: Path) -> Path:
    """Return a repository with the releases of the checkout, which needs no tags for that, and its HEAD as `main`."""
    _require_commit(CHECKOUT)
    repository = scratch / "template.git"
    git("init", "--quiet", "--bare", str(repository), cwd=scratch)
    common = Path(CHECKOUT, git("rev-parse", "--git-common-dir", cwd=CHECKOUT).strip())
    (repository / "objects" / "info" / "alternates").write_text(f"{(common / 'objects').resolve()}\n", encoding="utf-8")
    if (common / "shallow").is_file():
        (repository / "shallow").write_bytes((common / "shallow").read_bytes())
    for bundle in sorted((CHECKOUT / "releases").glob("v*.bundle"), key=lambda path: _numbers(path.stem)):
        git("fetch", "--quiet", str(bundle), "refs/tags/*:refs/tags/*", cwd=repository)
    tags = git("for-each-ref", "--format=%(refname) %(objectname)", "refs/tags/v*", cwd=CHECKOUT)
    for name, tag in (line.split() for line in tags.splitlines()):  # what projects of this checkout were made from
        git("update-ref", name, tag, cwd=repository)
    git("update-ref", "refs/heads/main", git("rev-parse", "HEAD", cwd=CHECKOUT).strip(), cwd=repository)
    git("symbolic-ref", "HEAD", "refs/heads/main", cwd=repository)
    return repository


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def is_public(source: str) -> bool:
    """Tell whether a recorded source is the repository of ddp-scaffold itself."""
    return _address(source) == PUBLIC_URL


def _address(source: str) -> str:
    """Return the URL that copier makes of a source: git fetches that one, so it is the one to redirect."""
    for alias, host in ALIASES.items():
        if source.startswith(alias):
            source = host + source.removeprefix(alias).removeprefix("/")
    if source.startswith("git+"):
        return source.removeprefix("git+")
    return source if source.endswith(".git") or not source.startswith(tuple(ALIASES.values())) else f"{source}.git"


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
            f"--template {wanted}: no such directory, and no URL that ends in .git",
            "Pass a path, or a URL that ends in .git.",
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
