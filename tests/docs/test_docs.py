"""The documentation is true: it builds, its commands run and print what it shows, its tables are what the code has."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RUN, OUTPUT = "{ .bash .run }", "{ .text .output }"
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
END_OF_BLOCK = "@@ end of block @@"
OUTCOMES = {"done", "failed", "stalled", "stopped", "config"}
PRESETS = ("list", "show", "check", "init", "diff", "probe", "schema")
LEAF_COMMANDS = ["new", "update", "check", "doctor", "explain", *(f"presets {name}" for name in PRESETS)]


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def section(page: str, heading: str) -> str:
    """The text below a heading, to the next one of the same or a higher level."""
    marks = heading.split()[0]
    pattern = rf"^{re.escape(heading)}$\n(.*?)(?=^#{{1,{len(marks)}}} |\Z)"
    found = re.search(pattern, text(page), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no heading {heading!r}"
    return found[1]


def rows(markdown: str) -> list[list[str]]:
    """The cells of every table row but the heads."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    heads = {number - 1 for number, line in enumerate(lines) if re.fullmatch(r"[|\s:-]+", line)}
    body = (line for number, line in enumerate(lines) if number not in heads and number - 1 not in heads)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def codes(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def outcomes(cell: str) -> set[str]:
    """The outcomes in a cell that holds nothing else: `failed or stalled`."""
    words = set(cell.replace("`", "").split(" or "))
    return words if words <= OUTCOMES else set()


# ------------------------------------------------------------------------------------------------------ the site


class Loaded(HTMLParser):
    """What a browser fetches by itself for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag in ("script", "img", "iframe"):
            self.addresses.append(attributes.get("src") or "")
        if tag == "link" and attributes.get("rel") not in ("canonical", "prev", "next"):
            self.addresses.append(attributes.get("href") or "")


def test_the_site_builds_strictly_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs mkdocs-material: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert built.returncode == 0, built.stderr
    site = tmp_path / "site"
    pages = list(site.rglob("*.html"))
    written = {page.relative_to(site).with_suffix("") for page in pages}
    assert written >= {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")}
    assert not list(site.rglob("*.py"))
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        remote = [address for address in loaded.addresses if re.match(r"(https?:)?//", address)]
        assert not remote, f"{page.name} loads {remote}"
    assert '<td><code class="name">clocks.collective_s</code></td>' in (site / "settings.html").read_text()
    assert '<td class="name">' in (site / "clusters" / "index.html").read_text(), "a day is not broken in two"
    assert (site / "search" / "search_index.js").is_file(), "the search works from disk"


# -------------------------------------------------------------------------------------------- commands that are run


@dataclass(frozen=True)
class Block:
    """A command block of a page, and the lines that must appear in its output, in their order."""

    script: str
    expected: list[str]


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    for fence in FENCE.finditer(text(page)):
        if fence["info"].strip() == RUN:
            found.append(Block(fence["body"], []))
        elif fence["info"].strip() == OUTPUT:
            assert found, f"{page}: an output stands before every command"
            found[-1].expected.extend(line for line in fence["body"].splitlines() if line.strip())
    return found


Executed = Callable[[str], tuple[Path, list[str]]]
PAGES = sorted(page.name for page in DOCS.glob("*.md") if RUN in page.read_text(encoding="utf-8"))

# `make test-more` runs them.
LONG_PAGES = {"quickstart.md", "updating.md", "faults.md", "command-line.md", "presets.md"}


@pytest.fixture(scope="session")
def executed(template_repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Executed:
    """`executed(page)` runs a page's commands once, in one shell; returns its directory and each block's output."""
    pytest.importorskip("torch", reason="the commands train")
    shim = tmp_path_factory.mktemp("bin") / "ddp-scaffold"
    shim.write_text(f'#!/bin/sh\nPYTHONPATH={template_repo}/scaffold exec "{sys.executable}" -m ddp_scaffold "$@"\n')
    shim.chmod(0o755)
    ours = ("DDP_", "SLURM_", "TORCH", "NCCL_", "GLOO_", "OMP_", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    for name in ("NPROC", "NNODES", "NODE_RANK", "MAX_RESTARTS", "VENV", "PYTHONPATH"):
        environment.pop(name, None)
    environment["PATH"] = os.pathsep.join([str(shim.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment |= {"COLUMNS": "120", "CUDA_VISIBLE_DEVICES": ""}  # two processes on the CPU, everywhere alike
    done: dict[str, tuple[Path, list[str]]] = {}

    def run(page: str) -> tuple[Path, list[str]]:
        if page not in done:
            directory = tmp_path_factory.mktemp(page.removesuffix(".md"))
            script = "".join(f"{block.script}echo '{END_OF_BLOCK}'\n" for block in blocks(page))
            ended = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", f"exec 2>&1\n{script}"],
                cwd=directory,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=False,
                timeout=280,
            )
            assert ended.returncode == 0, ended.stdout
            done[page] = directory, ended.stdout.split(f"{END_OF_BLOCK}\n")[:-1]
        return done[page]

    return run


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in LONG_PAGES else []) for page in PAGES]
)
def test_commands_run_and_print_what_the_page_shows(executed: Executed, page: str) -> None:
    _, outputs = executed(page)
    assert len(outputs) == len(blocks(page))
    for block, output in zip(blocks(page), outputs, strict=True):
        lines = iter(output.splitlines())
        for expected in block.expected:
            pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
            assert any(re.fullmatch(pattern, line.strip()) for line in lines), f"{expected!r} is not next in\n{output}"


# --------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("command", ["", *LEAF_COMMANDS])
def test_flags_are_those_of_the_command(command: str) -> None:
    """Both ways: no flag is invented, and none is left out. `--help` is described once, for all commands."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scaffold"), "COLUMNS": "200"}
    shown = subprocess.run(
        [sys.executable, "-m", "ddp_scaffold", *command.split(), "--help"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    options = shown.partition("Options:")[2].partition("Commands:")[0]
    heads = re.findall(r"^  (?:-\w, )?(--[a-z-]+(?: / --[a-z-]+)?)", options, re.MULTILINE)
    exist = {flag for head in heads for flag in head.split(" / ")}
    documented = section("command-line.md", f"## `{f'ddp-scaffold {command}'.strip()}`")
    described = {name for row in rows(documented) for name in codes(row[0]) if name.startswith("--")}
    assert described | {"--help"} == exist


def test_every_command_has_its_section() -> None:
    import typer.main

    from ddp_scaffold.cli import app

    def leaves(command: Any, path: str = "") -> Iterator[str]:
        for name, child in getattr(command, "commands", {}).items():
            yield from leaves(child, f"{path} {name}".strip())
        if not hasattr(command, "commands"):
            yield path

    assert sorted(leaves(typer.main.get_command(app))) == sorted(LEAF_COMMANDS)


def test_questions_and_json_keys_are_those_of_the_template(template_repo: Path, tmp_path: Path) -> None:
    from ddp_scaffold.template.questions import load_questions

    questions = load_questions((ROOT / "copier.yml").read_text("utf-8"), lambda path: (ROOT / path).read_text("utf-8"))
    asked = {name for name, question in questions.items() if not question.computed}
    described = [name for row in rows(section("command-line.md", "### Questions")) for name in codes(row[0])]
    assert sorted(described) == sorted(asked)

    environment = {**os.environ, "PYTHONPATH": str(template_repo / "scaffold")}
    command = [sys.executable, "-m", "ddp_scaffold", "new", "demo", "--json", "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    keys = [codes(row[0])[0] for row in rows(section("command-line.md", "### The JSON object"))]
    assert sorted(keys) == sorted(json.loads(done.stdout))


def test_preset_fields_are_those_of_the_schema() -> None:
    from ddp_scaffold.presets.schema import EnvLine, Preset

    fields, lines = section("presets.md", "## Fields").split("### Lines of environment files")
    described = {name: row[2] == "yes" for row in rows(fields) for name in codes(row[0])}
    assert described == {name: field.is_required() for name, field in Preset.model_fields.items()}
    assert {name for row in rows(lines) for name in codes(row[0])} == set(EnvLine.model_fields)


# ------------------------------------------------------------------------------------------- the generated project

SETTING = re.compile(r"(run|train|model|data|eval|sample|loader|checkpoint|log|clocks|preempt)\.[a-z_]+")
DESCRIBE = """
import json
from demo.config import Settings
from typing import get_args
from demo.ddp import clocks, errors, faults, kinds
from demo.ddp.start import settings as s
paths = [list(path) for path in s._fields(Settings)]
defaults = {name: value for name, value, _ in s.effective(*s.load(Settings, []))}
missing = {".".join(path) for path in paths} - set(defaults)
print(json.dumps({
    "settings": defaults | {name: str(getattr(clocks.Clocks(), name.split(".")[1])) for name in missing},
    "variables": [s.variable(Settings, path) for path in paths] + sorted(s.OTHER_VARIABLES),
    "clocks": list(clocks.Clocks.model_fields),
    "limits": clocks.PHASES,
    "codes": errors.OUTCOMES,
    "kinds_of_end": {
        name: {errors.OUTCOMES[code]: text for code, text in end.meanings.items()} for name, end in kinds.KINDS.items()
    },
    "kind_names": list(get_args(errors.KindName)),
    "kinds": list(faults.KINDS),
    "worker_kinds": list(faults.WORKER_KINDS),
    "options": faults.DEFAULTS,
    "phases": faults.PHASES,
}))
"""


@pytest.fixture(scope="session")
def project(render: Callable[..., Path]) -> Path:
    return render()


@pytest.fixture(scope="session")
def described_by_code(project: Path) -> dict[str, Any]:
    """Settings, variables, clocks, phases, exit codes and faults. A setting that is an empty mapping has no row."""
    pytest.importorskip("torch", reason="the settings are in modules that import it")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    environment["PYTHONPATH"] = str(project / "src")
    command = [sys.executable, "-c", DESCRIBE]
    shown = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(shown.stdout))


def test_settings_and_their_defaults_are_those_of_a_rendered_project(described_by_code: dict[str, Any]) -> None:
    table = [row for row in rows(text("settings.md")) if SETTING.fullmatch(codes(row[0])[0])]
    assert {codes(row[0])[0]: (codes(row[1]) or [""])[0] for row in table} == described_by_code["settings"]


def test_settings_and_variables_named_anywhere_exist(described_by_code: dict[str, Any], project: Path) -> None:
    settings, variables = described_by_code["settings"], described_by_code["variables"]
    for page in [*DOCS.glob("*.md"), project / "README.md"]:
        words = re.sub(r".* is not a setting", "", page.read_text(encoding="utf-8"))  # what is said of a misspelt one
        named = [code for code in codes(words) if SETTING.fullmatch(code)]
        named += re.findall(r"--((?:[a-z]+)\.[a-z_]+)", words)
        files = (".py", ".yaml", ".sbatch", ".pt")
        unknown = {name for name in named if name not in settings and not name.endswith((*files, ".key"))}
        assert not unknown, f"{page.name}: no such setting {unknown}"
        named = re.findall(r"\bDDP_(?!SCAFFOLD)[A-Z_]+[A-Z]\b", words)
        assert not set(named) - set(variables), f"{page.name}: nothing reads {set(named) - set(variables)}"


def test_the_readme_of_a_project_leads_to_what_exists(project: Path) -> None:
    """Pages with their headings, files, and commands: it is what people read first, and mostly all that they read."""
    readme = (project / "README.md").read_text()
    assert len(readme.splitlines()) <= 90, "answers are found in seconds"
    links = dict(re.findall(r"^\[(.+)\]: .*/blob/main/docs/(\S+)$", readme, re.MULTILINE))
    prose = re.sub(r"`[^`]*`", "", FENCE.sub("", readme))
    used = re.findall(r"\[([^]\[]+)\](?:\[([^]]+)\])?(?!:)", prose)
    assert {(label or shown).lower() for shown, label in used} == set(links)
    for link in links.values():
        page, _, anchor = link.partition("#")
        headings = re.findall(r"^#+ (.*)$", text(page), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, link
    for name in re.findall(r"\b(?:launch|configs|src|tests)/[\w/.]*", readme):
        assert (project / name).exists(), name
    for name in re.findall(r"python -m (demo\S*?)`? ", readme):
        module = project / "src" / Path(*name.split("."))
        assert "__main__" in module.with_suffix(".py").read_text() or (module / "__main__.py").exists(), name


def test_faults_are_those_of_the_code(described_by_code: dict[str, Any]) -> None:
    tables = re.split(r"^(?=\| (?:kind|option) )", section("faults.md", "## DDP_FAULTS"), flags=re.MULTILINE)
    ranks, workers, options = tables[1:]
    assert sorted(name for row in rows(ranks) for name in codes(row[0])) == sorted(described_by_code["kinds"])
    assert sorted(name for row in rows(workers) for name in codes(row[0])) == sorted(described_by_code["worker_kinds"])
    assert {codes(row[0])[0]: codes(row[1])[0] for row in rows(options)} == described_by_code["options"]


def test_the_matrix_is_that_of_the_project(project: Path) -> None:
    """Each row says where its cases are run; the rows without a case need two hosts."""
    cases = runpy.run_path(str(project / "tests/matrix/cases.py"))["cases"]()
    described = {int(row[0]): set(codes(row[3])) for row in rows(section("faults.md", "### What each row must do"))}
    assert set(described) == set(range(26))
    for number, places in described.items():
        mine = [case for case in cases if case.row == number]
        if number > 22 and not mine:  # what people have reported: a file of cases (reports_*.yaml) that is not there
            continue
        assert ("cpu" in places) == bool(mine), f"row {number}"
        assert ("cuda" in places) == any(case.gpu for case in mine), f"row {number}"
        assert mine or places == {"slurm"}, f"row {number}"

    shown = subprocess.run(
        [sys.executable, "tests/matrix/run.py", "--help"], cwd=project, capture_output=True, text=True, check=True
    ).stdout
    options = {row[0].strip("`") for row in rows(section("faults.md", "## The matrix")) if row[0].startswith("`--")}
    assert options == set(re.findall(r"^  (--[a-z]+)", shown, re.MULTILINE))


# --------------------------------------------------------------------------------------------------- when it fails


def test_every_clock_has_its_row(described_by_code: dict[str, Any]) -> None:
    settings = described_by_code["settings"]
    table = {codes(row[0])[0]: codes(row[1])[0] for row in rows(section("when-it-fails.md", "## Clocks"))}
    assert table == {f"clocks.{name}": settings[f"clocks.{name}"] for name in described_by_code["clocks"]}


def test_every_phase_has_its_row(described_by_code: dict[str, Any], project: Path) -> None:
    """Those that faults and limits may name, and those that the code enters."""
    described = [codes(row[0])[0] for row in rows(section("when-it-fails.md", "## Phases"))]
    assert sorted(described) == sorted([*described_by_code["phases"], "guard:<name>", "wait:<name>", "wait:end"])
    assert set(described_by_code["limits"]) < set(described)
    entered = {
        name
        for path in (project / "src/demo").rglob("*.py")
        for name in re.findall(r'\bphase\(f?"([^"{]+)', path.read_text())
    }
    assert entered <= set(described) | {"guard:", "wait:", "wait:compile", "name"}, entered


def test_every_exit_code_has_its_row(described_by_code: dict[str, Any]) -> None:
    exist = set(described_by_code["codes"].items())
    table = rows(section("when-it-fails.md", "## Exit codes"))
    assert {(codes(row[0])[0], codes(row[1])[0]) for row in table} == exist
    assert len(table) == len(exist)
    assert {(row[0], row[1]) for row in rows(section("launching.md", "## Exit codes"))} == exist


def test_the_tour_names_every_file(project: Path) -> None:
    tour = text("tour.md")
    schedulers = {"train.sbatch", "train.pbs", "site.sh", "task.sh", "node.sh"}
    schedulers |= {"jobset.yaml", "trainjob.yaml", "kube.py", "pod.sh", "Dockerfile", "Dockerfile.dockerignore"}
    schedulers |= {"train.sky.yaml", "sky.sh", "bucket.py", "nodes.py"}
    for folder in ("src/demo", "launch", "launch/env", "configs"):
        names = {path.name for path in (project / folder).iterdir() if path.is_file()} - {"__init__.py"}
        missing = {name for name in names if name not in tour}
        assert not missing, f"tour.md does not say what {missing} in {folder} is for"
    modules = [name for row in rows(section("tour.md", "## The template's: `ddp/`")) for name in codes(row[0])]
    ddp = project / "src/demo/ddp"
    exist = {path.relative_to(ddp).as_posix() for path in ddp.rglob("*.py") if path.name != "__init__.py"}
    assert sorted(modules) == sorted(exist)
    scripts = {name for row in rows(section("tour.md", "## The template's: `launch/`")) for name in codes(row[0])}
    launch = project / "launch"
    exist = {path.relative_to(launch).as_posix() for path in launch.rglob("*") if path.is_file()}
    assert scripts == exist | schedulers


# ------------------------------------------------------------------------------------------------ the run directory


@pytest.fixture(scope="session")
def runs(executed: Executed) -> Path:
    """The run directories that the quickstart leaves: `first`, stopped and resumed, and `hang`."""
    return executed("quickstart.md")[0] / "digits" / "runs"


def matching(entry: str) -> re.Pattern[str]:
    """`logs/rank<N>.log` matches logs/rank12.log; a name that ends in / matches all that is below it."""
    parts = re.split(r"(<[^>]*>)", entry)
    pattern = "".join(r"[^/]+" if part.startswith("<") else re.escape(part) for part in parts)
    return re.compile(pattern + (".*" if entry.endswith("/") else ""))


@pytest.mark.slow  # `make test-more` runs it
@pytest.mark.timeout(300)
def test_files_are_those_of_a_real_run(runs: Path) -> None:
    ended = [runs / "first", runs / "hang", *(runs / "fast-dev-run").iterdir()]
    files = {path.relative_to(run).as_posix() for run in ended for path in run.rglob("*") if path.is_file()}
    always, sometimes = section("run-directory.md", "## Files").split("Not in every run:")
    promised = [codes(row[0])[0] for row in rows(always)]
    for entry in promised:
        assert any(matching(entry).fullmatch(file) for file in files), f"no run has left {entry}"
    described = [matching(entry) for entry in promised + [codes(row[0])[0] for row in rows(sometimes)]]
    unexplained = {file for file in files if not any(pattern.fullmatch(file) for pattern in described)}
    assert not unexplained


@pytest.mark.slow  # `make test-more` runs it
@pytest.mark.timeout(300)
def test_fields_are_those_of_a_real_run(runs: Path) -> None:
    def fields(heading: str) -> set[str]:
        return {name for row in rows(section("run-directory.md", heading)) for name in codes(row[0])}

    outcome = json.loads((runs / "hang" / "outcome.json").read_text())
    names = {codes(row[0])[0] for row in rows(section("run-directory.md", "## outcome.json")) if not outcomes(row[1])}
    assert names == set(outcome)

    events = [json.loads(line) for line in (runs / "first" / "attempts.jsonl").read_text().splitlines()]
    start = {codes(row[0])[0] for row in rows(section("run-directory.md", "## attempts.jsonl")) if row[1] != "end"}
    assert start == set(events[0])
    assert set(events[1]) == names | {"event"}

    beat = json.loads((runs / "first" / "heartbeats" / "rank1.json").read_text())
    assert fields("## heartbeats") == set(beat)
    found = [json.loads(path.read_text()) for path in (runs / "first" / "checkpoints").glob("*/manifest.json")]
    manifest = {name: value for each in found for name, value in each.items()}  # that of a stop has no metric
    table = {codes(row[0])[0]: row[2] for row in rows(section("run-directory.md", "## manifest.json"))}
    assert set(table) == set(manifest)
    assert set(codes(table["counters"])) == set(manifest["counters"])


def test_kinds_are_those_of_the_code(described_by_code: dict[str, Any], project: Path) -> None:
    """kinds.py is the table: the reference has its texts, other pages the same kinds and outcomes; none is unused."""
    meanings = described_by_code["kinds_of_end"]
    assert described_by_code["kind_names"] == list(meanings)
    reference, advice = (
        [(codes(row[0])[0], outcomes(row[1]), row[2]) for row in rows(section(*place)) if outcomes(row[1])]
        for place in (("run-directory.md", "## outcome.json"), ("when-it-fails.md", "## Kinds"))
    )
    ends = {(kind, code, text) for kind, texts in meanings.items() for code, text in texts.items()}
    assert {(kind, code, text) for kind, ends_with, text in reference for code in ends_with} == ends
    assert {(kind, code) for kind, ends_with, _ in advice for code in ends_with} == {row[:2] for row in ends}
    plumbing = (project / "src/demo/ddp").rglob("*.py")
    written = "".join(path.read_text() for path in plumbing if path.name not in ("kinds.py", "errors.py"))
    assert [kind for kind in meanings if f'"{kind}"' not in written] == []
