"""Commands in a README: which are read, and what is said about them."""

from __future__ import annotations

import pytest

from ddp_scaffold.check.files import SourceFile, kind_of
from ddp_scaffold.check.findings import Finding
from ddp_scaffold.check.shell.documents import commands_of
from ddp_scaffold.check.shell.files import check_scripts

LAUNCH = "python -m torch.distributed.launch --nproc_per_node=4 train.py"


def found_in(text: str, name: str = "README.md", *others: str) -> list[Finding]:
    """What is found in a document of a repository with train.py, tools/main.py and these files."""
    files = {"train.py": "", "tools/main.py": "", **dict.fromkeys(others, ""), name: text}
    return check_scripts([SourceFile(path, content, kind_of(path), path) for path, content in files.items()])


def in_fence(command: str, language: str = "bash") -> str:
    return f"# Training\n\n```{language}\n{command}\n```\n"


@pytest.mark.parametrize(
    "text",
    [
        in_fence(LAUNCH),
        in_fence(LAUNCH, ""),
        in_fence(f"$ {LAUNCH}", "console"),
        in_fence(f"(env) user@host:~$ {LAUNCH}", "console"),
        in_fence(f"CUDA_VISIBLE_DEVICES=0,1,2,3 OMP_NUM_THREADS=1 {LAUNCH}"),
        in_fence("python -W ignore -m torch.distributed.launch \\ \n    --nproc_per_node=4 \\\n    train.py"),
        in_fence("cd tools\n$PYTHON -m torch.distributed.launch main.py"),
        in_fence("python -m torch.distributed.launch -m tools.main"),
        in_fence("python -m torch.distributed.launch --nproc_per_node=<number of GPUs> train.py"),
        f"1. Train:\n\n   ~~~sh\n   {LAUNCH}\n   ~~~\n",
        f"> {LAUNCH}\n",
        f"Train with\n\n    {LAUNCH}\n",
        f"Run `{LAUNCH} --lr 0.1` on one node.\n",
        f"<pre><code>\n{LAUNCH}\n</code></pre>\n",
    ],
)
def test_a_command_is_read_in_every_form(text: str) -> None:
    found = found_in(text)
    assert [one.rule for one in found] == ["DDP653"]
    assert "torch.distributed.launch" in text.splitlines()[found[0].line - 1]


@pytest.mark.parametrize(
    "text",
    [
        in_fence("python -m torch.distributed.launch YOUR_SCRIPT.py"),
        in_fence("python -m torch.distributed.launch <script> --arg"),
        in_fence("python -m torch.distributed.launch $SCRIPT"),
        in_fence("torchrun --nproc_per_node=4 train.py"),
        in_fence("MASTER_PORT=50000 torchrun --nproc_per_node=4 YOUR_SCRIPT.py"),
        f"We used torch.distributed.launch, and train.py was started by it: {LAUNCH}\n",
        in_fence("torchrun --standalone --master_port=[port] train.py"),
        in_fence("# " + LAUNCH.replace("python", "Python is needed for python")),
    ],
)
def test_what_is_no_command_of_this_repository_is_silent(text: str) -> None:
    assert found_in(text) == []


@pytest.mark.parametrize(
    ("command", "rules"),
    [
        ("torchrun --nproc_per_node=4 --master_port=29501 train.py", ["DDP651"]),
        ("MASTER_PORT=50000 torchrun --nproc_per_node=4 train.py", ["DDP652"]),
        ("python train.py --dist-url 'tcp://localhost:10001' --world-size 1", ["DDP651"]),
        ("python train.py --dist-url 'tcp://localhost:<port>'", []),
        ("torchrun --master_port=$PORT train.py", []),
        ("torchrun --standalone --nnodes=2 --nproc_per_node=4 train.py", ["DDP166"]),
        ("torchrun --nnodes=2 --nproc_per_node=4 train.py", ["DDP157"]),
        ("torchrun --nnodes=2 --node_rank=<0 or 1> --nproc_per_node=4 train.py", []),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node=4 train.py", ["DDP154"]),
        ("torchrun --nnodes=2 --node_rank=1 --master_addr=127.0.0.1 train.py", ["DDP155"]),
        ("CUDA_VISIBLE_DEVICES=0 torchrun --nnodes=2 --node_rank=1 --master_addr=127.0.0.1 train.py", []),
        ("NCCL_TIMEOUT=1800 torchrun --nproc_per_node=4 train.py", ["DDP553"]),
        ("NCCL_P2P_DISABLE=1 torchrun --nproc_per_node=4 train.py", []),  # advice for a machine without it
    ],
)
def test_what_is_said_about_a_command(command: str, rules: list[str]) -> None:
    assert [one.rule for one in found_in(in_fence(command))] == rules


def test_each_kind_is_told_once_in_a_document() -> None:
    text = in_fence(f"{LAUNCH}\n{LAUNCH} --eval") + in_fence(LAUNCH)
    assert [(one.rule, one.line) for one in found_in(text)] == [("DDP653", 4)]


def test_the_site_of_a_library_is_silent() -> None:
    assert [one.rule for one in found_in(in_fence(LAUNCH), "docs/train.md")] == ["DDP653"]
    assert found_in(in_fence(LAUNCH), "docs/train.md", "mkdocs.yml") == []
    assert found_in(in_fence(LAUNCH), "CHANGELOG.md") == []


def test_lines_stay_where_they_are() -> None:
    ((start, text),) = commands_of(in_fence(f"echo a\n\nWhat follows:\n{LAUNCH}"))
    assert start == 4
    assert text.split("\n") == ["", "", "", LAUNCH]


def test_settings_that_are_alike_are_told_once() -> None:
    text = "dist_url: tcp://localhost:10001\n"
    names = ("a.yaml", "config/b.yaml", "config/deep/c.json", "config/d.toml")
    texts = (text, text, '{\n  "dist_url": "tcp://127.0.0.1:54321"\n}\n', "master_port = 29500\n")
    files = [SourceFile(name, text, kind_of(name), name) for name, text in zip(names, texts, strict=True)]
    found = check_scripts(files)
    assert [(one.file, one.rule) for one in found] == [("a.yaml", "DDP651"), ("config/b.yaml", "DDP651")]
    assert "2 other files" in found[1].message
    assert [one.rule for one in check_scripts(files[2:3])] == ["DDP652"]
    assert [one.rule for one in check_scripts(files[3:])] == ["DDP651"]


@pytest.mark.parametrize(
    "text",
    [
        "# Base\n\nOn 8 nodes, each with 8 GPUs:\n\n```sh\ntorchrun --nproc_per_node=8 train.py\n```\n",
        in_fence("# Large (needs to run on 4 nodes, 32 GPUs)\ntorchrun --standalone --nproc_per_node=8 train.py"),
        "Training on two machines:\n" + in_fence(LAUNCH).partition("\n\n")[2],
    ],
)
def test_a_command_that_is_meant_for_several_nodes_and_starts_one(text: str) -> None:
    (one,) = (one for one in found_in(text) if one.rule == "DDP251")
    assert "no gradient crosses a node" in one.message
    assert "nproc" in text.splitlines()[one.line - 1]


@pytest.mark.parametrize(
    "text",
    [
        in_fence("# on 4 nodes, by srun\ntorchrun --nproc_per_node=8 train.py"),
        in_fence("# on a single node, in place of 4 nodes\ntorchrun --nproc_per_node=8 train.py"),
        in_fence("# on 4 nodes\ntorchrun --nnode=4 --node_rank=$R --master_addr=$A --nproc_per_node=8 train.py"),
        in_fence(
            "# on 4 nodes\ntorchrun --nnodes=4 --rdzv_backend=c10d --rdzv_endpoint=$A --nproc_per_node=8 train.py"
        ),
        in_fence("# on 4 nodes\n# Base\ntorchrun --nproc_per_node=8 train.py"),
        in_fence("torchrun --nproc_per_node=8 train.py"),
    ],
)
def test_a_command_for_one_node_or_for_those_that_are_said(text: str) -> None:
    assert not [one for one in found_in(text) if one.rule == "DDP251"]
