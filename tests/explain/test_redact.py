"""What `redact` takes out, what it leaves, and that it neither follows links nor overwrites."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_scaffold._errors import UsageError
from ddp_scaffold.explain import flight_recorder
from ddp_scaffold.explain.explain import explain
from ddp_scaffold.explain.redact import redact

sys.path.insert(0, str(Path(__file__).parent))
from lookalikes import CASES, Case
from test_dumps import call, write

PRIVATE = """\
host      : gpu-a07.cs.uni-x.edu
gpu-a07:123:456 [0] NCCL INFO Bootstrap : Using eth0:172.16.4.9<0>
File "/home/jsmith/secret-project/train.py", line 88, in step
File "/home/jsmith/env/lib/python3.11/site-packages/torch/nn/module.py", line 12, in forward
WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567 HF_TOKEN='hf_abcdefghijklmnopqrstuvwxyz' DB_PASSWORD=hunter22
Authorization: Bearer abcdefghijkl.mnop-qrst AKIAABCDEFGHIJKLMNOP ghp_abcdefghijklmnopqrstuvwxyz0123456789
eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-def j.smith@uni-x.edu https://jsmith:pw12@git.uni-x.edu/x
link 3c:ec:ef:12:34:56 via fe80::3eec:efff:fe12:3456 and 172.16.4.10, not 127.0.0.1
jsmith at gpu-a07 waits
"""
SECRETS = (
    r"gpu-a07|uni-x|jsmith|j\.smith|172\.16|3c:ec|fe80|hunter22|0123456789abcdef|hf_abc|AKIA|ghp_|eyJ|abcdefghijkl|pw12"
    r"|secret-project"
)
KEPT = (
    "[rank6]:[E805 12:12:42.510 ProcessGroupNCCL.cpp:632] [Rank 6] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=16172, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600026 milliseconds "
    "before timing out.\nTime 2024-05-06_07:08:09 epoch 12: loss=0.3 [30:09<33:25, 1.2it/s] max_tokens=4096\n"
)


def test_all_that_is_private_goes(tmp_path: Path) -> None:
    (tmp_path / "job-gpu-a07.log").write_text(PRIVATE)
    (copy,), _ = redact([str(tmp_path / "job-gpu-a07.log")], tmp_path / "copy")
    text = copy.read_text()
    assert not re.search(SECRETS, str(copy.relative_to(tmp_path)) + text), text
    assert '/train.py", line 88' in text
    assert '/site-packages/torch/nn/module.py", line 12' in text
    assert "127.0.0.1" in text


def test_what_a_verdict_stands_on_stays(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(KEPT.encode() + b"\xff\xfe broken\n")
    (copy,), _ = redact([str(tmp_path / "a.log")], tmp_path / "copy")
    assert copy.read_bytes() == KEPT.encode() + b"\xff\xfe broken\n"


def test_one_host_has_one_name_in_all_files(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank0.log").write_text("late news of n17 and n18\n")
    (logs / "rank1.log").write_text("heartbeat rank=1 host=n17 phase=train\nheartbeat rank=2 host=n18 phase=train\n")
    texts = [[copy.read_text() for copy in redact([str(logs)], tmp_path / name)[0]] for name in ("one", "two")]
    assert texts[0] == texts[1]
    assert texts[0][0] == "late news of host-1 and host-2\n"
    assert "host=host-1 phase" in texts[0][1]


def test_links_and_fifos_are_left_out(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "outside").write_text("private\n")
    (logs / "link.log").symlink_to(tmp_path / "outside")
    os.mkfifo(logs / "fifo.log")
    (logs / "rank_0").write_bytes(b"\x80\x02\0")
    (logs / "model.bin").write_bytes(b"\0\1\2")
    (logs / "a.log").write_text("x\n")
    copies, notes = redact([str(logs)], tmp_path / "copy")
    assert [copy.name for copy in copies] == ["a.log"]
    assert [re.sub(r".*/(\S+) was.*", r"\1", note) for note in notes] == ["fifo.log", "link.log", "model.bin", "rank_0"]


HASH = "0f" * 20  # torch names groups so


def test_a_dump_is_written_anew_with_the_names_that_the_logs_have(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    entry = call(3, state="started", group="7")
    entry["frames"][1]["filename"] = "/home/jsmith/secret project/train.py"
    entry |= {"process_group": (HASH, "secret-project-encoder"), "thread_name": "jsmith on gpu-a07"}
    write(logs, {0: [entry], 1: [entry]}, {HASH: (0, 1)})
    config = {HASH: {"name": HASH, "desc": "secret-project-encoder", "ranks": "[0, 1]"}}
    record = {"entries": [entry], "pg_config": config, "hostname": "gpu-a07", "one": [entry] * 2}
    (logs / "nccl_trace_rank_0").write_bytes(pickle.dumps(record, protocol=2))
    (logs / "rank_1.json").write_text(json.dumps(record))
    (logs / "job.log").write_text(f"{PRIVATE}[rank0]: [PG ID 1 PG GUID 7(secret-project-encoder) Rank 0] waits\n")
    copies, notes = redact([str(logs)], tmp_path / "copy")
    assert (len(copies), notes) == (4, ())
    by_name = {copy.name: copy for copy in copies}
    for copy in copies:
        assert not re.search(SECRETS, copy.read_bytes().decode(errors="replace")), copy
    kept = flight_recorder.plain(by_name["nccl_trace_rank_0"].read_bytes(), "copy")
    assert isinstance(kept, dict)
    assert kept["entries"][0]["process_group"] == (HASH, "group-1")
    assert kept["pg_config"] == {HASH: {"name": HASH, "desc": "group-1", "ranks": "[0, 1]"}}
    torch, own = kept["entries"][0]["frames"]
    assert torch["filename"] == "/env/torch/distributed/distributed_c10d.py"
    assert (own["name"], own["line"], own["filename"].rpartition("/")[2]) == ("main", 88, "train.py")
    host = re.search(r"host      : ([\w-]+)", by_name["job.log"].read_text())
    assert host
    assert host[1] == kept["hostname"].partition(".")[0]
    assert json.loads(by_name["rank_1.json"].read_text())["hostname"] == kept["hostname"]
    assert "PG GUID 7(group-1) Rank 0" in by_name["job.log"].read_text()
    assert kept["one"][0] is kept["one"][1]


def test_a_dump_within_itself_and_one_that_calls_code_are_left_out(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    endless: dict[str, object] = {"entries": []}
    endless["entries"] = [endless]
    logs.mkdir()
    (logs / "rank_0").write_bytes(pickle.dumps(endless, protocol=2))
    (logs / "rank_1").write_bytes(pickle.dumps({"entries": [Path("x")]}, protocol=2))
    (logs / "a_2.json").write_text('{"entries": "no list", "host": "gpu-a07"}')
    copies, notes = redact([str(logs)], tmp_path / "copy")
    assert [copy.read_text() for copy in copies] == ['{"entries": "no list", "host": "host-1"}']
    assert [note.partition(" was left out: ")[2][:30] for note in notes] == [
        "its containers are deeper with",
        f"{logs}/rank_1 is no"[:30],
    ]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("x\n")
    (tmp_path / "copy").mkdir()
    with pytest.raises(UsageError, match="exists already"):
        redact([str(tmp_path / "a.log")], tmp_path / "copy")
    with pytest.raises(UsageError, match="no text file"):
        redact([str(tmp_path / "none.log")], tmp_path / "new")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_copy_has_the_same_verdict(case: Case, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(case.log)
    (copy,), _ = redact([str(tmp_path / "job.log")], tmp_path / "copy")
    one, other = (explain([str(path)])[0].verdict for path in (tmp_path / "job.log", copy))
    assert (one.kind, one.first_ranks, one.phase, one.confidence) == (
        other.kind,
        other.first_ranks,
        other.phase,
        other.confidence,
    )


def test_what_is_packed_is_unpacked_or_left_out(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    text = PRIVATE + "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    packed = gzip.compress(text.encode())
    (logs / "a.log.gz").write_bytes(packed)
    (logs / "a.log").write_text("step 1\n")
    (logs / "cut.log.gz").write_bytes(packed[:-12])
    (logs / "b.log.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(range(1, 256)) * 20)
    (logs / "model.bin").write_bytes(bytes(range(1, 256)) * 20)  # no zeros
    written, notes = redact([str(logs)], tmp_path / "out")
    assert sorted(path.name for path in written) == ["a.log", "cut.log", "unpacked-a.log"]
    assert not any(re.search(SECRETS, path.read_text()) for path in written)
    assert len(notes) == 2
    before, after = (explain([str(folder)])[0].verdict for folder in (logs, tmp_path / "out"))
    assert (before.kind, before.first_ranks) == (after.kind, after.first_ranks) == ("cuda_oom", (1,))


@pytest.mark.skipif(not shutil.which("zstd"), reason="there is no zstd here to pack with")
def test_what_zstd_has_packed_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(PRIVATE)
    subprocess.run(["zstd", "-q", "--rm", tmp_path / "a.log"], check=True)
    (written,), notes = redact([str(tmp_path / "a.log.zst")], tmp_path / "out")
    assert (written.name, notes) == ("a.log", ())
    assert written.read_text()
    assert not re.search(SECRETS, written.read_text())


@pytest.mark.parametrize("part", ["a_", "a.", "1.", "/a", "://a", "f:", "host="])
def test_a_long_line_that_looks_much_like_a_secret_is_no_work_without_end(part: str, tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(part * 100_000)
    done = subprocess.run(
        [sys.executable, "-m", "ddp_scaffold", "explain", str(tmp_path / "job.out"), "--redact", str(tmp_path / "out")],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "SLURM_JOB_NODELIST=bigcluster[001-004]",
        "srun: error: bigcluster[003-004]: tasks 2-3: Terminated",
        "SLURM_NODELIST=bigcluster[001-004]\nbigcluster003: kernel: something",
        "Connecting to bigcluster003.corp.com:29500",
        "failed to connect to [bigcluster003]:29500 (errno: 111 - Connection refused).\nbigcluster003 waits",
        "rdzv_endpoint    : bigcluster003:29500",
        "init_method=tcp://bigcluster003:29500",
        "The node 'bigcluster003.corp.com_1234_0' has failed to send a keep-alive heartbeat",
        "wandb: Syncing run https://wandb.ai/bigcluster/proj/runs/abc",
        "copied to s3://bigcluster/alice/key",
        "wandb: Logged in as: bigcluster (use `wandb login`)",
        "ssh -q bigcluster@n1 nvidia-smi",
        r"File C:\Users\bigcluster\proj\x.py",
    ],
)
def test_hosts_users_and_places_are_known_where_launchers_name_them(line: str, tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(line + "\nsee https://pytorch.org/docs/stable/elastic/errors.html\n")
    written, _ = redact([str(tmp_path / "job.out")], tmp_path / "out")
    text = written[0].read_text()
    assert not re.search("bigcluster|corp", text), text
    assert "https://pytorch.org/docs/stable/elastic/errors.html" in text
