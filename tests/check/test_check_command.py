"""The command: formats, selection, what a line ignores, --fix, exit codes, and the table against an installed torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ddp_scaffold.check.fixing import FIXES
from ddp_scaffold.check.run import all_rules
from ddp_scaffold.cli import app

ROOT = Path(__file__).parents[2]
SCRIPT = """\
#!/bin/bash
#SBATCH --nodes=2
export NCCL_TIMEOUT=1800
export NCCL_P2P_DISABLE=1
srun python train.py
"""
CLEAN = "#!/bin/bash\nexport NCCL_DEBUG=WARN\ntorchrun --standalone train.py\n"


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def check() -> Callable[..., Any]:
    return lambda *words: CliRunner().invoke(app, ["check", *words], prog_name="ddp-scaffold")


def rules_of(result: Any) -> list[str]:
    return [one["rule"] for one in json.loads(result.stdout)]


def test_text(repo: Path, check: Callable[..., Any]) -> None:
    result = check()
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("run.sh:3:8: DDP553 [placebo] Nothing reads NCCL_TIMEOUT")
    assert lines[1].startswith("    fix: Pass timeout=timedelta(...)")
    assert lines[-1] == "2 findings in 1 file: 1 slow, 1 placebo"
    (repo / "run.sh").write_text(CLEAN)
    result = check("run.sh")
    assert (result.exit_code, result.stdout) == (0, "no findings in 1 file\n")


def test_json(repo: Path, check: Callable[..., Any]) -> None:
    result = check("--format", "json", ".")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)
    assert set(first) == {"file", "line", "column", "rule", "severity", "message", "fix", "docs"}
    assert (first["file"], first["line"], first["rule"], first["severity"]) == ("run.sh", 3, "DDP553", "placebo")
    assert second["docs"].endswith("docs/check.md#ddp450")
    (repo / "run.sh").write_text(CLEAN)
    assert json.loads(check("--format", "json").stdout) == json.loads(check("--json").stdout) == []
    both = check("--json", "--format", "sarif")
    assert both.exit_code == 2
    assert "ask for different things" in json.loads(both.stdout)["error"]["message"]


def test_sarif(repo: Path, check: Callable[..., Any]) -> None:
    """By structure: the properties that the standard requires, and the indices that must fit each other."""
    (repo / "a b.sh").write_text(SCRIPT)
    report = json.loads(check("--format", "sarif").stdout)
    assert (report["version"], set(report)) == ("2.1.0", {"$schema", "version", "runs"})
    (run,) = report["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert [rule["id"] for rule in rules] == ["DDP450", "DDP553"]
    assert all(rule["helpUri"].startswith("https://") for rule in rules)
    assert len(run["results"]) == 4
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] in ("run.sh", "a%20b.sh")
        assert place["region"]["startLine"] in (3, 4)


# What each object of the report must have, and may have besides: of the properties of SARIF 2.1.0 those that are used
# here, and of GitHub's "SARIF support for code scanning" those that an upload needs (three texts for each rule, and
# the first line of a result's place, in a file whose path is relative to the repository). Held once against the schema
# of OASIS (112 kB, which are not kept here): sarif-2.1/schema/sarif-schema-2.1.0.json of oasis-tcs/sarif-spec.
OBJECTS: dict[str, tuple[set[str], set[str]]] = {
    "log": ({"$schema", "version", "runs"}, set()),
    "run": ({"tool", "results"}, set()),
    "tool": ({"driver"}, set()),
    "driver": ({"name", "rules"}, {"version", "informationUri"}),
    "rule": ({"id", "shortDescription", "fullDescription", "help"}, {"name", "helpUri", "properties"}),
    "text": ({"text"}, set()),
    "result": ({"message", "locations", "ruleId"}, {"ruleIndex", "level"}),
    "location": ({"physicalLocation"}, set()),
    "place": ({"artifactLocation", "region"}, set()),
    "file": ({"uri"}, set()),
    "region": ({"startLine"}, {"startColumn"}),
}


def assert_is(kind: str, held: dict[str, Any]) -> dict[str, Any]:
    must, may = OBJECTS[kind]
    assert must <= set(held) <= must | may, (kind, sorted(held))
    return held


def test_sarif_has_what_an_upload_to_github_needs(repo: Path, check: Callable[..., Any]) -> None:
    (repo / "a b.sh").write_text(SCRIPT)
    text = check("--format", "sarif").stdout
    report = assert_is("log", json.loads(text))
    assert report["$schema"].endswith("sarif-schema-2.1.0.json")
    (run,) = (assert_is("run", one) for one in report["runs"])
    driver = assert_is("driver", assert_is("tool", run["tool"])["driver"])
    ids = [assert_is("rule", rule)["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids) == 2
    for rule in driver["rules"]:
        texts = [assert_is("text", rule[name])["text"] for name in ("shortDescription", "fullDescription", "help")]
        assert all(0 < len(one) <= 1024 for one in texts)
    assert len(run["results"]) == 4
    for result in run["results"]:
        assert assert_is("result", result)["ruleId"] in ids
        assert assert_is("text", result["message"])["text"].strip()
        (location,) = result["locations"]
        place = assert_is("place", assert_is("location", location)["physicalLocation"])
        uri = assert_is("file", place["artifactLocation"])["uri"]
        assert ":" not in uri
        assert not uri.startswith("/")
        region = assert_is("region", place["region"])
        assert min(region.values()) >= 1
        assert all(type(number) is int for number in region.values())


def test_github(repo: Path, check: Callable[..., Any]) -> None:
    (repo / "a,b%.sh").write_text(SCRIPT)
    first, _, third, _ = check("--format", "github").stdout.splitlines()
    assert first.startswith("::warning file=a%2Cb%25.sh,line=3,col=8,title=DDP553 placebo::Nothing reads NCCL_TIMEOUT")
    assert third.startswith("::warning file=run.sh,line=3,")


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--select", "DDP553"], ["DDP553"]),
        (["--select", "DDP4"], ["DDP450"]),
        (["--select", "unread-variable,slow"], ["DDP553", "DDP450"]),
        (["--ignore", "placebo"], ["DDP450"]),
        (["--select", "DDP", "--ignore", "DDP4", "--ignore", "DDP5"], []),
    ],
)
def test_selection(repo: Path, check: Callable[..., Any], words: list[str], left: list[str]) -> None:
    result = check("--format", "json", *words)
    assert rules_of(result) == left
    assert result.exit_code == (1 if left else 0)


def test_pyproject(repo: Path, check: Callable[..., Any]) -> None:
    (repo / "pyproject.toml").write_text('[tool.ddp-scaffold.check]\nignore = [\n  "DDP553", # on purpose\n]\n')
    assert rules_of(check("--format", "json")) == ["DDP450"]
    (repo / "sub").mkdir()
    shutil.move(repo / "run.sh", repo / "sub" / "run.sh")
    assert rules_of(check("--format", "json", "sub")) == ["DDP450"]
    assert rules_of(check("--format", "json", "--ignore", "DDP4")) == ["DDP553"]  # the command line wins
    (repo / "pyproject.toml").write_text('[tool.ddp-scaffold.check]\nexclude = ["x"]\n')
    result = check()
    assert result.exit_code == 2
    assert "there is no exclude" in result.stderr


@pytest.mark.parametrize(
    ("comment", "count"),
    [
        ("# ddp: ignore[DDP553]", 1),
        ("# ddp: ignore[unread-variable, DDP450]", 1),
        ("# ddp: ignore", 1),
        ("# ddp: ignore[DDP450]", 2),
    ],
)
def test_ignored_in_the_line(repo: Path, check: Callable[..., Any], comment: str, count: int) -> None:
    line = "export NCCL_TIMEOUT=1800"
    (repo / "run.sh").write_text(SCRIPT.replace(line, f"{line}  {comment}"))
    assert len(rules_of(check("--format", "json"))) == count
    (repo / "run.sh").write_text(SCRIPT.replace(line, f"{comment}\n{line}"))
    assert len(rules_of(check("--format", "json"))) == count


@pytest.mark.parametrize("words", [["nowhere"], ["--select", "DDP999"], ["--format", "xml"], ["--variables", "."]])
def test_errors(repo: Path, check: Callable[..., Any], words: list[str]) -> None:
    result = check(*words)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert "Traceback" not in result.output


UNFIXED = """\
#!/bin/bash
export NCCL_TIMEOUT=1800
export NCCL_DEBUG = WARN
export NCCL_BLOCKING_WAIT=0
if [ "$1" = x ]; then
  export NCCL_LL_THRESHOLD=0
fi
export A=1 NCCL_SOCKET_TIMEOUT=2
python -m torch.distributed.launch --use_env --nproc_per_node=2 train.py
python -m torch.distributed.launch --nproc_per_node=2 train.py
"""
FIXED = """\
#!/bin/bash
export NCCL_DEBUG=WARN
export TORCH_NCCL_BLOCKING_WAIT=0
if [ "$1" = x ]; then
  export NCCL_LL_THRESHOLD=0
fi
export A=1 NCCL_SOCKET_TIMEOUT=2
torchrun --nproc_per_node=2 train.py
python -m torch.distributed.launch --nproc_per_node=2 train.py
"""


def test_fix(repo: Path, check: Callable[..., Any]) -> None:
    """What could need a decision stays: the only line of an `if`, a second assignment, a launch without --use_env."""
    script = repo / "run.sh"
    script.write_text(UNFIXED)
    script.chmod(0o751)
    (repo / "pyproject.toml").write_text('[project]\ndependencies = ["torch>=2.4"]\n')
    before = rules_of(check("--format", "json"))
    result = check("--fix")
    assert result.exit_code == 1
    assert script.read_text() == FIXED
    assert script.stat().st_mode & 0o777 == 0o751
    left = rules_of(check("--format", "json"))
    assert sorted(left) == ["DDP553", "DDP554", "DDP653"]
    assert set(before) - set(left) == {"DDP559", "DDP655"}
    assert set(FIXES) <= {one.rule.id for one in all_rules()}
    assert sorted(path.name for path in repo.iterdir()) == ["pyproject.toml", "run.sh"]


def test_fix_leaves_other_line_ends_alone(repo: Path, check: Callable[..., Any]) -> None:
    crlf = UNFIXED.replace("\n", "\r\n").encode()
    (repo / "run.sh").write_bytes(crlf)
    assert check("--fix").exit_code == 1
    assert (repo / "run.sh").read_bytes() == crlf


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """An environment with what is looked at of a torch: a version, a library, a source."""
    folder = tmp_path / "env/lib/python3.11/site-packages/torch"
    (folder / "lib").mkdir(parents=True)
    (folder / "distributed").mkdir()
    (folder / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    return folder


def names(version: str) -> str:
    from ddp_scaffold.check.variables import load_table, release

    rows = load_table().variables.values()
    return "\n".join(row.name for row in rows if row.read_by == "torch" and release(row.since) <= release(version))


def test_the_table_against_a_torch(torch: Path, tmp_path: Path, check: Callable[..., Any]) -> None:
    library = torch / "lib" / "libtorch_cpu.so"
    library.write_bytes(b"\x7fELF\x00" + names("2.13").replace("\n", "\x00").encode() + b"\x00")
    result = check("--variables", str(tmp_path / "env"))
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "nothing differs")
    assert "not checked: what NCCL reads" in result.stdout
    library.write_bytes(library.read_bytes().replace(b"\x00USE_LIBUV\x00", b"\x00XUSE_LIBUV\x00"))
    (torch / "distributed" / "new.py").write_text('os.environ["NCCL_TIMEOUT"]\n')
    result = check("--variables", "--format", "json", str(torch))
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["torch"] == "2.13.0+cpu"
    assert sorted(line["name"] for line in found["differences"]) == ["NCCL_TIMEOUT", "USE_LIBUV"]


def test_the_page_explains_every_rule() -> None:
    page = (ROOT / "docs/check.md").read_text()
    for one in all_rules():
        row = f'| <a id="{one.rule.id.lower()}"></a>{one.rule.id} | `{one.rule.name}` | {one.rule.severity} |'
        assert row in page, one.rule.id


def test_the_hook_names_a_command_that_exists(repo: Path, check: Callable[..., Any]) -> None:
    import yaml

    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook["entry"] == "ddp-scaffold check"
    assert check("run.sh", *hook.get("args", [])).exit_code == 1
