"""Files that have moved, by the release or by the user, and in which both have changed something.

Copier compares by path: it takes such a file for one that is gone and one that is new. So what it made of them is
replaced by a three-way merge of the file in the old release, in the project and in the new release, wherever each has
it. A file that the user has removed stays removed under its new name, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from shlex import quote

from .._git import git, git_bytes
from .compare import Entry, entries
from .recorded import Refused

LABELS = ("before updating", "last update", "after updating")  # copier's


@dataclass(frozen=True)
class Sides:
    """The project as the old release made it, as it is, and as the update would make it if nobody had touched it."""

    repository: Path
    made: Mapping[str, Entry]
    ours: Mapping[str, Entry]
    updated: Mapping[str, Entry]


@dataclass(frozen=True)
class Carried:
    """A file that is not to be left to copier."""

    old: str  # where the old release has it
    mine: str  # where the user has it; empty if the user has removed it
    new: str  # where the new release has it

    @property
    def place(self) -> str:
        """Where the project has it after the update: the user's own place counts."""
        return self.new if self.mine == self.old else self.mine


def sides(repository: Path, made: str, ours: str, updated: str) -> Sides:
    return Sides(repository, entries(repository, made), entries(repository, ours), entries(repository, updated))


def find(tree: Sides, moved: Mapping[str, str], missing: Iterable[str], renames: Mapping[str, str]) -> list[Carried]:
    """Return the files to carry: `moved` by the release, and `missing` at their place, or renamed, in the project.

    Raises Refused if something of the user's is in the way.
    """
    absent, found = set(missing), []
    for old in sorted({*moved, *absent}):
        new = moved.get(old, old)
        if new not in tree.updated or tree.ours.get(old, Entry("", "")).is_link:
            continue
        if old not in absent and old not in tree.ours:
            _require_unedited_behind_link(tree, old)
            continue
        mine = _place(tree, old, new, renames) if old in absent else old
        edited = not mine or tree.ours[mine] != tree.made[old]
        if new not in (old, mine):
            _require_free(tree, old, new, edited)
        if mine == old and not edited and new not in absent:  # what is absent there, copier would not bring
            continue
        if new == old and (not mine or tree.updated[new] == tree.made[old]):
            continue
        if mine not in (old, new) and mine in tree.updated:
            raise Refused(
                f"you moved {old} to {mine}, where the release has a file of its own now",
                f"Choose another place: git mv {quote(mine)} ELSEWHERE. Then commit, and run the update again.",
            )
        found.append(Carried(old, mine, new))
    return found


def _place(tree: Sides, old: str, new: str, renames: Mapping[str, str]) -> str:
    """Return where the user has a file that is not where the old release has it; an empty text if nowhere."""
    if old in renames and renames[old] not in tree.made:
        return renames[old]
    at_the_new_place = new in tree.ours and new not in tree.made and new not in renames.values()
    return new if at_the_new_place else ""


def _require_unedited_behind_link(tree: Sides, old: str) -> None:
    """Raise Refused if a folder of the file is a symbolic link, and the file behind it was edited."""
    real = (tree.repository / old).resolve().relative_to(tree.repository.resolve()).as_posix()
    if tree.ours.get(real) != tree.made[old]:
        raise Refused(
            f"the release moves {old}, and your edits in it stand behind a symbolic link, in {real}",
            "Put the folder itself there for the update, and commit that.",
        )


def _require_free(tree: Sides, old: str, new: str, edited: bool) -> None:
    """Raise Refused if something of the user's stands where the release has moved a file to."""
    own = {path for path in tree.ours if path not in tree.made or tree.ours[path].is_link}
    if not edited and tree.ours.get(new) == tree.updated[new]:
        return
    in_the_way = [path for path in own if path == new or path.startswith(f"{new}/")]
    in_the_way += [str(folder) for folder in PurePosixPath(new).parents if str(folder) in own]
    if in_the_way:
        raise Refused(
            f"the release moves {old} to {new}, and in your project {in_the_way[0]} is something else",
            f"Move yours away: git mv {quote(in_the_way[0])} ELSEWHERE. Then commit, and run the update again.",
        )


def bring(tree: Sides, carried: Sequence[Carried], windows: Iterable[str], unmerged: str, scratch: Path) -> str:
    """Bring what is carried into the work tree, after copier; return the list of unmerged files with ours in it.

    Raises Refused if the user and the release have moved a file to different places, and it cannot be merged.
    """
    places = {each.place for each in carried}
    for each in carried:  # files may have changed places: first all leave, then all come
        if each.mine == each.old:
            _write(tree.repository, each.old, tree.updated.get(each.old))
    gone = {each.new for each in carried if each.place != each.new} - places
    for path in gone:
        _write(tree.repository, path, None)
    touched = places | gone | {each.old for each in carried}
    kept = [entry for entry in unmerged.split("\0")[:-1] if entry.split("\t", 1)[1] not in touched]
    crlf = set(windows)
    for each in carried:
        if each.mine:
            kept += _merge(tree, each, each.mine in crlf, scratch)
    return "".join(f"{entry}\0" for entry in kept)


def _merge(tree: Sides, each: Carried, crlf: bool, scratch: Path) -> list[str]:
    """Write the merged file; return the entries of the index that make it unmerged, none if it is clean."""
    versions = (tree.ours[each.mine], tree.made[each.old], tree.updated[each.new])
    ours, base, theirs = versions
    texts = [git_bytes("cat-file", "blob", version.blob, cwd=tree.repository).stdout for version in versions]
    if crlf:
        texts = [text.replace(b"\r\n", b"\n") for text in texts]
    merged, clean = _merged(texts, tree.repository, scratch)
    if not clean and each.mine not in (each.old, each.new) and each.old != each.new:
        raise Refused(
            f"you moved {each.old} to {each.mine}, the release moved it to {each.new}, and both changed the same lines",
            f"mkdir -p {quote(str(PurePosixPath(each.new).parent))} && git mv {quote(each.mine)} {quote(each.new)}."
            " Then commit, and run the update again: both come as a conflict there.",
        )
    file = tree.repository / each.place
    _remove(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(merged)
    mode = theirs.mode if ours.mode == base.mode else ours.mode
    file.chmod(0o755 if mode == "100755" else 0o644)
    if clean:
        return []
    stages = ((base, 1), (ours, 2), (theirs, 3))
    return [f"{version.mode} {version.blob} {number}\t{each.place}" for version, number in stages]


def _merged(texts: Sequence[bytes], repository: Path, scratch: Path) -> tuple[bytes, bool]:
    """Return the three-way merge of ours, base and theirs, and whether it is clean.

    Of binary files that both sides changed, it is ours, as in any merge by git.
    """
    ours, base, theirs = texts
    if base in (ours, theirs):
        return (theirs if ours == base else ours), True
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        paths = [Path(name, label) for label in ("ours", "base", "theirs")]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text)
        labels = [word for label in LABELS for word in ("-L", label)]
        done = git_bytes("merge-file", "--stdout", *labels, *map(str, paths), cwd=repository)
    if done.returncode >= 128:
        return ours, ours == theirs
    return done.stdout, done.returncode == 0


def _write(repository: Path, path: str, version: Entry | None) -> None:
    """Make a file of the work tree what a release has there; None: nothing."""
    if version is None:
        _remove(repository / path)
    else:
        git("update-index", "--add", "--cacheinfo", f"{version.mode},{version.blob},{path}", cwd=repository)
        git("checkout-index", "--force", "--", path, cwd=repository)


def _remove(file: Path) -> None:
    file.unlink(missing_ok=True)
