"""Every rule on scripts and variables: files where it must fire, and look-alikes where it must not.

The cases of scripts stand in cases/scripts.txt: `=== DDP151 fires` begins one, and may name its file. `@job` and its
like stand for the usual beginnings below. The cases of variables are made from VARIABLES, in every form a file has.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from cross_section import every

from ddp_scaffold.check.files import SourceFile, collect, kind_of
from ddp_scaffold.check.findings import Finding
from ddp_scaffold.check.shell.files import check_scripts
from ddp_scaffold.check.shell.reader import read_script
from ddp_scaffold.check.shell.rules import SCRIPTS

ROOT = Path(__file__).parents[2]
BEGINNINGS = {
    "@job": "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=4",
    "@one": "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:4",
    "@cpus": "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --ntasks-per-node=1\n#SBATCH --cpus-per-task=16",
    "@signal": "#!/bin/bash\n#SBATCH --signal=B:USR1@120",
}
# rule -> variable, a value that is wrong, and one that is not
VARIABLES = {
    "DDP150": ("GLOO_SOCKET_IFNAME", "^lo", "eth0"),
    "DDP660": ("TORCH_NCCL_BLOCKING_WAIT", "1", "0"),
    "DDP661": ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "3"),
    "DDP161": ("NCCL_IB_TIMEOUT", "40", "22"),
    "DDP662": ("TORCH_NCCL_ENABLE_MONITORING", "0", "1"),
    "DDP164": ("TORCH_NCCL_DUMP_ON_TIMEOUT", "on", "1"),
    "DDP250": ("NCCL_PROTO", "Simple,LL128", "^LL128"),
    "DDP360": ("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1", "SIGTERM,SIGINT"),
    "DDP450": ("NCCL_P2P_DISABLE", "1", "0"),
    "DDP451": ("NCCL_SHM_DISABLE", "1", "0"),
    "DDP452": ("NCCL_IB_DISABLE", "1", "0"),
    "DDP453": ("CUDA_LAUNCH_BLOCKING", "1", "0"),
    "DDP454": ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "INFO"),
    "DDP456": ("NCCL_NVLS_ENABLE", "0", "2"),
    "DDP553": ("NCCL_TIMEOUT", "1800", None),
    "DDP554": ("NCCL_LL_THRESHOLD", "0", None),
    "DDP557": ("NCCL_DEBGU", "INFO", None),
    "DDP654": ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", "3"),
    "DDP656": ("TORCH_NCCL_ENABLE_TIMING", "1", "0"),
    "DDP657": ("NCCL_ALGO", "Ring", "^Tree"),
    "DDP658": ("TORCH_FR_BUFFER_SIZE", "0", "2000"),
    "DDP659": ("NCCL_IB_RETRY_CNT", "13", "7"),
}
FORMS = {
    "run.sh": "export {name}='{value}'\ntorchrun train.py\n",
    "prefix.sh": "{name}='{value}' torchrun train.py\n",
    "job.env": "{name}={value}\n",
    "train.py": 'import os\nos.environ["{name}"] = "{value}"\nmain(DistributedDataParallel)\n',
    "Dockerfile": "FROM pytorch\nENV {name}={value}\n",
    "pod.yaml": 'env:\n  - name: {name}\n    value: "{value}"\n',
}
LOOK_ALIKES = {
    "comment.sh": "# export {name}='{value}'\ntorchrun train.py\n",
    "heredoc.sh": "cat > notes <<'END'\nexport {name}={value}\nEND\n",
    "of_the_shell.sh": "{name}='{value}'\ntimeout ${name} make test\n",
    "read.py": 'import os\nlimit = os.environ["{name}"]\nprint("{value}")\n',
}


def cases() -> list[tuple[str, bool, str, str]]:
    found = []
    for part in (ROOT / "tests/check/cases/scripts.txt").read_text().split("=== ")[1:]:
        head, _, body = part.partition("\n")
        rule, fires, *name = head.split()
        for short, text in BEGINNINGS.items():
            body = body.replace(f"{short}\n", f"{text}\n")
        found.append((rule, fires == "fires", name[0] if name else "job.sh", body))
    return found


def found_in(**texts: str) -> list[Finding]:
    """What is found in files with these names and texts; `__` in a name is a dot."""
    named = {name.replace("__", "."): text for name, text in texts.items()}
    return check_scripts([SourceFile(name, text, kind_of(name), name) for name, text in named.items()])


@pytest.mark.parametrize(
    ("rule", "fires", "name", "text"),
    [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate(cases())],
)
def test_scripts(rule: str, fires: bool, name: str, text: str) -> None:
    found = [one for one in found_in(**{name.replace(".", "__"): text}) if one.rule == rule]
    assert bool(found) is fires
    for one in found:
        assert 1 <= one.line <= len(text.splitlines())
        assert one.message
        assert one.fix
        assert one.docs.endswith(f"#{rule.lower()}")


@pytest.mark.parametrize("rule", VARIABLES)
def test_variables(rule: str) -> None:
    name, wrong, right = VARIABLES[rule]
    for file, form in FORMS.items():
        if rule == "DDP557" and file in ("Dockerfile", "pod.yaml"):  # only names of the table are looked at there
            continue
        found = found_in(**{file.replace(".", "__"): form.format(name=name, value=wrong)})
        assert rule in {one.rule for one in found}, file
        if right is not None:
            found = found_in(**{file.replace(".", "__"): form.format(name=name, value=right)})
            assert rule not in {one.rule for one in found}, file
    for file, form in LOOK_ALIKES.items():
        found = found_in(**{file.replace(".", "__"): form.format(name=name, value=wrong)})
        assert found == [], file


def test_a_variable_that_the_repository_reads_itself_is_no_placebo() -> None:
    script = "export NCCL_TIMEOUT=1800\ntorchrun train.py\n"
    assert [one.rule for one in found_in(run__sh=script)] == ["DDP553"]
    reader = 'import os\nlimit = int(os.environ.get("NCCL_TIMEOUT", 600))\n'
    assert found_in(run__sh=script, train__py=reader) == []
    writer = 'import os\nos.environ["NCCL_TIMEOUT"] = "600"\n'
    assert [one.rule for one in found_in(run__sh=script, train__py=writer)] == ["DDP553", "DDP553"]


def test_a_variable_of_groups_is_not_judged_in_a_file_that_makes_none() -> None:
    script = 'import os\nimport vllm\nos.environ["NCCL_BLOCKING_WAIT"] = "1"\nvllm.LLM("x").generate("y")\n'
    assert found_in(infer__py=script) == []


def test_the_protocol_that_google_chooses_for_its_network_is_not_judged() -> None:
    assert [one.rule for one in found_in(a__env="NCCL_PROTO=Simple,LL128\n")] == ["DDP250"]
    assert found_in(a__env="NCCL_PROTO=Simple,LL128\nNCCL_FASTRAK_CTRL_DEV=eth0\n") == []


def project(torch: str) -> str:
    return f'[project]\ndependencies = [\n  "torch{torch}",\n]\n'


@pytest.mark.parametrize(
    ("rule", "torch", "name", "other"),
    [
        ("DDP555", "==2.5.1", "TORCH_FR_BUFFER_SIZE", ">=2.13"),
        ("DDP555", ">=2.4,<2.8", "TORCH_FR_DUMP_TEMP_FILE", "==2.8.0"),
        ("DDP555", "<=2.12", "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", ">=2.10"),
        ("DDP655", "==2.9.0", "TORCH_NCCL_TRACE_BUFFER_SIZE", ">=2.5"),
        ("DDP655", ">=2.8", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "<2.8"),
        ("DDP655", "~=2.6", "NCCL_ASYNC_ERROR_HANDLING", ">=2.1"),
        ("DDP554", ">=2.9", "TORCH_NCCL_AVOID_RECORD_STREAMS", "==2.5"),
    ],
)
def test_names_by_the_release_of_torch(rule: str, torch: str, name: str, other: str) -> None:
    script = f"export {name}=3\n"
    assert [one.rule for one in found_in(run__sh=script, pyproject__toml=project(torch))] == [rule]
    assert found_in(run__sh=script) == []  # which torch runs is not known
    assert found_in(run__sh=script, pyproject__toml=project(other)) == []


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("export NCCL_IB_DISABLE=1\nexport NCCL_IB_HCA=mlx5_0\n", "NCCL_IB_HCA"),
        ("export NCCL_P2P_DISABLE=1\nexport NCCL_P2P_LEVEL=NVL\n", "NCCL_P2P_LEVEL"),
        ("export NCCL_DEBUG=WARN\nexport NCCL_DEBUG_SUBSYS=INIT\n", "NCCL_DEBUG_SUBSYS"),
        (
            "export TORCH_NCCL_BLOCKING_WAIT=1\nexport TORCH_NCCL_ASYNC_ERROR_HANDLING=3\n",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        ),
        (
            "export NCCL_BLOCKING_WAIT=0\nexport TORCH_NCCL_BLOCKING_WAIT=1\n",
            "NCCL_BLOCKING_WAIT",
        ),
    ],
)  # fmt: skip
def test_pairs(script: str, name: str) -> None:
    found = [one for one in found_in(run__sh=script) if one.rule == "DDP556"]
    assert [name in one.message for one in found] == [True]
    for line in script.splitlines():
        assert "DDP556" not in {one.rule for one in found_in(run__sh=f"{line}\n")}
    apart = "if [ $1 = a ]; then\n{}\nelse\n{}\nfi\n".format(*script.splitlines())
    assert "DDP556" not in {one.rule for one in found_in(run__sh=apart)}


@pytest.mark.parametrize("subsystem", ["ALL", "COLL", "INIT,COLL"])
def test_a_line_for_each_collective(subsystem: str) -> None:
    script = f"export NCCL_DEBUG=INFO\nexport NCCL_DEBUG_SUBSYS={subsystem}\n"
    assert [one.rule for one in found_in(run__sh=script)] == ["DDP455"]
    for other in (script.replace("INFO", "WARN"), script.replace(subsystem, "INIT,NET"), script.splitlines()[1]):
        assert "DDP455" not in {one.rule for one in found_in(run__sh=other)}


@pytest.mark.parametrize("value", ["'\"eth0\"'", "\"'eth0'\"", "“eth0”"])
def test_quotes_in_the_value(value: str) -> None:
    assert [one.rule for one in found_in(run__sh=f"export NCCL_SOCKET_IFNAME={value}\n")] == ["DDP165"]
    for right in ("eth0", "'eth0'", '"eth0"', '"$INTERFACE"'):
        assert found_in(run__sh=f"export NCCL_SOCKET_IFNAME={right}\n") == []


@pytest.mark.parametrize("form", ["run.sh", "prefix.sh", "train.py"])
def test_a_variable_of_rpc(form: str) -> None:
    files = {
        "main__py": "import torch\n",
        form.replace(".", "__"): FORMS[form].format(name="TP_SOCKET_IFNAME", value="eth0"),
    }
    assert [one.rule for one in found_in(**files)] == ["DDP558"]
    assert found_in(**{**files, "main__py": "import torch.distributed.rpc\n"}) == []
    if form != "train.py":
        assert (
            found_in(**{name: text for name, text in files.items() if name != "main__py"}) == []
        )  # no code to look at


@pytest.mark.parametrize("name", ["TORCH_NCCL_DUMP_ON_TIMEOUT", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG"])
def test_set_too_late(name: str) -> None:
    late = 'import os\ndist.init_process_group("nccl")\nos.environ["{}"] = "1"\n'
    assert [one.rule for one in found_in(train__py=late.format(name))] == ["DDP560"]
    early = 'import os\nos.environ["{}"] = "1"\ndist.init_process_group("nccl")\n'
    again = 'import os\ndist.init_process_group("nccl")\ndist.destroy_process_group()\nos.environ["{}"] = "1"\n'
    other = 'import os\ndef a():\n    dist.init_process_group("nccl")\ndef b():\n    os.environ["{}"] = "1"\n'
    for code in (early, again, other):
        assert found_in(train__py=code.format(name)) == []


def test_every_rule_is_tested() -> None:
    here = Path(__file__).read_text()
    of_scripts = Counter((rule, fires) for rule, fires, _, _ in cases())
    for one in SCRIPTS:
        in_cases = of_scripts[one.rule.id, True] >= 3 and of_scripts[one.rule.id, False] >= 3
        assert in_cases or f'"{one.rule.id}"' in here, one.rule.id


@pytest.mark.parametrize("preset", every(3, ["generic-slurm", "generic-pbs", "local"]))
def test_rendered_scripts_are_clean(render: Callable[..., Path], preset: str) -> None:
    files = collect([render({"preset": preset})])
    assert len([file for file in files if file.kind in ("shell", "env")]) >= 4
    assert check_scripts(files) == []


def test_examples_are_clean() -> None:
    assert check_scripts(collect([ROOT / "examples"])) == []


@pytest.mark.parametrize(
    "text",
    [
        "echo 'never closed\nexport NCCL_TIMEOUT=1\n",
        'echo "never closed $(ls\n',
        "cat <<END\nno end\n",
        'case $1 in\n a|b) srun x ;;\n *) echo ${x:-$(date "+%F")} ;;\nesac\n',
        "f() { :; }; if true; then f; fi; done; }\n",
        "\\",
        "a=(1 2\n3) ; echo ${a[@]} $((1 << 2)) <(ls) >(cat) 2>&1 |& tee x\n",
        "\x00\x01\ufffd",
    ],
)
def test_the_reader_takes_everything(text: str) -> None:
    script = read_script("x.sh", text)
    assert all(command.line >= 1 and command.words for command in script.commands)


def test_the_reader_agrees_with_bash(tmp_path: Path) -> None:
    """Words as bash splits them, of a line with everything that can stand in one."""
    bash = shutil.which("bash")
    assert bash is not None
    line = "printf '%s\\n' a\\ b 'c d' \"e f\" g\"h i\"'j k' --x=\"1 2\" \\\n  end # comment\n"
    done = subprocess.run([bash, "-c", line], capture_output=True, text=True, check=True)
    words = read_script("x.sh", line).commands[0].literals()[2:]
    assert words == done.stdout.splitlines()


def test_places_are_those_of_the_file() -> None:
    text = "cat <<-'END' > x\n\tNCCL_TIMEOUT=1\n\tEND\nexport A=1 \\\n  NCCL_TIMEOUT=2\n"
    found = found_in(run__sh=text)
    assert [(one.line, one.column) for one in found] == [(5, 3)]
    assert re.match("NCCL_TIMEOUT", text.splitlines()[found[0].line - 1][found[0].column - 1 :])


def test_at_a_shared_endpoint_one_node_trains_and_the_others_wait() -> None:
    script = "#!/bin/bash\n#SBATCH --nodes=2\nsrun torchrun --nproc_per_node 4 {} train.py\n"
    alone = [one for one in found_in(job__sh=script.format("")) if one.rule == "DDP251"]
    shared = script.format("--rdzv_backend c10d --rdzv_endpoint $H:29500")
    waits = [one for one in found_in(job__sh=shared) if one.rule == "DDP251"]
    assert "2 runs" in alone[0].message
    assert "One of the 2 nodes" in waits[0].message


def test_a_variable_of_groups_is_not_judged_where_one_process_is_started() -> None:
    script = "export NCCL_BLOCKING_WAIT=1\n{} main.py\n"
    assert [one.rule for one in found_in(run__sh=script.format("torchrun --nproc_per_node=2"))] == ["DDP660"]
    assert found_in(run__sh=script.format("python")) == []


def test_tests_in_python_are_not_judged() -> None:
    text = 'import os\nos.environ["NCCL_ASYNC_ERROR_HANDLING"] = "0"\n'
    assert [one.rule for one in found_in(train__py=text)] == ["DDP661"]
    assert found_in(test_train__py=text) == []


def test_error_handling_is_off_for_cuda_graphs() -> None:
    text = 'import os\nos.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"\n'
    assert [one.rule for one in found_in(train__py=text)] == ["DDP661"]
    assert found_in(train__py=text + "graph = torch.cuda.CUDAGraph()\n") == []


@pytest.mark.parametrize(
    ("address", "rules"),
    [
        ('"tcp://localhost:54321"', ["DDP652"]),
        ("'tcp://127.0.0.1:23456'", ["DDP651"]),
        ('f"tcp://localhost:{random.randint(20000, 60000)}"', ["DDP652"]),
        ("'tcp://127.0.0.1:123' + str(random.randint(0, 9))", ["DDP652"]),
        ("'tcp://127.0.0.1:123' + str(job % 100)", []),
        ('f"tcp://localhost:{port}"', []),
        ('"tcp://224.66.41.62:23456"', []),
        ('"env://"', []),
    ],
)
def test_ports_that_a_program_writes_down(address: str, rules: list[str]) -> None:
    text = f'import random\nurl = {address}\ndist.init_process_group("nccl", init_method=url)\n'
    assert [one.rule for one in found_in(train__py=text)] == rules


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ('parser.add_argument("-p", "--port", default="23455", type=str)', ["DDP651"]),
        ('parser.add_argument("--master_port", type=int, default=54321)', ["DDP652"]),
        ('os.environ["MASTER_PORT"] = "12355"', ["DDP651"]),
        ('os.environ.setdefault("MASTER_PORT", "12355")', ["DDP651"]),
        ('MASTER_PORT = "12355"\nos.environ["MASTER_PORT"] = MASTER_PORT', ["DDP651"]),
        ('parser.add_argument(\n    "--master-port",\n    type=int,\n    default=12355,\n)', ["DDP651"]),
        ('os.environ["MASTER_PORT"] = str(port)', []),
        ('WEB_PORT = 12355\nos.environ["MASTER_PORT"] = str(port)', []),
        ('parser.add_argument("--port", type=int, default=0)', []),
        ('parser.add_argument("--report", default=12345)', []),
    ],
)
def test_ports_of_options_and_variables(line: str, rules: list[str]) -> None:
    text = f'import os\n{line}\ndist.init_process_group("nccl")\n'
    assert [one.rule for one in found_in(train__py=text)] == rules
    assert found_in(serve__py=f"import os\n{line}\n") == []  # no group of torch


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ('  dist_url: "tcp://localhost:54321"', ["DDP652"]),
        ("init_method: tcp://127.0.0.1:23456", ["DDP651"]),
        ("master_port: 29500", ["DDP651"]),
        ("dist_url: env://", []),
        ("dist_url: tcp://10.0.0.1:23456", []),
        ("# dist_url: tcp://localhost:23456", []),
    ],
)
def test_ports_of_settings(line: str, rules: list[str]) -> None:
    assert [one.rule for one in found_in(default__yaml=f"train:\n{line}\n")] == rules


def test_a_program_that_requeues_itself() -> None:
    text = "import os\ndef handler(signum, frame):\n    os.system(f'scontrol requeue {JOB}')\n{use}\n"
    used = text.replace("{use}", "signal.signal(signal.SIGUSR1, handler)")
    assert [(one.rule, one.line) for one in found_in(train__py=used)] == [("DDP353", 3)]
    assert found_in(train__py=text.replace("{use}", "")) == []  # nothing installs it
    assert found_in(train__py=used + "if int(os.environ['SLURM_RESTART_COUNT']) > 3: raise SystemExit\n") == []


def test_a_requeue_by_a_variable_that_another_file_calls() -> None:
    text = "import os\ndef again():\n    command = 'scontrol requeue ' + JOB\n    os.system(command)\n"
    used = found_in(slurm__py=text, train__py="from slurm import again\nagain()\n")
    assert [(one.file, one.rule, one.line) for one in used] == [("slurm.py", "DDP353", 3)]
    assert found_in(slurm__py=text, train__py="import slurm\n") == []
