"""The port where ranks meet, followed through variables, options, settings and callers."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_scaffold.check.files import SourceFile, kind_of
from ddp_scaffold.check.python import findings
from ddp_scaffold.check.run import Selection, check
from ddp_scaffold.check.shell.files import check_scripts

SET = 'import os, random\nimport torch.distributed as dist\n{}\nos.environ["MASTER_PORT"] = {}\n'
CALLED = """import os
import torch.distributed as dist

def setup(rank, port{default}):
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("nccl", rank=rank)

setup({given})
"""


def ports_in(**texts: str) -> list[tuple[str, str, int]]:
    """The findings on ports in files with these names, as (rule, file, line)."""
    files = [SourceFile(f"{name}.py", text, kind_of(f"{name}.py"), f"{name}.py") for name, text in texts.items()]
    return [(one.rule, one.file, one.line) for one in findings(files) if one.rule in ("DDP651", "DDP652")]


@pytest.mark.parametrize(
    ("before", "value", "rule"),
    [
        ("port = 9595", "str(port)", "DDP651"),
        ("port = 9595", 'f"{port}"', "DDP651"),
        ("port = 40112", "str(port)", "DDP652"),
        ("port = random.randint(20000, 55555)", "str(port)", "DDP652"),
        ("port = 15000 + random.randrange(25)", "str(port)", "DDP652"),
        ("port = random.choice(range(12300, 12400))", "str(port)", "DDP652"),
        ("", 'os.environ.get("MASTER_PORT", "29500")', "DDP651"),
        ("port = None", "str(port or 29500)", "DDP651"),
        ("port = random.randint(10000, 20000)", "str(port)", ""),
        ("port = 10000 + int(os.environ['SLURM_JOB_ID']) % 20000", "str(port)", ""),
        ("port = find_free_port()", "str(port)", ""),
        ("port = 0", "str(port)", ""),
    ],
)
def test_a_port_of_the_environment(before: str, value: str, rule: str) -> None:
    assert [one[0] for one in ports_in(train=SET.format(before, value))] == ([rule] if rule else [])


@pytest.mark.parametrize(
    ("default", "given", "line"),
    [("=12355", "0", 4), ("", "0, 12355", 8), ("=12355", "0, port=free", 0), ("=None", "0, 12355", 8)],
)
def test_a_port_that_callers_give(default: str, given: str, line: int) -> None:
    found = ports_in(train=CALLED.format(default=default, given=given))
    assert found == ([("DDP651", "train.py", line)] if line else [])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            "from argparse import ArgumentParser\np = ArgumentParser()\np.add_argument('--port', default=29500)\n",
            3,
        ),
        ("class Settings:\n    port: int = 29500\n", 2),
        ('settings = {\n    "port": "29500",\n}\n', 2),
        ("class Settings:\n    port: int = 0\n", 0),
        ("class Settings:\n    support: int = 29500\n", 0),
        ("app.run(port=6842, host='0.0.0.0')\n", 0),
        ("class Settings:\n    port: int = 29500 + job_number()\n", 0),
    ],
)
def test_a_port_of_options_and_settings(settings: str, line: int) -> None:
    train = (
        "import os\nimport torch.distributed as dist\nimport settings\n\n"
        'def main(args):\n    os.environ["MASTER_PORT"] = str(args.port)\n    dist.init_process_group("nccl")\n'
    )
    found = ports_in(train=train, settings=settings)
    assert found == ([("DDP651", "settings.py", line)] if line else [])


@pytest.mark.parametrize(
    ("address", "rules"),
    [
        ('f"tcp://{host}:{port}"', ["DDP651"]),
        ('"tcp://" + host + ":23456"', ["DDP651"]),
        ('"tcp://{}:{}".format(host, port)', ["DDP651"]),
        ('"tcp://%s:%s" % (host, port)', ["DDP651"]),
        ('f"tcp://{host}:{free_port()}"', []),
        ('"tcp://224.66.41.62:23456"', []),
        ('"env://"', []),
    ],
)
def test_a_port_of_an_address(address: str, rules: list[str]) -> None:
    made = 'dist.init_process_group("nccl", init_method=url)'
    text = f"import torch.distributed as dist\nport = 23457\nurl = {address}\n{made}\n"
    assert [one[0] for one in ports_in(train=text)] == rules


def test_a_port_that_two_rules_see_is_told_once(tmp_path: Path) -> None:
    text = (
        "import os\nimport torch.distributed as dist\nos.environ['MASTER_PORT'] = '12355'\ndist.init_process_group()\n"
    )
    (tmp_path / "train.py").write_text(text)
    found = [one for one in check([tmp_path], Selection()).findings if one.rule == "DDP651"]
    assert [one.line for one in found] == [3]


@pytest.mark.parametrize(
    ("path", "reads", "fixed"),
    [
        ("configs/small.py", "Config.fromfile(path)", True),
        ("configs/small.py", "parse(path)", False),
        ("tools/small.py", "Config.fromfile(path)", False),
    ],
)
def test_a_port_of_settings_that_are_read_by_their_path(path: str, reads: str, fixed: bool) -> None:
    train = f"""import torch.distributed as dist

def worker(path):
    cfg = {reads}
    dist.init_process_group("nccl", init_method=f"tcp://localhost:{{cfg.port}}")
"""
    texts = {"train.py": train, path: "lr = 0.1\nport = 10001\n"}
    files = [SourceFile(name, text, kind_of(name), name) for name, text in texts.items()]
    found = [(one.rule, one.file, one.line) for one in check_scripts(files) if one.rule == "DDP651"]
    assert found == ([("DDP651", path, 2)] if fixed else [])
