"""Which lines of existing code are to be changed: every finding, and what looks like one and is none."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest

from ddp_scaffold.adopting.advice import Change, advise, own_files, script_of

HEAD = """\
import os
import random
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

"""


def changes(tmp_path: Path, code: str, head: str = HEAD, **others: str) -> list[Change]:
    """Return the findings in a train.py of `head` and `code`, beside other modules."""
    (tmp_path / "train.py").write_text(head + textwrap.dedent(code))
    for name, text in others.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    return advise(tmp_path, ["train.py", *(f"{name}.py" for name in others)], "train.py", ".").changes


FOUND = [
    ("dist.init_process_group('nccl')", "init_process_group", "without timeout=", "with session(...)"),
    (
        "torch.distributed.init_process_group('gloo', timeout=t, device_id=d)",
        "init_process_group",
        "session()",
        "delete",
    ),
    ("dist.destroy_process_group()", "destroy_process_group", "after all ranks have met", "delete it"),
    ("dist.new_group([0, 1])", "new_group", "does not inherit", "timeout=seconds(run.job.clocks.collective_s))"),
    ("dist.new_group()", "new_group", "does not inherit", "dist.new_group(timeout=seconds("),
    ("try:\n    step()\nfinally:\n    dist.barrier()", "dist.barrier", "only the failed rank comes here", "delete it"),
    (
        "try:\n    step()\nexcept OSError:\n    dist.barrier()\n    raise",
        "dist.barrier",
        "only the failed",
        "delete it",
    ),
    ("try:\n    step()\nfinally:\n    dist.destroy_process_group()", "destroy", "hides which rank", "names the one"),
    ("loader = DataLoader(data, batch_size=4)", "DataLoader", "all ranks read the same samples", "make_loader(data, "),
    ("loader = DataLoader(data, 4, shuffle=False, collate_fn=f)", "DataLoader", "", "train=False, collate_fn=f"),
    ("loader = DataLoader(data, 4, num_workers=2)", "DataLoader", "waited for without a limit", "DDP_LOADER__WORKERS"),
    ("s = DistributedSampler(data)", "DistributedSampler", "set_epoch is never called", "delete it"),
    (
        "if dist.get_rank() == 0:\n    evaluate(model)",
        "evaluate(model)",
        "only rank 0",
        "on_rank0(run.job, 'evaluate'",
    ),
    ("if not dist.get_rank():\n    pipe.sample(4)", "pipe.sample", "only rank 0", "lambda progress: pipe.sample(4)"),
    ("if args.local_rank in [-1, 0]:\n    run_eval(model)", "run_eval", "only rank 0", "on_rank0"),
    ("if step and is_main_process():\n    torch.save(x, p)", "torch.save", "only rank 0", "checkpoint.save(run.job"),
    ("if rank == 0:\n    model.module.save_pretrained(p)", "save_pretrained", "only rank 0", "checkpoint.save"),
    ("if not args.distributed or args.rank % n == 0:\n    validate(m)", "validate", "only rank 0", "on_rank0"),
    ("if rank == 0:\n    dist.all_reduce(x)", "all_reduce", "only rank 0 calls all_reduce", "every rank must call it"),
    ("def w(m):\n    torch.save(m, 'p')\nif i % 9 == 0:\n    w(m)", "torch.save", "all ranks write", "checkpoint.save"),
    ("torch.save(model, 'last.pt')", "torch.save", "all ranks write this file", "renames it"),
    ("loss.backward(retain_graph=True)", "retain_graph", "remark", "leave it out"),
    ("model = DDP(model, find_unused_parameters=True)", "find_unused", "remark", "leave it out"),
    (
        "for p in model.parameters():\n    n += p.grad.norm().item() ** 2",
        "p.grad",
        "once for each",
        "global_norm(p.grad",
    ),
    (
        "for p in net.parameters():\n    x = p.grad.data.norm(2)\n    n += x.item()",
        "x.item",
        "once for each",
        "net.param",
    ),
    (
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.5).item()",
        "clip_grad_norm_",
        "wait for the GPU",
        "clip_gradients(model.parameters(), 1.0, 1.5)",
    ),
    ("signal.signal(signal.SIGUSR1, handler)", "signal.signal", "the last handler wins", "run.agreement.poll(step)"),
    ("os.environ['NCCL_TIMEOUT'] = '1'", "NCCL_TIMEOUT", "nothing reads NCCL_TIMEOUT", "DDP_CLOCKS__COLLECTIVE_S"),
    ("os.environ.setdefault('NCCL_MAX_RETRIES', '1')", "NCCL_MAX_RETRIES", "nothing reads", "delete it"),
    ("dist.distributed_c10d._DEFAULT_PG_TIMEOUT = t", "_DEFAULT_PG_TIMEOUT", "no such attribute", "delete it"),
]


@pytest.mark.parametrize(
    ("code", "text", "why", "instead"), FOUND, ids=[code.split("\n")[0][:40] for code, *_ in FOUND]
)
def test_a_finding(tmp_path, code, text, why, instead):
    found = [change for change in changes(tmp_path, code) if text in change.text]
    assert len(found) == 1, found
    assert why in found[0].why
    assert instead in found[0].instead
    assert found[0].text == " ".join((HEAD + textwrap.dedent(code)).split("\n")[found[0].line - 1].split())


NOT_FOUND = [
    "self.barrier()",
    "dist.barrier()",
    "dist.all_reduce(loss)",
    "dist.new_group([0], timeout=t)",
    "loader = DataLoader(data, batch_sampler=b)",
    "loader = DataLoader(data, batch_size=None)",
    "loader = DataLoader(data, 4, sampler=WeightedRandomSampler(w, 9))",
    "loader = DataLoader(*args)",
    "loader = DataLoader(data, **options)",
    "if rank == 0:\n    loader = DataLoader(data, 4)",
    "if rank == 0:\n    model.eval()\n    print(random.sample(names, 3))\n    x = normal.sample()",
    "if rank == 0:\n    logger.info('saved')\n    bar.update()",
    "if step % 100 == 0 or rank == 0:\n    evaluate(model)",
    "if rank != 0:\n    evaluate(model)",
    "if order == 0:\n    evaluate(model)",
    "if rank == 1:\n    evaluate(model)",
    "def f():\n    if rank != 0:\n        dist.barrier()\n    load()\n    if rank == 0:\n        dist.barrier()",
    "if rank == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(x, 0)",
    "torch.save(model, f'rank{rank}.pt')",
    "def helper(x):\n    torch.save(x, 'p')",
    "def helper(x):\n    torch.save(x, 'p')\nif rank == 0:\n    helper(x)",
    "def main():\n    if rank != 0:\n        return\n    torch.save(x, 'p')",
    "if args.save:\n    torch.save(x, 'p')",
    "def _write(x):\n    torch.save(x, 'p')\nif unit == 0 and epoch % 5 == 0:\n    _write(x)",
    "def _keep(x):\n    torch.save(x, 'p')\nif self.gpu_id == 0:\n    _keep(x)",
    "@rank_zero_only\ndef main():\n    torch.save(x, 'p')",
    "loss.backward(retain_graph=False)",
    "model = DDP(model)",
    "for p in model.parameters():\n    n += p.numel()",
    "norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "signal.signal(signal.SIGPIPE, signal.SIG_DFL)",
    "os.environ['NCCL_DEBUG'] = 'INFO'",
    "os.environ['NCCL_TIMEOUT'] = '1'\nt = os.environ.get('NCCL_TIMEOUT')",
    "os.environ['NCCL_ASYNC_ERROR_HANDLING'] = '1'",
]


@pytest.mark.parametrize("code", NOT_FOUND, ids=[code.split("\n")[-1][:40] for code in NOT_FOUND])
def test_no_finding(tmp_path, code):
    assert changes(tmp_path, code) == []


def test_the_barrier_after_rank_0_s_work_goes_away(tmp_path):
    found = changes(tmp_path, "if rank == 0:\n    sample(model)\ndist.barrier()")
    assert [change.text for change in found] == ["sample(model)", "dist.barrier()"]
    assert "on_rank0" in found[1].instead


def test_a_sampler_and_its_epoch_in_another_file(tmp_path):
    code = "import loop\ns = DistributedSampler(d, shuffle=True) if many else None\nl = DataLoader(d, 2, sampler=s)\n"
    found = changes(tmp_path, code, loop="def go(loader):\n    loader.sampler.set_epoch(1)  # torch\n")
    assert [change.text.split(" =")[0] for change in found] == ["s", "l"]
    assert "never called" not in found[0].why
    assert "counts twice" in found[0].why


def test_only_code_that_training_reaches_counts(tmp_path):
    torch_loader = "from torch.utils.data import DataLoader\nx = DataLoader(d, batch_size=1)\n"
    found = changes(tmp_path, "from data import x\n", data=torch_loader, notebook_export=torch_loader)
    assert [change.file for change in found] == ["data.py"]
    single = changes(tmp_path, "x = DataLoader(d, batch_size=1)", "from torch.utils.data import DataLoader\n")
    assert single == [], "a repository for one process is no business of ours"


def test_other_frameworks_are_left_alone(tmp_path):
    (tmp_path / "train.py").write_text(HEAD + "import accelerate\nif rank == 0:\n    evaluate(m)\nDataLoader(d, 1)\n")
    advice = advise(tmp_path, ["train.py"], "train.py", ".")
    assert advice.changes == []
    assert advice.framework == "accelerate"


def test_files_of_any_kind_are_read_or_named(tmp_path):
    contents = {
        "latin.py": b"# -*- coding: latin-1 -*-\nimport torch.distributed as d  # \xe9\nd.destroy_process_group()\n",
        "bom.py": b"\xef\xbb\xbfimport torch.distributed as d\r\nd.destroy_process_group()\r\n",
        "two.py": b"import torch\nprint 'two'\n",
        "null.py": b"import torch\x00",
        "wrong.py": b"# -*- coding: nothing -*-\nimport torch\n",
        "deep.py": b"import torch\nx = " + b"(" * 3000 + b")" * 3000,
        "huge.py": b"import torch\n" + b"#" * (1 << 20),
        "empty.py": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link.py").symlink_to(tmp_path / "latin.py")
    advice = advise(tmp_path, [*contents, "link.py", "gone.py"], "train.py", ".")
    assert [(change.file, change.line) for change in advice.changes] == [("bom.py", 2), ("latin.py", 3)]
    assert advice.unread == ["deep.py", "null.py", "two.py", "wrong.py"]


def test_which_files_are_the_user_s(repository):
    mine = ["train.py", "pkg/model.py", "new.py"]
    others = [
        *("tests/test_x.py", "test_y.py", ".hidden/a.py", "venv/lib/a.py", "build/a.py", "mine/ddp/start/launcher.py"),
        *("setup.py", "conftest.py", "ignored/a.py", "third_party/a.py"),
    ]
    directory = repository("mine", dict.fromkeys(mine[:2] + others[:6], "") | {".gitignore": "ignored/\n"})
    for name in [mine[2], *others[6:]]:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("")
    assert own_files(directory, ours=["mine/ddp"]) == sorted(mine)


def test_the_script_of_a_command():
    files = {"train.py", "src/pkg/train.py", "src/pkg/__main__.py"}
    assert script_of("train.py --x 1", files, ".") == "train.py"
    assert script_of("./train.py", files, ".") == "train.py"
    assert script_of("-m pkg.train", files, "src") == "src/pkg/train.py"
    assert script_of("-m pkg", files, "src") == "src/pkg/__main__.py"
    assert script_of("absent.py", files, "src") == ""


def test_ten_thousand_files_take_seconds(tmp_path):
    files = []
    for number in range(10_000):
        name = f"p{number % 100}/m{number}.py"
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = "import torch\n" if number % 10 == 0 else "import os\n"
        (tmp_path / name).write_text(text + "def f(x):\n    return x\n" * 20)
        files.append(name)
    began = time.monotonic()
    assert advise(tmp_path, files, "train.py", ".").changes == []
    assert time.monotonic() - began < 15
