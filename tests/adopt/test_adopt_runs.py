"""Adopted repositories at work, with real torch: the user's command, the advice followed, our tests, an update."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from adopt_repos import FLAT, FLAT_CHANGED, OWN_TESTS, SRC
from git_helpers import git

from ddp_scaffold import __version__
from ddp_scaffold.adopting.advice import advise
from ddp_scaffold.adopting.sketch import sketch

SETTINGS = {"NPROC": "2", "MAX_RESTARTS": "0", "OMP_NUM_THREADS": "1", "DDP_RUN__ID": "one"}


def launch(directory: Path, *args: str, code: int = 0, **settings: str) -> str:
    """Run launch/torchrun.sh with two processes and return what it printed."""
    pytest.importorskip("torch")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DDP_", "PYTHONPATH"))}
    environment |= SETTINGS | settings
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = ["bash", "-c", 'bash launch/torchrun.sh "$@" 2>&1', "launch", *args]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    return done.stdout


def outcome(directory: Path) -> dict[str, object]:
    return dict(json.loads((directory / "runs/one/outcome.json").read_text()))


def test_the_user_s_script_is_what_launch_starts(repository, adopt):
    directory = repository("mnist", FLAT)
    adopt()
    script = directory / "train.py"
    shown = "rank = dist.get_rank(); print(f'{args} {rank}\\n', end='')"
    script.write_text(script.read_text().replace("rank = dist.get_rank()", shown))
    told = launch(directory, "--epochs", "1")
    assert {f"Namespace(epochs=1) {rank}" for rank in (0, 1)} <= set(re.findall(r"Namespace\(epochs=1\) \d", told))
    assert "no outcome.json, and the launcher ended with 0; exit code 0" in told


@pytest.mark.slow  # `make test-update` runs it
def test_the_changed_script_trains_stops_and_goes_on(repository, adopt):
    directory = repository("mnist", FLAT)
    told = json.loads(adopt("--json").stdout)
    assert [change["line"] for change in told["changes"] if change["must"]] == [46, 25, 42, 32, 34]
    (directory / "train.py").write_text(FLAT_CHANGED)
    left = advise(directory, ["train.py", "model.py"], "train.py", ".", "mnist").changes
    assert [change for change in left if change.must] == [], "the same by hand, without the helpers of the patch"
    stopped = launch(directory, "--epochs", "40", code=75, DDP_FAULTS="term@rank=1,step=12", DDP_PREEMPT__POLL_S="0.1")
    assert "stopped" in stopped
    assert outcome(directory)["outcome"] == "stopped"
    line = stopped.rstrip().splitlines()[-1]
    assert line.endswith("launch/torchrun.sh --epochs 40")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", line], cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from" in done.stderr
    assert outcome(directory)["outcome"] == "done"


def test_preflight_where_configs_hold_something_else(repository, adopt):
    directory = repository("lab", SRC)
    adopt("--set", "collective_timeout_s=100")
    session = "from .ddp.session import session\nfrom .ddp.variables import read_variables\n\n"
    body = "ddp, rows = read_variables()\nwith session(ddp.run, ddp.clocks, ddp.log, ddp.preempt, rows) as run:\n"
    body += "    print(f'rank {run.job.rank} is here\\n', end='')\n"
    (directory / "src/vision_lab/train.py").write_text(session + body)
    told = launch(directory, "--config", "configs/train.yaml", "--lr", "3", PREFLIGHT="1", DDP_BACKEND="mine")
    assert "rank 1 is here" in told
    assert "clocks.collective_s     100" in told
    assert "preflight" in told
    assert outcome(directory)["outcome"] == "done"
    wrong = launch(directory, code=78, DDP_CLOCKS__STAL_S="3")
    assert "clocks.stal_s (from DDP_CLOCKS__STAL_S): is not a known setting" in wrong


def test_the_sketch_runs_when_it_is_filled_in(repository, adopt):
    directory = repository("mnist", FLAT)
    adopt()
    text = "\n".join(sketch("mnist")).replace("build_model()", "zoo.build()").replace("(dataset", "(zoo.train_set()")
    text = text.replace("EPOCHS", "3").replace("evaluate(network)", "print('evaluated')")
    text = text.replace("loss_of(model, batch)", "torch.nn.functional.mse_loss(model(batch[0]), batch[1])")
    head = "import torch\nfrom torch.nn.parallel import DistributedDataParallel\n"
    head += "from torch.utils.data import DataLoader, DistributedSampler\nimport model as zoo\n"
    (directory / "train.py").write_text(f"{head}{text}\n\nmain()\n")
    assert launch(directory, DDP_CHECKPOINT__EVERY_STEPS="5").count("evaluated") == 3
    assert sorted(path.name for path in (directory / "runs/one/checkpoints").iterdir()) == [
        "step_00000010",
        "step_00000012",
    ]


@pytest.mark.parametrize(
    ("files", "some"),
    [(FLAT, "not runs"), (OWN_TESTS, "mine or watching or exception")],
    ids=["flat", "own-tests-and-importlib"],
)
def test_our_tests_pass_there_beside_the_user_s(repository, adopt, files, some):
    pytest.importorskip("torch")
    directory = repository("lab", files)
    adopt()
    done = run_tests(directory, "-k", some)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d\d passed", done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_of_our_tests_pass_there(repository, adopt):
    pytest.importorskip("torch")
    directory = repository("lab", SRC)
    adopt()
    done = run_tests(directory, "tests")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("preset", ["local", "generic-slurm", "generic-pbs", "tacc-vista"])
def test_what_is_rendered_is_clean(repository, adopt, preset):
    directory = repository("lab", SRC)
    adopt("--preset", preset)
    scripts = [*directory.glob("launch/*.sh"), *directory.glob("launch/train.*")]
    assert all("{{" not in path.read_text() for path in scripts)
    job = next((path for path in scripts if path.name.startswith("train.")), directory / "launch/torchrun.sh")
    assert "-m vision_lab.train" in job.read_text()
    assert "-m vision_lab.ddp.preflight --config /dev/null" in job.read_text()
    if shutil.which("shellcheck"):
        names = [path.relative_to(directory) for path in scripts]
        done = subprocess.run(["shellcheck", "-x", *names], cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
    rules = "E,F,W,I,UP,B,SIM,RUF,PT,C4,PIE"
    for check in (["check", f"--select={rules}", "--ignore=RUF001,RUF002,RUF003"], ["format", "--check"]):
        config = ["--isolated", "--config", "line-length=120", "--config", "src=['src']"]
        ruff = [sys.executable, "-m", "ruff", *check, *config]
        where = ["src/vision_lab/ddp", "tests/ddp", "launch"]
        done = subprocess.run([*ruff, *where], cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_an_update_keeps_to_our_files(repository, cli, template_repo, tmp_path):
    """Also where the user's .gitattributes stayed, where a file of ours was removed, and with plain copier."""
    import copier

    template = tmp_path / "template"
    subprocess.run(["git", "clone", "--quiet", template_repo, template], check=True)
    directory = repository("own", OWN_TESTS | {"README.md": "mine\n", "src/own/model.py": "mine\n"})
    adopted = cli("new", ".", "--into-existing", "-y", "--template", str(template))
    assert adopted.exit_code == 0, adopted.output
    (directory / "tests/ddp/test_ddp_loader.py").unlink()
    git(directory, "add", "--all", "--force")
    git(directory, "commit", "--quiet", "--message", "Adopt")
    before = tracked(directory)

    changed = next(template.glob("templates/project/*/*/ddp/start/launcher.py"))
    changed.write_text(changed.read_text() + "# newer\n")
    (template / "templates/project/.gitattributes").write_text("*.sh text eol=lf\n*.new text\n")
    for name in ("README.md.jinja", "Makefile.jinja"):
        path = template / "templates/project" / name
        path.write_text(path.read_text() + "newer\n")
    git(template, "commit", "--quiet", "--all", "--message", "Newer")
    git(template, "tag", "--annotate", "--message", "Newer", "v99.0.0")

    copier.run_update(str(directory), overwrite=True, defaults=True, quiet=True)
    assert git(directory, "status", "--porcelain").split() == [
        "M",
        ".copier-answers.yml",
        "M",
        "src/own/ddp/start/launcher.py",
    ]
    git(directory, "checkout", "--quiet", ".")
    assert tracked(directory) == before
    result = cli("update", "-y", "--template", str(template))
    assert result.exit_code == 0, result.output
    after = tracked(directory)
    assert after.keys() == before.keys()
    assert {path for path in before if after[path] != before[path]} == {
        ".copier-answers.yml",
        "src/own/ddp/start/launcher.py",
    }
    assert "_commit: v99.0.0" in after[".copier-answers.yml"]
    assert "code: existing" in after[".copier-answers.yml"]
    assert f"v{__version__}" in before[".copier-answers.yml"]


def run_tests(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run pytest there, as the user does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def tracked(directory: Path) -> dict[str, str]:
    names = filter(None, git(directory, "ls-files", "-z").split("\0"))
    return {name: (directory / name).read_text() for name in names if (directory / name).exists()}
