"""A server's state, and what runs a distillation through servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from light_run import weightless
from openai_server import Serving, State
from serving_help import FAST, read

from headstart.data.config import DistillConfig, ServerConfig
from headstart.data.distilling.distill import distill
from headstart.data.prompts import Prompt
from headstart.data.serving.answerer import ServerAnswerer
from headstart.data.serving.connect import connect
from headstart.heads.targets.target import Target


@pytest.fixture
def state(tokenizer: Any, target: Any) -> Any:
    """state(**changes) → what a server is like that serves the target."""

    def make(**changes: Any) -> State:
        return State(tokenizer, target.stop_token_ids[0], **changes)

    return make


@pytest.fixture
def target_with() -> Any:
    """target_with(tokenizer) → a target without weights and with another tokenizer."""
    return weightless


@pytest.fixture
def ask(ask_target: Any, target: Any) -> Any:
    """ask(servers, prompts, **settings): `ask_target` for the target."""
    return lambda servers, prompts, **more: ask_target(target, servers, prompts, **more)


@pytest.fixture
def ask_target(tmp_path: Path) -> Any:
    """ask_target(target, servers, prompts, **settings) → records by id. It distils into tmp_path/out.jsonl."""

    def run(target: Target, servers: list[Serving], prompts: list[Prompt], **more: Any) -> dict[str, dict[str, Any]]:
        patience = more.pop("patience", FAST)
        concurrency = more.pop("concurrency", 4)
        said: list[str] = more.pop("said", [])
        kwargs = more.pop("template_kwargs", None)
        each = more.pop("server", {})
        configs = [ServerConfig(server.url, concurrency=concurrency, **each) for server in servers]
        config = DistillConfig(servers=configs, **{"max_new_tokens": 32, **more})
        config.check()
        connected = connect(target, config, kwargs)
        answerer = ServerAnswerer(target, config, connected, said.append, patience)

        def progress(done: int, total: int, message: str) -> None:
            if message:
                said.append(message)

        out = distill(target, prompts, config, tmp_path / "out.jsonl", 0, progress, kwargs, answerer)
        records = read(out)
        assert len({record["id"] for record in records}) == len(records)
        return {record["id"]: record for record in records}

    return run
