"""What no template may do to the machine that renders it, whoever wrote it.

Copier runs nothing of a template without `--trust`. Git does: what stands in a `.git/config` names programs, and git
reads that of any repository that it comes by. So no call of copier renders into one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .._errors import ScaffoldError
from .._git import git
from .questions import documents
from .source import Template

# For `exclude`: a git directory, at any depth and as any file system may spell it; and what makes one of a directory
# with another name, a bare repository, in which git would look for its configuration as well.
NOT_RENDERED = (".[gG][iI][tT]", "[gG][iI][tT]~[0-9]*", "HEAD")
NOTHING_RENDERED = ("**",)


@lru_cache
def require_harmless(template: Template) -> None:
    """Raise ScaffoldError if the template, at its ref, has means to get around NOT_RENDERED."""
    hint = f"Ask who wrote it what for; it was read from {template.repository}."
    named = git("for-each-ref", f"refs/tags/{template.ref}", f"refs/heads/{template.ref}", cwd=template.repository)
    if named.count("\n") > 1:  # copier might take the other one
        raise ScaffoldError(f"the template has a tag and a branch {template.ref}", "Rename one of them there.")
    for document in documents("copier.yml", _read_plain(template, "copier.yml"), lambda p: _read_plain(template, p)):
        if not isinstance(document, dict):
            raise ScaffoldError("the template's copier.yml holds no questions", "Write a mapping of questions there.")
        if document.get("_preserve_symlinks") and (link := _link(template)):
            raise ScaffoldError(
                f"the template keeps symbolic links (_preserve_symlinks) and has one, {link}: files could be written"
                " through it to any place",
                hint,
            )
        if "_envops" in document and not _leaves_alone(document["_envops"]):
            raise ScaffoldError(
                f"the template's _envops would change what is never rendered ({', '.join(NOT_RENDERED)})", hint
            )


def _read_plain(template: Template, path: str) -> str:
    """Return the text of a file as copier gets it too: of a link, git would show where it leads to instead."""
    if not template.work_tree:
        entry = git("ls-tree", template.ref, "--", path, cwd=template.repository)
        if not entry.startswith("100"):
            raise ScaffoldError(f"the template's {path} is no file", "Make it one there.")
    return template.read(path)


def _link(template: Template) -> str:
    """Return a symbolic link of the template, or a submodule, which may hold one; an empty text if there is neither."""
    root = template.repository
    if template.work_tree:
        listed = git("ls-files", "-z", "--cached", "--others", cwd=root).split("\0")[:-1]
        return next((path for path in listed if (root / path).is_symlink() or (root / path).is_dir()), "")
    entries = git("ls-tree", "-r", "-z", "--full-tree", template.ref, cwd=root).split("\0")[:-1]
    return next((entry.split("\t", 1)[1] for entry in entries if entry.startswith(("120000", "160000"))), "")


def _leaves_alone(envops: Any) -> bool:
    """Tell whether Jinja, with these delimiters, gives back our patterns as they are: copier renders them, too."""
    from jinja2.sandbox import SandboxedEnvironment

    try:
        options = {name: value for name, value in envops.items() if name != "undefined"}
        jinja = SandboxedEnvironment(**options)
        return all(jinja.from_string(text).render() == text for text in NOT_RENDERED + NOTHING_RENDERED)
    except Exception:  # whatever is wrong there, copier would say; here it is enough that we cannot tell
        return False
