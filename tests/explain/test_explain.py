"""`ddp-scaffold explain`: look-alike logs, what wraps and compresses them, hostile input, and the command itself."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lookalikes import CASES, Case, T, behind, raised, table, watchdog
from table import outcome

from ddp_scaffold._errors import UsageError
from ddp_scaffold.explain import sources
from ddp_scaffold.explain.events import RECOGNISERS, SIGNS, anchors
from ddp_scaffold.explain.explain import explain, read
from ddp_scaffold.explain.explanation import Verdict
from ddp_scaffold.explain.kinds import ADVICE
from ddp_scaffold.explain.scan import hits

MISSING = watchdog(0, 55) + watchdog(1, 55) + behind(2, 54, 0)
ENDLESS = 1_000_000_000
PEAK = (
    "import resource, sys; from ddp_scaffold.explain.explain import explain;"
    " print(explain([sys.argv[1]])[0].verdict.first_ranks);"
    " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)
TEMPLATES = Path(__file__).parents[2] / "templates"


def verdict(path: Path) -> Verdict:
    return explain([str(path)])[0].verdict


def command(*args: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ddp_scaffold", "explain", *args], input=text, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_look_alikes_come_out_right(case: Case, tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(case.log)
    found = verdict(tmp_path / "job.out")
    assert outcome(case, found) == "right", found


def test_each_kind_stands_twice_among_the_look_alikes() -> None:
    assert {kind for kind in ADVICE if sum(case.kind == kind for case in CASES) < 2} == set()


def test_every_marker_is_found_by_the_first_search() -> None:
    marked = anchors()
    for item in (*RECOGNISERS, *SIGNS):
        for word in item.words:
            for text in (word, f"step 7, {word}", f"[rank0]:{word}.", f"\x1b[31m{word}\x1b[0m"):
                assert [hit.number for hit in hits([f"a\n{text}\nb".encode()], marked)] == [2], text


@pytest.mark.parametrize("ending", ["", "\r\n", "gzip", "folder", "noise", "latin"])
def test_the_answer_does_not_depend_on_how_the_log_came(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "job.out"
    noise = "".join(f"step {step} loss {step / 7}\n" for step in range(60_000))
    if ending == "gzip":
        path = tmp_path / "job.out.gz"
        path.write_bytes(gzip.compress(MISSING.encode()))
    elif ending == "folder":
        path = tmp_path / "logs"
        path.mkdir()
        for rank in range(3):
            lines = [line for line in MISSING.splitlines() if f"[rank{rank}]" in line]
            (path / f"rank_{rank}.log").write_text("\n".join(lines))
        os.mkfifo(path / "pipe")
    else:
        begin = b"\xff\xfe broken\n" if ending == "latin" else noise.encode() if ending == "noise" else b""
        path.write_bytes(begin + MISSING.replace("\n", ending if ending == "\r\n" else "\n").encode())
    found = verdict(path)
    assert (found.kind, found.first_ranks, found.confidence) == ("missing_rank", (2,), "certain")
    if ending == "noise":
        assert found.evidence[0].line == 60_005
        assert "Received a dump signal" in found.evidence[0].text


def test_a_file_that_is_read_in_parts_says_the_same(tmp_path: Path) -> None:
    """Wherever the parts meet: within a traceback, a table or a wrapped line, and the lines have their numbers."""
    noise = "".join(f"step {step} loss {step / 7}\n" for step in range(400))
    log = noise + raised(1, "KeyError: 'x'") + table((0, -15, T), (1, 1, T)) + noise + MISSING + noise
    path = tmp_path / "job.out"
    path.write_text(log)
    whole = [(event.name, event.line, event.text) for event in read(sources.find([str(path)]).files[0])[0]]
    assert len(whole) > 8
    (source,) = sources.find([str(path)]).files
    for size in range(700, 3000, 100):
        pieces = sources.parts(source, 1000, size)
        assert len(pieces) > 2
        found, lines = [], 0
        for piece in pieces:
            events, count = read(piece)
            found += [(event.name, event.line + lines, event.text) for event in events]
            lines += count
        assert found == whole, size
        assert lines == log.count("\n")


def test_a_tail_that_is_cut_off_gives_what_it_has(tmp_path: Path) -> None:
    packed = gzip.compress(os.urandom(2_000_000).hex().encode() + b"\n" + MISSING.encode())
    (tmp_path / "job.gz").write_bytes(packed[: len(packed) // 2])
    assert verdict(tmp_path / "job.gz").kind == "unknown"


def test_one_line_without_end_is_read_in_bounded_memory(tmp_path: Path) -> None:
    """The peak of a fresh process on 1 GB without a newline, against that on a short line: the rest is the same."""
    short, endless = tmp_path / "short.out", tmp_path / "endless.out"
    short.write_text("x\n" + MISSING)
    with endless.open("wb") as file:
        file.truncate(ENDLESS)  # sparse: zeros that take no room on the disk
        file.seek(ENDLESS)
        file.write(b"\n" + MISSING.encode())
    peaks = {}
    for path in (short, endless):
        done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
        ranks, kilobytes = done.stdout.split("\n")[:2]
        assert ranks == "(2,)"
        peaks[path] = int(kilobytes)
    assert peaks[endless] - peaks[short] < ENDLESS // 1024 // 4, peaks


def test_a_packed_file_that_is_cut_off_gives_what_it_has(tmp_path: Path) -> None:
    log = "[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB\n"
    packed = gzip.compress(log.encode())
    (tmp_path / "job.log.gz").write_bytes(packed[:-6])
    verdict = explain([str(tmp_path / "job.log.gz")])[0].verdict
    assert (verdict.kind, verdict.first_ranks) == ("cuda_oom", (1,))


@pytest.mark.parametrize("pack", ["gzip", "zstd"])
def test_what_unpacks_without_end_is_left_early(pack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bomb: what stands behind its 120 MB of zeros is not reached; a log that compresses well is read whole."""
    if pack == "zstd" and not shutil.which("zstd"):
        pytest.skip("there is no zstd here to pack with")
    monkeypatch.setattr(sources, "BOMB_BYTES", 1 << 24)
    bomb, fair = tmp_path / "bomb", tmp_path / "fair"
    with bomb.open("wb") as file:
        file.truncate(120_000_000)
        file.seek(120_000_000)
        file.write(b"\n" + MISSING.encode())
    fair.write_text("".join(f"step {step} loss {step / 7}\n" for step in range(60_000)) + MISSING)
    found = {}
    for path in (bomb, fair):
        packed = path.with_suffix(".packed")
        with path.open("rb") as file, packed.open("wb") as out:
            subprocess.run(["zstd", "-qc"] if pack == "zstd" else ["gzip", "-c9"], stdin=file, stdout=out, check=True)
        found[path] = verdict(packed).first_ranks
    assert found[bomb] is None
    assert found[fair] == (2,)


@pytest.mark.parametrize(("begin", "word"), [(b"PK\x03\x04rest", "zip"), (b"BZh91AY", "bzip2"), (b"\xfd7zXZ\0", "xz")])
def test_an_archive_is_refused(begin: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "logs.packed").write_bytes(begin)
    with pytest.raises(UsageError, match=word) as refusal:
        explain([str(tmp_path / "logs.packed")])
    assert "Unpack" in refusal.value.hint


def test_a_pickle_that_calls_code_is_refused_and_not_carried_out(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps(Calls(str(tmp_path / "called")), protocol=2))
    done = command(str(path))
    assert done.returncode == 2
    assert "no flight-recorder dump" in done.stderr
    assert not (tmp_path / "called").exists()


@dataclass(frozen=True)
class Calls:
    path: str

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_a_marker_in_the_midst_of_a_line_without_end_is_found(tmp_path: Path) -> None:
    log = b"x " * 3_000_000 + b"torch.OutOfMemoryError: CUDA out of memory. " + b"y " * 3_000_000
    (tmp_path / "job.out").write_bytes(log)
    found = verdict(tmp_path / "job.out")
    assert found.kind == "cuda_oom"
    assert len(found.evidence[0].text) <= 400


def test_what_a_progress_bar_has_overwritten_is_read(tmp_path: Path) -> None:
    bar = "".join(
        f"\r{percent}%|###  | {percent}/100 [00:{percent % 60:02d}<00:10, 2.00it/s]" for percent in range(100)
    )
    (tmp_path / "job.out").write_text(bar + "\r" + MISSING + bar)
    found = verdict(tmp_path / "job.out")
    assert found.first_ranks == (2,)
    assert [line.line for line in found.evidence[:1]] == [5]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, word in ((tmp_path / "pipe", "a FIFO"), (Path("/dev/zero"), "a device"), (tmp_path / "none", "no file")):
        with pytest.raises(UsageError, match=word):
            explain([str(path)])
    done = command(str(tmp_path / "pipe"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_log_with_a_few_zeros_is_read_and_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_bytes(b"a\0b\n" + MISSING.encode())
    (tmp_path / "events.out.tfevents.17.n1").write_bytes(bytes(range(8)) * 100 + b"\0" * 100)
    answer, notes = explain([str(tmp_path)])
    assert answer.verdict.first_ranks == (2,)
    assert [note.rpartition("/")[2] for note in notes] == ["events.out.tfevents.17.n1 was passed over: it is no text"]


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(raised(1, "ValueError: bad \x1b]0;title\x07\x1b[2J\u202elabel\x9b31m"))
    done = command(str(tmp_path / "job.out"))
    assert "ValueError: bad label31m" in done.stdout
    assert not {"\x1b", "\x07", "\u202e", "\x9b"} & set(done.stdout)


def test_json_and_stdin() -> None:
    done = command("-", "--json", text=MISSING)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["version"]) == (0, 1)
    assert set(answer["verdict"]) == {
        *("kind", "first_ranks", "phase", "confidence", "summary", "evidence", "advice", "needs")
    }
    assert answer["verdict"]["first_ranks"] == [2]
    assert [row["role"] for row in answer["ranks"]] == ["victim", "victim", "culprit"]
    assert {span["rank"] for span in answer["timeline"]} == {0, 1}


def test_advice_is_that_of_a_generated_project() -> None:
    """Where both know a kind and no setting of the project takes part, they say the same."""
    (path,) = TEMPLATES.glob("project/**/ddp/kinds.py")
    text = path.read_text()
    for kind in (
        *("cuda_oom", "nonfinite_loss", "mismatched_collectives", "dataloader_worker_died", "shm_exhausted"),
        *("fd_exhausted", "hardware_fault", "store_lost", "network_unreachable"),
    ):
        assert f'"{ADVICE[kind]}"' in text, kind


def test_a_line_that_is_nothing_but_markers_is_read_once() -> None:
    line = b"CUDA out of memory, KeyError: " * 100_000
    found = list(hits([line, b"\n[rank1]: ValueError: x\n"], anchors()))
    assert len(found) < len(line) / 200
    assert found[-1].number == 2


def test_a_closed_stdout_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "job.out").write_text(MISSING)
    shell = f"exec {sys.executable} -m ddp_scaffold explain {tmp_path / 'job.out'} >&-"
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode
    assert done.stderr.startswith("error: stdout is closed")
    assert "Traceback" not in done.stderr


def test_what_fails_behind_a_preemption_may_be_of_a_job_that_was_started_again(tmp_path: Path) -> None:
    cancelled = "slurmstepd: error: *** JOB 5123 ON n1 CANCELLED AT 2026-11-27T22:00:00 DUE TO PREEMPTION ***\n"
    (tmp_path / "job.out").write_text(cancelled)
    assert verdict(tmp_path / "job.out").confidence == "certain"
    (tmp_path / "job.out").write_text(cancelled + raised(1, "ValueError: x") + table((0, -15, T), (1, 1, T)))
    found = verdict(tmp_path / "job.out")
    assert (found.kind, found.confidence) == ("preempted", "likely")
    assert found.needs


def test_the_last_attempt_below_a_log_dir_counts(tmp_path: Path) -> None:
    for attempt, rank, error in ((0, 1, "torch.OutOfMemoryError: CUDA out of memory."), (1, 0, "ValueError: x")):
        folder = tmp_path / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(raised(None, error))
    found = verdict(tmp_path)
    assert (found.kind, found.first_ranks) == ("rank_exception", (0,))
