"""Configuration of an evaluation and of tuning: the recipe nodes `eval` and `tune`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from headstart.heads.errors import ConfigError

TREE_KINDS = ("chain", "dynamic", "static")
DRAFTERS = ("auto", "ngram", "none")
ACCEPTANCE = ("lossless", "typical")
ENGINES = ("auto", "fused", "transformers")
#: the most that is far above any use: beyond it, memory and time go to nothing
MOST = {
    "depth": 1024, "k": 4096, "total_tokens": 1 << 16, "bootstrap": 10**6, "kv_bucket": 1 << 20, "ngram_min": 1024,
    "ngram_max": 1024, "warmup_tokens": 1 << 16, "batch_sizes": 1 << 16, "sweep_prompts": 1 << 20, "repeats": 10**4,
}  # fmt: skip
#: fields that are a count or null
LIMITS = ("limit", "limit_per_task", "max_turns")


@dataclass
class TreeConfig:
    """What is drafted before each verification."""

    #: chain | dynamic (EAGLE-2, autoregressive heads) | static (Medusa: per-head top-k ranks)
    kind: str = "chain"
    #: drafted levels (chain length, or levels of the tree); heads with fewer depths draft only those they have
    depth: int = 5
    #: dynamic tree: children kept per node and nodes expanded per level
    k: int = 10
    #: nodes verified at once, the root included (published counting: 60 means 59 drafted); trees only
    total_tokens: int = 60
    #: at temperature > 0 a chain draws its tokens from the draft's distribution; false drafts the most likely ones
    sample: bool = True
    #: static tree: the nodes as lists of ranks, parents before children and best first, e.g. [[0], [1], [0, 0]]; null =
    #: the published widths. `headstart tune` finds the best for given prompts
    paths: Any = None


@dataclass
class EvalConfig:
    """How a head is measured (methods §0, §10, §11)."""

    #: prompts: a JSONL file, a Hub dataset `user/name` (split "test"), {dataset: …, subset: …, split: …}, or a list of
    #: such. Records hold `prompt_token_ids`, `messages`, `turns` (Spec-Bench), `conversations` (ShareGPT), `prompt`,
    #: `question` (GSM8K), `problem` (MATH) or `instruction` (Alpaca)
    data: Any = None
    #: variables passed to the chat template, e.g. {enable_thinking: false}; a recipe's default is data.template_kwargs
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    #: auto = the head's own drafter, or plain decoding without a head | ngram = prompt lookup | none = plain decoding
    drafter: str = "auto"
    #: tree or chain to draft
    tree: TreeConfig = field(default_factory=TreeConfig)
    #: tokens generated per prompt (and per turn) at most
    max_new_tokens: int = 256
    #: 0 = greedy
    temperature: float = 0.0
    #: keep the k most likely tokens; 0 = all
    top_k: int = 0
    #: keep the smallest set of tokens whose probability reaches top_p; 1 = all
    top_p: float = 1.0
    #: drop tokens less likely than min_p × the most likely; 0 = none
    min_p: float = 0.0
    #: divide (multiply) positive (negative) logits of tokens already in the context; 1 = off
    repetition_penalty: float = 1.0
    #: lossless = output distribution is the target's | typical = Medusa's typical acceptance, LOSSY at temperature > 0
    acceptance: str = "lossless"
    #: typical acceptance: hard probability threshold ε
    typical_epsilon: float = 0.09
    #: typical acceptance: entropy-dependent factor δ
    typical_delta: float = 0.3
    #: accept by chance instead of by the target, to see what a head of that quality gains. LOSSY. One probability for
    #: every level, or a list by level, given that earlier levels were accepted; levels beyond the list are refused
    synthetic_acceptance: Any = None
    #: auto = fused kernels and captured cycles on a GPU where the target's layers allow | fused | transformers = the
    #: target's own forward
    engine: str = "auto"
    #: measure which kernels run fastest, also where an earlier run on such a card has; its choices are kept in
    #: ~/.cache/headstart/kernels
    measure_kernels: bool = False
    #: also time the parts of a cycle: drafting, the target's forward, the rest
    cycle_parts: bool = True
    #: conversations decoded together
    batch_size: int = 1
    #: auto = as the target was loaded; another value must equal the target's dtype (set target.dtype)
    dtype: str = "auto"
    #: first prompts of each file or dataset, or null for all
    limit: int | None = None
    #: first prompts of each task, or null for all
    limit_per_task: int | None = None
    #: field that names a record's task in the report; auto = `task`, else `category`
    task_field: str = "auto"
    #: turns of a multi-turn prompt to decode, or null for all
    max_turns: int | None = None
    #: also decode plainly in the same loop: speed-up and identity need it
    baseline: bool = True
    #: seed of sampling and of the bootstrap
    seed: int = 0
    #: unmeasured tokens decoded before timing starts
    warmup_tokens: int = 8
    #: prompt tokens per prefill forward
    prefill_chunk: int = 512
    #: attention reads the KV buffer up to the next multiple of this many slots
    kv_bucket: int = 128
    #: batch sizes at which plain and speculative decoding are timed besides, e.g. [1,2,4,8,16,32,64]
    batch_sizes: list[int] = field(default_factory=list)
    #: context lengths in tokens at which they are timed besides, at batch_size; a context is its prompt's own tokens
    #: repeated, or the last of them
    context_lengths: list[int] = field(default_factory=list)
    #: prompts decoded at every point of a sweep at least, spread over the data; repeated where a batch needs more
    sweep_prompts: int = 16
    #: also time HF `generate` at batch 1 on the same contexts (slow; not the baseline of the speed-up)
    generate_baseline: bool = False
    #: bootstrap resamples behind tau_ci95
    bootstrap: int = 1000
    #: n-gram drafter: longest suffix that is looked up in the context
    ngram_max: int = 4
    #: n-gram drafter: shortest suffix that is looked up
    ngram_min: int = 1


@dataclass
class TuneConfig:
    """What `headstart tune` searches, and how long it measures."""

    #: batch sizes to choose a tree for
    batch_sizes: list[int] = field(default_factory=lambda: [1, 4, 16])
    #: longest chain and deepest tree; heads with a fixed number of depths draft at most those
    depth: int = 8
    #: dynamic trees: children per node
    k: list[int] = field(default_factory=lambda: [4, 10])
    #: trees: nodes verified at once, the root included
    total_tokens: list[int] = field(default_factory=lambda: [8, 16, 24, 32, 48, 60])
    #: prompts whose acceptance is recorded and on which the winner is measured, spread evenly over the data
    prompts: int = 32
    #: context length in tokens for which costs are measured; null = as long as the prompts with half an answer
    context: int | None = None
    #: timed repetitions behind each cost
    repeats: int = 5


def check_config(config: EvalConfig) -> None:
    """Refuse what cannot be evaluated. Raises ConfigError naming the field, the value and the remedy."""
    for name, value, allowed in (
        ("eval.tree.kind", config.tree.kind, TREE_KINDS),
        ("eval.drafter", config.drafter, DRAFTERS),
        ("eval.acceptance", config.acceptance, ACCEPTANCE),
        ("eval.engine", config.engine, ENGINES),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}: found {value!r}, expected one of {list(allowed)}")
    for name, number, low in (
        ("eval.tree.depth", config.tree.depth, 1),
        ("eval.tree.k", config.tree.k, 1),
        ("eval.tree.total_tokens", config.tree.total_tokens, 2),
        ("eval.max_new_tokens", config.max_new_tokens, 1),
        ("eval.batch_size", config.batch_size, 1),
        ("eval.prefill_chunk", config.prefill_chunk, 1),
        ("eval.kv_bucket", config.kv_bucket, 1),
        ("eval.ngram_min", config.ngram_min, 1),
        ("eval.ngram_max", config.ngram_max, config.ngram_min),
        ("eval.top_k", config.top_k, 0),
        ("eval.bootstrap", config.bootstrap, 0),
        ("eval.sweep_prompts", config.sweep_prompts, 1),
        ("eval.warmup_tokens", config.warmup_tokens, 0),
        ("eval.seed", config.seed, 0),
        *((f"eval.{n}", getattr(config, n), 1) for n in LIMITS if getattr(config, n) is not None),
        *((f"eval.batch_sizes[{n}]", size, 1) for n, size in enumerate(config.batch_sizes)),
        *((f"eval.context_lengths[{n}]", length, 2) for n, length in enumerate(config.context_lengths)),
    ):
        _check_whole(name, number, low)
    if not 0 <= config.temperature < math.inf:
        raise ConfigError(f"eval.temperature: found {config.temperature}, expected a finite number of at least 0")
    paths = config.tree.paths
    if paths is not None and not (
        isinstance(paths, list | tuple)
        and paths
        and all(isinstance(path, list | tuple) and path for path in paths)
        and all(type(rank) is int and 0 <= rank < MOST["total_tokens"] for path in paths for rank in path)
    ):
        raise ConfigError(f"eval.tree.paths: found {paths!r}, expected lists of ranks, e.g. [[0], [1], [0, 0]]")
    if not 0 < config.top_p <= 1:
        raise ConfigError(f"eval.top_p: found {config.top_p}, expected 0 < top_p ≤ 1 (1 keeps every token)")
    if not 0 <= config.min_p < 1:
        raise ConfigError(f"eval.min_p: found {config.min_p}, expected 0 ≤ min_p < 1 (0 keeps every token)")
    synthetic_rates(config)
    for name, sweep in (("batch_sizes", config.batch_sizes), ("context_lengths", config.context_lengths)):
        if len(set(sweep)) < len(sweep):
            raise ConfigError(f"eval.{name}: found {list(sweep)}, expected every value once")
    if not 0 < config.repetition_penalty < math.inf:
        raise ConfigError(f"eval.repetition_penalty: found {config.repetition_penalty}, expected more than 0 (1 = off)")
    if not 0 < config.typical_epsilon <= 1:
        raise ConfigError(f"eval.typical_epsilon: found {config.typical_epsilon}, expected 0 < epsilon ≤ 1")
    if not 0 < config.typical_delta < math.inf:
        raise ConfigError(f"eval.typical_delta: found {config.typical_delta}, expected more than 0")


def _check_whole(name: str, number: Any, low: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise ConfigError(f"{name}: found {number!r}, expected a whole number")
    if number < low:
        raise ConfigError(f"{name}: found {number}, expected at least {low}")
    if number >= 1 << 63:
        raise ConfigError(f"{name}: found {number}, expected less than 2^63")
    most = MOST.get(name.rpartition(".")[2].partition("[")[0], number)
    if number > most:
        raise ConfigError(f"{name}: found {number}, expected at most {most}")


def check_tune(config: TuneConfig) -> None:
    """Raises ConfigError naming the field, the value and the remedy."""
    for name, values, low in (
        ("batch_sizes", config.batch_sizes, 1),
        ("k", config.k, 1),
        ("total_tokens", config.total_tokens, 2),
        ("depth", [config.depth], 1),
        ("prompts", [config.prompts], 1),
        ("repeats", [config.repeats], 1),
        ("context", [2 if config.context is None else config.context], 2),
    ):
        if not values:
            raise ConfigError(f"tune.{name}: found an empty list, expected at least one value")
        for value in values:
            _check_whole(f"tune.{name}", value, low)


def synthetic_rates(config: EvalConfig) -> tuple[float, ...] | None:
    """`eval.synthetic_acceptance` by level, or None where the target decides.

    Raises: ConfigError unless it is a probability or a non-empty list of them.
    """
    given = config.synthetic_acceptance
    if given is None:
        return None
    rates = list(given) if isinstance(given, list | tuple) else [given] * config.tree.depth
    numbers = [rate for rate in rates if isinstance(rate, int | float) and not isinstance(rate, bool)]
    if not rates or len(numbers) < len(rates) or not all(0 <= rate <= 1 for rate in numbers):
        raise ConfigError(
            f"eval.synthetic_acceptance: found {given!r}, expected a probability, or a list with one per draft level"
        )
    if config.acceptance != "lossless":
        raise ConfigError(
            f"eval.synthetic_acceptance: found {given!r} with eval.acceptance={config.acceptance}: set one of them only"
        )
    return tuple(float(rate) for rate in numbers)


def tree_label(tree: TreeConfig, nodes: int) -> str:
    """`chain5`, `tree60`, `static63`, or `plain`: the name under which results are filed.

    Args: nodes: the most that the drafter can draft (a head may have fewer depths than `tree.depth`).
    """
    if nodes == 0:
        return "plain"
    if tree.kind == "dynamic":
        return f"tree{tree.total_tokens}"
    return f"{tree.kind}{nodes}"
