"""How the threads of a CPU wait for one another. It is said before torch is imported, which reads it once."""

from __future__ import annotations

import os

#: turns of a waiting loop before a thread sleeps. libgomp's default is millions: where other programs share the cores,
#: threads then wait for one that the machine does not run (a step on two shared cores took four times as long)
SPIN = "3000"


def sleep_soon() -> None:
    """Let threads that wait sleep soon, unless the environment says how they wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
