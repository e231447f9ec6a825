"""Make a release: `make release VERSION=x.y.z`.

Checks the tree, the changelog and what an update would do to projects of the last release; then writes version,
changelog and the release's bundle, and commits and tags them. Nothing is written before all checks have passed.

    python releases/release.py VERSION           all of it
    python releases/release.py --check VERSION   only what is checked in a moment, and needs nothing but git

Exit codes: 0 released (with --check: may be), 1 refused (nothing was changed), 2 wrong usage, 130 interrupted (nothing
was changed).
"""

from __future__ import annotations

import datetime
import re
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import history
import moved
from history import git

ROOT = Path(__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
VERSION_FILE = ROOT / "scaffold" / "ddp_scaffold" / "__init__.py"
ALLOWED = Path(__file__).with_name("removed.yml")  # removals and renames that are meant, by release
IMPORTS = Path(__file__).with_name("imports.yml")  # what adopters were told to import
MOVES = "templates/moves.yml"
# One of each kind: what a project consists of depends on its scheduler and its model. All families: the model.py of
# each imports something else of ddp/.
PRESETS = ("local", "generic-slurm", "generic-pbs", "tacc-vista")
FAMILIES = ("classifier", "diffusion", "masked-lm", "rectified-flow")
PROJECTS = [{"preset": preset, "model": model} for preset, model in zip(PRESETS, FAMILIES, strict=True)]
PROJECTS += [{"model": model} for model in ("custom", "retrieval", "adversarial-diffusion", "causal-lm")]
PROJECTS += [{"code": "existing"}]
UNSAFE = ("_tasks", "_migrations", "_jinja_extensions")  # would need --trust, of every user at every update


def check(version: str) -> None:
    """Raise SystemExit with every reason against a release that can be seen at once."""
    _refuse([*_tree_problems(version), *_changelog_problems(CHANGELOG.read_text(encoding="utf-8"))])


def release(version: str, today: str) -> None:
    """Release what the checkout holds. Raises SystemExit with every reason against it."""
    check(version)
    _refuse(template_problems(version))  # takes half a minute
    with _all_or_nothing(version):
        bundle = _write(version, today)
    print(f"released {version}: {bundle.relative_to(ROOT)}, {bundle.stat().st_size / 1024:.0f} kB, tag v{version}")
    print(f"next: git push origin main v{version}; python -m build; upload dist/")


def _refuse(reasons: list[str]) -> None:
    if reasons:
        sys.exit("refused:\n" + "\n".join(f"  - {reason}" for reason in reasons))


@contextmanager
def _all_or_nothing(version: str) -> Iterator[None]:
    """Take back what the block has done if it fails or a signal comes. Raises SystemExit with the reason.

    A signal counts at the end of the block, which takes seconds: then no git is at work that it would cut off.
    """
    before = git("rev-parse", "HEAD", cwd=ROOT)
    came: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: came.append(number))
    reason = ""
    try:
        yield
    except Exception as error:  # whatever it is: often a git that the terminal's Ctrl-C has ended
        reason = str(error)
    if not came and not reason:
        return
    git("reset", "--quiet", "--hard", before, cwd=ROOT)  # the tree was clean
    history.bundle_of(version).unlink(missing_ok=True)
    if git("tag", "--list", f"v{version}", cwd=ROOT):
        git("tag", "--delete", f"v{version}", cwd=ROOT)
    print("interrupted, and taken back" if came else f"failed, and taken back: {reason}", file=sys.stderr)
    sys.exit(130 if came else 1)


def _write(version: str, today: str) -> Path:
    """Write version, changelog and bundle, commit and tag them; return the bundle. Raises RuntimeError."""
    text = CHANGELOG.read_text(encoding="utf-8")
    CHANGELOG.write_text(text.replace("## Unreleased\n", f"## {version} ({today})\n", 1), encoding="utf-8")
    source = VERSION_FILE.read_text(encoding="utf-8")
    VERSION_FILE.write_text(re.sub(r'__version__ = "[^"]*"', f'__version__ = "{version}"', source), encoding="utf-8")
    git("add", "--", str(CHANGELOG), str(VERSION_FILE), cwd=ROOT)
    bundle = history.add(ROOT, version, today)
    git("add", "--", str(bundle), cwd=ROOT)
    git("commit", "--quiet", "-m", f"Release {version}", cwd=ROOT)
    git("tag", "-a", f"v{version}", "-m", f"ddp-scaffold {version}", cwd=ROOT)
    return bundle


def _tree_problems(version: str) -> list[str]:
    found = []
    if git("status", "--porcelain", cwd=ROOT):
        found.append("the tree is not clean: commit or stash first")
    if git("rev-parse", "--abbrev-ref", "HEAD", cwd=ROOT) != "main":
        found.append("releases are made on main")
    last = history.versions()[-1:]
    if last and _key(version) <= _key(last[0]):
        found.append(f"{version} is not newer than {last[0]}")
    if git("tag", "--list", f"v{version}", cwd=ROOT):
        found.append(f"there is a tag v{version} already")
    # A moving tag such as v1 would be recorded by copier in the place of the release's own.
    short = [tag for tag in git("tag", "--list", cwd=ROOT).split() if re.fullmatch(r"v?\d+(\.\d+)?", tag)]
    found += [f"the tag {tag} reads as a version, and would be taken for a release: remove it" for tag in short]
    return found


def _changelog_problems(text: str) -> list[str]:
    """An entry says what a project gains, and whether anything must be done by hand."""
    found = re.search(r"^## Unreleased\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if not found or not found[1].strip():
        return ["CHANGELOG.md has no entry below '## Unreleased'"]
    if not re.search(r"^By hand: ", found[1], re.MULTILINE):
        return ["the entry below '## Unreleased' lacks its line 'By hand: ...' ('By hand: nothing.' if so)"]
    return []


def template_problems(version: str) -> list[str]:
    """Return what in the template would hurt projects of the last release at their update."""
    questions = _questions(lambda path: (ROOT / path).read_text(encoding="utf-8"))
    found = [f"copier.yml has {key}: every update would need --trust" for key in UNSAFE if key in questions]
    ignoring = [path for path in (ROOT / "templates").rglob(".gitignore") if path.is_file()]
    found += [f"{path.relative_to(ROOT)} hides template files from git: name it .gitignore.jinja" for path in ignoring]
    before = history.versions()[-1:]
    if not before:
        return found
    import yaml

    allowed = (yaml.safe_load(ALLOWED.read_text()) or {}).get(version) or {} if ALLOWED.is_file() else {}
    old = _old_questions(f"v{before[0]}")
    for name, question in old.items():
        if name in allowed.get("questions", ()) or name.startswith("_"):
            continue
        if name not in questions:
            found.append(f"the question {name} of {before[0]} is gone, and its answers with it (releases/removed.yml)")
            continue
        lost = _choices(question) - _choices(questions[name])
        lost -= set(allowed.get("choices", {}).get(name, ()))
        found += [f"{name}={choice} of {before[0]} is no choice any more (releases/removed.yml)" for choice in lost]
    if not found:  # it can be rendered
        found += _file_problems(version, before[0], allowed.get("files", ()))
    return found


def _file_problems(version: str, before: str, removed: Collection[str]) -> list[str]:
    """Return what projects of the release `before` would miss, but for the files that are `removed` on purpose."""
    import yaml

    told = yaml.safe_load(IMPORTS.read_text(encoding="utf-8"))
    listed = (ROOT / MOVES).read_text(encoding="utf-8") if (ROOT / MOVES).is_file() else ""
    with _history() as repository, tempfile.TemporaryDirectory(prefix="ddp-scaffold-projects-") as name:
        known = git("ls-tree", f"v{before}", "--", MOVES, cwd=repository)
        listed_before = git("show", f"v{before}:{MOVES}", cwd=repository) if known else ""
        pairs = []
        for number, answers in enumerate(PROJECTS):
            pair = moved.Pair(Path(name, f"{number}-old"), Path(name, f"{number}-new"))
            _render(repository, f"v{before}", answers, pair.old)
            _render(ROOT, "HEAD", answers, pair.new)
            pairs.append(pair)
        found = moved.problems(version, before, listed, listed_before, removed, pairs)
        return found or moved.import_problems(pairs, told)


def _render(repository: Path, ref: str, answers: dict[str, str], project: Path) -> None:
    """Make a project, with the old names of modules that have moved, as one has that was updated."""
    import copier

    data = {"project_name": "demo", **answers}
    warnings.simplefilter("ignore")  # copier's, of a checkout
    with_old_names = ["!/**/ddp/*.py"]  # which a new one is spared: templates/questions/moved.yml
    copier.run_copy(
        str(repository),
        project,
        data=data,
        vcs_ref=ref,
        defaults=True,
        quiet=True,
        unsafe=False,
        exclude=with_old_names,
    )


def _old_questions(tag: str) -> dict[str, object]:
    with _history() as repository:
        return _questions(lambda path: git("show", f"{tag}:{path}", cwd=repository))


@contextmanager
def _history() -> Iterator[Path]:
    """Yield the releases as a repository."""
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-history-") as name:
        repository = Path(name, "history.git")
        history.unpack(repository)
        yield repository


def _questions(read: Callable[[str], str]) -> dict[str, object]:
    """Return copier.yml as one mapping, with what it includes."""
    import yaml

    questions: dict[str, object] = {}

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!include", lambda loader, node: yaml.safe_load(read(node.value)))
    for document in yaml.load_all(read("copier.yml"), Loader):
        questions |= document or {}
    # The choices of presets stand in a file of their own.
    preset = questions.get("preset")
    if isinstance(preset, dict) and isinstance(preset.get("choices"), str):
        preset["choices"] = yaml.safe_load(read("templates/questions/presets.yml"))
    return questions


def _choices(question: object) -> set[str]:
    choices = question.get("choices") if isinstance(question, dict) else None
    if isinstance(choices, dict):
        return {str(value.get("value", value) if isinstance(value, dict) else value) for value in choices.values()}
    return {str(choice) for choice in choices} if isinstance(choices, list) else set()


def _key(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


if __name__ == "__main__":
    words = sys.argv[1:]
    only_check = words[:1] == ["--check"]
    if len(words) != 1 + only_check or not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", words[-1]):
        print("usage: make release VERSION=x.y.z", file=sys.stderr)
        sys.exit(2)
    try:
        if only_check:
            check(words[-1])
        else:
            release(words[-1], datetime.datetime.now(datetime.timezone.utc).date().isoformat())
    except KeyboardInterrupt:  # during the checks
        print("interrupted, nothing was changed", file=sys.stderr)
        sys.exit(130)
