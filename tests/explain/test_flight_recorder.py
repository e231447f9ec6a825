"""Flight-recorder dumps: what real ones of gloo say, and that hostile ones are refused."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_scaffold._errors import UsageError
from ddp_scaffold.explain import flight_recorder

RANK = """
import os, pickle, sys, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
dist.all_reduce(torch.ones(4))
while not pickle.loads(c10d._dump_fr_trace())["entries"][0]["retired"]:
    pass  # a thread of gloo writes that down, a moment later
if rank != 1:
    dist.all_reduce(torch.ones(2, 3), async_op=True)
open(f"{folder}/rank_{rank}", "wb").write(c10d._dump_fr_trace())
open(f"{folder}/rank_{rank}.json", "wb").write(c10d._dump_fr_trace_json())
dist.distributed_c10d._get_default_store().add("left", 1)
while dist.distributed_c10d._get_default_store().add("left", 0) < 3:
    pass
os._exit(0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dumps of three ranks on gloo, of which rank 1 has not issued the second all_reduce."""
    folder = tmp_path_factory.mktemp("dumps")
    program = folder / "rank.py"
    program.write_text(RANK)
    ranks = [subprocess.Popen([sys.executable, program, str(rank), folder]) for rank in range(3)]
    try:
        assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return folder


@pytest.mark.slow  # three processes of torch; test_dumps.py has the reasoning
@pytest.mark.parametrize("ending", ["", ".json"])
def test_the_rank_that_lags_is_named(folder: Path, ending: str) -> None:
    dumps = [flight_recorder.read_dump(folder / f"rank_{rank}{ending}") for rank in range(3)]
    (state,) = flight_recorder.compare(dumps)
    assert (state.lagging, state.undumped, state.mismatch) == ((1,), (), None)
    assert [(each.number, each.state) for each in state.last.values()] == [
        (2, "scheduled"),
        (1, "completed"),
        (2, "scheduled"),
    ]
    assert state.last[0].sizes == "2x3"
    if not ending:
        assert flight_recorder._is_harmless((folder / "rank_0").read_bytes())  # so the reader in C has read it
    assert state.last[0].line == ("" if ending else "rank.py:10")


@pytest.mark.slow
def test_a_missing_dump_is_named(folder: Path) -> None:
    dumps = [flight_recorder.read_dump(folder / f"rank_{rank}") for rank in (0, 2)]
    (state,) = flight_recorder.compare(dumps, world_size=3)
    assert (state.lagging, state.undumped) == ((), (1,))


def entry(number: int, operation: str, sizes: list[list[int]]) -> dict[str, object]:
    return {
        "collective_seq_id": number,
        "process_group": ("0", "default_pg"),
        "profiling_name": f"nccl:{operation}",
        "input_sizes": sizes,
        "state": "started",
    }


def test_unlike_collectives_under_one_number_are_told_apart() -> None:
    records = [
        {"entries": [entry(7, "all_reduce", [[4]])], "pg_config": {"0": {"ranks": "[0, 1, 2, 3]"}}},
        {"entries": [entry(7, "broadcast", [[4]])]},
        {"entries": [entry(7, "all_reduce", [[5]])]},
    ]
    dumps = [flight_recorder.dump_of(record, rank, "x") for rank, record in enumerate(records)]
    (state,) = flight_recorder.compare(dumps)
    assert state.mismatch == flight_recorder.Mismatch(
        7, {"all_reduce 4": (0,), "broadcast 4": (1,), "all_reduce 5": (2,)}
    )
    assert state.undumped == (3,)


class Calls:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("called",)


HOSTILE = {
    "a call": pickle.dumps({"entries": [Calls()]}),
    "a class": pickle.dumps(Path),
    "a memo of 16 GiB": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a key whose hash recurses": b"\x80\x02})" + b"\x85" * 200_000 + b"Ns.",
    "a key whose hash doubles": b"\x80\x02})q\x00" + b"h\x00h\x00\x86q\x00" * 99 + b"Ns.",
    "a key whose hash doubles, put aside": b"\x80\x02)q\x00" + b"]h\x00h\x00\x86(eq\x00a" * 99 + b"}h\x00Ns.",
    "pairs of pairs": b"\x80\x02}N" + b"N\x86" * 200_000 + b"Ns.",
    "cut short": pickle.dumps({"entries": []})[:-3],
    "no dump": b"hello",
    "nothing": b"",
    "deep JSON": b'{"entries":' + b"[" * 200_000,
    "another shape": json.dumps({"entries": 3}).encode(),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_hostile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rank_0").write_bytes(data)
    with pytest.raises(UsageError, match="no flight-recorder dump") as refusal:
        flight_recorder.read_dump(Path("rank_0"))
    assert "\n" not in refusal.value.message
    assert not Path("called").exists()


@pytest.mark.parametrize(
    "data", [b"\x80\x02" + b"]" * 6_000_000 + b".", b'{"entries": [' + b"[]," * 3_000_000 + b"0]}"]
)
def test_what_asks_for_millions_of_lists_is_refused_before_they_are_built(data: bytes) -> None:
    with pytest.raises(UsageError, match="more than 5000000 containers"):
        flight_recorder.plain(data, "x")


def test_a_pair_that_others_may_contain_is_not_read_in_c() -> None:
    """The hash of a pair of pairs of pairs takes twice the time with each level, again for each key."""
    alone = b"\x80\x02}X\1\0\0\0aq\0h\0h\0\x86s."
    assert flight_recorder._is_harmless(alone)
    assert not flight_recorder._is_harmless(alone.replace(b"\x86", b"\x86q\1"))
    assert not flight_recorder._is_harmless(b"\x80\x02}N" + b"N\x86" * 17 + b"Ns.")


def test_what_is_damaged_at_any_place_is_refused_or_read_and_never_carried_out() -> None:
    """With few pairs it is the reader in C that gets most of them."""
    record = {"entries": [entry(7, "all_reduce", [[4]]) | {"process_group": ["0", "pg"], "x": 2**70, "y": 0.5}] * 3}
    whole = pickle.dumps(record, protocol=2)
    source = random.Random(17)
    read = fast = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(data))
            data[at : at + source.randint(0, 2)] = source.choice(
                (b"", b"c", b"R", b"q", b"r", b"\x86", b"u", b"]", b"0")
            )
        fast += flight_recorder._is_harmless(bytes(data))
        with contextlib.suppress(UsageError):
            assert type(flight_recorder.plain(bytes(data), "x")) in {
                dict,
                list,
                tuple,
                str,
                int,
                float,
                bool,
                type(None),
            }
            read += 1
    assert read > 100
    assert fast > 100


def test_a_fifo_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank_0")
    with pytest.raises(UsageError, match="no regular file"):
        flight_recorder.read_dump(tmp_path / "rank_0")
