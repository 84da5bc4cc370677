"""vLLM on this machine, for the parity gate: its processes' environment, and a server for the time of a measurement."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headstart.eval.servers.api_client import Client
from headstart.heads.errors import ServerError

#: seconds until the server must answer
START = 600.0
#: what vLLM's CPU build needs, and what keeps it offline and quiet
ENGINE_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def engine_environment(added: dict[str, str]) -> dict[str, str]:
    """The environment of a process of vLLM's interpreter. PYTHONPATH would show Headstart's packages to it."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **added}


def end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def vllm_server(
    python: str,
    target: Path,
    speculative: dict[str, Any] | None,
    log: Path,
    environment: dict[str, str],
    *arguments: str,
) -> Iterator[str]:
    """Start a server and yield its address. It is stopped at the end.

    Args:
        python: interpreter of an environment with vLLM.
        target: directory of the model.
        speculative: `--speculative-config`; None = without speculation.
        log: file for what the server says.
        environment: variables that it gets besides this process's own.
        arguments: further arguments of `vllm serve`.
    Raises: ServerError with the end of the log when it stops or does not answer in time.
    """
    port = free_port()
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(target.resolve())]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    command += [] if speculative is None else ["--speculative-config", json.dumps(speculative)]
    url = f"http://127.0.0.1:{port}"
    with open(log, "w") as out:
        process = subprocess.Popen(command, env=engine_environment(environment), stdout=out, stderr=out)
        try:
            _wait(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up = time.monotonic() + START
    while True:
        try:
            Client(url).text("/health")
            return
        except ServerError:
            status = process.poll()
            if status is not None or time.monotonic() > give_up:
                said = f"ended with status {status}" if status is not None else f"does not answer after {START:g} s"
                raise ServerError(f"vLLM {said}; see {log}:\n{end_of(log)}") from None
            time.sleep(0.5)
