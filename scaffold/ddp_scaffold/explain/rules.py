"""From facts to a verdict: a list of rules, of which the first that knows something answers.

The order is the reasoning. A scheduler that ended the job knows why. What a line states by itself comes next, then how
processes died, then what the watchdogs' reports tell when they are laid side by side, in which the rank that reports is
usually the victim. Messages that only tell of another rank's failure come last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from .dump_rules import dumps_compared
from .events import Event
from .explanation import Confidence, Verdict
from .facts import Exit, Job, Timeout, aborted
from .kinds import KINDS
from .verdicts import name, verdict_of

SIGNALS = {-4: "SIGILL", -6: "SIGABRT", -7: "SIGBUS", -8: "SIGFPE", -9: "SIGKILL", -11: "SIGSEGV", -15: "SIGTERM"}
NUMBERS = {1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 9: "SIGKILL", 10: "SIGUSR1", 12: "SIGUSR2", 15: "SIGTERM"}
MOST_TASKS = 65_536
SCHEDULERS = ("pbs", "lsf", "submitit", "kubernetes", "slurm_state")  # events in which one of them tells why
START = frozenset({"port_in_use", "device_mapping", "launcher_misconfig", "rendezvous_failed", "network_misconfig"})
# What a process that was ended while others still held it may say: not a first failure once a timeout stands before it.
LATE = frozenset({"rank_exception", "rank_killed", "network_unreachable", "rendezvous_failed", "port_in_use"})


def judge(job: Job) -> Verdict:
    """Return the verdict of the first rule that has one."""
    for rule in RULES:
        if verdict := rule(job):
            return _with_setting(job, verdict)
    return verdict_of(
        "unknown",
        None,
        "unknown",
        "Nothing in the input says what failed.",
        [],
        needs=("the output of all ranks, from the first error on", "the launcher's or the scheduler's last lines"),
    )


def told_by_the_project(job: Job) -> Verdict | None:
    """What a generated project prints at a bad end: its ranks could still ask each other. The last attempt counts."""
    if not job.named["project_verdict"]:
        return None
    event = job.named["project_verdict"][-1]
    kind, reason = KINDS.get(event.values["kind"], event.values["kind"]), event.values["reason"]
    ranks = _blamed(reason) if kind not in NOBODYS else _not_finite(reason)
    phase = re.search(r"\bphase ([\w:]+)", reason)
    sure: Confidence = "unknown" if kind == "unknown" else "certain"
    return verdict_of(kind, ranks, sure, reason, [event], phase=phase[1] if phase else "")


def _not_finite(reason: str) -> list[int] | None:
    """Return the ranks whose own loss was NaN, where the project's reason says that it was not on all."""
    found = re.search(r"; so was the loss itself, on ranks? ([\d, .]+) of \d+ only", reason)
    return [int(rank) for rank in re.findall(r"\d+", found[1])] if found else None


def _blamed(reason: str) -> list[int] | None:
    """Return the ranks with which a reason begins, or the one whose number of collectives differs from all others'."""
    if found := FIRST_RANKS.match(reason):
        return [int(rank) for rank in re.findall(r"rank (\d+) \(", found[0])]
    if found := re.match(r"ranks have made different numbers of \w+ \((.*?)\)", reason):
        numbers = re.findall(r"rank (\d+): (\d+)", found[1])
        rare = Counter(number for _, number in numbers).most_common()[-1]
        return [int(rank) for rank, number in numbers if number == rare[0]] if rare[1] == 1 < len(numbers) - 1 else None
    return None


def scheduler_ended_it(job: Job) -> Verdict | None:
    """Node failure, preemption and time limit; the last two only where nothing had failed before."""
    for event in (*job.named["slurm_cancel"], *job.named["slurm_step"]):
        why = event.values.get("why", event.text).upper()
        if "NODE FAIL" in why:
            return verdict_of("node_failure", None, "certain", "The scheduler reports that a node has failed.", [event])
        kind = "preempted" if "PREEMPT" in why or "REQUEUE" in why else "time_limit" if "TIME LIMIT" in why else ""
        earlier = [event for _, _, event in job.failures] + [timeout.event for timeout in job.timeouts]
        if kind and not any(_before(other, event) is not False for other in earlier):
            if kind == "preempted" and (since := _since(job, event)):
                if all(later.name == "finished" for later in since):
                    continue
                summary = (
                    "The scheduler has preempted the job; nothing failed before, and what failed after it may come"
                )
                summary += " of that, or of a job that was started again."
                needs = ["the output since the job was started again, alone"]
                return verdict_of(kind, None, "likely", summary, [event, since[0]], needs=needs)
            what = "preempted the job" if kind == "preempted" else "ended the job at its time limit"
            return verdict_of(kind, None, "certain", f"The scheduler has {what}; nothing failed before.", [event])
    return _other_scheduler(job)


def _since(job: Job, event: Event) -> list[Event]:
    """Return the failures, and the end of a job that is done, that stand behind an event in its file."""
    told = [other for _, _, other in job.failures] + job.named["finished"]
    return [other for other in told if other.file == event.file and other.line > event.line]


def _other_scheduler(job: Job) -> Verdict | None:
    """What PBS, LSF, submitit and Kubernetes write into the job's output, or tell of its pods."""
    for event in (event for source in SCHEDULERS for event in job.named[source]):
        why = event.values["why"]
        failed = any(_before(other, event) is not False for _, _, other in job.failures)
        if (
            any(word in why for word in ("walltime", "RUNLIMIT", "timed-out", "TIMEOUT", "Deadline", "deadline"))
            and not failed
        ):
            summary = "The scheduler has ended the job at its time limit; nothing failed before."
            return verdict_of("time_limit", None, "certain", summary, [event])
        if "PREEMPT" in why.upper() and not failed:
            return verdict_of("preempted", None, "certain", "The scheduler has preempted the job.", [event])
        if event.values.get("resource", "memory") != "memory":  # of the node: disk, or numbers of processes
            summary = f"The node had too little {event.values['resource']}, and Kubernetes has evicted the pod."
            return verdict_of("preempted", None, "likely", summary, [event])
        if any(word in why for word in ("mem", "MEMLIMIT", "OUT_OF_MEMORY")):
            summary = "The scheduler has ended the job because it used more memory than it had asked for."
            return verdict_of("host_oom_kill", None, "certain", summary, [event])
        if any(word in why for word in ("SISTER_EOF", "communicate with sister", "NODE_FAIL")):
            return verdict_of("node_failure", None, "likely", "The scheduler has lost a node of the job.", [event])
    return None


def launcher_was_ended(job: Job) -> Verdict | None:
    """torchrun itself got a signal, before anything failed: a session that was closed, a scheduler, somebody's kill."""
    for event in job.named["launcher_signal"]:
        signal = _signal(event)
        earlier = [other for _, _, other in job.failures] + [other for _, other in (*job.consequences, *job.vague)]
        earlier += [timeout.event for timeout in job.timeouts]
        if signal == "SIGINT" or any(
            other.line != event.line and _before(other, event) is not False for other in earlier
        ):
            return None
        summary = f"The launcher itself was ended by {signal}, from outside, before any rank had failed."
        if signal != "SIGHUP":
            return verdict_of("preempted", None, "likely", summary, [event])
        verdict = verdict_of(
            "preempted", None, "likely", f"{summary} SIGHUP comes where a terminal is closed.", [event]
        )
        return replace(verdict, advice=("start the job in tmux, by nohup, or by a scheduler", *verdict.advice))
    return None


def _signal(event: Event) -> str:
    """Return the name of the signal that the launcher got, which it prints as a number or as a name."""
    told = event.values.get("s") or event.values["g"]
    return NUMBERS.get(int(told), f"signal {told}") if told.isdecimal() else told


def interrupted(job: Job) -> Verdict | None:
    """Somebody has pressed Ctrl-C: what the job did until then, or hung in, the input does not say."""
    events = [event for event in job.named["launcher_signal"] if _signal(event) == "SIGINT"]
    if not events or job.timeouts:
        return None
    summary = "Somebody has interrupted the launcher (SIGINT). If the job hung, the input does not say in what."
    needs = ("`py-spy dump` of each rank while it hangs", "the output of all ranks before that line")
    return verdict_of("unknown", None, "unknown", summary, events[:1], needs=needs)


def ranks_were_ended(job: Job) -> Verdict | None:
    """Ranks say that SIGTERM came, and nothing in the input had failed before, nor does a launcher speak of a rank."""
    launchers = ("elastic_failed", "launcher_kill", "slurm_task", "deepspeed_exit")
    events = job.named["rank_signal"]
    if (
        not events
        or job.exits
        or job.failures
        or job.timeouts
        or job.vague
        or any(job.named[name] for name in launchers)
    ):
        return None
    if any(_before(other, events[0]) is not False for _, other in job.consequences):
        return None
    summary = f"The ranks were ended by {events[0].values['s']}, from outside; nothing failed before."
    return verdict_of(
        "preempted", None, "likely", summary, events[:2], needs=["the launcher's or the scheduler's output"]
    )


def work_beside_a_barrier(job: Job) -> Verdict | None:
    """Others wait for rank 0 in a barrier, and a progress bar has run as long as the timeout, or the stack tells."""
    waits = [timeout.event for timeout in job.timeouts if timeout.sizes == (1, 1)]
    waiting = {timeout.rank for timeout in job.timeouts}
    if not waits:
        waits = [event for _, _, event in job.failures if "store->get" in event.text and "from [0]" in event.text]
        waiting = {int(found[1]) for event in waits if (found := re.search(r"\[(\d+)\] is setting up", event.text))}
    if not waits or 0 in waiting or None in waiting:
        return None
    limits = {timeout.limit_ms / 1000 for timeout in job.timeouts if timeout.limit_ms} or {600.0, 1800.0}
    bar = any(_near(event.number("elapsed"), limit) for event in waits for limit in limits)
    stack = any(FIRST.search(event.values.get("functions", "")) for event in waits)
    if not bar and not stack:
        return None
    how = "a progress bar had run for about as long" if bar else "the stack shows a `rank 0 first` block"
    others = name(rank for rank in waiting if rank is not None)
    summary = f"Rank 0 worked alone while {others} waited for it in a barrier, for longer than the timeout; {how}."
    return verdict_of("rank0_work", [0], "likely", summary, waits)


def _near(elapsed: int | None, limit: float) -> bool:
    return elapsed is not None and abs(elapsed - limit) <= 0.1 * limit


def first_named_failure(job: Job) -> Verdict | None:
    """A line that states a failure of its own rank; of several the first."""
    failures = list(job.failures)
    if job.first_timeout:
        failures = [item for item in failures if item[0] not in LATE or _before(job.first_timeout, item[2]) is not True]
    if job.exits:  # the launcher's table knows better which process a signal has ended
        failures = [item for item in failures if item[2].name != "death" or item[1] is not None]
    if not failures:
        return None
    special = [item for item in failures if item[0] != "rank_exception" and item[2].name != "death"]
    kind, rank, event = _earliest(failures)
    if kind == "rank_killed" and "Actor" in event.text:  # Ray says why below
        kind, rank, event = next((item for item in special if item[0] == "node_failure"), (kind, rank, event))
    for other in special:  # the sign says more than the exception of the same rank
        if kind == "rank_exception" and other[1] == rank:
            kind, event = other[0], other[2]
    if kind == "rank_exception" and special and _before(event, special[0][2]) is None:
        kind, rank, event = special[0]
    if kind == "rank_exception" and event.values.get("kind") is None and rank is None:
        rank = _only_failed(job)
    tasks = _tasks_out_of_memory(job) if kind == "host_oom_kill" else []
    ranks = tasks or _named_ranks(event) or ([rank] if rank is not None else _one(_only_failed(job)))
    alike = [(_named_ranks(item) or _one(other)) for what, other, item in failures if what == kind]
    ranks = ranks or next(filter(None, alike), [])
    nobody = kind in EVERY_RANK_REPORTS or kind == "network_unreachable"  # whose line is written by either end
    if nobody:
        ranks = []
    nothing = "inconsistent 0 params" in event.text  # that rank did not come, or no data get through between GPUs
    stated = kind in CERTAIN and not nothing and (ranks or kind in START | EVERY_RANK_REPORTS)
    confidence: Confidence = "certain" if stated and _alone(job, kind, ranks, event) else "likely"
    where = "between two hosts" if kind == "network_unreachable" else "all ranks"
    who = name(ranks) if ranks else where if nobody else "a rank that the input does not name"
    what = "its kernel has faulted, by the driver" if "Xid" in event.text else _SUMMARIES["rank_exception"]
    what = what if kind == "rank_exception" else _SUMMARIES.get(kind, "failed first")
    summary = f"{who[0].upper()}{who[1:]}: {what}."
    if nothing:
        summary = f"Nothing arrived from {name(ranks)}: it did not come, or the GPUs do not exchange data."
    if _named_ranks(event) and rank is not None and rank not in ranks:
        summary += f" {name([rank]).capitalize()} only reports it."
    needs = [] if ranks or nobody or kind in START else ["which rank wrote that line"]
    same = [item[2] for item in job.failures if item[0] == kind and item[2] is not event]
    return verdict_of(kind, ranks or None, confidence, summary, [event, *same[:2]], phase=_phase(event), needs=needs)


def dead_process(job: Job) -> Verdict | None:
    """The launchers' tables of all nodes, merged: the earliest end that neither launcher nor watchdog has caused."""
    timed_out = {timeout.rank for timeout in job.timeouts}
    rows = [row for row in job.exits if row.code != -15 and not (row.code == -6 and _watchdog(job, row, timed_out))]
    if not rows or job.timeouts:
        return None if job.exits or job.timeouts or job.failures else _failed_line(job)
    told = {rank for rank, _ in job.consequences}
    # a victim's end may be noticed seconds before that of the culprit, on a machine that is busy
    begin = min(row.event.clock or 0.0 for row in [row for row in rows if row.rank not in told] or rows)
    first = [row for row in rows if (row.event.clock or 0.0) - begin < 1]
    own = [row for row in first if row.code < 0 and row.rank not in told] or [
        row for row in first if row.rank not in told
    ]
    if not own:
        return None
    ranks = [row.rank for row in own]
    if len(own) > 1 and all(row.code == -6 for row in job.exits):
        summary = f"{name(ranks).capitalize()} have all ended by SIGABRT, as a watchdog ends them; nothing says why."
        needs = ["what the ranks have printed before: the watchdogs' lines, or an error"]
        return verdict_of("unknown", None, "unknown", summary, [row.event for row in own], needs=needs)
    if all(row.code < 0 for row in own):
        signal = ", ".join(sorted({SIGNALS.get(row.code, f"signal {-row.code}") for row in own}))
        complete = {row.rank for row in job.exits} >= set(range(max(row.rank for row in job.exits) + 1))
        others = all(row.code == -15 or row.rank in told for row in job.exits if row.rank not in ranks)
        sure: Confidence = "certain" if len(own) == 1 and complete and others and len(job.exits) > 1 else "likely"
        summary = f"{name(ranks).capitalize()} ended by {signal}, before any other rank; nothing says who sent it."
        return verdict_of("rank_killed", ranks, sure, summary, [row.event for row in own])
    summary = f"{name(ranks).capitalize()} ended with exit code {own[0].code}; the input does not have its exception."
    needs = [f"the output of {name(ranks)} (torchrun --log-dir, or @record for the traceback)"]
    return verdict_of("rank_exception", ranks, "likely", summary, [row.event for row in own], needs=needs)


def _failed_line(job: Job) -> Verdict | None:
    """The launcher's one line about a process, where its table is not there; it knows only the local rank."""
    lines = [event for event in job.named["elastic_failed"] if event.values["x"] not in {"-15", "-6", "1"}]
    if not lines:
        return _deepspeed(job)
    line = lines[0]
    code = int(line.values["x"])
    what = SIGNALS.get(code, f"exit code {code}")
    kind = "rank_killed" if code < 0 else "rank_exception"
    nodes = {event.values["n"] for event in job.named["group_world"]}
    if nodes == {"1"}:  # then a local rank is a rank
        ranks = [int(line.values["lr"])]
        summary = f"{name(ranks).capitalize()} ended by {what}; nothing says why."
        return verdict_of(kind, ranks, "likely", summary, [line], needs=["dmesg of that host"])
    summary = f"Local rank {line.values['lr']} ended by {what}; the input does not say which rank of the job that is."
    needs = ["the launcher's table of failures", "dmesg of that host"]
    return verdict_of(kind, None, "likely", summary, [line], needs=needs)


def _deepspeed(job: Job) -> Verdict | None:
    """DeepSpeed's launcher names a return code, and the command of the last process, which need not be the one."""
    lines = [event for event in job.named["deepspeed_exit"] if event.values["x"].startswith("-")]
    lines = [event for event in lines if event.values["x"] not in {"-15", "-6"}]
    if not lines:
        return None
    signal = SIGNALS.get(int(lines[0].values["x"]), lines[0].values["x"])
    summary = (
        f"A rank ended by {signal}; DeepSpeed's launcher does not say which: its line shows the last one's command."
    )
    needs = ["the output of each rank (deepspeed --enable_each_rank_log)", "dmesg of that host"]
    return verdict_of("rank_killed", None, "likely", summary, lines[:1], needs=needs)


def task_of_srun(job: Job) -> Verdict | None:
    """srun's line about the tasks that ended first, where it has started the ranks itself."""
    if job.exits or job.timeouts or job.named["elastic_failed"] or job.named["launcher_kill"]:
        return None
    told = {rank for rank, _ in job.consequences}
    for event in job.named["slurm_task"]:
        what, tasks = event.values["what"], _tasks(event)
        ranks = [task for task in tasks if task not in told]
        if not ranks or what.startswith(("Terminated", "Out Of Memory")):
            continue
        killed = not re.match(r"Exited with exit code (?!13[4-9])\d", what)
        summary = f"{name(ranks).capitalize()} ended first ({what.strip()}), by srun, whose tasks the ranks seem to be."
        needs = [f"the output of {name(ranks)}"]
        kind = "rank_killed" if killed else "rank_exception"
        return verdict_of(kind, ranks, "likely", summary, [event], needs=needs)
    return None


def different_collectives(job: Job) -> Verdict | None:
    """Ranks that waited in different operations under one number of one group."""
    by_number: dict[int, list[Timeout]] = {}
    for timeout in job.timeouts:
        if timeout.sequence is not None and timeout.rank is not None:
            by_number.setdefault(timeout.sequence, []).append(timeout)
    groups = set(job.counts)
    for waiting in by_number.values():
        forms = Counter((timeout.operation, timeout.sizes) for timeout in waiting)
        if (
            len(forms) < 2
            or len(groups) > 1
            or any("ALLTOALL" in form[0] or form[0] in {"SEND", "RECV"} for form in forms)
        ):
            continue
        (_, most), (rare, fewest) = forms.most_common()[0], forms.most_common()[-1]
        odd = [timeout.rank for timeout in waiting if (timeout.operation, timeout.sizes) == rare]
        ranks = [rank for rank in odd if rank is not None] if fewest < most and len(forms) == 2 else None
        calls = "; ".join(
            f"{name([t.rank or 0])} {t.collective} of {t.sizes[0] if t.sizes else '?'}" for t in waiting[:4]
        )
        summary = f"Ranks wait in different collectives under one number: {calls}."
        unlike = len({t.operation for t in waiting}) > 1 or waiting[0].operation == "ALLREDUCE"
        sure: Confidence = "certain" if groups and unlike else "likely"
        return verdict_of("mismatched_collectives", ranks, sure, summary, [timeout.event for timeout in waiting])
    return None


def never_issued(job: Job) -> Verdict | None:
    """A rank whose last enqueued collective lies before the one that others wait in: it never came."""
    for group, counts in job.counts.items():
        stuck = [t for t in job.timeouts if t.rank in counts and t.sequence is not None and _of(job, t, group)]
        if not stuck:
            continue
        number = max(t.sequence or 0 for t in stuck)
        waiting = {t.rank for t in job.timeouts}
        absent = [rank for rank, state in counts.items() if state.enqueued < number and rank not in waiting]
        if absent and len(absent) < len(counts):
            events = [counts[rank].event for rank in absent[:2]] + [t.event for t in stuck[:3]]
            return _missing(job, absent, stuck, events, "certain", f"never issued collective {number}")
    return None


def alone_in_it(job: Job) -> Verdict | None:
    """One rank waits in a collective whose number all others have left behind: only it issued that one."""
    waiting = [timeout for timeout in job.timeouts if timeout.sequence is not None]
    if len(waiting) != 1 or waiting[0].rank is None:
        return None
    alone, rank = waiting[0], waiting[0].rank
    for counts in job.counts.values():
        others = [state for other, state in counts.items() if other != rank]
        if others and all(state.completed >= (alone.sequence or 0) for state in others):
            who = name([rank]).capitalize()
            summary = f"{who} waits alone in {alone.collective}; the others are past that number."
            events = [alone.event, *(state.event for state in others[:3])]
            return verdict_of("subset_collective", [rank], "likely", summary, events)
    return None


def different_numbers(job: Job) -> Verdict | None:
    """Ranks of one group that each wait in a collective of another number: they have not done the same."""
    waiting = [t for t in job.timeouts if t.sequence is not None and t.rank is not None]
    if len(job.counts) != 1 or len({t.sequence for t in waiting}) < 2 or len({t.rank for t in waiting}) < 2:
        return None
    calls = "; ".join(f"{name([t.rank or 0])} {t.collective}" for t in waiting[:4])
    summary = f"Ranks of one group wait in collectives of different numbers: {calls}."
    needs = ["the flight-recorder dump of each rank"]
    return verdict_of("divergent_control_flow", None, "likely", summary, [t.event for t in waiting], needs=needs)


def late_rank(job: Job) -> Verdict | None:
    """A rank whose wait began much later than that of the others, in the same collective: they waited for it."""
    begun = [(t.since, t) for t in job.timeouts if t.since is not None and t.rank is not None and t.limit_ms]
    if len(begun) < 2 or len({t.collective for _, t in begun}) != 1:
        return None
    first = min(since for since, _ in begun)
    limit = max(t.limit_ms or 0 for _, t in begun) / 1000
    late = [t for since, t in begun if since - first > LATE_SHARE * limit]
    if not late or 2 * len(late) > len(begun):
        return None
    ranks = [t.rank for t in late if t.rank is not None]
    by = max(since for since, _ in begun) - first
    summary = f"{name(ranks).capitalize()} came to {late[0].collective} {by:.0f} s after the others, who waited for it."
    return verdict_of("straggler", ranks, "likely", summary, [t.event for t in (*late[:2], *(t for _, t in begun[:2]))])


def silent_ranks(job: Job) -> Verdict | None:
    """Ranks that must exist and say nothing, while all others report a timeout."""
    waiting = {timeout.rank for timeout in job.timeouts if timeout.rank is not None}
    if not waiting or _came_to_the_first(job):
        return None
    size = job.world_size or max(job.ranks | waiting) + 1
    silent = sorted(set(range(size)) - waiting)
    events = [timeout.event for timeout in job.timeouts[:4]]
    if (
        not silent
        or len(silent) > max(1, len(waiting) - (job.world_size is None))  # of a job whose size nothing tells, fewer
        or (job.world_size is None and len(job.exits) == 0 and len(waiting) < 2)
    ):
        return None
    if len(waiting) == 1 and not _barrier(job):
        if len(silent) > 1:
            return None
        needs = (f"the flight-recorder dump of {name(silent)}", f"the log of {name(silent)}")
        summary = (
            f"{name(waiting).capitalize()} waited alone in {job.timeouts[0].collective}: {name(silent)}"
            f" either issued it with another"
            " size or operation, or never came. It did not answer the request for a dump."
        )
        return verdict_of("mismatched_collectives", None, "likely", summary, events, needs=needs)
    return _missing(job, silent, job.timeouts, events, "likely", "never reported, while all others waited")


def all_wait(job: Job) -> Verdict | None:
    """Every rank waits in one collective: nobody is missing, so it is the transport, or a GPU."""
    if not job.timeouts:
        return None
    waiting = {timeout.rank for timeout in job.timeouts if timeout.rank is not None}
    events = [timeout.event for timeout in job.timeouts[:4]]
    first = job.timeouts[0]
    needs = ["the logs of all ranks, and how many there were", "the flight-recorder dump of each rank"]
    complete = job.world_size is not None and waiting >= set(range(job.world_size)) and job.world_size > 1
    if complete and first.sequence == 1:
        hosts = {job.hosts[rank] for rank in waiting if rank in job.hosts}
        kind = "network_misconfig" if len(hosts) > 1 or len(waiting) > 8 else "peer_to_peer"
        summary = (
            "All ranks wait in the very first collective: it never worked, so it is the transport between the GPUs."
        )
        return verdict_of(kind, None, "likely", summary, events, needs=["a run with NCCL_DEBUG=INFO"])
    if complete:
        needs = ["dmesg of each host (Xid, link errors)", "the flight-recorder dump of each rank"]
        summary = (
            f"All {job.world_size} ranks wait in the same collective: nobody is missing; a GPU or the network stopped."
        )
        return verdict_of("unknown", None, "unknown", summary, events, needs=needs)
    who = name(waiting).capitalize() if waiting else "A rank"
    summary = f"{who} waited in {first.collective}; it is a victim, and the input lacks the others."
    return verdict_of("unknown", None, "unknown", summary, events, needs=needs)


def _came_to_the_first(job: Job) -> bool:
    """Tell whether ranks that say nothing may well have come to the first collective: NCCL was ready, with all of them.

    Without `device_id`, torch makes a communicator at the first collective, so that each rank has issued that.
    """
    sizes = {event.number("ready") for event in job.named["nccl_ready"]}
    first = all(timeout.sequence == 1 for timeout in job.timeouts) and len(job.counts) < 2
    return first and bool(job.timeouts) and sizes == {job.world_size}


def unequal_steps(job: Job) -> Verdict | None:
    """Ranks whose loops have other lengths, of which one is through with its own, while others wait for it."""
    waiting = _waiting(job)
    known = {rank: step for rank, step in job.steps.items() if step.total}
    shortest = min((step.total or 0 for step in known.values()), default=0)
    short = [rank for rank, step in known.items() if step.total == shortest and step.number >= shortest - 1]
    if not waiting or not short or all(step.total == shortest for step in known.values()):
        return None
    longest = max(step.total or 0 for step in known.values())
    summary = f"{name(short).capitalize()} had {shortest} steps and others up to {longest}; they waited for the next."
    others = [known[rank].event for rank in known if rank not in short][:2]
    return verdict_of("uneven_inputs", short, "likely", summary, [*(known[rank].event for rank in short[:2]), *others])


def ended_early(job: Job) -> Verdict | None:
    """A rank says that it is done, or left without an error, while others wait in a collective: it had fewer steps."""
    waiting = _waiting(job)
    events = [*job.named["finished"], *job.named["left"]]
    done = [e for e in events if e.origin.rank is not None and e.origin.rank not in waiting]
    if not waiting or not done or len({event.origin.rank for event in done}) > len(waiting):
        return None
    ranks = [event.origin.rank for event in done if event.origin.rank is not None]
    how = "had finished" if job.named["finished"] else "had left, without an error,"
    summary = f"{name(ranks).capitalize()} {how} while {name(waiting)} waited for the next collective: unequal steps."
    steps = [job.steps[rank] for rank in ranks if rank in job.steps]
    if steps:
        summary += f" Its last step was {steps[0].number}."
    lines = [*done[:2], *(step.event for step in steps[:1]), *(timeout.event for timeout in job.timeouts[:2])]
    return verdict_of("uneven_inputs", ranks, "likely", summary, lines)


def _waiting(job: Job) -> set[int]:
    """Return the ranks that wait for others, or have lost their connection to them."""
    ranks = {timeout.rank for timeout in job.timeouts} | {rank for rank, _ in job.consequences}
    return {rank for rank in ranks if rank is not None}


def heartbeat_stopped(job: Job) -> Verdict | None:
    """The heartbeats of a rank of a generated project stop before those of the others: it was killed or suspended."""
    beats: dict[int, list[Event]] = {}
    for event in job.named["heartbeat_of_rank"]:
        if _time(event) is not None:
            beats.setdefault(int(event.values["r"]), []).append(event)
    times = {rank: [_time(event) or 0.0 for event in events] for rank, events in beats.items()}
    steps = [own[-1] - own[-2] for own in times.values() if len(own) > 1]
    if len(times) < 2 or not steps:
        return None
    newest = max(own[-1] for own in times.values())
    quiet = max(MOST_BEATS_MISSED * max(steps), 2.0)
    stopped = sorted(rank for rank, own in times.items() if newest - own[-1] > quiet)
    if not stopped or 2 * len(stopped) > len(times):
        return None
    last = beats[stopped[0]][-1]
    summary = (
        f"The heartbeats of {name(stopped)} stop {newest - times[stopped[0]][-1]:.0f} s before those of the others,"
    )
    summary += f" in phase {last.values['phase']} of step {last.values['step']}: its process was killed or suspended."
    needs = [f"dmesg of {last.values['host']}, and what the scheduler says of it"]
    lines = [last, *(own[-1] for rank, own in beats.items() if rank not in stopped)]
    return verdict_of("rank_killed", stopped, "likely", summary, lines, phase=last.values["phase"], needs=needs)


def heartbeat_alone(job: Job) -> Verdict | None:
    """The heartbeat monitor ended processes, and no collective had timed out: what held up the watchdog threads?"""
    beats = job.named["heartbeat"]
    if not beats:
        return None
    ranks = {beat.origin.rank for beat in beats if beat.origin.rank is not None}
    if len(ranks) > 1:  # of several ranks at once: rather a hang of all than a monitor that was too strict
        summary = (
            f"The heartbeat monitors of {name(ranks)} ended their processes though no collective had timed out: a"
            " call of CUDA or NCCL does not return on each of them. None of them is known to be the first."
        )
        needs = [f"`py-spy dump --native` of {name(ranks)} while they hang", "the flight-recorder dump of each rank"]
        return verdict_of("unknown", None, "unknown", summary, beats, needs=needs)
    summary = (
        "The heartbeat monitor ended the process though no collective had timed out: its watchdog thread was held up."
    )
    needs = ["`py-spy dump --native` of that rank"]
    return verdict_of("watchdog_false_positive", ranks or None, "likely", summary, beats, needs=needs)


def stalled_operations(job: Job) -> Verdict | None:
    """Horovod names the ranks that others wait for: they are the culprits only where nothing else is known."""
    events = job.named["stalled"]
    if not events:
        return None
    ranks = _named_ranks(events[-1])
    summary = f"{name(ranks).capitalize()} did not submit an operation that the others waited for."
    needs = [f"the stack (py-spy dump) or the log of {name(ranks)}"]
    return verdict_of("missing_rank", ranks, "likely", summary, events[-1:], needs=needs)


def nccl_failed(job: Job) -> Verdict | None:
    """NCCL says that it has failed, and nothing of why; where others only miss that rank, it was the first."""
    if not job.vague:
        return None
    rank, event = job.vague[0]
    failed = {other for other, _ in job.vague}
    if rank is not None and len(failed) < len({other for other, _ in job.consequences} - failed - {None}):
        summary = (
            f"{name([rank]).capitalize()}: a call of NCCL failed there, and the others lost their connection to it."
        )
        return verdict_of("rank_exception", [rank], "likely", summary, [event], needs=["a run with NCCL_DEBUG=WARN"])
    if "hccl" in event.text.lower():
        summary = "HCCL has failed, and does not say in what."
        return verdict_of("unknown", None, "unknown", summary, [event], needs=["the logs of CANN of all ranks"])
    summary = "NCCL has failed, and does not say in what: its own warnings are not in the input."
    return verdict_of("unknown", None, "unknown", summary, [event], needs=["a run with NCCL_DEBUG=WARN"])


def never_started(job: Job) -> Verdict | None:
    """The last that the log says is that ranks wait for each other at the start, or lost the store there."""
    lost = [event for _, event in job.consequences]
    if any("start" not in event.values for event in lost if event.name == "exception"):
        return None
    events = [event for event in lost if "start" in event.values] or job.named["start_awaited"]
    if not events or any(step.file == events[-1].file and step.line > events[-1].line for step in job.named["step"]):
        return None
    last = events[-1]
    size, came = last.number("w"), last.number("n")
    if size is not None and size == came:
        return None
    summary = f"{came} ranks came to the start, of {size}." if size else "A rank did not reach the store at the start."
    if size and came and came > size:
        summary = f"{came} ranks have come to a start of {size}: one more than once, or others use the same store."
    needs = ["the output of the other nodes"]
    return verdict_of("rendezvous_failed", None, "likely", summary, events[-2:], phase="init", needs=needs)


def child_raised(job: Job) -> Verdict | None:
    """`mp.spawn` names a process that has raised, and the log is cut before its exception."""
    spawned = [(rank, event) for rank, event in job.hints if event.name == "spawned"]
    if not spawned or any("launcher" not in event.values for _, event in job.consequences):
        return None
    rank, event = spawned[0]
    who = name([rank]).capitalize() if rank is not None else "A rank"
    summary = f"{who} raised an exception first; the input lacks its end."
    return verdict_of("rank_exception", _one(rank), "likely", summary, [event], needs=["its traceback"])


def said_in_passing(job: Job) -> Verdict | None:
    """An error that only a logger's line tells of, or an abort of which nothing says why."""
    logged = [(rank, event) for rank, event in job.hints if event.name == "logged"]
    if logged:
        rank, event = logged[0]
        who = name([rank]).capitalize() if rank is not None else "A rank"
        summary = f"{who} has logged an exception."
        return verdict_of("rank_exception", _one(rank), "likely", summary, [event], needs=["its traceback"])
    deaths = [event for event in job.named["death"] if aborted(event)]
    if not deaths or job.timeouts or job.named["thread_ended"] or job.named["heartbeat"]:
        return None
    summary = "A process has aborted; what it said before, the input does not have."
    return verdict_of("rank_killed", _one(deaths[0].origin.rank), "likely", summary, deaths[:2], needs=["its output"])


def broken_connections(job: Job) -> Verdict | None:
    """Connections broke, and no rank says why: whoever is absent among those that complain is the suspect."""
    told = {rank for rank, _ in job.consequences if rank is not None}
    if not job.consequences:
        return None
    events = [event for _, event in job.consequences[:4]]
    if all(event.values.get("kind") == "store_lost" for _, event in job.consequences):
        summary = "The host of the store went away, and the input does not say why."
        return verdict_of(
            "store_lost", None, "likely", summary, events, needs=["the log of rank 0 and of its launcher"]
        )
    size = job.world_size or (max(job.ranks) + 1 if job.ranks else 0)
    # torchrun's table has every rank but those that left with 0
    unlisted = set(range(size)) - told - {row.rank for row in job.exits} if job.exits else set()
    absent = sorted(unlisted or set(range(size)) - told)
    # one rank that complains does not tell how many there are, if no other has ever spoken
    known = job.exits or job.world_size or len(told) > 1 or job.ranks >= set(absent)
    if told and absent and known and (len(absent) <= len(told) or len(unlisted) == 1):
        ended = {row.rank for row in job.exits if row.code == -15}
        how = "did not come, until the launcher ended it" if ended & set(absent) else "left without an error of its own"
        summary = f"The others lost their connection to {name(absent)}, which {how}."
        return verdict_of("missing_rank", absent, "likely", summary, events, needs=[f"the log of {name(absent)}"])
    return verdict_of(
        "unknown", None, "unknown", "Connections broke, and no rank says why.", events, needs=["the logs of all ranks"]
    )


def nothing_failed(job: Job) -> Verdict | None:
    """The log ends as one of a job that is done."""
    done = job.named["finished"]
    if done and not job.exits:
        return verdict_of("benign", None, "likely", "The job says that it is done, and nothing failed.", done[-1:])
    return None


RULES: tuple[Callable[[Job], Verdict | None], ...] = (
    told_by_the_project,
    scheduler_ended_it,
    launcher_was_ended,
    work_beside_a_barrier,
    first_named_failure,
    dead_process,
    task_of_srun,
    unequal_steps,
    dumps_compared,
    different_collectives,
    ended_early,
    never_issued,
    alone_in_it,
    different_numbers,
    late_rank,
    silent_ranks,
    heartbeat_stopped,
    all_wait,
    heartbeat_alone,
    stalled_operations,
    interrupted,
    ranks_were_ended,
    child_raised,
    nccl_failed,
    never_started,
    broken_connections,
    nothing_failed,
    said_in_passing,
)
FIRST = re.compile(r"main_process_first|rank_zero_first|main_first|rank0_first|zero_first")
FIRST_RANKS = re.compile(r"(?:rank \d+ \([^)]*\)(?:, )?)+")  # with their hosts, at the begin of a reason
MOST_BEATS_MISSED = 4  # heartbeats that a rank may miss: they come from a thread that may have to wait
LATE_SHARE = 0.25  # of the timeout: more than clocks of hosts usually differ
# Whoever writes such a line is no more to blame than the others.
EVERY_RANK_REPORTS = frozenset({"mismatched_collectives", "uneven_inputs", "rendezvous_failed"})
NOBODYS = (
    EVERY_RANK_REPORTS | START | {"nonfinite_loss", "preempted", "time_limit"}
)  # nor does the project blame a rank, but for a loss that was NaN on some only
CERTAIN = frozenset(
    {"rank_exception", "cuda_oom", "hardware_fault", "dataloader_worker_died", "dataloader_stalled", "fd_exhausted"}
    | {"shm_exhausted", "device_mapping", "port_in_use", "missing_rank", "mismatched_collectives", "uneven_inputs"}
)
_SUMMARIES = {
    "rank_exception": "raised an exception first; the others ended because of it",
    "cuda_oom": "its GPU ran out of memory first",
    "host_oom_kill": "the kernel killed a process because the host ran out of memory",
    "hardware_fault": "a GPU or link reported an error of the hardware",
    "dataloader_worker_died": "a loader worker was killed",
    "dataloader_stalled": "a loader worker gave no batch in time",
    "shm_exhausted": "/dev/shm is full",
    "fd_exhausted": "no more open files",
    "device_mapping": "two ranks have one GPU, or a GPU number does not exist",
    "port_in_use": "the port is taken by another process",
    "missing_rank": "did not arrive where the others waited; nothing says why",
    "mismatched_collectives": "the ranks issued different collectives, or have different models",
    "uneven_inputs": "some ranks had no batches left",
    "divergent_control_flow": "did not do the same as the other ranks: a part of the model got no gradient there",
    "checkpoint_failed": "a checkpoint is broken or could not be written",
    "nonfinite_loss": "the loss is not finite",
    "rendezvous_failed": "the ranks did not find each other in time",
    "launcher_misconfig": "the launcher, or its variables, do not fit the program",
    "network_misconfig": "an interface, address or name of the network is wrong",
    "network_unreachable": "a connection failed",
    "node_failure": "a host was lost",
    "rank_killed": "its process died; what ended it, the input does not say",
    "peer_to_peer": "GPUs of one host cannot reach each other directly",
}


def _alone(job: Job, kind: str, ranks: Sequence[int], event: Event) -> bool:
    """Tell whether the input excludes that another rank failed before: nothing else may have come first.

    Ranks that a message names itself (a monitored barrier, a GPU that two share) need no witness. Else the other ranks
    must be seen to be victims, in the launcher's table or by what they say.
    """
    if kind in EVERY_RANK_REPORTS or _named_ranks(event) or (kind in START and event.name == "exception"):
        return True
    if not ranks:
        return False
    for _, other, item in job.failures:
        if other not in ranks and item is not event and (other is None or _before(event, item) is not True):
            return False
    told = {rank for rank, _ in job.consequences} | {timeout.rank for timeout in job.timeouts}
    rows = [row for row in job.exits if row.rank not in ranks]
    if any(row.code not in {-15, -6} and row.rank not in told for row in rows):
        return False
    return bool(rows or (told - {None, *ranks}))


def _of(job: Job, timeout: Timeout, group: str) -> bool:
    """Tell whether a timeout happened in a group: a line of the same rank that names group and number says so."""
    if len(job.counts) == 1:
        return True
    for event in job.named["group_status"]:
        of = event.values.get("guid") or event.values.get("short") or "0"
        if of == group and event.number("w") == timeout.sequence and event.origin.rank == timeout.rank:
            return True
    return False


def _tasks_out_of_memory(job: Job) -> list[int]:
    """Return the tasks that srun calls out of memory, where it started the ranks itself."""
    if job.exits or job.named["elastic_failed"] or job.named["launcher_kill"]:
        return []
    events = [event for event in job.named["slurm_task"] if event.values["what"].startswith("Out Of Memory")]
    return [task for event in events for task in _tasks(event)]


def _tasks(event: Event) -> list[int]:
    """Return the tasks that srun names, as in "0,2-3"; none where one of a range has more than a job has ranks."""
    tasks: list[int] = []
    for part in event.values["tasks"].split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and int(last or first) < MOST_TASKS:
            tasks += range(int(first), int(last or first) + 1)
    return tasks


def _with_setting(job: Job, verdict: Verdict) -> Verdict:
    """Add that a timeout which somebody has set was not the one that fired."""
    limits = sorted({timeout.limit_ms // 1000 for timeout in job.timeouts if timeout.limit_ms})
    for event in job.named["timeout_set"]:
        wanted = event.number("v")
        if limits and wanted is not None and not {wanted, wanted / 1000} & set(limits):
            text = (
                f"the timeout that fired is {limits[0]} s, so {event.values['name']}={wanted} did not reach this"
                " process group: pass timeout= to init_process_group and to each new_group"
            )
            return replace(verdict, advice=(*verdict.advice, text))
    return verdict


def _missing(
    job: Job, absent: Sequence[int], waiting: Sequence[Timeout], events: Sequence[Event], sure: Confidence, how: str
) -> Verdict:
    """Return the verdict about ranks that did not come to a collective."""
    if list(absent) == [0] and _barrier(job):
        others = name(t.rank for t in waiting if t.rank is not None)
        summary = f"Rank 0 worked alone while {others} waited for it in a barrier, for longer than the timeout."
        return verdict_of("rank0_work", [0], "likely", summary, events)
    victims = name(t.rank for t in waiting if t.rank is not None and t.rank not in absent)
    summary = f"{name(absent).capitalize()} {how}; {victims} waited for it, and only report it."
    needs = [f"the stack (py-spy dump) or the flight-recorder dump of {name(absent)}"]
    return verdict_of("missing_rank", absent, sure, summary, events, needs=needs)


def _barrier(job: Job) -> bool:
    """A barrier of NCCL is an all_reduce of one element."""
    stack = any(event.values.get("function") == "barrier" for event in job.named["collective_frame"])
    return stack or any(t.operation in {"ALLREDUCE", "BARRIER"} and t.sizes == (1, 1) for t in job.timeouts)


def _watchdog(job: Job, row: Exit, timed_out: set[int | None]) -> bool:
    return row.rank in timed_out or bool(job.named["thread_ended"]) or bool(job.named["heartbeat"])


def _before(one: Event, other: Event) -> bool | None:
    """Tell whether one event came before another; None where the input cannot tell."""
    if one.file == other.file:
        return one.line < other.line
    if one.clock is not None and other.clock is not None and abs(one.clock - other.clock) > 1:
        return one.clock < other.clock
    return None


def _time(event: Event) -> float | None:
    return event.clock if event.clock is not None else event.collected


def _earliest(failures: Sequence[tuple[str, int | None, Event]]) -> tuple[str, int | None, Event]:
    first = failures[0]
    for _, later in pairwise(failures):
        if _before(later[2], first[2]) is True:
            first = later
    return first


def _named_ranks(event: Event) -> list[int]:
    """Return the ranks that a message itself calls missing."""
    return [int(part) for part in re.findall(r"\d+", event.values.get("named", ""))]


def _only_failed(job: Job) -> int | None:
    """Return the rank of the one row of the table that is nobody's consequence."""
    rows = [row for row in job.exits if row.code not in {-15}]
    begin = min((row.event.clock or 0.0 for row in rows), default=0.0)
    first = [row.rank for row in rows if (row.event.clock or 0.0) - begin < 1]
    return first[0] if len(first) == 1 else None


def _one(rank: int | None) -> list[int]:
    return [] if rank is None else [rank]


def _phase(event: Event) -> str:
    functions = event.values.get("functions", "").split()
    for word, phase in (
        ("backward", "backward"),
        ("save", "checkpoint"),
        ("_next_data", "data"),
        ("step", "optim"),
        ("forward", "forward"),
        ("init_process_group", "init"),
    ):
        if any(word in function for function in functions):
            return phase
    return ""
