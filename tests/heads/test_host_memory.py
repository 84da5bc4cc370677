"""The memory that is left, by the files of a made-up machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headstart.heads.host_memory import free_bytes, group_bytes, own_bytes, peak_bytes

GIB = 1 << 30


def machine(root: Path, files: dict[str, str], groups: str) -> Path:
    about = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 20971520 kB\n", "proc/self/cgroup": groups}
    for name, text in {**about, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"
CASES = {
    "nothing": ({}, "0::/\n", None),
    "no limit": ({f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "5\n"}, "0::/\n", None),
    "version 2": ({f"{V2}/memory.max": f"{4 * GIB}\n", f"{V2}/memory.current": f"{GIB}\n"}, "0::/\n", 3 * GIB),
    "pages of files can go": (
        {
            f"{V2}/memory.max": f"{4 * GIB}\n",
            f"{V2}/memory.current": f"{3 * GIB}\n",
            f"{V2}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 7\n",
        },
        "0::/\n", 3 * GIB,
    ),
    "the group above is tighter": (
        {
            f"{V2}/user/job/memory.max": f"{8 * GIB}\n",
            f"{V2}/user/job/memory.current": "0\n",
            f"{V2}/user/memory.max": f"{4 * GIB}\n",
            f"{V2}/user/memory.current": f"{3 * GIB}\n",
        },
        "0::/user/job\n", GIB,
    ),
    "version 1": (
        {f"{V1}/box/memory.limit_in_bytes": f"{2 * GIB}\n", f"{V1}/box/memory.usage_in_bytes": f"{GIB}\n"},
        "11:cpu,cpuacct:/box\n5:memory:/box\n", GIB,
    ),
    "version 1 from inside": (
        {
            f"{V1}/memory.limit_in_bytes": f"{2 * GIB}\n",
            f"{V1}/memory.usage_in_bytes": f"{2 * GIB}\n",
            f"{V1}/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n",
        },
        "5:memory:/docker/abc\n", GIB // 2,
    ),
    "version 1 without a limit": (
        {f"{V1}/memory.limit_in_bytes": "9223372036854771712\n", f"{V1}/memory.usage_in_bytes": "7\n"},
        "5:memory:/\n", None,
    ),
    "more is used than allowed": (
        {f"{V2}/memory.max": f"{GIB}\n", f"{V2}/memory.current": f"{2 * GIB}\n"}, "0::/\n", -GIB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_limits_of_control_groups(name: str, tmp_path: Path) -> None:
    files, groups, left = CASES[name]
    root = machine(tmp_path, files, groups)
    assert group_bytes(root) == left
    assert free_bytes(root) == (20 * GIB if left is None else max(left, 0))


def test_a_machine_without_such_files(tmp_path: Path) -> None:
    assert group_bytes(tmp_path) is None and free_bytes(tmp_path) > 0


def test_this_process_is_counted() -> None:
    before = own_bytes()
    held = bytearray(b"x") * (256 << 20)
    assert 200 << 20 < own_bytes() - before < 400 << 20
    del held


def test_the_peak_of_a_process_does_not_begin_with_that_of_its_parent() -> None:
    held = bytearray(300 << 20)
    held[::4096] = b"\1" * len(held[::4096])
    code = "from headstart.heads.host_memory import peak_bytes; a = peak_bytes(); b = bytearray(b'1') * (64 << 20); " \
        "print(a, peak_bytes())"  # fmt: skip
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, made.stdout.split())
    assert before < 250 << 20 and 60 << 20 < after - before < 80 << 20
    assert peak_bytes() > 300 << 20


def test_a_peak_may_be_forgotten() -> None:
    code = "from headstart.heads.host_memory import forget_peak, peak_bytes; b = bytearray(b'1') * (300 << 20); " \
        "del b; a = peak_bytes(); print(int(forget_peak()), a, peak_bytes())"  # fmt: skip
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    can, before, after = map(int, made.stdout.split())
    assert before > 300 << 20 and (before - after > 200 << 20 if can else after >= before)
