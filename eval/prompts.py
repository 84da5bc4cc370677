"""Prompts to evaluate on: token ids, chat messages, Spec-Bench turns, ShareGPT, or plain prompts, from JSONL files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.heads.errors import DataError, TemplateError

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass
class EvalPrompt:
    """One record of an evaluation file.

    Attributes:
        id, task: names for the report (the task is "all" where the record names none).
        prompt_token_ids: taken verbatim when the file has them.
        messages: conversation before the first decoded turn.
        turns: user turns to decode one after another; each answer goes into the context of the next.
    """

    id: str
    task: str
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)


def load_prompts(
    path: Path | str,
    limit: int | None = None,
    limit_per_task: int | None = None,
    max_turns: int | None = None,
    task_field: str = "auto",
) -> list[EvalPrompt]:
    """Read a JSONL file of prompts. Raises DataError naming file, line and field."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; eval.data expects a JSONL file of prompts")
    prompts: list[EvalPrompt] = []
    per_task: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) >= limit:
            break
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not valid JSON ({error.msg})") from error
        prompt = parse_prompt(record, f"{path}:{number}", number, task_field)
        per_task[prompt.task] = per_task.get(prompt.task, 0) + 1
        if limit_per_task is None or per_task[prompt.task] <= limit_per_task:
            prompt.turns = prompt.turns[:max_turns]
            prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path}: holds no prompts; expected one JSON object per line")
    return prompts


def parse_prompt(record: Any, where: str, number: int, task_field: str = "auto") -> EvalPrompt:
    """Recognise one record by its fields. Raises DataError naming what was found and what is understood."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: found {type(record).__name__}, expected a JSON object")
    name = record.get("id", record.get("question_id", number))
    task = record.get(task_field) if task_field != "auto" else record.get("task") or record.get("category")
    prompt = EvalPrompt(str(name), str(task or "all"))
    if record.get("prompt_token_ids"):
        ids = record["prompt_token_ids"]
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise DataError(f"{where}: prompt_token_ids: expected a list of integers")
        prompt.prompt_token_ids = ids
    elif "turns" in record:
        if not record["turns"] or not all(isinstance(turn, str) for turn in record["turns"]):
            raise DataError(f"{where}: turns: found {record['turns']!r}, expected a non-empty list of strings")
        prompt.turns = list(record["turns"])
    elif "messages" in record or "conversations" in record:
        messages = _messages(record.get("messages") or record.get("conversations"), where)
        asked = [n for n, message in enumerate(messages) if message["role"] == "user"]
        if not asked:
            raise DataError(f"{where}: no user message to answer")
        # answers that follow the last question are what the target is to say itself
        prompt.messages, prompt.turns = messages[: asked[-1]], [messages[asked[-1]]["content"]]
    elif isinstance(record.get("prompt"), str):
        prompt.turns = [record["prompt"]]
    else:
        raise DataError(
            f"{where}: found fields {sorted(record)}, expected one of "
            "prompt_token_ids, turns, messages, conversations, prompt"
        )
    return prompt


def _messages(found: Any, where: str) -> list[dict[str, str]]:
    messages = []
    for message in found if isinstance(found, list) else [None]:
        if not isinstance(message, dict):
            raise DataError(f"{where}: messages: expected a list of objects with role and content")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if role not in ROLES or not isinstance(content, str):
            raise DataError(
                f"{where}: messages: found role {role!r}, expected one of {sorted(set(ROLES))} with text content"
            )
        messages.append({"role": ROLES[role], "content": content})
    return messages


def render(messages: list[dict[str, str]], tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> list[int]:
    """Token ids of a conversation that waits for the assistant, by the target's own chat template."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise TemplateError(
            "the target's tokenizer has no chat template; set target.chat_template, "
            "or give prompt_token_ids in the data"
        )
    given = template_kwargs or {}
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False, **given)
    )
