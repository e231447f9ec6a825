"""Processes, known by more than a number that another one may have by now."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CLAIM = "LAUNCH_CLAIM"  # the variable by which ranks know that their launch script has taken the directory for them
JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "JOBSET_UID", "SKYPILOT_TASK_ID")


def space() -> str:
    """Of process numbers: containers of one host may have their own."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return ""


def began(pid: int) -> str:
    """When process `pid` of this host began, as the kernel counts; empty if there is none (proc(5), stat)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return ""
        with suppress(OSError):
            os.kill(pid, 0)
            return "unknown"
    except (OSError, IndexError):
        pass
    return ""
