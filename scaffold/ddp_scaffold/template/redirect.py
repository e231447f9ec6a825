"""Git's configuration while a template is in use: its URL leads to a repository on this machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from .._errors import ScaffoldError
from .._git import LOCAL_VARIABLES, git, run_git

WHERE = "`git config --show-origin --get-regexp insteadof` shows where it stands"


def git_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that adds these settings to git's configuration."""
    first = int(os.environ.get("GIT_CONFIG_COUNT") or 0)  # others use these too: append
    variables = {"GIT_CONFIG_COUNT": str(first + len(settings))}
    for number, (key, value) in enumerate(settings.items(), first):
        variables |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return variables


def mirror_of(address: str) -> str | None:
    """Return what the user's git configuration puts in the place of exactly this URL, if anything.

    Ours could not win over that. One for the beginning of it, such as a whole host, is about many other URLs.
    """
    found = run_git("config", "--null", "--get-regexp", r"^url\..*\.insteadof$", cwd=Path("/")).stdout.split("\0")
    if address not in (entry.partition("\n")[2] for entry in found):
        return None
    return git("ls-remote", "--get-url", address, cwd=Path("/")).strip()


def require_redirect(source: str, allowed: Collection[str]) -> None:
    """Raise ScaffoldError if the user's own insteadOf wins over ours: of equally long ones, git takes the first."""
    leads_to = git("ls-remote", "--get-url", source, cwd=Path("/")).strip()
    if leads_to not in (source, *allowed):
        raise ScaffoldError(
            f"your git configuration replaces {source} by {leads_to}",
            f"Remove that insteadOf, or leave --template out; {WHERE}.",
        )


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
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
