"""How a state gets to disk beside training, and back: without ranks, and in runs of one."""

from __future__ import annotations

import copy
import errno
import hashlib
import importlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import textwrap
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cross_section import every

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(120)

Part = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def project(render: Callable[..., Path]) -> Path:
    return render({"package": "saved", "model": "custom"}, name="saved")


@pytest.fixture(scope="module")
def part(project: Path) -> Iterator[Part]:
    """Imports a module of a rendered project's plumbing."""
    source = str(project / "src")
    sys.path.insert(0, source)
    yield lambda name: importlib.import_module(f"saved.ddp.{name}")
    sys.path.remove(source)


def state() -> dict[str, Any]:
    """Tensors and values of all kinds; 3 MB."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)), torch.nn.BatchNorm1d(300))
    network[1].weight = network[0].weight  # tied
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.rand(4, 300)).sum().backward()
    optimizer.step()
    rows = torch.arange(100)
    own: dict[str, Any] = {"list": [1, {"deep": torch.ones(2, 2)}], "set": {1, 2}, "order": OrderedDict(a=[1])}
    own |= {"empty": torch.empty(0), "view": rows[10:20:2], "whole": rows, "half": torch.ones(3, dtype=torch.bfloat16)}
    own |= {"transposed": torch.rand(3, 4).t(), "parameter": torch.nn.Parameter(torch.ones(2)), "text": "x"}
    return {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "own": own}


def spoil(value: Any) -> None:
    """What training may do to a state: change all of it in place."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.zero_()
    elif isinstance(value, dict):
        for inner in list(value.values()):
            spoil(inner)
        value["added"] = 1
    elif isinstance(value, list):
        for inner in value:
            spoil(inner)
        value.append(7)


def flat(value: Any, path: str = "") -> dict[str, str]:
    """Every leaf as text, with its type, shape and layout."""
    if isinstance(value, torch.Tensor):
        layout = (value.dtype, tuple(value.shape), value.stride(), value.requires_grad, type(value).__name__)
        return {path: f"{layout} {value.tolist()}"}
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found = {path: type(value).__name__}
        for key, inner in items:
            found |= flat(inner, f"{path}/{key}")
        return found
    return {path: repr(value)}


def test_a_copied_state_is_what_it_was_whatever_training_does_to_it(part: Part) -> None:
    freeze = part("saving.snapshot").freeze
    given = state()
    before = flat(given)
    copied = freeze(given).state
    spoil(given)
    assert flat(copied) == before
    model = copied["model"]
    assert model["0.weight"].data_ptr() == model["1.weight"].data_ptr(), "tied weights are stored once, as without it"
    assert copied["own"]["view"].untyped_storage().data_ptr() == copied["own"]["whole"].data_ptr()
    assert model._metadata == given["model"]._metadata
    assert model._metadata is not given["model"]._metadata


def test_a_state_that_holds_itself_is_copied(part: Part) -> None:
    given: dict[str, Any] = {"tensor": torch.ones(2)}
    given["itself"] = [given]
    copied = part("saving.snapshot").freeze(given).state
    assert copied["itself"][0]["itself"] is copied["itself"]
    assert copied["tensor"] is not given["tensor"]


def test_the_memory_of_a_copy_is_used_again(part: Part) -> None:
    freeze = part("saving.snapshot").freeze
    first = freeze(state()).state["model"]["0.weight"]
    assert freeze(state()).state["model"]["0.weight"].data_ptr() == first.data_ptr()
    assert freeze({"large": torch.ones(10_000_000)}).state["large"].sum() == 10_000_000


def test_what_cannot_be_copied_is_said(part: Part) -> None:
    assert "cannot pickle" in part("saving.snapshot").freeze({"module": sys})


class Counting(torch.optim.AdamW):
    """Beside its moments, state of two other types: a moment in half the memory, and a count that no float holds."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for parameter, state in self.state.items():
            state["half"] = state["exp_avg"].bfloat16()
            state["updates"] = 1 + state.get("updates", torch.full_like(parameter, 2**53, dtype=torch.int64))
        return loss


def stepped(network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a checkpoint holds after three more steps, in memory of its own."""
    for _ in range(3):
        optimizer.zero_grad()
        network(torch.ones(1, 2, dtype=next(network.parameters()).dtype)).sum().backward()
        optimizer.step()
    return copy.deepcopy({"model": network.state_dict(), "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize("kind", [Counting, torch.optim.NAdam, torch.optim.ASGD, torch.optim.SGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_of_an_optimiser_comes_back_in_the_types_that_it_had(
    part: Part, tmp_path: Path, kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """Torch gives it that of its parameter: NAdam's float32 product beside bfloat16 would be another number."""
    restore = part("restore")
    torch.manual_seed(0)
    network = torch.nn.Linear(2, 2).to(dtype)
    optimizer = kind(network.parameters())
    saved, whole = stepped(network, optimizer), stepped(network, optimizer)
    orders = restore.parameter_orders({"model": network, "optimizer": optimizer})
    network = torch.nn.Linear(2, 2).to(dtype)
    optimizer = kind(network.parameters())
    restore.fill({"model": network, "optimizer": optimizer}, copy.deepcopy(saved), tmp_path, orders)
    assert flat(optimizer.state_dict()) == flat(saved["optimizer"])
    assert flat(stepped(network, optimizer)) == flat(whole), "to the bit"


def test_state_follows_parameters_that_have_another_type_than_when_it_was_saved(part: Part, tmp_path: Path) -> None:
    network = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(network.parameters())
    saved = stepped(network, optimizer)
    later = torch.nn.Linear(2, 2).to(torch.bfloat16)
    resumed = torch.optim.AdamW(later.parameters())
    part("restore").fill({"model": later, "optimizer": resumed}, saved, tmp_path)
    assert {state["exp_avg"].dtype for state in resumed.state.values()} == {torch.bfloat16}


def write(part: Part, root: Path, step: int = 3) -> Path:
    frozen = part("saving.snapshot").freeze(state())
    payload = {"format": 1, "counters": {"step": step}, "rng": [0], "objects": frozen.state}
    assert part("saving.directory").write(root, payload, 5, lambda _note: None, frozen.block.holds) is None
    return root / f"step_{step:08d}"


def test_a_checkpoint_is_read_once_and_compared_on_the_way(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = part("saving.directory")
    path = write(part, tmp_path)
    preadv, read = os.preadv, list[int]()

    def counted(*given: Any) -> int:
        read.append(preadv(*given))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    name, payload = directory.read_newest(tmp_path, lambda _note: None)
    size = (path / "state.pt").stat().st_size
    assert size < sum(read) < 1.05 * size, "only headers are read twice"
    assert name == path.name
    assert flat(payload["objects"]) == flat(state())
    assert flat(torch.load(path / "state.pt", weights_only=True)) == flat(payload), "PyTorch alone reads it, too"


def test_one_bit_anywhere_is_noticed(part: Part, tmp_path: Path) -> None:
    directory = part("saving.directory")
    path = write(part, tmp_path)
    whole = (path / "state.pt").read_bytes()
    places = [0, 100, len(whole) - 1, len(whole) - 30, *random.Random(0).sample(range(len(whole)), 20)]
    for place in places:
        content = bytearray(whole)
        content[place] ^= 1
        (path / "state.pt").write_bytes(content)
        with pytest.raises(directory.Damaged, match="does not match its checksum"):
            directory.read(path, lambda _note: None)
    (path / "state.pt").write_bytes(whole)
    directory.read(path, lambda _note: None)


def test_the_manifest_says_how_anybody_can_check_the_file(part: Part, tmp_path: Path) -> None:
    path = write(part, tmp_path)
    content, manifest = (path / "state.pt").read_bytes(), json.loads((path / "manifest.json").read_text())
    said = manifest["files"]["state.pt"]
    assert said["sha256"] == hashlib.sha256(content).hexdigest(), "as sha256sum prints it, and older releases read it"
    size = said["pieces"]["bytes"]
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    digests = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    assert said["pieces"]["sha256"] == hashlib.sha256(digests).hexdigest()


@pytest.mark.parametrize("pieces", [None, 1000, 123_457, 1 << 22])
def test_pieces_of_any_size_and_files_of_older_releases_without_any(
    part: Part, tmp_path: Path, pieces: int | None
) -> None:
    directory, hashed = part("saving.directory"), part("saving.hashed")
    path = write(part, tmp_path)
    content, manifest = (path / "state.pt").read_bytes(), json.loads((path / "manifest.json").read_text())
    sums = manifest["files"]["state.pt"]
    del sums["pieces"]
    if pieces:
        sha = hashed._PiecesSha(pieces)
        sha.update(content)
        sums["pieces"] = {"bytes": pieces, "sha256": sha.hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert flat(directory.read(path, lambda _note: None)["objects"]) == flat(state())
    (path / "state.pt").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(directory.Damaged, match="does not match its checksum"):
        directory.read(path, lambda _note: None)


@pytest.mark.parametrize("size", [0, -1, 1 << 40, "many", None])
def test_pieces_that_make_no_sense_are_a_damaged_manifest(part: Part, tmp_path: Path, size: Any) -> None:
    directory = part("saving.directory")
    path = write(part, tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.pt"]["pieces"]["bytes"] = size
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(directory.Damaged, match=r"manifest\.json"):
        directory.read(path, lambda _note: None)


@pytest.mark.parametrize(
    "manifest",
    [
        "",
        "[]",
        '{"files": {"state.pt": {"bytes": 1e999, "sha256": ""}}}',
        '{"files": {"state.pt": {"bytes": 1, "sha256": "", "pieces": {"bytes": 1e999, "sha256": ""}}}}',
        '{"files": {"a\\u0000b": {"bytes": 1, "sha256": ""}, "state.pt": {"bytes": 1, "sha256": ""}}}',
        '{"files": {"\\ud800": {"bytes": 1, "sha256": ""}, "state.pt": {"bytes": 1, "sha256": ""}}}',
        "[" * 200_000,
        '{"a":' * 200_000,
    ],
    ids=["empty", "list", "endless", "endless pieces", "zero in a name", "surrogate", "deep list", "deep object"],
)
def test_whatever_a_manifest_holds_an_older_checkpoint_is_read(part: Part, tmp_path: Path, manifest: str) -> None:
    older, newer = write(part, tmp_path, 3), write(part, tmp_path, 4)
    (newer / "manifest.json").write_text(manifest)
    name, _ = part("saving.directory").read_newest(tmp_path, lambda _note: None)
    assert name == older.name
    assert (tmp_path / f"broken-{newer.name}").is_dir()


def test_a_file_that_becomes_shorter_while_it_is_read(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, path = part("saving.directory"), write(part, tmp_path)
    preadv, size = os.preadv, (path / "state.pt").stat().st_size

    def shorter(file: int, buffers: Any, start: int) -> int:
        there = buffers[0][: max(0, size // 2 - start)]
        return preadv(file, [there], start) if there else 0

    monkeypatch.setattr(os, "preadv", shorter)
    with pytest.raises(directory.Damaged, match="does not match its checksum"):
        directory.read(path, lambda _note: None)


def test_a_disk_that_cannot_read_is_no_damage(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, path = part("saving.directory"), write(part, tmp_path)

    def broken(_file: int, _buffers: Any, _start: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error"):
        directory.read(path, lambda _note: None)


@pytest.mark.parametrize("spoilt", ["empty", "unreadable"])
def test_a_run_of_which_no_checkpoint_can_be_read_does_not_begin_anew(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    """At a requeue nobody reads a warning: weeks of work would be made once more, over the files of the run."""
    directory = part("saving.directory")
    paths = [write(part, tmp_path, step) for step in (3, 4)]
    if spoilt == "empty":
        for path in paths:
            (path / "state.pt").write_bytes(b"")
    else:
        monkeypatch.setattr(os, "preadv", lambda *_given: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
    for _ in range(2):
        with pytest.raises(directory.NoneWhole, match=r"step_00000004: .*step_00000003: "):
            directory.read_newest(tmp_path, lambda _note: None)
        assert sorted(tmp_path.iterdir()) == paths, "as they were: the next start must not begin anew, either"


def test_where_no_checkpoint_can_be_read_all_ranks_end_with_78(project: Path, tmp_path: Path) -> None:
    path = tmp_path / "run/checkpoints/step_00000005"
    path.mkdir(parents=True)
    said, root = run(project, tmp_path, "trains", ranks=2)
    outcome = json.loads((tmp_path / "run/outcome.json").read_text())
    assert (outcome["exit_code"], outcome["restart"]) == (78, False), said
    assert "step_00000005: [Errno 2]" in outcome["reason"]
    assert "run.resume" in outcome["reason"]
    assert list(root.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_named_with_what_is_left_of_it(
    part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own error, of a device without room: it names no file."""
    directory = part("saving.directory")
    payload = {"counters": {"step": 1}, "rng": [None], "state": torch.zeros(1 << 20)}
    monkeypatch.setattr(directory, "STATE", "/dev/full")
    problem = directory.write(tmp_path, payload, 1, lambda _note: None)
    named = re.escape(f"OSError: [Errno 28] No space left on device: {tmp_path} (the file system has ")
    assert re.fullmatch(named + r"\d+ MB left\)", problem), problem


def test_a_disk_of_any_size_costs_no_more_than_the_checkpoint_that_does_not_fit(project: Path, tmp_path: Path) -> None:
    """A real file system that is full after every 24 kB in turn; the one that was written before is loaded."""
    script = Path(__file__).with_name("full_disk_script.py")
    alone = ["unshare", "--user", "--map-root-user", "--mount"] if os.geteuid() else ["unshare", "--mount"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody but root mount, not even in a namespace")
    inside = f"mount -t tmpfs -o size=8m tmpfs {tmp_path} && exec {sys.executable} {script} {tmp_path}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    environment |= {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*alone, "sh", "-c", inside], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    newest = 1
    for step, (free_kb, written, at, whole) in enumerate(rows, 1):
        newest = step if written else newest
        assert (at, whole) == (newest, True), (free_kb, done.stderr)
        assert written or f"checkpoint of step {step} not written: OSError: [Errno 28] No space left" in done.stderr
    assert [rows[1][1], rows[-1][1]] == [False, True], rows


def test_what_a_killed_writer_of_this_host_has_left_goes_at_once(part: Part, tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    host = socket.gethostname()
    names = [f".writing-{host}-{ended.stdout.strip()}", f".writing-{host}-{os.getppid()}", ".writing-elsewhere-1"]
    for name in names:
        (tmp_path / name).mkdir()
    write(part, tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".writing-*")) == sorted(names[1:]), "others may be at work"


def run(project: Path, tmp_path: Path, what: str, faults: str = "", ranks: int = 0) -> tuple[str, Path]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    environment |= {"PYTHONPATH": str(project / "src"), "DDP_RUN__DIR": str(tmp_path), "DDP_RUN__ID": "run"}
    environment |= {"DDP_FAULTS": faults, "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).with_name("saving_script.py"))
    alone = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    launcher = ["-m", "torch.distributed.run", *alone, "--local-addr", "127.0.0.1"] if ranks else []
    command = [sys.executable, *launcher, script, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    outcome = json.loads((tmp_path / "run/outcome.json").read_text())
    return f"{outcome['kind']}\n{done.stdout}{done.stderr}", tmp_path / "run/checkpoints"


def test_training_goes_on_while_a_checkpoint_is_written(project: Path, tmp_path: Path) -> None:
    """The file system takes a second for the second one, and the end of training waits for it."""
    said, root = run(project, tmp_path, "trains", "sleep@step=2,phase=checkpoint:write,seconds=1")
    assert said.startswith("benign"), said
    assert said.count("copied False") == 2, said
    assert "beside training, which stood still for" in said
    assert sorted(path.name for path in root.iterdir()) == ["step_00000001", "step_00000002"]


def test_the_line_of_a_step_is_there_before_its_checkpoint(project: Path, tmp_path: Path) -> None:
    """Lines are written at the next one, as a rule; a run that is killed before does not make this step again."""
    said, _ = run(project, tmp_path, "logs")
    assert re.findall("^lines .*", said, re.MULTILINE) == ["lines 1", "lines 2"], said


def test_what_is_being_written_is_waited_for_before_one_is_loaded(project: Path, tmp_path: Path) -> None:
    said, _ = run(project, tmp_path, "loads", "sleep@step=2,phase=checkpoint:write,seconds=1")
    assert "loaded 2" in said, said


def test_an_exception_after_a_save_does_not_cost_the_checkpoint(project: Path, tmp_path: Path) -> None:
    said, root = run(project, tmp_path, "raises", "sleep@step=2,phase=checkpoint:write,seconds=1")
    assert said.startswith("rank_exception"), said
    assert sorted(path.name for path in root.iterdir()) == ["step_00000001", "step_00000002"]


def test_an_error_while_it_is_written_costs_that_checkpoint(project: Path, tmp_path: Path) -> None:
    """The injected exception is a RuntimeError, as those of torch.save: it counts as a write that failed."""
    said, root = run(project, tmp_path, "trains", "raise@step=1,phase=checkpoint:write")
    assert said.startswith("benign"), said
    assert said.count("checkpoint of step 1 not written: InjectedFault") == 1, said
    assert [path.name for path in root.iterdir()] == ["step_00000002"]


@pytest.mark.parametrize("what", ["trains", pytest.param("agrees", marks=pytest.mark.slow)])
def test_a_write_that_failed_is_told_once_and_before_anything_of_the_next(
    project: Path, tmp_path: Path, what: str
) -> None:
    """On both ranks, by the next save; also when rank 0 has told it at an agreement that is not over yet."""
    said, root = run(project, tmp_path, what, "raise@step=1,phase=checkpoint:write", ranks=2)
    assert said.startswith("benign"), said
    assert [path.name for path in root.iterdir()] == ["step_00000002"]
    for rank in (0, 1):
        log = (tmp_path / f"run/logs/rank{rank}.log").read_text()
        warnings = re.findall(r"WARNING rank 0 \(\S+\): checkpoint of step 1 not written: InjectedFault", log)
        assert len(warnings) == 1, log
        assert "checkpoint of step 2" not in log.partition("of step 1 not written")[0], log
        assert rank or "checkpoint of step 2 written" in log
    assert said.count("checkpoint of step 1 not written") == 1, "rank 0 says it aloud, and nobody else"


def test_without_memory_for_a_copy_training_stands_still_and_says_so_once(project: Path, tmp_path: Path) -> None:
    said, root = run(project, tmp_path, "no memory")
    assert said.startswith("benign"), said
    assert said.count("copied True") == 2, said
    assert said.count("training stands still while a checkpoint is written: a copy needs") == 1, said
    assert sorted(path.name for path in root.iterdir()) == ["step_00000001", "step_00000002"]


def snippet(text: str) -> str:
    """The lines that load what was exported, as a reader copies them."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.strip() == "from pathlib import Path")
    last = next(number for number, line in enumerate(lines) if line.strip() == "network.eval()")
    return textwrap.dedent("\n".join([*lines[first : last + 1], ""]))


AFTER = """
import sys, torch
assert not network.training
assert not [name for name in sys.modules if name.startswith("saved.ddp")], "needs nothing of the plumbing"
torch.save(network.state_dict(), "loaded.pt")
"""


def test_exported_weights_are_loaded_without_the_plumbing(project: Path, part: Part, tmp_path: Path) -> None:
    """By the lines that stand in the documentation and in the docstring."""
    pytest.importorskip("safetensors")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DDP_")}
    environment |= {"PYTHONPATH": str(project / "src"), "OMP_NUM_THREADS": "1"}
    words = ["--run.dir", str(tmp_path), "--run.id", "run", "--run.device", "cpu", "--log.tracker", "none"]
    words += ["--train.steps", "3", "--train.ema", "0.5"]
    for module, arguments in (("train", words), ("ddp.export", [str(tmp_path / "run")])):
        command = [sys.executable, "-m", f"saved.{module}", *arguments]
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "average of step 3" in done.stdout
    noted = json.loads((tmp_path / "run/wrapped.json").read_text())
    assert {name: noted[name] for name in ("model", "average")} == {"model": [], "average": ["module"]}
    docs = (Path(__file__).parents[2] / "docs/how-it-works.md").read_text()
    loads = snippet(docs).replace("digits", "saved")
    assert snippet(part("export").__doc__).replace("<package>", "saved") == loads
    bare = tmp_path / "bare" / "saved"
    bare.mkdir(parents=True)
    for name in ("__init__.py", "model.py", "data.py"):
        (bare / name).write_text((project / "src/saved" / name).read_text())
    environment["PYTHONPATH"] = str(bare.parent)
    done = subprocess.run(
        [sys.executable, "-c", loads + AFTER],
        cwd=tmp_path / "run/export",
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loaded = torch.load(tmp_path / "run/export/loaded.pt", weights_only=True)
    _, payload = part("saving.directory").read_newest(tmp_path / "run/checkpoints", lambda _note: None)
    average = {key.removeprefix("module."): value for key, value in payload["objects"]["average"].items()}
    assert loaded
    assert all(torch.equal(value, average[key]) for key, value in loaded.items())


def test_tied_weights_are_exported_once(part: Part) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    network[1].weight = network[0].weight
    network.register_buffer("column", torch.arange(6).view(2, 3)[:, 1])
    kept, tied = part("export").weights(network.state_dict())
    assert tied == {"1.weight": "0.weight"}
    assert kept.keys() == {"0.weight", "0.bias", "1.bias", "column"}
    assert kept["column"].is_contiguous()


class Holder(torch.nn.Module):
    """A network of which all that counts is in a child named as those of wrappers are."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.ModuleDict({"_orig_mod": torch.nn.Linear(2, 2)})


def compiled_inside() -> torch.nn.Module:
    network = Holder()
    network.module["_orig_mod"] = torch.compile(network.module["_orig_mod"])
    return network


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: Holder(),
        lambda: torch.nn.DataParallel(Holder()),
        lambda: torch.compile(Holder()),
        lambda: torch.nn.DataParallel(torch.compile(Holder())),
        compiled_inside,
        lambda: torch.optim.swa_utils.AveragedModel(Holder()),
        lambda: torch.optim.swa_utils.AveragedModel(torch.nn.DataParallel(Holder())),
        lambda: torch.nn.Sequential(torch.nn.DataParallel(Holder())),
    ],
)
def test_exported_names_are_those_of_the_bare_module(part: Part, wrap: Callable[[], torch.nn.Module]) -> None:
    """A child of the user's own keeps its name, whatever it is called, and wrappers lose theirs, in any order."""
    network = wrap()
    inside = "0.module._orig_mod" if isinstance(network, torch.nn.Sequential) else "module._orig_mod"
    found = part("export").bare(network.state_dict(), part("restore").wrapped(network))
    assert list(found) == [f"{inside}.weight", f"{inside}.bias"]


def test_names_in_checkpoints_of_older_releases_are_guessed(part: Part) -> None:
    state = {"n_averaged": 1, "module._orig_mod.weight": 2, "module.layer._orig_mod.bias": 3}
    assert part("export").bare(state, None) == {"weight": 2, "layer.bias": 3}
    assert part("export").bare({"module.weight": 1, "head.bias": 2}, None) == {"module.weight": 1, "head.bias": 2}


class WithExtra(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": 7}

    def set_extra_state(self, _state: Any) -> None:
        pass


def saved_run(part: Part, run_dir: Path) -> torch.nn.Module:
    """A run with one checkpoint, of DDP's names without a process group."""
    network = torch.nn.DataParallel(torch.nn.Sequential(WithExtra(2, 2), torch.nn.Linear(2, 2)))
    optimizer = torch.optim.Adam(network.parameters())
    objects = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
    payload = {"format": 1, "counters": {"step": 3}, "rng": [0], "objects": objects}
    assert part("saving.directory").write(run_dir / "checkpoints", payload, 5, lambda _note: None) is None
    return network


def test_what_is_no_tensor_is_left_out_and_named(part: Part, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    network = saved_run(part, tmp_path)
    said = part("export").export(tmp_path, tmp_path / "to")
    assert "4 tensors" in said
    assert "\nleft out, as no tensors: 0._extra_state; network.load_state_dict(" in said
    fresh = torch.nn.Sequential(WithExtra(2, 2), torch.nn.Linear(2, 2))
    fresh.load_state_dict(safetensors.load_file(tmp_path / "to/weights.safetensors"), strict=False)
    assert torch.equal(fresh[1].bias, network.module[1].bias)
    assert (tmp_path / "to/weights.safetensors").stat().st_mode == (tmp_path / "to/settings.yaml").stat().st_mode


@pytest.mark.parametrize(("name", "problem"), [("optimizer", "optimizer holds no"), ("modle", "holds no modle")])
def test_what_cannot_be_exported_is_told_with_what_can(part: Part, tmp_path: Path, name: str, problem: str) -> None:
    pytest.importorskip("safetensors")
    saved_run(part, tmp_path)
    with pytest.raises(part("errors").ConfigError, match=rf"{problem}.*\n  -> choose with --of: model$"):
        part("export").export(tmp_path, tmp_path / "to", name)


@pytest.mark.parametrize("spoilt", [b"\xff\xfe", b"\0" * 90, b"words\n", b"- 1\n", b""], ids=range(5))
def test_spoilt_settings_cost_the_settings_and_not_the_export(part: Part, tmp_path: Path, spoilt: bytes) -> None:
    pytest.importorskip("safetensors")
    saved_run(part, tmp_path)
    for name in ("settings.yaml", "settings.txt", "wrapped.json"):
        (tmp_path / name).write_bytes(spoilt)
    said = part("export").export(tmp_path, tmp_path / "to")
    assert "\nno settings of this run can be read: settings.yaml is empty" in said
    assert (tmp_path / "to/weights.safetensors").stat().st_size > 0
    assert (tmp_path / "to/settings.yaml").read_text() == "{}\n"


FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"  # Python ignores SIGXFSZ


@pytest.mark.parametrize(
    ("where", "before"), every(4, [("file", ""), ("file/inside", ""), ("/proc/to", ""), ("to", FULL)])
)
def test_where_nothing_can_be_written_one_line_says_so_and_nothing_is_left(
    project: Path, part: Part, tmp_path: Path, where: str, before: str
) -> None:
    """A file in the way, a directory that cannot be made, and no room."""
    pytest.importorskip("safetensors")
    saved_run(part, tmp_path)
    (tmp_path / "file").write_text("mine")
    code = f"import sys; from saved.ddp.export import main\n{before}sys.exit(main())"
    command = [sys.executable, "-c", code, str(tmp_path), "--to", str(tmp_path / where)]
    environment = {**os.environ, "PYTHONPATH": str(project / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 78, done.stderr
    problem, remedy = done.stderr.splitlines()
    assert problem.startswith(f"error: nothing is exported to {tmp_path / where}: ")
    assert remedy == "  -> give --to a directory that can be made and written to, with room"
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "to").exists() or not list((tmp_path / "to").iterdir())


def test_settings_keep_their_types_on_the_way_to_the_exported_file(project: Path, part: Part, tmp_path: Path) -> None:
    """Also what text does not tell apart: '12' and 12, 'None' and nothing, a list and its text."""
    values: dict[str, Any] = {"own": {"text": "12", "number": 12, "word": "None", "nothing": None, "flag": "true"}}
    values |= {
        "train": {"precision": "auto", "small": 1e-05},
        "data": {"list": [1, "1"], "path": "a: b", "lines": "a\nb"},
    }
    leaves = list(part("start.settings").leaves(values))
    rows = [(".".join(where), str(value), "default") for where, value in leaves]
    logs = part("start.logs")
    job = types.SimpleNamespace(
        precision="bf16", place=types.SimpleNamespace(attempt=0, launcher="none"), hosts=("n1",)
    )
    logs.describe(tmp_path, job, logs.TypedRows(rows, values))
    chosen = {**values, "train": {"precision": "bf16", "small": 1e-05}}
    assert part("export").settings_of(tmp_path) == chosen
    older = (tmp_path / "settings.txt").read_text().replace("  12  (default)\n", "  13  (default)\n")
    (tmp_path / "settings.txt").write_text(older)
    assert part("export").settings_of(tmp_path)["own"]["number"] == 13, "an older release has made the last start"
    (tmp_path / "settings.yaml").unlink()
    assert part("export").settings_of(tmp_path)["train"]["precision"] == "bf16"


def test_without_safetensors_one_line_says_what_to_install(project: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['safetensors'] = None\nfrom saved.ddp.export import main\nsys.exit(main())"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(project / "src")}, capture_output=True, text=True
    )
    assert done.returncode == 78
    assert done.stderr == "error: safetensors is not installed\n  -> pip install safetensors\n"


MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /scratch rw shared:7 - nfs4 server:/export/one rw,vers=4.2
31 22 0:41 / /scratch rw - lustre 10.0.0.1@o2ib:/two rw
33 22 0:42 / /home/a\040b rw - fuse.sshfs host:/x\040y rw
cut short
"""


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/scratch/runs/first", "lustre of 10.0.0.1@o2ib:/two at /scratch"),
        ("/scratch", "lustre of 10.0.0.1@o2ib:/two at /scratch"),
        ("/scratch2/runs", "ext4 of /dev/sda1 at /"),
        ("/home/a b/runs", "fuse.sshfs of host:/x y at /home/a b"),
    ],
)
def test_the_file_system_of_a_path_is_the_last_one_mounted_over_it(part: Part, path: str, says: str) -> None:
    assert part("saving.mounts").file_system(path, MOUNTS) == says
    assert part("saving.mounts").file_system(path, "nonsense") == "unknown file system"
    assert " at /" in part("saving.mounts").file_system("/proc/self")
