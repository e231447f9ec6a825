"""Which lines of existing code are to be changed, in which order, and what looks like one of them and is none."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import adopt_shapes
import pytest
from git_helpers import git

from ddp_scaffold.adopting import advice as reading
from ddp_scaffold.adopting import packaging
from ddp_scaffold.adopting.advice import Advice, Change, advise, own_files, script_of
from ddp_scaffold.adopting.suggest import suggest

HEAD = """\
import os
import signal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

"""
# A loop that trains, which all that follows stands before or in.
LOOP = """\
model = DDP(build())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for x, y in train_loader:
        model(x).sum().backward()
        optimizer.step()
"""


def read(tmp_path: Path, code: str, head: str = HEAD, **others: str) -> Advice:
    """Return what is said of a train.py of `head` and `code`, beside other modules."""
    (tmp_path / "train.py").write_text(head + textwrap.dedent(code))
    for name, text in others.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    return advise(tmp_path, ["train.py", *(f"{name}.py" for name in others)], "train.py", ".", "mine")


def changes(tmp_path: Path, code: str, head: str = HEAD, **others: str) -> list[Change]:
    return list(read(tmp_path, code, head, **others).changes)


@pytest.mark.parametrize("shape", adopt_shapes.SHAPES)
def test_the_patch_of_every_shape_applies_and_leaves_nothing_that_must_change(tmp_path, shape):
    for name, text in adopt_shapes.files(shape).items():
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    found = advise(tmp_path, ["model.py", "train.py"], "train.py", ".", "mine")
    assert found.unknown == ()
    (tmp_path / "adopt.patch").write_bytes(found.patch)
    git(tmp_path, "apply", "adopt.patch")
    changed = (tmp_path / "train.py").read_text()
    compile(changed, "train.py", "exec")
    assert "init_process_group(" not in changed
    again = advise(tmp_path, ["model.py", "train.py"], "train.py", ".", "mine")
    assert [change for change in again.changes if change.must] == []
    assert len(again.changes) < len(found.changes)
    assert again.patch == b""


EDITS = [
    ("torchrun", "resumed_epochs(range(args.epochs), net=net, opt=opt, schedule=schedule, scaler=scaler):"),
    ("torchrun", "for step, (x, y) in resumed_batches(enumerate(loader, 1)):"),
    ("torchrun", "loss = torch.nn.functional.mse_loss(net(x), y)  # of a batch"),
    ("torchrun", "(best,) = resumed_values(lambda: (best,))"),
    ("torchrun", 'default=int(__import__("os").environ.get("LOCAL_RANK", -1))'),
    ("torchrun", "    with ddp_session():\n        main()\n"),
    ("spawn", "  with ddp_session():\n    main(ddp_local_rank(), ddp_world_size(), epochs)\n"),
    ("spawn", "resumed_epochs(range(epochs), model=self.model, optimizer=self.optimizer):"),
    ("spawn", "(self.global_step,) = resumed_values(lambda: (self.global_step,))"),
    (
        "srun",
        'rank = int(os.environ["RANK"])\n    world_size = int(os.environ["WORLD_SIZE"])\n    os.environ["MASTER_PORT"]',
    ),
    ("srun", "model=model, ema_model=ema_model, optimizer=optimizer):"),
    ("srun", 'int(os.environ.get("SLURM_CPUS_PER_TASK", "1"))'),
    ("while", "    for _ in resumed_epochs(iter(lambda: True, False), model=model, optimizer=optimizer):\n"),
    ("while", '    note = """steps\n of a run\n"""\n'),
    ("while", "    if ddp:\n        pass\n"),
    (
        "pass",
        "for _ in resumed_epochs(range(1), model=model, optimizer=optimizer):\n        for x, y in resumed_batches(",
    ),
]


@pytest.mark.parametrize(("shape", "text"), EDITS)
def test_what_the_patch_writes(tmp_path, shape, text):
    assert text in patched(tmp_path, adopt_shapes.SHAPES[shape], adopt_shapes.MODEL)


def patched(tmp_path: Path, code: str, model: str = "") -> str:
    """Return train.py as the patch makes it."""
    (tmp_path / "train.py").write_text(code)
    (tmp_path / "model.py").write_text(model)
    found = advise(tmp_path, ["model.py", "train.py"], "train.py", ".", "mine")
    assert found.patch, found.unknown
    git(tmp_path, "init", "--quiet")
    (tmp_path / "adopt.patch").write_bytes(found.patch)
    git(tmp_path, "apply", "adopt.patch")
    return (tmp_path / "train.py").read_text()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda text: text.replace("\n", "\r\n"), b"with ddp_session():\r\n"),
        (lambda text: "# -*- coding: latin-1 -*-\n# \xe9\n" + text, b"# \xe9\n"),
        (lambda text: "\ufeff" + text, b"\xef\xbb\xbf"),
        (lambda text: text.rstrip("\n"), b"        main()"),
        (lambda text: text.replace("    ", "\t"), b"\twith ddp_session():\n\t\tmain()\n"),
    ],
    ids=["crlf", "latin-1", "byte-order-mark", "no-newline-at-the-end", "tabs"],
)
def test_a_file_keeps_its_form(tmp_path, change, expected):
    encoding = "latin-1" if "latin-1" in change("") else "utf-8"
    before = change(adopt_shapes.TORCHRUN).encode(encoding)
    (tmp_path / "train.py").write_bytes(before)
    (tmp_path / "model.py").write_text(adopt_shapes.MODEL)
    found = advise(tmp_path, ["model.py", "train.py"], "train.py", ".", "mine")
    git(tmp_path, "init", "--quiet")
    (tmp_path / "adopt.patch").write_bytes(found.patch)
    git(tmp_path, "apply", "adopt.patch")
    after = (tmp_path / "train.py").read_bytes()
    assert expected in after
    assert after.endswith(b"\n") == before.endswith(b"\n")
    left = [line for line in before.splitlines() if b"main()" not in line and b"process_group" not in line]
    kept = [line for line in left if b"for " not in line and b"local_rank" not in line]
    assert set(kept) <= set(after.splitlines())


def test_the_patch_applies_in_a_folder_of_a_repository(tmp_path):
    lab = tmp_path / "a lab"
    lab.mkdir()
    git(tmp_path, "init", "--quiet")
    assert "with ddp_session" in patched_in(lab)


def patched_in(folder: Path) -> str:
    for name, text in adopt_shapes.files("pass").items():
        (folder / name).write_text(text)
    (folder / "adopt.patch").write_bytes(advise(folder, ["train.py"], "train.py", ".", "mine").patch)
    git(folder, "apply", "adopt.patch")
    return (folder / "train.py").read_text()


UNKNOWN = [
    (
        "for step in range(9):\n    pass\noptimizer = torch.optim.SGD(p, 1)\nloss.backward()\noptimizer.step()",
        "outside of a loop",
    ),
    (LOOP + LOOP, "several loops train"),
    (
        f"def work(rank):\n{textwrap.indent(LOOP, '    ')}"
        "for rank in range(2):\n    mp.Process(target=work, args=(rank,)).start()",
        "one by one, with Process()",
    ),
    (
        "class Fit:\n    def step(self):\n        opt = torch.optim.SGD(self.p, 1)\n        self.loss.backward()\n"
        "        opt.step()\nfit = Fit()\nmodel = DDP(m)\nfor epoch in range(3):\n    fit.step()\n",
        "the optimizer `opt` has no name in the function of the loop",
    ),
]


@pytest.mark.parametrize(("code", "words"), UNKNOWN, ids=[words for _, words in UNKNOWN])
def test_a_shape_that_is_not_recognised_is_said_with_its_line_and_has_no_patch(tmp_path, code, words):
    found = read(tmp_path, "dist.init_process_group('gloo')\n" + code)
    assert found.patch == b""
    assert any(words in text and text.startswith("train.py:") for text in found.unknown), found.unknown
    assert [change.text for change in found.changes if "init_process_group" in change.text], "what is seen is listed"


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


# The cases of adopting that were wrong once. The shapes have mp.spawn, options of launchers and Slurm's variables.


def test_a_session_whose_stop_nobody_asks_for_says_so(tmp_path):
    code = (
        "from mine.ddp.adopted import ddp_session\nimport torch\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "def main():\n    model = DistributedDataParallel(build())\n    model.load_state_dict(torch.load('x.pt'))\n"
        "    optimizer = torch.optim.SGD(model.parameters(), 1)\n    for epoch in range(3):\n"
        "        for x in loader:\n            model(x).sum().backward()\n            optimizer.step()\n"
        "    torch.save(model.state_dict(), 'x.pt')\nwith ddp_session():\n    main()\n"
    )
    found = changes(tmp_path, code, "")
    must = {change.line: change for change in found if change.must}
    assert set(must) == {8, 9}, "the session is there"
    assert "SIGTERM does nothing" in must[9].why
    assert "nothing loads" in must[8].why
    assert {change.line for change in found if not change.must} == {6, 10, 11, 12}, "load, phases, save"


def test_places_come_in_the_order_of_work(tmp_path):
    found = [change for change in changes(tmp_path, f"dist.init_process_group('gloo')\n{LOOP}") if change.must]
    wanted = ["with ddp_session():", "delete it", "resumed_epochs(range(3), ", "in resumed_batches(train_loader):"]
    assert len(found) == len(wanted)
    for change, words in zip(found, wanted, strict=True):
        assert words in change.instead


def test_loader_and_sampler_together_or_neither(tmp_path):
    both = "s = DistributedSampler(d, seed=7) if many else None\n"
    both += "train_loader = DataLoader(d, 4, shuffle=not many, sampler=s)\n"
    found = {change.text.split(" = ")[0]: change for change in changes(tmp_path, both + LOOP) if not change.must}
    assert "delete it" in found["s"].instead
    assert "seed=7" in found["train_loader"].instead
    assert "train=False" not in found["train_loader"].instead
    inline = "train_loader = DataLoader(d, 4, shuffle=not many, sampler=DistributedSampler(d) if many else None)\n"
    found = {change.text.split(" = ")[0]: change for change in changes(tmp_path, inline + LOOP) if not change.must}
    assert "make_loader(d, " in found["train_loader"].instead
    own = "train_loader = DataLoader(d, 4, sampler=Mine(d))\nother = DistributedSampler(d)\n"
    assert not [c for c in changes(tmp_path, own + LOOP) if "Sampler" in c.text or "DataLoader" in c.text]


def test_what_a_loader_has_is_kept_or_said(tmp_path):
    code = "train_loader = DataLoader(d, batch_size=4, shuffle=True, drop_last=True, worker_init_fn=f, collate_fn=c)\n"
    code += "val_loader = DataLoader(v, batch_size=4)\n" + LOOP
    found = {change.text.split(" = ")[0]: change.instead for change in changes(tmp_path, code)}
    assert "full=True" in found["train_loader"]
    assert "collate_fn=c" in found["train_loader"]
    assert "not kept: worker_init_fn" in found["train_loader"]
    assert "train=False" in found["val_loader"]
    assert "train=False" not in found["train_loader"]


def test_both_branches_that_train_are_no_finding(tmp_path):
    fit = "def fit(net, writer):\n    for epoch in range(3):\n        for x in train_loader:\n"
    fit += "            net(x).backward()\n"
    code = f"{fit}            optimizer.step()\nif rank == 0:\n    fit(net, writer)\nelse:\n    fit(net, None)\n"
    read(tmp_path, code)
    assert not [one for one in reading.findings_in(tmp_path) if one.severity == "hang"]


def test_a_program_that_samples_is_no_training(tmp_path):
    code = "dist.init_process_group('gloo')\nfor i in range(9):\n    images = model.sample()\n"
    found = read(tmp_path, code)
    assert found.changes == ()
    assert found.patch == b""
    assert "would end it as stalled; leave it alone" in found.loop


@pytest.mark.parametrize("before", ["lab/__init__.py", "lab.py"])
def test_a_project_that_setuptools_installs_still_installs(tmp_path, before):
    pytest.importorskip("setuptools")
    (tmp_path / before).parent.mkdir(exist_ok=True)
    (tmp_path / before).write_text("")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "lab"\nversion = "1"')

    def installs() -> subprocess.CompletedProcess[str]:
        code = "from setuptools import setup; setup(script_args=['--quiet', 'egg_info'])"
        command = [sys.executable, "-c", code]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert installs().returncode == 0
    needed = packaging.needed(tmp_path, "lab_ddp")
    assert needed is not None
    for name in ("launch", "lab_ddp/ddp"):
        (tmp_path / name).mkdir(parents=True)
    spoilt = installs()
    assert spoilt.returncode or "lab" not in (tmp_path / "lab.egg-info/top_level.txt").read_text().split()
    (tmp_path / "pyproject.toml").write_bytes(needed.after)
    done = installs()
    assert done.returncode == 0, done.stderr
    assert "lab" in (tmp_path / "lab.egg-info/top_level.txt").read_text().split()
    assert packaging.needed(tmp_path, "lab_ddp") is None, "once is enough"


@pytest.mark.parametrize(
    ("files", "package", "command"),
    [
        (
            {"src/train.py": "from src.model import f\nDistributedDataParallel\n" + "if __name__ == '__main__':\n"},
            "lab",
            "-m src.train",
        ),
        (
            {"code/run/train.py": "import code.x\nDistributedDataParallel\nif __name__ == '__main__':\n"},
            "lab",
            "-m code.run.train",
        ),
        ({"train.py": "import lab.net\nDistributedDataParallel\nif __name__ == '__main__':\n"}, "lab_ddp", "train.py"),
        (
            {"train.py": "import lab.net\nDistributedDataParallel\nif __name__ == '__main__':\n", "lab/net.py": ""},
            "lab",
            "train.py",
        ),
        (
            {
                "src/__init__.py": "",
                "src/net.py": "",
                "src/train.py": "from net import f\nDistributedDataParallel\nif __name__ == '__main__':\n",
            },
            "lab",
            "src/train.py",
        ),
    ],
)
def test_what_starts_it_finds_its_imports(repository, files, package, command):
    directory = repository("lab", files)
    suggested = suggest(directory, lambda name: (Path(__file__).parents[2] / name).read_text())
    assert (suggested["package"], suggested["command"]) == (package, command)


def test_names_are_taken_as_they_are_under_the_condition_of_the_loop(tmp_path):
    code = f"dist.init_process_group('gloo')\nif __name__ == '__main__':\n{textwrap.indent(LOOP, '    ')}"
    assert "resumed_epochs(range(3), model=model, optimizer=optimizer):" in patched(tmp_path, HEAD + code)


def test_a_name_that_one_branch_makes_is_taken_there_only(tmp_path):
    code = f"dist.init_process_group('gloo')\nif amp:\n    scaler = torch.amp.GradScaler()\n{LOOP}"
    code += "        if amp:\n            scaler.update()\n"
    assert "scaler=scaler if (amp) else None):" in patched(tmp_path, HEAD + code)


def test_a_loop_that_starts_processes_is_none_of_epochs(tmp_path):
    code = f"def work(rank):\n{textwrap.indent(LOOP, '    ')}for gpu in range(2):\n    mp.spawn(work, nprocs=1)\n"
    told = [change.instead for change in changes(tmp_path, f"dist.init_process_group('gloo')\n{code}")]
    assert any("resumed_epochs(range(3), model=model" in text for text in told)
    assert not any("resumed_epochs(range(2)" in text for text in told)


def test_a_folder_named_like_an_installed_package(repository):
    directory = repository("yaml", {"train.py": "print()\n"})
    suggested = suggest(directory, lambda name: (Path(__file__).parents[2] / name).read_text())
    assert suggested["package"] == "yaml_ddp"


def test_names_that_the_user_has_are_not_taken(tmp_path):
    code = f"def resumed_batches(x):\n    return x\nddp_session = 3\n{LOOP}"
    told = patched(tmp_path, HEAD + "dist.init_process_group('gloo')\n" + code)
    assert "from mine.ddp.adopted import ddp_session as adopted_ddp_session, resumed_batches as adopted_" in told
    assert "with adopted_ddp_session():" in told
    assert "in adopted_resumed_batches(train_loader):" in told


FRAMEWORKS = [
    ("import lightning as L\nL.Trainer().fit(m)\n", "lightning"),
    ("from accelerate import Accelerator\na = Accelerator()\nfor x in d:\n    a.backward(loss)\n", "accelerate"),
    ("from transformers import Trainer\nTrainer(m).train()\n", "transformers"),
    (
        "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\nmodel = FSDP(m)\n",
        "FullyShardedDataParallel",
    ),
]


@pytest.mark.slow  # each renders a project
@pytest.mark.parametrize(("code", "name"), FRAMEWORKS, ids=[name for _, name in FRAMEWORKS])
def test_a_framework_that_owns_the_loop_is_told_before_anything_is_written(repository, cli, code, name):
    directory = repository("lab", {"train.py": code})
    result = cli("new", ".", "--into-existing", "-y")
    assert result.exit_code == 1
    assert f"{name} owns the loop of train.py" in result.stderr
    assert {path.name for path in directory.iterdir()} == {"train.py", ".git"}


def test_a_loop_in_pytorch_beside_a_framework_is_the_users_own(tmp_path):
    found = read(tmp_path, f"import deepspeed\ndist.init_process_group('gloo')\n{LOOP}")
    assert found.framework == ""
    assert found.patch


@pytest.mark.slow  # each renders a project
@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a.ipynb": "{}"}, "no file of the repository is what python -m lab.train runs"),
        ({"train.py": "print 'two'\n"}, "train.py: it is not Python 3"),
        ({"train.py": "print('hello')\n"}, "train.py trains nothing"),
    ],
    ids=["notebook", "python-2", "nothing"],
)
def test_where_nothing_trains_that_is_said_first(repository, cli, files, words):
    repository("lab", files)
    result = cli("new", ".", "--into-existing", "-y")
    assert result.exit_code == 0, result.output
    assert words in result.stderr
    assert result.output.index(words) < result.output.index("What follows from the answers"), "before it is written"


@pytest.mark.slow  # each renders a project
def test_shell_scripts_keep_their_line_ends(repository, adopt):
    directory = repository("lab", adopt_shapes.files("pass") | {".gitattributes": "* text=auto eol=crlf\n"})
    adopt()
    told = git(directory, "check-attr", "eol", "launch/torchrun.sh", "train.py")
    assert told.splitlines() == ["launch/torchrun.sh: eol: lf", "train.py: eol: crlf"]


def test_check_gives_the_list_again_and_shorter(repository, adopt, cli, monkeypatch):
    directory = repository("lab", adopt_shapes.files("torchrun"))
    adopt()
    before = cli("check", ".")
    assert "Adopting: 7 lines must change yet, and 5 may" in before.stdout
    assert before.exit_code == 1
    git(directory, "apply", "adopt.patch")
    after = cli("check", ".")
    assert "Adopting: 0 lines must change yet, and 5 may" in after.stdout
    assert "resumed_epochs(" not in after.stdout


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    contents = {
        "two.py": b"import torch\nprint 'two'\n",
        "null.py": b"import torch\x00",
        "deep.py": b"import torch\nx = " + b"(" * 3000 + b")" * 3000,
        "huge.py": b"import torch\n" + b"#" * (1 << 20),
        "empty.py": b"",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "train.py").write_text(HEAD + "dist.init_process_group('gloo')\n" + LOOP)
    (tmp_path / "link.py").symlink_to(tmp_path / "two.py")
    found = advise(tmp_path, [*contents, "train.py", "link.py", "gone.py"], "train.py", ".", "mine")
    assert set(found.unread) >= {"null.py", "two.py"}
    assert "link.py" not in found.unread
    assert found.patch
