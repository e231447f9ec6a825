"""The same faults on plain DDP, Accelerate, Lightning and a generated project: who is named, how soon, what is lost.

    pip install accelerate lightning        (beside torch, scikit-learn, and what a generated project needs)
    python benchmarks/peers.py [--peers plain project] [--only kill stop] [--runs 1] [--json FILE] [--merge FILE]
    python benchmarks/peers.py --table [FILE] [--write]

Each peer is a script in benchmarks/peers/, as the guides of its library write it, started as they say; the generated
project is rendered from this working tree (classifier family). All train the same network on the same data with gloo on
the CPU, with 20 s as the timeout of the process group, and call the same faults at the same places (peers/fault.py).
Nothing is restarted by itself. Seconds are counted from the fault to the exit of the last process of the job; a job
that has not ended 90 s after the fault counts as hung. After a stop, and after a kill while a checkpoint is written,
the same command is given again, and what was lost is what it does not find.

--merge puts what was measured now in the place of the same faults and peers in FILE. --table prints the tables of
FILE, by default benchmarks/peers.json, and measures nothing; --write puts them into docs/peers.md and README.md.
Needs Linux. There are 80 jobs, most of which end within a minute.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(__file__).parent / "peers"
KEPT = Path(__file__).with_suffix(".json")
LIMIT_S = 90.0  # after the fault
START_S = 120.0  # until the fault
GRACE_S = 30.0  # for what is on its way out when the launcher has ended; what then still runs is left behind
HALF = 600_000  # bytes of a file in which the writer was killed, see peers/fault.py

PEERS = {"plain": "plain DDP", "accelerate": "Accelerate", "lightning": "Lightning", "project": "generated project"}


@dataclass(frozen=True)
class Fault:
    """What happens, and who is to blame: None where nobody is, or where two ranks differ and either may be wrong."""

    title: str
    culprit: int | None = None
    ranks: int = 2
    again: bool = False  # the same command is given once more, to see what it finds


FAULTS = {
    "none": Fault("no fault"),
    "raise": Fault("exception in rank 1's forward", 1),
    "kill": Fault("SIGKILL of rank 1", 1),
    "suspend": Fault("SIGSTOP of rank 1", 1),
    "hang-data": Fault("rank 1 hangs in its data set", 1),
    "hang-forward": Fault("rank 1 hangs in forward", 1),
    "sample-slow": Fault("rank 0 samples for 40 s, twice the timeout, and is well"),
    "sample-hang": Fault("rank 0 hangs in sampling", 0),
    "mismatch": Fault("rank 1 reports its loss in another shape"),
    "mismatch-3": Fault("the same, 3 ranks", 1, ranks=3),
    "skip": Fault("rank 1 does not report its loss, once"),
    "skip-3": Fault("the same, 3 ranks", 1, ranks=3),
    "nan": Fault("NaN in rank 1's loss, once", 1),
    "stop": Fault("SIGTERM to the launcher", again=True),
    "kill-save": Fault("SIGKILL of rank 0 while it writes a checkpoint", 0, again=True),
    "s1": Fault("layers named from a `set`: another order on rank 1"),
    "s3": Fault("two networks, the loss of the second beside DDP"),
    "e1": Fault("SIGTERM to every process, one loader worker a rank", again=True),
    "n1": Fault("rank 0 alone enters a barrier"),
    "n1-3": Fault("the same, 3 ranks", 0, ranks=3),
}


@dataclass
class Result:
    """What became of one job."""

    fault: str
    peer: str
    exit_code: int | None  # None: hung
    seconds: float | None  # from the fault to the last exit; None: hung, or there was no fault
    named: int | None
    words: str  # of the first error that names a rank, or of the last line of the launcher
    processes_left: int
    half_files: int
    lost: int | None  # steps that have to be made again; None: see `wrong`
    wrong: str = ""  # what is wrong with the result, or with the checkpoints
    again: str = field(default="")  # what the second start did


# ----------------------------------------------------------------------------------------------------- one job


def command(peer: str, fault: str, base: Path) -> list[str]:
    """How the guides of this peer start it."""
    ranks = FAULTS[fault].ranks
    if peer == "project":
        sys.path.insert(0, str(SCRIPTS))
        import project

        folder = base / ("project-s3" if fault == "s3" else "project")
        if not folder.exists():
            project.render(folder, second=fault == "s3")
        return project.command(folder, workers=int(fault == "e1"))
    # `accelerate launch --cpu --num_processes 2` starts one process (1.15). Lightning can start the ranks itself, each
    # a whole import later than rank 0, which on a busy machine is more than 20 s. Both guides have torchrun as well.
    script = SCRIPTS / ("plain.py" if peer == "plain" else f"{peer}_.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, str(script)]


def environment(fault: str, folder: Path) -> dict[str, str]:
    """PEERS_DIR also marks the processes of the job."""
    strange = ("DDP_", "PEERS_", "SLURM_", "LIGHTNING_", "ACCELERATE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    ranks = str(FAULTS[fault].ranks)
    own = {"PEERS_FAULT": fault.removesuffix("-3"), "PEERS_DIR": str(folder), "PEERS_RANKS": ranks}
    own |= {"PYTHONPATH": str(SCRIPTS), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    own |= {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "HOME": str(folder)}
    own |= {"NPROC": ranks, "MAX_RESTARTS": "0", "DDP_RUN__DIR": str(folder / "runs"), "DDP_RUN__ID": "run"}
    return clean | own


def notes(folder: Path) -> list[dict[str, Any]]:
    """What the ranks have noted, in the order of time."""
    found = []
    for path in folder.glob("*.notes"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found.append({"by": path.stem, **json.loads(line)})
    return sorted(found, key=lambda note: note["time"])


def marked(folder: Path) -> list[int]:
    """Processes of the job that still run, or are suspended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"PEERS_DIR={folder}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def send(number: int, processes: list[int]) -> None:
    """A signal, to those that are still there."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def end(folder: Path) -> None:
    """Nothing of the job is left when this returns."""
    while left := marked(folder):
        send(signal.SIGKILL, left)
        time.sleep(0.05)


def run(peer: str, fault: str, folder: Path, base: Path) -> Result:
    """Start the job, wait for its end, look at what it has left, and end that."""
    (folder / "tmp").mkdir(parents=True)
    try:
        code, ended, left = watched(peer, fault, folder, base)
        found = notes(folder)
        times = [note["time"] for note in found if "fault" in note]
        result = Result(fault, peer, code, None, None, "", left, half_files(folder), None)
        if times and code is not None:
            result.seconds = round(ended - min(times), 1)
        result.named, result.words = who(peer, folder)
        judge(result, found)
        if FAULTS[fault].again:
            once_more(result, found, folder, base)
        return result
    finally:
        end(folder)


def watched(peer: str, fault: str, folder: Path, base: Path) -> tuple[int | None, float, int]:
    """Run it to its end or to the limit: exit code, time of the last exit, and how many processes are left."""
    words = command(peer, fault, base)
    with open(folder / "log", "a") as log:
        job = subprocess.Popen(
            words, cwd=folder, env=environment(fault, folder), stdout=log, stderr=log, start_new_session=True
        )
    began, signalled = time.time(), False
    while job.poll() is None:
        injected = [note["time"] for note in notes(folder) if "fault" in note]
        if injected and fault in ("stop", "e1") and not signalled:
            signalled = True
            send(signal.SIGTERM, [job.pid] if fault == "stop" else marked(folder))
        if time.time() > (min(injected) + LIMIT_S if injected else began + START_S):
            left = marked(folder)
            end(folder)
            job.wait()
            return None, time.time(), len(left)
        time.sleep(0.02)
    ended = time.time()
    while (left := marked(folder)) and time.time() < ended + GRACE_S:
        time.sleep(0.02)
    last = ended if left else time.time()
    end(folder)
    return job.returncode, last if last - ended > 0.1 else ended, len(left)


def half_files(folder: Path) -> int:
    """Files in which a writer was killed."""
    return sum(path.is_file() and path.stat().st_size == HALF for path in folder.rglob("*"))


def who(peer: str, folder: Path) -> tuple[int | None, str]:
    """The rank that is named, and the words: the launcher's root cause where it gives one, else the first error."""
    outcome = folder / "runs" / "run" / "outcome.json"
    if peer == "project":
        told = json.loads(outcome.read_text()) if outcome.is_file() else {}
        ranks = told.get("first_ranks") or []
        return (ranks[0] if len(ranks) == 1 else None), f"{told.get('kind', '')}: {told.get('reason', '')}"
    text = re.sub(r"\x1b\[[0-9;]*m", "", (folder / "log").read_text(errors="replace"))
    prefixed = re.findall(r"^\[rank(\d+)\]:(?:\[[^]]*\]:?)? ?((?:\w+\.)*\w*(?:Error|Exception|Fault)\b.*)$", text, re.M)
    bare = re.findall(r"^((?:\w+\.)*\w*(?:Error|Exception|Fault)\b: .*)$", text, re.M)
    words = {int(rank): line for rank, line in reversed(prefixed)}
    root = re.search(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+).*?traceback\s*: ([^\n]*)", text, re.S)
    if root:
        rank = int(root[1])
        signalled = root[3] if root[3].startswith("Signal") else ""
        return rank, signalled or words.get(rank, f"exitcode {root[2]}")
    if prefixed:
        return int(prefixed[0][0]), prefixed[0][1]
    return None, bare[-1] if bare else ""


def judge(result: Result, found: list[dict[str, Any]]) -> None:
    """What was lost, by the notes of the ranks."""
    finished = [note for note in found if "finished" in note]
    saves = [note for note in found if "saving" in note and note["by"] == "rank0"]
    steps = [note for note in found if "step" in note and note["by"] == "rank0"]
    later = [note["time"] for note in (*steps, *finished) if note["by"] == "rank0"]
    written = [note for note in saves if later and note["time"] < max(later)]
    reached = max((note.get("step", note.get("saving", 0)) for note in (*steps, *saves)), default=0)
    if written and not written[-1]["finite"]:
        result.wrong = "NaN in the weights and in the newest checkpoints"
    elif len(finished) == FAULTS[result.fault].ranks:
        same = all(note["weights"] == finished[0]["weights"] for note in finished)
        result.lost, result.wrong = (0, "") if same else (None, "each rank has other weights")
    else:
        result.lost = reached - max((note["saving"] for note in written), default=0)


def once_more(result: Result, found: list[dict[str, Any]], folder: Path, base: Path) -> None:
    """The same command again, without a fault: where it goes on from."""
    for path in [*folder.glob("*.notes"), folder / "log"]:
        path.rename(path.with_name(f"first-{path.name}.kept"))
    code, _, _ = watched(result.peer, "none", folder, base)
    reached = max((note.get("step", note.get("saving", 0)) for note in found), default=0)
    resumed = [note["resumed"] for note in notes(folder) if "resumed" in note]
    if code == 0:
        result.lost = reached - max(resumed, default=0)
        result.again = f"goes on at step {max(resumed)}" if resumed else "begins anew"
    else:
        _, words = who(result.peer if result.peer != "project" else "plain", folder)
        result.lost, result.wrong, result.again = None, "the newest checkpoint cannot be loaded", words


# ----------------------------------------------------------------------------------------------------- the tables


def cell(results: list[Result]) -> str:
    """What became of a fault at one peer, over all runs."""
    if not results:
        return "-"
    texts = list(dict.fromkeys("; ".join(filter(None, facts(result))) for result in results))
    seconds = [result.seconds for result in results if result.seconds is not None]
    if not seconds or results[0].fault in ("none", "s1", "s3", "nan"):
        return " / ".join(texts)
    low, high = f"{min(seconds):.0f}", f"{max(seconds):.0f}"
    return " / ".join(texts) + (f"; {low} s" if low == high else f"; {low} to {high} s")


def facts(result: Result) -> list[str]:
    """Who was named, what was lost, what is left, the exit code."""
    culprit = FAULTS[result.fault].culprit
    named = ""
    if result.exit_code != 0 and culprit is not None:
        named = "names nobody" if result.named is None else f"names rank {result.named}"
        named += ", the wrong one" if names_another(result) else ""
    lost = result.wrong or (f"{result.lost} steps lost" if result.lost else "nothing lost")
    left = plural(result.processes_left, "process", "processes") if result.exit_code is not None else ""
    halves = plural(result.half_files, "half file", "half files")
    code = f"hung after {LIMIT_S:.0f} s" if result.exit_code is None else f"exit {result.exit_code}"
    return [named, lost, left and f"{left} left", halves and f"{halves} left", code]


def plural(number: int, one: str, many: str) -> str:
    """Nothing for none."""
    return f"{number} {one if number == 1 else many}" if number else ""


def tables(kept: dict[str, Any]) -> str:
    """Markdown: what became of each fault, then what was said."""
    results = [Result(**row) for row in kept["results"]]
    lines = [versions(kept), "", "| fault | " + " | ".join(PEERS.values()) + " |", "| --- " * (len(PEERS) + 1) + "|"]
    for fault, described in FAULTS.items():
        cells = [cell([each for each in results if (each.fault, each.peer) == (fault, peer)]) for peer in PEERS]
        lines.append(f"| {described.title} | " + " | ".join(cells) + " |")
    lines += ["", "What stood in the output, as far as it names a rank or the error:", "", "| fault | peer | words |"]
    lines.append("| --- | --- | --- |")
    for fault, described in FAULTS.items():
        for peer, title in PEERS.items():
            words = [each.words for each in results if (each.fault, each.peer) == (fault, peer) and each.words]
            if words and fault != "none":
                lines.append(f"| {described.title} | {title} | `{shortened(words[0])}` |")
    return "\n".join(lines) + "\n"


def shortened(text: str, most: int = 200) -> str:
    """One line that can stand in a cell."""
    text = re.sub(r"(/[\w.+-]+){3,}/", ".../", " ".join(text.split())).replace("|", "/").replace("`", "'")
    return text if len(text) <= most else text[: most - 3] + "..."


def versions(kept: dict[str, Any]) -> str:
    """What was measured where and when."""
    days = sorted({each["date"] for each in kept["peers"].values()})
    names = {name: version for each in kept["peers"].values() for name, version in each["versions"].items()}
    what = ", ".join(f"{name} {version}" for name, version in names.items())
    return f"{what}; {kept['machine']}; {' and '.join(days)}."


def summary(kept: dict[str, Any]) -> str:
    """The short form: counts over all faults, of the first run of each."""
    first: dict[tuple[str, str], Result] = {}
    for row in kept["results"]:
        first.setdefault((row["fault"], row["peer"]), Result(**row))
    named = [name for name, fault in FAULTS.items() if fault.culprit is not None and name != "nan"]
    faults = [name for name in FAULTS if name != "none"]
    columns = {peer: [first[name, peer] for name in faults if (name, peer) in first] for peer in PEERS}
    rows = {
        f"names the rank to blame, of {len(named)} where one is": lambda each: blamed(each, named),
        "seconds from the fault to the last exit: median, longest": spread,
        "wrong or NaN weights, and exit 0": lambda each: sum(bool(r.wrong) and r.exit_code == 0 for r in each),
        "steps lost at a stop, by SIGTERM": lambda each: sum(r.lost or 0 for r in each if r.fault == "stop"),
        "the newest checkpoint cannot be loaded after a kill": lambda each: sum("loaded" in r.wrong for r in each),
        "processes left behind": lambda each: sum(r.processes_left for r in each if r.exit_code is not None),
    }
    lines = [f"| {len(faults)} faults | " + " | ".join(PEERS.values()) + " |", "| --- " * (len(PEERS) + 1) + "|"]
    for title, count in rows.items():
        lines.append(f"| {title} | " + " | ".join(str(count(columns[peer])) for peer in PEERS) + " |")
    return "\n".join(lines) + "\n"


def blamed(results: list[Result], named: list[str]) -> str:
    """In how many of these faults the rank to blame was named, and in how many another."""
    asked = [each for each in results if each.fault in named]
    right = sum(each.named == FAULTS[each.fault].culprit for each in asked)
    wrong = sum(names_another(each) for each in asked)
    return f"{right}" + (f", and another in {wrong}" if wrong else "")


def names_another(result: Result) -> bool:
    """Whether a rank is named that is not to blame."""
    return result.exit_code != 0 and result.named not in (None, FAULTS[result.fault].culprit)


def spread(results: list[Result]) -> str:
    """Of the jobs that had to end."""
    hung = sum(each.exit_code is None for each in results)
    seconds = [each.seconds for each in results if each.seconds is not None and each.exit_code != 0]
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.0f}, {max(seconds):.0f}" + (f"; {hung} hung" if hung else "")


def put(path: Path, name: str, text: str) -> str:
    """The page with `text` between its marks `name`."""
    page, (begin, end) = path.read_text(), (f"<!-- {name} -->\n", f"<!-- end of {name} -->")
    if begin not in page or end not in page:
        sys.exit(f"{path} has no lines {begin.strip()!r} and {end!r}")
    return page[: page.index(begin) + len(begin)] + text + page[page.index(end) :]


def pages(kept: dict[str, Any]) -> dict[Path, str]:
    """The pages with today's tables in them."""
    docs, readme = ROOT / "docs" / "peers.md", ROOT / "README.md"
    return {docs: put(docs, "peers", tables(kept)), readme: put(readme, "peers in short", summary(kept))}


# ----------------------------------------------------------------------------------------------------- the command


def installed(peer: str) -> dict[str, str]:
    """Versions of what this peer is made of; exits when something is missing."""
    wanted = {"plain": ["torch"], "accelerate": ["torch", "accelerate"], "lightning": ["torch", "lightning"]}
    try:
        found = {name: importlib.metadata.version(name) for name in wanted.get(peer, ["torch"])}
    except importlib.metadata.PackageNotFoundError as error:
        sys.exit(f"{error.name} is not installed: pip install accelerate lightning, or choose --peers plain project")
    if peer == "project":
        text = (ROOT / "scaffold" / "ddp_scaffold" / "__init__.py").read_text()
        found["ddp-scaffold"] = re.findall(r'__version__ = "(.*)"', text)[0]
    return found


def measured(options: argparse.Namespace) -> None:
    """Run everything that was asked for."""
    kept: dict[str, Any] = {"version": 1, "machine": f"{os.cpu_count()} CPU cores, gloo", "peers": {}, "results": []}
    kept["python"] = platform.python_version()
    for peer in options.peers:
        kept["peers"][peer] = {"versions": installed(peer), "date": time.strftime("%Y-%m-%d")}
    print(versions(kept), flush=True)
    with tempfile.TemporaryDirectory(prefix="ddp-scaffold-peers-") as name:
        for fault in options.only:
            for peer in options.peers:
                for number in range(options.runs):
                    result, folder = started(peer, fault, number, Path(name))
                    kept["results"].append(asdict(result))
                    write(options, kept)
                    seconds = "" if result.seconds is None else f"; {result.seconds} s"
                    told = "; ".join(filter(None, facts(result))) + seconds + (result.again and f"; {result.again}")
                    print(f"{fault:13}{peer:11}{told}\n{'':24}{shortened(result.words)}", flush=True)
                    if options.logs:
                        (options.logs / f"{folder.name}.log").write_text(output(folder))


def started(peer: str, fault: str, number: int, base: Path) -> tuple[Result, Path]:
    """Run it; once more where the fault was never reached: on a busy machine the ranks may come 20 s apart."""
    for attempt in range(3):
        folder = base / f"{fault}-{peer}-{number}.{attempt}"
        result = run(peer, fault, folder, base)
        if fault in ("none", "s1", "s3") or result.seconds is not None or result.exit_code is None:
            break
        print(f"{fault:13}{peer:11}ended before the fault: {shortened(result.words)}", flush=True)
    return result, folder


def output(folder: Path) -> str:
    """Everything that a job has printed, in both starts."""
    paths = [path for path in (folder / "first-log.kept", folder / "log") if path.exists()]
    return "".join(path.read_text(errors="replace") for path in paths)


def write(options: argparse.Namespace, kept: dict[str, Any]) -> None:
    """After each job, so that nothing is lost when this is ended early."""
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n")
    if options.merge:
        old = json.loads(options.merge.read_text()) if options.merge.exists() else kept
        options.merge.write_text(json.dumps(merged(old, kept), indent=1) + "\n")


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`old` with what `new` has measured in the place of the same."""
    again = {(row["fault"], row["peer"]) for row in new["results"]}
    results = [row for row in old["results"] if (row["fault"], row["peer"]) not in again] + new["results"]
    order = [(fault, peer) for fault in FAULTS for peer in PEERS]
    results.sort(key=lambda row: order.index((row["fault"], row["peer"])))
    return {**old, **new, "peers": {**old["peers"], **new["peers"]}, "results": results}


def leave(number: int, _frame: object) -> None:
    """Ctrl-C or a signal: the job is ended and its files go, which a second signal must not interrupt."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(128 + number)


def main() -> None:
    """Measure, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    faults = ", ".join(FAULTS)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="FAULT", help=faults)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured now")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="put what was measured now into FILE")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what each job has printed")
    parser.add_argument("--table", type=Path, nargs="?", const=KEPT, metavar="FILE", help="print its tables")
    parser.add_argument("--write", action="store_true", help="with --table: into docs/peers.md and README.md")
    options = parser.parse_args()
    if options.table:
        kept = json.loads(options.table.read_text())
        print(summary(kept) + "\n" + tables(kept))
        for path, text in (pages(kept) if options.write else {}).items():
            path.write_text(text)
        return
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    measured(options)


if __name__ == "__main__":
    main()
