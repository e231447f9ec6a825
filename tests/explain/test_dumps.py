"""Flight-recorder dumps of several ranks: the verdict, agreement with torch's analyser, and what goes beyond it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_scaffold.explain.explain import explain
from ddp_scaffold.explain.explanation import Verdict
from ddp_scaffold.explain.redact import redact

Entry = dict[str, Any]
Dumps = Mapping[int, Sequence[Entry]]
WORLD = (0, 1, 2, 3)


def call(
    number: int,
    operation: str = "all_reduce",
    size: int = 4,
    state: str = "completed",
    *,
    line: int = 88,
    group: str = "0",
    dtype: str = "Float",
) -> Entry:
    """Return an entry with all keys that torch 2.13 writes: `_dump_fr_trace()` has been looked at."""
    done = state == "completed"
    return {
        "collective_seq_id": number,
        "frames": [
            {"name": "all_reduce", "filename": "/env/torch/distributed/distributed_c10d.py", "line": 3245},
            {"name": "main", "filename": "/home/user/train.py", "line": line},
        ],
        "input_dtypes": [dtype],
        "input_sizes": [[size]],
        "is_p2p": False,
        "op_id": number,
        "output_dtypes": [dtype],
        "output_sizes": [[size]],
        "p2p_seq_id": 0,
        "pg_id": int(group),
        "process_group": (group, "default_pg" if group == "0" else f"mesh_{group}"),
        "profiling_name": f"nccl:{operation}",
        "record_id": number - 1,
        "retired": done,
        "state": state,
        "thread_id": "1",
        "thread_name": "python",
        "time_created_ns": 10**18 + number,
        "time_discovered_completed_ns": 10**18 if done else None,
        "time_discovered_started_ns": 10**18 if state != "scheduled" else None,
        "timeout_ms": 600000,
    }


def receive(rank: int, peer: int) -> Entry:
    return {
        **call(1, f"recv {rank}<-{peer}", state="started", line=31),
        "is_p2p": True,
        "p2p_seq_id": 1,
    }


def write(folder: Path, dumps: Dumps, groups: Mapping[str, Sequence[int]] = {"0": WORLD}) -> Path:
    """Write dumps as NCCL does: a pickle a rank, whose groups have their ranks as text."""
    folder.mkdir(exist_ok=True)
    for rank, entries in dumps.items():
        config = {
            name: {"name": name, "desc": "default_pg" if name == "0" else f"mesh_{name}", "ranks": str(list(ranks))}
            for name, ranks in groups.items()
            if rank in ranks
        }
        record = {"version": "2.10", "entries": list(entries), "pg_config": config, "pg_status": {}}
        (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(record, protocol=2))
    return folder


def verdict(folder: Path) -> Verdict:
    """Return the verdict about a folder, which is also that about the copy that can be posted."""
    found = explain([str(folder)])[0].verdict
    with tempfile.TemporaryDirectory() as name:
        redact([str(folder)], Path(name, "copy"))
        copy = explain([name])[0].verdict
    assert (copy.kind, copy.first_ranks, copy.phase, copy.confidence) == (
        found.kind,
        found.first_ranks,
        found.phase,
        found.confidence,
    )
    return found


BOTH = [call(1), call(2, "broadcast", 7)]
WAITS = [*BOTH, call(3, size=9, state="started", line=90)]
ODD = [*BOTH, call(3, "all_gather", size=9, state="started", line=95)]
SMALL = [*BOTH, call(3, size=8, state="started", line=90)]
HALF = [*BOTH, call(3, size=9, state="started", line=90, dtype="Half")]
MORE = [call(4, "broadcast", 3), call(5, size=6), call(6, "broadcast", 2, state="started")]


def analyser(folder: Path) -> tuple[set[int], set[int], set[str]]:
    """Return which ranks torch's analyser calls missing and which it calls culprits, and the states it names."""
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    loader = pytest.importorskip("torch.distributed.flight_recorder.components.loader")
    arguments = SimpleNamespace(
        trace_dir=str(folder),
        prefix="nccl_trace_rank_",
        verbose=False,
        just_print_entries=False,
        allow_incomplete_ranks=False,
        mismatch_cap=10,
    )
    details, version = loader.read_dir(arguments)
    last = builder.build_db(details, arguments, version).collectives[-1]
    unlike = last.mismatch_collectives or {}
    states = {each.type_of_mismatch.state.name for each in unlike.values()}
    return set(last.missing_ranks or ()), set(unlike), states


def test_it_agrees_with_the_analyser_of_torch_where_all_ranks_have_dumps(tmp_path: Path) -> None:
    missing = write(tmp_path / "missing", {0: WAITS, 1: WAITS, 2: BOTH, 3: WAITS})
    assert analyser(missing)[0] == {2}
    found = verdict(missing)
    assert (found.kind, found.first_ranks, found.confidence) == ("missing_rank", (2,), "certain")
    for name, odd, state in (
        ("operation", ODD, "COLLECTIVE_TYPE_MISMATCH"),
        ("size", SMALL, "SIZE_OR_SYNTAX_MISMATCH"),
        ("type", HALF, "COLLECTIVE_DTYPE_MISMATCH"),
    ):
        folder = write(tmp_path / name, {0: WAITS, 1: odd, 2: WAITS, 3: WAITS})
        assert analyser(folder)[1:] == ({1}, {state})
        found = verdict(folder)
        assert (found.kind, found.first_ranks, found.confidence) == ("mismatched_collectives", (1,), "certain")
    same = write(tmp_path / "same", dict.fromkeys(WORLD, WAITS))
    assert analyser(same) == (set(), set(), set())
    assert (verdict(same).kind, verdict(same).first_ranks) == ("unknown", None)


def test_the_analyser_blames_all_but_rank_0_where_rank_0_is_odd(tmp_path: Path) -> None:
    folder = write(tmp_path, {0: ODD, 1: WAITS, 2: WAITS, 3: WAITS})
    assert analyser(folder)[1] == {1, 2, 3}
    assert verdict(folder).first_ranks == (0,)


def test_a_rank_without_a_dump_is_the_one_that_the_others_wait_for(tmp_path: Path) -> None:
    folder = write(tmp_path, {0: WAITS, 1: WAITS, 3: WAITS})
    with pytest.raises(AssertionError, match="Missing dump files"):
        analyser(folder)
    found = verdict(folder)
    assert (found.kind, found.first_ranks, found.confidence) == ("missing_rank", (2,), "likely")
    assert "left no dump" in found.summary
    assert any("rank 2" in text for text in found.needs)


def test_with_few_dumps_nobody_is_blamed(tmp_path: Path) -> None:
    assert verdict(write(tmp_path, {1: WAITS})).first_ranks is None


def test_the_evidence_says_how_far_each_rank_is(tmp_path: Path) -> None:
    found = verdict(write(tmp_path, {0: WAITS, 1: WAITS, 2: BOTH, 3: WAITS}))
    assert "enqueued 2, started 2, completed 2; broadcast 2 of 7 at train.py:88, completed" in found.evidence[0].text
    assert "enqueued 3, started 3, completed 2; all_reduce 3 of 9 at train.py:90, started" in found.evidence[1].text
    assert found.evidence[0].file.endswith("nccl_trace_rank_2")
    assert "Its last call: broadcast 2 of 7 at train.py:88" in found.summary
    rows = {row.rank: row for row in explain([str(tmp_path)])[0].ranks}
    assert {rank: row.role for rank, row in rows.items()} == {0: "victim", 1: "victim", 2: "culprit", 3: "victim"}
    assert rows[0].collective == "all_reduce 3 of group 0, started"


@pytest.mark.parametrize("extra", [True, False])
def test_a_collective_that_one_rank_leaves_out_or_adds_is_told_from_another_operation(
    extra: bool, tmp_path: Path
) -> None:
    common = [call(1), call(2, "broadcast", 7), call(3, size=9), *MORE]
    shifted = [call(1), call(2, "broadcast", 7), *({**each, "collective_seq_id": n} for n, each in enumerate(MORE, 3))]
    odd, others = (common, shifted) if extra else (shifted, common)
    found = verdict(write(tmp_path, {0: others, 1: odd, 2: others, 3: others}))
    assert (found.kind, found.first_ranks) == ("subset_collective", (1,))
    assert ("more than" if extra else "left out") in found.summary


def test_who_waits_for_a_victim_of_another_group_is_not_blamed(tmp_path: Path) -> None:
    """Rank 1 does not come to the group of all, because it waits for rank 3, which never came to theirs."""
    inner = [call(1), call(1, group="1"), call(2, group="1", state="started", line=55)]
    dumps = {0: [call(1), call(2, state="started")], 1: inner, 2: [call(1), call(2, state="started")]}
    dumps[3] = [call(1), call(1, group="1")]
    found = verdict(write(tmp_path, dumps, {"0": WORLD, "1": (1, 3)}))
    assert (found.kind, found.first_ranks) == ("missing_rank", (3,))


def test_groups_in_different_order_are_a_circle(tmp_path: Path) -> None:
    dumps = {0: [call(1), call(2, state="started")], 1: [call(1), call(1, group="1", state="started")]}
    found = verdict(write(tmp_path, dumps, {"0": (0, 1), "1": (0, 1)}))
    assert (found.kind, found.first_ranks) == ("mismatched_collectives", None)
    assert "different order" in found.summary


def test_who_waits_for_a_send_is_a_victim_of_the_sender(tmp_path: Path) -> None:
    dumps = {0: [call(1)], 1: [call(1), receive(1, 0)], 2: [call(1), receive(2, 1)], 3: [call(1), receive(3, 2)]}
    found = verdict(write(tmp_path, dumps))
    assert (found.kind, found.first_ranks) == ("missing_rank", (0,))


def test_groups_that_share_a_name_are_kept_apart(tmp_path: Path) -> None:
    """`split_group` gives its halves one name: the second half is elsewhere, and that is nobody's fault."""
    ahead, behind = [call(1), call(2, "broadcast", 5, group="7")], [call(1), call(2, group="7")]
    write(tmp_path, {0: ahead, 1: ahead}, {"0": WORLD, "7": (0, 1)})
    write(tmp_path, {2: behind, 3: behind}, {"0": WORLD, "7": (2, 3)})
    assert verdict(tmp_path).kind == "unknown"


def test_coalesced_collectives_of_one_number_are_no_mismatch(tmp_path: Path) -> None:
    entries = [call(1, "_all_gather_base", 3), call(1, "_all_gather_base", 5), call(2, state="started")]
    found = verdict(write(tmp_path, {0: entries, 1: entries, 2: entries, 3: entries[:2]}))
    assert (found.kind, found.first_ranks) == ("missing_rank", (3,))


def test_a_ring_that_has_turned_over_is_no_proof_of_absence(tmp_path: Path) -> None:
    """Rank 3 has overwritten what it issued in the group "1"; so its silence there says nothing."""
    dumps = {rank: [call(9, state="started"), call(2, group="1", state="started")] for rank in (0, 1, 2)}
    dumps[3] = [call(9, state="started")]
    assert verdict(write(tmp_path, dumps, {"0": WORLD, "1": WORLD})).kind == "unknown"


def test_a_gpu_that_has_not_begun_is_named(tmp_path: Path) -> None:
    late = [*BOTH, call(3, size=9, state="scheduled", line=90)]
    found = verdict(write(tmp_path, {0: WAITS, 1: late, 2: WAITS, 3: WAITS}))
    assert (found.kind, found.first_ranks, found.confidence) == ("missing_rank", (1,), "likely")


def test_an_exception_in_a_log_says_more_than_the_dumps(tmp_path: Path) -> None:
    write(tmp_path, {0: WAITS, 1: WAITS, 3: WAITS})
    error = '[rank2]: Traceback (most recent call last):\n[rank2]:   File "train.py", line 3, in main\n'
    (tmp_path / "job.out").write_text(error + "[rank2]: KeyError: 'x'\n")
    assert (verdict(tmp_path).kind, verdict(tmp_path).first_ranks) == ("rank_exception", (2,))


def test_json_of_the_debug_server_is_read_as_well(tmp_path: Path) -> None:
    for rank, entries in {0: WAITS, 1: BOTH}.items():
        record = {"version": "2.10", "entries": entries, "pg_config": {"0": {"ranks": "[0, 1]"}}}
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(record))
    assert (verdict(tmp_path).kind, verdict(tmp_path).first_ranks) == ("missing_rank", (1,))


def test_a_hostile_dump_beside_good_ones_is_left_out_with_a_note(tmp_path: Path) -> None:
    write(tmp_path, {0: WAITS, 1: BOTH, 2: WAITS, 3: WAITS})
    (tmp_path / "nccl_trace_rank_7").write_bytes(pickle.dumps(Path, protocol=2))
    answer, notes = explain([str(tmp_path)])
    assert answer.verdict.first_ranks == (1,)
    assert any("nccl_trace_rank_7 is no flight-recorder dump" in note for note in notes)


def test_a_person_is_told_who_where_and_on_what_evidence(tmp_path: Path) -> None:
    write(tmp_path, {0: WAITS, 1: WAITS, 2: BOTH, 3: WAITS})
    command = [sys.executable, "-m", "ddp_scaffold", "explain", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    lines = " ".join(told.split())
    assert "missing_rank (certain) first rank 2" in lines
    assert "Rank 2 never issued collective 3 of group 0 (default_pg); ranks 0, 1, 3 waited for it." in lines
    assert "nccl_trace_rank_2: rank 2 in group 0 (default_pg): enqueued 2" in lines
