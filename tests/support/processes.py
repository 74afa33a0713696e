"""What the kernel says about the processes of jobs."""

from pathlib import Path

from carpool.live.freezer import cgroup_of, process_stat


def is_paused(pid: int) -> bool:
    """Return whether a process is stopped by a signal, or frozen with its cgroup."""
    stat, cgroup = process_stat(pid), cgroup_of(pid)
    if stat is not None and stat[0] == "T":
        return True
    events = Path(cgroup or "/nowhere") / "cgroup.events"
    try:
        return "frozen 1" in events.read_text()
    except OSError:  # there is none, or it was removed meanwhile
        return False
