"""Recipe nodes `data` and `data.distill`: where conversations come from and how they become training rows."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from headstart.data.records.columns import FIELDS
from headstart.data.records.conversation import LAYOUTS
from headstart.heads.errors import ConfigError, check_settings
from headstart.heads.files import short_path
from headstart.heads.repository import check_repository

FORMATS = ("auto", *LAYOUTS)


@dataclass
class SourceConfig:
    """Files or one dataset of conversations; give `path` or `dataset`, not both."""

    #: A file (.jsonl, .json, .parquet, .csv, .tsv; .txt with a prompt a line; also .gz or .zst), a folder of them, or a
    #: pattern (logs/*.jsonl). `workload:NAME` is a file that comes with the package (data/workloads/NAME.jsonl).
    path: str | None = None
    #: Name of a dataset on the Hub, read from the Hub or from the local cache; or a folder that `datasets` reads.
    dataset: str | None = None
    #: Configuration of the Hub dataset.
    subset: str | None = None
    #: Split of the Hub dataset.
    split: str = "train"
    #: Read the first records only; null reads all.
    limit: int | None = None
    #: Use at most so many of the conversations that are read. Their content and the seed choose them; null uses all.
    cap: int | None = None
    #: Share of this source in the conversations that train, relative to the weights of the other sources; null, for
    #: all of them, uses everything once. See data.most_repeats.
    weight: float | None = None
    #: Layout of the records: auto, messages, sharegpt, prompt_response, turns, prompt, question, problem, instruction,
    #: input_output, request or batch.
    format: str = "auto"
    #: Other names of fields, ours first: {prompt: question, response: answer}. A dot leads into an object or a list:
    #: {prompt: request.prompt}.
    columns: dict[str, str] | None = None
    #: What happens at a record that cannot be read: stop, or skip. Skipped ones are counted by reason and listed in the
    #: run's data/rejects.jsonl.
    on_bad: str = "stop"
    #: Read the dataset while it is downloaded; null does so where there is a limit.
    streaming: bool | None = None

    def check(self, where: str) -> None:
        """Raise ConfigError when the source cannot be read; `where` is the recipe key."""
        for name in ("path", "dataset", "subset", "split", "format", "on_bad"):
            value = getattr(self, name)  # eval.data may hold mappings whose types nobody has checked
            given = value is not None or name in ("split", "format", "on_bad")
            if given and not (isinstance(value, str) and value.strip()):
                raise ConfigError(f"{where}.{name}: found {short_path(value)}, expected text")
        if (self.path is None) == (self.dataset is None):
            found = "both" if self.path else "neither"
            raise ConfigError(
                f"{where}: found {found} of path and dataset, expected exactly one: set {where}.path=FILE.jsonl"
            )
        if self.dataset is not None and not os.path.isdir(self.dataset):
            check_repository(self.dataset, f"{where}.dataset", "user/name of a dataset on the Hub")
        if self.format not in FORMATS:
            raise ConfigError(f"{where}.format: found {self.format!r}, expected one of {', '.join(FORMATS)}")
        if self.on_bad not in ("stop", "skip"):
            raise ConfigError(f"{where}.on_bad: found {short_path(self.on_bad)!r}, expected stop or skip")
        if self.streaming is not None and type(self.streaming) is not bool:
            found = short_path(str(self.streaming))
            raise ConfigError(f"{where}.streaming: found {found}, expected true, false or null")
        self._check_columns(where)
        if self.limit is not None and (type(self.limit) is not int or not 1 <= self.limit < 1 << 63):
            raise ConfigError(
                f"{where}.limit: found {short_path(str(self.limit))}, expected a number ≥ 1, or null for all"
            )
        if self.cap is not None and (type(self.cap) is not int or not 1 <= self.cap < 1 << 63):
            raise ConfigError(f"{where}.cap: found {short_path(str(self.cap))}, expected a number ≥ 1, or null for all")
        check_weight(self.weight, where)

    def _check_columns(self, where: str) -> None:
        if self.columns is None:
            return
        if not isinstance(self.columns, Mapping) or not self.columns:
            raise ConfigError(f"{where}.columns: found {short_path(str(self.columns))}, expected {{OURS: THEIRS}}")
        for ours, theirs in self.columns.items():
            if ours not in FIELDS:
                raise ConfigError(
                    f"{where}.columns: found {short_path(str(ours))}, expected one of {', '.join(FIELDS)}"
                )
            if not isinstance(theirs, str) or not theirs:
                raise ConfigError(f"{where}.columns.{ours}: found {short_path(str(theirs))}, expected a field's name")


#: kinds of OpenAI-compatible servers, which differ in the fields that they take; auto asks the server
ENGINES = ("auto", "vllm", "sglang", "tgi", "llama.cpp", "openai")
#: most log-probabilities per token; OpenAI's interface has this limit
MOST_LOGPROBS = 20


@dataclass
class ServerConfig:
    """An OpenAI-compatible server that runs the target."""

    #: Address, such as http://host:8000/v1.
    url: str = ""
    #: Name under which it serves the target. null takes the only model that it serves, whose name must be the target's.
    model: str | None = None
    #: Most requests that it gets at once.
    concurrency: int = 32
    #: Environment variable that holds its API key. The key itself is neither stored nor logged.
    api_key_env: str | None = None
    #: What it is: auto, vllm, sglang, tgi, llama.cpp or openai (any other).
    engine: str = "auto"

    def check(self, where: str) -> None:
        """Raise ConfigError naming the first field that cannot work; `where` is the recipe key."""
        if not self.url.strip():
            raise ConfigError(f"{where}.url: not set, expected an address such as http://host:8000/v1")
        if self.model is not None and not self.model.strip():
            raise ConfigError(f"{where}.model: found {self.model!r}, expected a name, or null")
        if self.api_key_env is not None and not self.api_key_env.isidentifier():
            # whoever writes the key itself here must not see it in a log
            raise ConfigError(f"{where}.api_key_env: expected the name of an environment variable, not a key")
        check_settings(self, where, ("concurrency",), "a number ≥ 1", lambda value: value >= 1)
        check_settings(self, where, ("engine",), "one of " + ", ".join(ENGINES), ENGINES.__contains__)


def check_weight(weight: Any, where: str) -> None:
    """Raise ConfigError for a weight that is none."""
    number = type(weight) in (int, float) and 0 < weight < math.inf
    if weight is not None and not number:
        raise ConfigError(f"{where}.weight: found {short_path(str(weight))}, expected a number above 0, or null")


def check_weights(weights: Mapping[str, float | None]) -> None:
    """Raise ConfigError where only some of the sources that are mixed have a weight. Keys are recipe keys."""
    given = [name for name, weight in weights.items() if weight is not None]
    missing = [name for name, weight in weights.items() if weight is None]
    if given and missing:
        raise ConfigError(
            f"{missing[0]}.weight: not set, but {given[0]}.weight is: give every source a weight, or none of them"
        )


@dataclass
class DistillConfig:
    """Answers generated by the target itself: in process, or by servers that run it."""

    #: Prompts that the target answers before training; an empty list answers none.
    prompts: list[SourceConfig] = field(default_factory=list)
    #: How many prompts the target writes itself before it answers: it continues its chat template's opening of a user's
    #: message (Magpie). They join `prompts`; 0 writes none. Needs an instruct-tuned target that answers in process.
    written: int = 0
    #: Sampling temperature of the prompts that it writes, above 0.
    written_temperature: float = 1.0
    #: Its prompts are sampled from the smallest set of tokens whose probability reaches this; 1 keeps all.
    written_top_p: float = 0.95
    #: Most tokens of a prompt that it writes. A longer one is cut, and left out.
    written_max_tokens: int = 256
    #: OpenAI-compatible servers that answer the prompts: [{url: http://host:8000/v1}]. Empty: in process.
    servers: list[ServerConfig] = field(default_factory=list)
    #: Most tokens of an answer. A longer one is cut (finish_reason "length").
    max_new_tokens: int = 256
    #: Sampling temperature; 0 decodes greedily.
    temperature: float = 0.0
    #: Sample from the smallest set of tokens whose probability reaches top_p; 1 keeps all.
    top_p: float = 1.0
    #: Sample among the k most likely tokens; 0 keeps all.
    top_k: int = 0
    #: Answers per prompt. More than one needs temperature > 0.
    samples_per_prompt: int = 1
    #: Conversations decoded at a time. One that ended gives its place to the next.
    batch_size: int = 32
    #: Longest prompt that is answered. Longer ones are skipped and reported; null takes what the target's context
    #: allows.
    max_prompt_tokens: int | None = None
    #: Seconds after which no further conversation begins; null answers every prompt. The same command with more seconds
    #: goes on. Prompts then come in random order, not by length. The time of `written` does not count.
    max_seconds: float | None = None
    #: Share of the target's answers in the conversations that train, as `weight` of a source.
    weight: float | None = None
    #: Answers that were cut: keep (they train up to the cut) or drop, with what follows them in their conversation.
    #: They are stored in either case.
    cut_answers: str = "keep"
    #: Servers: log-probabilities of the k most likely tokens, kept in the records; 0 keeps none.
    top_logprobs: int = 0
    #: Servers: seconds after which an answer must be whole.
    server_timeout: float = 600.0
    #: Servers: how often a request is sent before its prompt is skipped.
    server_tries: int = 5
    #: Servers: seconds without any answer after which a server that fails counts as down. When all are, the run stops.
    server_patience: float = 300.0

    @property
    def asks(self) -> bool:
        """Whether the target answers any prompts: given ones, or those that it writes."""
        return bool(self.prompts) or self.written > 0

    def check(self) -> None:
        """Raise ConfigError naming the first field that cannot work."""
        check = partial(check_settings, self, "data.distill")
        self._check_written()
        for index, source in enumerate(self.prompts):
            source.check(f"data.distill.prompts[{index}]")
        check_weights({f"data.distill.prompts[{index}]": source.weight for index, source in enumerate(self.prompts)})
        check_weight(self.weight, "data.distill")
        check(("max_new_tokens", "samples_per_prompt", "batch_size"), "a number ≥ 1", lambda value: value >= 1)
        check(("max_seconds",), "a number above 0, or null", lambda value: value is None or 0 < value < math.inf)
        check(("temperature",), "0 (greedy) or more", lambda value: 0 <= value < math.inf)
        check(("top_p",), "a number in (0, 1]", lambda value: 0 < value <= 1)
        check(("top_k",), "0 (all) or more", lambda value: value >= 0)
        check(("cut_answers",), "keep or drop", ("keep", "drop").__contains__)
        for index, server in enumerate(self.servers):
            server.check(f"data.distill.servers[{index}]")
        check(("server_tries",), "a number ≥ 1", lambda value: value >= 1)
        check(("server_timeout", "server_patience"), "a number above 0", lambda value: 0 < value < math.inf)
        check(("top_logprobs",), f"0 (none) to {MOST_LOGPROBS}", lambda value: 0 <= value <= MOST_LOGPROBS)
        if self.top_logprobs and not self.servers:
            raise ConfigError(
                f"data.distill.top_logprobs: found {self.top_logprobs} without data.distill.servers, expected 0: only "
                "servers give log-probabilities (training in process needs none: the target itself is the teacher)"
            )
        if self.samples_per_prompt > 1 and self.temperature == 0:
            raise ConfigError(
                f"data.distill.samples_per_prompt: found {self.samples_per_prompt} with temperature 0, which repeats "
                "one answer: set data.distill.temperature above 0"
            )

    def _check_written(self) -> None:
        check = partial(check_settings, self, "data.distill")
        check(("written",), "a number ≥ 0", lambda value: type(value) is int and value >= 0)
        expected = "a number above 0 (at 0 every prompt that the target writes is the same)"
        check(("written_temperature",), expected, lambda value: 0 < value < math.inf)
        check(("written_top_p",), "a number in (0, 1]", lambda value: 0 < value <= 1)
        check(("written_max_tokens",), "a number ≥ 2", lambda value: value >= 2)
        if self.written and self.servers:
            raise ConfigError(
                f"data.distill.written: found {self.written} with data.distill.servers, expected 0: through a server's "
                "chat interface no target continues a user's message. Leave data.distill.servers out, or give prompts "
                "that a run without servers wrote: data.distill.prompts=[{path: runs/NAME/data/written.jsonl}]"
            )


@dataclass
class DataConfig:
    """Conversations, tokenisation, packing and where hidden states come from."""

    #: Conversations with answers. The target's own answers train best.
    sources: list[SourceConfig] = field(default_factory=list)
    #: Prompts that the target answers first; its answers join data.sources. See data.distill.
    distill: DistillConfig = field(default_factory=DistillConfig)
    #: Conversations for validation, kept out of training. An empty list splits off data.held_out_fraction.
    held_out: list[SourceConfig] = field(default_factory=list)
    #: Share of the conversations kept out of training where data.held_out is empty.
    held_out_fraction: float = 0.02
    #: What becomes of duplicates. exact: of conversations that say the same, one stays, and training loses near copies
    #: of held-out conversations. near: of near duplicates one stays as well (needs `pip install 'headstart[near]'`).
    #: keep: all stay. null: exact, or keep where an earlier version of Headstart began the run.
    duplicates: str | None = None
    #: Two conversations are near copies from this likeness on: the runs of three words that both hold, divided by those
    #: that either holds.
    near_threshold: float = 0.8
    #: How often a conversation may train in one epoch where the weight of its source asks for more than there are.
    most_repeats: int = 1
    #: Prompts that must not train, such as those of a benchmark: conversations whose first prompt is a near copy of one
    #: of them are left out.
    exclude: list[SourceConfig] = field(default_factory=list)
    #: Most tokens of a sample.
    max_length: int = 2048
    #: What happens to longer samples: truncate or drop. Both are reported.
    too_long: str = "truncate"
    #: Least number of supervised tokens of a sample. Others are dropped and reported; one draft needs two.
    min_supervised: int = 2
    #: Assistant turns that are supervised: all or last.
    turns: str = "all"
    #: Tokens that the head trains on: answers, or all (prompts and template text too). The teacher is the target's own
    #: distribution, which exists at every position, so `all` helps where data is scarce. Validation and the draft
    #: vocabulary always keep to the answers, because only those are drafted.
    supervise: str = "answers"
    #: Copies of every training sample in which the target redraws tokens of the answers; 0 makes none. The teacher of a
    #: copy is the target's distribution over the changed text.
    resampled_copies: int = 0
    #: Share of a copy's answer tokens that are redrawn, in (0, 1], each from the target's distribution (temperature 1)
    #: after the original text before it. A draw may give the same token. Special tokens and prompts stay.
    resampled_share: float = 0.15
    #: Variables passed to the chat template, e.g. {enable_thinking: false}.
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    #: Most tokens of one pack. A pack holds whole documents; a longer document gets a pack of its own. auto: 16384, or
    #: the half, the quarter … that fits the device's memory; a step then has twice, four times … train.accumulation
    #: packs, so it learns from as many tokens. A run keeps what was chosen when it began.
    pack_tokens: int | str = 4096
    #: Where hidden states come from: online (the target runs in the training step), stored (written to disk first),
    #: memory (computed once and held on the device) or auto (memory where one process trains and its device holds all,
    #: else online).
    features: str = "online"
    #: dtype of stored hidden states: auto (the target's), float32, bfloat16 or float16.
    features_dtype: str = "auto"
    #: Tokens per file of the feature store. A killed build repeats one file at most.
    shard_tokens: int = 8192

    @property
    def pack_size(self) -> int:
        """`pack_tokens` as a number. Raises: ConfigError where it is auto and no command has chosen it."""
        if not isinstance(self.pack_tokens, int):
            raise ConfigError(f"data.pack_tokens: found {self.pack_tokens!r}, expected a number here: set one")
        return self.pack_tokens

    def check(self) -> None:
        """Raise ConfigError naming the first field that cannot work."""
        check = partial(check_settings, self, "data")
        for name in ("sources", "held_out", "exclude"):
            for index, source in enumerate(getattr(self, name)):
                source.check(f"data.{name}[{index}]")
        check_weights({f"data.held_out[{index}]": source.weight for index, source in enumerate(self.held_out)})
        for index, source in enumerate(self.exclude):
            for name in ("weight", "cap"):
                if (found := getattr(source, name)) is not None:
                    raise ConfigError(
                        f"data.exclude[{index}].{name}: found {found}, expected null: every prompt is excluded; "
                        "`limit` takes the first ones"
                    )
        self.distill.check()
        self._check_mixing()
        if not self.sources and not self.distill.asks:
            raise ConfigError(
                "data: no sources and no distill.prompts: set data.sources=[{path: FILE.jsonl}], or "
                "data.distill.written=20000, so that the target writes prompts itself"
            )
        if self.duplicates is not None:
            check(("duplicates",), "one of keep, exact, near, or null", ("keep", "exact", "near").__contains__)
        check(("near_threshold",), "a number from 0.5 to 1", lambda value: 0.5 <= value <= 1)
        choices = {
            "too_long": ("truncate", "drop"),
            "turns": ("all", "last"),
            "supervise": ("answers", "all"),
            "features": ("online", "stored", "memory", "auto"),
            "features_dtype": ("auto", "float32", "bfloat16", "float16"),
        }
        for name, allowed in choices.items():
            check((name,), "one of " + ", ".join(allowed), allowed.__contains__)
        check(("max_length",), "a number ≥ 3", lambda value: value >= 3)
        check(("min_supervised", "shard_tokens", "most_repeats"), "a number ≥ 1", lambda value: value >= 1)
        check(("pack_tokens",), "a whole number ≥ 1, or auto", lambda value: value == "auto" or _counts(value))
        check(("resampled_copies",), "0 (none) or more", lambda value: value >= 0)
        check(("resampled_share",), "a number in (0, 1]", lambda value: 0 < value <= 1)
        check(("held_out_fraction",), "a number in [0, 1)", lambda value: 0 <= value < 1)

    def _check_mixing(self) -> None:
        weights = {f"data.sources[{index}]": source.weight for index, source in enumerate(self.sources)}
        if self.distill.asks:
            weights["data.distill"] = self.distill.weight
        elif self.distill.weight is not None:
            raise ConfigError("data.distill.weight: found a weight, but no data.distill.prompts or written: remove it")
        check_weights(weights)


def _counts(value: object) -> bool:
    return type(value) is int and value >= 1
