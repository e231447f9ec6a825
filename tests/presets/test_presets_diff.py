"""`ddp-scaffold presets diff`, and the last change in `presets list`: real bundles, made and read by git."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import pytest
from git_helpers import git
from preset_helpers import fact, preset, run

from ddp_scaffold.presets import history, load
from ddp_scaffold.template import source

TODAY = datetime.date.today()


@pytest.fixture
def released(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed wheel: three releases in its bundle, and the files of the third.

    In 0.2.0 the preset `one` has other GPUs; 0.3.0 only says that it was read again.
    """
    repository = tmp_path / "history"
    folder = repository / "templates" / "presets"
    folder.mkdir(parents=True)
    git(repository, "init", "--quiet", "--initial-branch=main")
    lines = {"env": [{"name": "NCCL_NET", "value": "OFI", "read_by": "NCCL", "why": "w", "source": "s",
                      "confidence": "seen"}]}  # fmt: skip
    later = {"gpus_per_node": fact(8), "notes": [fact("new")]}
    states = (
        ("v0.1.0", "2026-01-10", {"gpus_per_node": fact(4), **lines}),
        ("v0.2.0", "2026-03-20", later),
        ("v0.3.0", "2026-05-30", {**later, "verified_on": datetime.date(2026, 5, 29)}),
    )
    for tag, day, values in states:
        preset(folder, "one", **{"verified_on": datetime.date(2026, 1, 1), **values})
        shutil.copy(installed / "local.yml", folder)
        git(repository, "add", "--all")
        for role in ("AUTHOR", "COMMITTER"):
            monkeypatch.setenv(f"GIT_{role}_DATE", f"{day}T12:00:00+00:00")
        git(repository, "commit", "--quiet", "--message", tag)
        git(repository, "tag", "--annotate", "--message", tag, tag)
    bundle = tmp_path / "template.bundle"
    git(repository, "bundle", "create", "--quiet", str(bundle), "HEAD", "main", "--tags")
    shutil.copy(folder / "one.yml", installed)
    monkeypatch.setattr(source, "CHECKOUT", tmp_path / "none")
    monkeypatch.setattr(source, "BUNDLE", bundle)
    return installed


def differences(*words: str) -> dict[str, tuple[str, object, object]]:
    code, text = run("diff", "one", *words, "--json")
    assert code == 0, text
    return {row["field"]: (row["change"], row["from"], row["to"]) for row in json.loads(text)["differences"]}


@pytest.mark.usefixtures("released")
def test_two_days_of_a_preset() -> None:
    found = differences("--from", "2026-01-10", "--to", "2026-03-31")
    assert found["gpus_per_node.value"] == ("changed", 4, 8)
    assert found["env.NCCL_NET"][0] == "removed"
    assert found["notes.new"][0] == "added"
    assert differences("--from", "2026-03-20", "--to", "2026-05-29") == {}
    assert differences("--from", "0.2.0") == {"verified_on": ("changed", "2026-01-01", "2026-05-29")}


@pytest.mark.usefixtures("released")
def test_without_days_it_is_the_last_change() -> None:
    assert set(differences()) == {"verified_on"}
    code, text = run("diff", "one")
    assert code == 0
    assert "one: v0.2.0 (2026-03-20) to v0.3.0 (2026-05-30)" in text
    assert "verified_on  changed  2026-01-01  2026-05-29" in text
    assert "between two of them shows at the second" in text
    assert "presets diff generic-slurm" in text


def test_the_file_of_this_installation_is_the_last_state(released: Path) -> None:
    path = released / "one.yml"
    path.write_text(path.read_text().replace("value: 8", "value: 2"))
    assert differences() == {"gpus_per_node.value": ("changed", 8, 2)}
    assert json.loads(run("diff", "one", "--json")[1])["to"] == {"release": history.HERE, "day": None}


@pytest.mark.usefixtures("released")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one", "--from", "2025-12-31"], "no release of that day or before"),
        (["one", "--from", "soon"], "neither a day nor a release"),
        (["one", "--to", "9.9.9"], "no such release"),
        (["one", "--from", "0.3.0", "--to", "0.1.0"], "is after --to"),
        (["nowhere"], "there is no preset 'nowhere'"),
        (["./one.yml"], "a file of your own has no history here"),
        (["a\nb"], "there is no preset"),
    ],
)
def test_what_cannot_be_compared(words: list[str], said: str) -> None:
    code, text = run("diff", *words)
    assert code == 2
    assert said in text


@pytest.mark.usefixtures("released")
def test_the_list_tells_age_and_last_change() -> None:
    entries = {entry["name"]: entry["last_change"] for entry in json.loads(run("list", "--json")[1])["presets"]}
    assert entries["one"] == {"release": "v0.3.0", "day": "2026-05-30", "fields": ["verified_on"]}
    assert entries["local"] == {"release": "v0.1.0", "day": "2026-01-10", "fields": []}
    text = run("list", "one")[1]
    assert "2026-05-30: read again, nothing else" in text
    assert f"2026-05-29, {(TODAY - datetime.date(2026, 5, 29)).days // 30}" in text.replace(" months", "")


def test_a_list_without_git_or_releases(released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.bundle"
    broken.write_bytes((tmp_path / "template.bundle").read_bytes()[:300])
    for change in ({"BUNDLE": broken}, {"BUNDLE": tmp_path / "absent"}):
        for name, value in change.items():
            monkeypatch.setattr(source, name, value)
        assert json.loads(run("list", "one", "--json")[1])["presets"][0]["last_change"] is None
        assert run("diff", "one")[0] == 1
    monkeypatch.setattr(source, "BUNDLE", tmp_path / "template.bundle")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, text = run("list", "one")
    assert code == 0
    assert "one " in text
    code, text = run("diff", "one")
    assert code == 1
    assert "git cannot be run" in text


def test_the_presets_of_this_checkout_have_a_history() -> None:
    """Every preset of the newest release is found in it, by its name."""
    names = [path.stem for path in load.files()]
    states = history.read(names, source.carried_releases)
    assert all(states[name] for name in names)
    assert sum(len(each) > 3 for each in states.values()) > 30
