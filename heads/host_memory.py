"""How much memory a process on this machine may still take: what is free, and what its control group allows.

In a container, /proc/meminfo shows the whole machine. The container's limit stands in the files of its control group,
of version 2 (memory.max) or 1 (memory.limit_in_bytes). A group is bound by the limits of all groups above it as well.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: name of version → (file of the limit, file of what is used, name in memory.stat of the files' pages that can go)
VERSIONS = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def free_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process may take beyond those it holds. Args: root: another folder than `/`, for tests."""
    allowed = group_bytes(root)
    available = _available(root)
    return available if allowed is None else max(0, min(available, allowed))


def own_bytes() -> int:
    """Bytes that this process holds in memory now."""
    import psutil

    return psutil.Process().memory_info().rss


def peak_bytes() -> int:
    """The most bytes that this process held in memory so far.

    The system's own peak (ru_maxrss) begins with what the process that started this one held.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak() -> bool:
    """Let `peak_bytes` begin anew with what this process holds now. Returns whether the system can do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM alone
    except OSError:
        return False
    return True


def group_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that the control groups of this process leave, the tightest of them; None where none has a limit."""
    left = [
        _number(group / limit) - max(0, _number(group / used) - _inactive(group / "memory.stat", pages))
        for group, version in _groups(root)
        for limit, used, pages in (VERSIONS[version],)
        if _number(group / limit) < 1 << 60  # version 1 writes 2^63, rounded, where there is no limit
    ]
    return min(left, default=None)


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """(folder of a control group of this process, version of its files), the process's own and all above it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, inside = rest.partition(":")
        if number != "0" and "memory" not in controllers.split(","):
            continue
        version = 2 if number == "0" else 1
        mounted = root / "sys/fs/cgroup" / ("" if version == 2 else "memory")
        parts = [part for part in inside.split("/") if part not in ("", "..")]
        # a container may see its own group as the root, whatever the path says
        for depth in range(len(parts), -1, -1):
            group = mounted.joinpath(*parts[:depth])
            if (group / VERSIONS[version][0]).is_file():
                yield group, version


def _available(root: Path) -> int:
    """Bytes that the machine can give without swapping."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    import psutil

    return psutil.virtual_memory().available


def _number(path: Path) -> int:
    """The number in a file. `max`, and what cannot be read, count as no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 1 << 62


def _inactive(path: Path, name: str) -> int:
    try:
        found = [line.split()[1] for line in path.read_text().splitlines() if line.split()[:1] == [name]]
        return int(found[0]) if found else 0
    except (OSError, ValueError, IndexError):
        return 0
