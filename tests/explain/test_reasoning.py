"""How sure `explain` is, and which rank a local rank is: what single look-alikes cannot show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lookalikes import OOM, T, raised, table, watchdog

from ddp_scaffold.explain.explain import explain
from ddp_scaffold.explain.explanation import Verdict


def verdict(folder: Path, **logs: str) -> Verdict:
    for name, log in logs.items():
        (folder / f"{name}.log").write_text(log)
    return explain([str(folder)])[0].verdict


def test_an_exception_is_certain_only_with_a_sign_that_the_others_are_victims(tmp_path: Path) -> None:
    assert verdict(tmp_path, a=raised(1, "KeyError: 'x'")).confidence == "likely"
    found = verdict(tmp_path, a=raised(1, "KeyError: 'x'") + table((0, -15, T), (1, 1, T)))
    assert (found.first_ranks, found.confidence) == ((1,), "certain")


def test_two_files_without_clocks_do_not_tell_which_exception_was_first(tmp_path: Path) -> None:
    found = verdict(tmp_path, rank_0=raised(0, "KeyError: 'x'"), rank_1=raised(1, "ValueError: y"))
    assert found.confidence == "likely"


def test_a_death_by_signal_of_another_rank_keeps_an_exception_from_being_certain(tmp_path: Path) -> None:
    found = verdict(tmp_path, a=raised(1, "KeyError: 'x'") + table((0, -15, T), (2, -11, T), (1, 1, T)))
    assert found.confidence == "likely"


def test_a_kill_is_certain_only_where_the_table_has_all_ranks(tmp_path: Path) -> None:
    assert verdict(tmp_path, a=table((4, -9, T))).confidence == "likely"
    assert verdict(tmp_path, a=table((0, -15, T), (1, -9, T))).confidence == "certain"


def test_a_local_rank_is_that_of_the_table_in_its_own_file(tmp_path: Path) -> None:
    second = raised(1, OOM, prefix="[default1]:") + table((8, -15, T), (9, 1, T), host="n2")
    first = table((0, -15, "21:08:44"), (1, -15, "21:08:44"), host="n1")
    found = verdict(tmp_path, node1=first, node2=second)
    assert (found.kind, found.first_ranks) == ("cuda_oom", (9,))


def test_a_local_rank_without_a_table_of_its_node_is_nobody(tmp_path: Path) -> None:
    second = raised(1, OOM, prefix="[default1]:")
    found = verdict(
        tmp_path, node1=table((0, -15, T), (1, -15, T), host="n1") + table((9, -15, T), host="n3"), b=second
    )
    assert (found.kind, found.first_ranks) == ("cuda_oom", None)


@pytest.mark.parametrize(
    ("place", "ranks"),
    [
        ("rank_1/stderr.log", (1,)),
        ("rank-12/node/stderr.log", (12,)),
        ("job_rank3_stderr.txt", (3,)),
        ("logs/rank_0003.log", (3,)),
        ("SIGKILL of rank_1-gloo/job.out", None),
        ("two_rank_1/job.out", None),
        ("rank_1_and_2/job.out", None),
        ("frank_1/job.out", None),
        ("rank_1.old/job.out", None),
    ],
)
def test_only_a_file_or_a_whole_folder_with_the_name_of_a_rank_gives_it(
    place: str, ranks: tuple[int, ...] | None, tmp_path: Path
) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(raised(None, "KeyError: 'x'"))
    found = explain([str(tmp_path)])[0].verdict
    assert (found.kind, found.first_ranks) == ("rank_exception", ranks)


@pytest.mark.parametrize(
    "form", ["step {step}/{total} [rank{rank}]", "[rank{rank}]: step {step}/{total}", "{rank}: step {step}/{total}"]
)
def test_the_last_steps_of_ranks_that_write_to_one_file_by_turns(form: str, tmp_path: Path) -> None:
    totals = (120, 120, 100)
    lines = [
        f"2026-11-30 04:00:{step % 60:02d},123 " * (form[0] != "{")
        + form.format(step=step, total=totals[rank], rank=rank)
        for step in range(60, 101)
        for rank in (0, 1, 2)
    ]
    found = verdict(tmp_path, a="\n".join(lines) + "\n" + watchdog(0, 55) + watchdog(1, 55))
    assert (found.kind, found.first_ranks) == ("uneven_inputs", (2,))


def test_a_timeout_that_was_set_and_did_not_fire_is_named(tmp_path: Path) -> None:
    set_to = "args: --ddp_timeout 324000 --fp16\n"
    assert "ddp_timeout=324000" in verdict(tmp_path, a=set_to + watchdog(0, 9) + watchdog(1, 9)).advice[-1]
    same = "args: --ddp_timeout 600 --fp16\n"
    assert not any("did not reach" in text for text in verdict(tmp_path, a=same + watchdog(0, 9)).advice)


def test_the_size_of_a_sub_group_is_not_that_of_the_job(tmp_path: Path) -> None:
    log = "".join(
        watchdog(rank, 55, "_ALLGATHER_BASE", 100, out=400).replace(f"[Rank {rank}]", f"[Rank {rank - 8}]")
        for rank in (8, 9)
    )
    assert verdict(tmp_path, a=log).kind == "unknown"
