"""Configuration of an evaluation and of tuning: the recipe nodes `eval` and `tune`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from headstart.heads.errors import ConfigError

TREE_KINDS = ("chain", "dynamic", "static", "ddtree")
DRAFTER_SETTINGS = ("auto", "ngram", "none")
ACCEPTANCE = ("lossless", "typical")
VERIFICATION = ("block", "token")
ENGINES = ("auto", "fused", "transformers")
HALVES = ("odd", "even")
#: settings of earlier versions, which old recipes and runs still name → the value that is always used now
RETIRED = {"kv_bucket": 128, "prefill_chunk": 512, "bootstrap": 1000}
#: largest values: far above any use, so that a typing error does not use up memory or time
MOST = {
    "depth": 1024, "k": 4096, "total_tokens": 1 << 16, "ngram_min": 1024, "ngram_max": 1024,
    "warmup_tokens": 1 << 16, "batch_sizes": 1 << 16, "sweep_prompts": 1 << 20, "repeats": 10**4, "samples": 32,
}  # fmt: skip
#: fields that hold a count or null
LIMITS = ("limit", "limit_per_task", "max_turns")


@dataclass
class TreeConfig:
    """What is drafted before each verification."""

    #: Shape of the draft: chain, dynamic (EAGLE-2's tree, for heads that read the tokens drafted before), static
    #: (Medusa's tree: ranks of the heads' candidates) or ddtree (DDTree: the most likely paths of each cycle, for heads
    #: whose drafts do not depend on the ones before them).
    kind: str = "chain"
    #: Tokens of the chain, or levels of the tree. A head with fewer depths drafts only those that it has.
    depth: int = 5
    #: Dynamic tree: children kept per node, and nodes expanded per level.
    k: int = 10
    #: Tree: nodes that the target verifies in one forward pass, the root included (60 means 59 drafted tokens).
    total_tokens: int = 60
    #: Chain at temperature > 0: true draws the tokens from the head's distribution, false takes the most likely ones.
    sample: bool = True
    #: Static tree: its nodes as lists of ranks, parents first and the best first, e.g. [[0], [1], [0, 0]]. null takes
    #: Medusa's published tree of 63 nodes. `headstart tune` finds the best ones for given prompts.
    paths: Any = None


@dataclass
class EvalConfig:
    """How a head is measured (methods §0, §10, §11)."""

    #: Prompts to measure on: a JSONL file, a Hub dataset `user/name` (its split "test"), {dataset: …, subset: …, split:
    #: …}, or a list of these. A record holds `prompt_token_ids`, `messages`, `turns` (Spec-Bench), `conversations`
    #: (ShareGPT), `prompt`, `question` (GSM8K), `problem` (MATH) or `instruction` (Alpaca). null takes the run's
    #: held-out conversations.
    data: Any = None
    #: Variables passed to the chat template, e.g. {enable_thinking: false}. A recipe takes data.template_kwargs unless
    #: this is set.
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    #: What drafts: auto (the head's own drafter, or plain decoding without a head), ngram (prompt lookup) or none
    #: (plain decoding).
    drafter: str = "auto"
    #: What is drafted before each verification; see eval.tree.
    tree: TreeConfig = field(default_factory=TreeConfig)
    #: true lets every cycle draft and verify what is expected to give the most tokens per second: at most eval.tree (a
    #: chain up to its depth, a tree up to its total_tokens), and nothing where plain decoding is faster. The answers
    #: stay the target's. It needs a head, and a target without recurrent states.
    scheduler: bool = False
    #: Most tokens generated per prompt and turn.
    max_new_tokens: int = 256
    #: Sampling temperature; 0 decodes greedily.
    temperature: float = 0.0
    #: Sample among the k most likely tokens; 0 keeps all.
    top_k: int = 0
    #: Sample from the smallest set of tokens whose probability reaches top_p; 1 keeps all.
    top_p: float = 1.0
    #: Drop tokens that are less likely than min_p times the most likely token; 0 drops none.
    min_p: float = 0.0
    #: Make tokens of the context less likely: positive logits are divided by this, negative ones multiplied. 1 is off.
    repetition_penalty: float = 1.0
    #: lossless keeps the target's output distribution. typical is Medusa's typical acceptance, which is lossy at
    #: temperature > 0.
    acceptance: str = "lossless"
    #: Lossless rule for chains whose tokens are drawn: block weighs the drafts of a chain together and accepts at least
    #: as many as token, which takes them one by one. Trees, and chains of the most likely tokens, are verified token by
    #: token.
    verification: str = "block"
    #: Typical acceptance: the probability ε that always suffices for a token.
    typical_epsilon: float = 0.09
    #: Typical acceptance: the factor δ of the threshold that falls with the entropy.
    typical_delta: float = 0.3
    #: Accept drafts at random, to see what a head of that quality would gain (lossy). Give one probability for all
    #: levels, or a list with one per level, which hold where all earlier levels were accepted. Levels beyond the list
    #: are never accepted.
    synthetic_acceptance: Any = None
    #: How the target's forward runs: auto (fused kernels and captured cycles, on a GPU and for layers that allow it),
    #: fused, or transformers (the model's own forward).
    engine: str = "auto"
    #: Measure again which kernels are fastest, even if an earlier run did so on such a card. The choices are kept in
    #: ~/.cache/headstart/kernels.
    measure_kernels: bool = False
    #: Also time the parts of a cycle: drafting, the target's forward, the rest.
    cycle_parts: bool = True
    #: Conversations decoded together.
    batch_size: int = 1
    #: The next conversation takes the place of one that ended, at once; false lets the place stay empty until the whole
    #: batch has ended.
    refill: bool = True
    #: A check only: auto accepts the target as it was loaded, any other value must be its dtype (which target.dtype
    #: sets).
    dtype: str = "auto"
    #: Use the first prompts of each file or dataset; null uses all.
    limit: int | None = None
    #: Use every second prompt of each task: odd takes the first, the third and so on, even the others; null takes all.
    #: A tree that was tuned on one half can be measured on the other.
    half: str | None = None
    #: Use the first prompts of each task (of the half that eval.half takes); null uses all.
    limit_per_task: int | None = None
    #: Field of a record that names its task in the report; auto looks for `task`, then `category`.
    task_field: str = "auto"
    #: Decode the first turns of a prompt with several turns; null decodes all.
    max_turns: int | None = None
    #: Also decode plainly in the same loop. Speed-up and greedy identity need it.
    baseline: bool = True
    #: Seed of sampling and of the bootstrap. A recipe takes its `seed` unless this is set.
    seed: int = 0
    #: Tokens decoded, unmeasured, before timing starts.
    warmup_tokens: int = 8
    #: Batch sizes at which plain and speculative decoding are timed besides, e.g. [1,2,4,8,16,32,64].
    batch_sizes: list[int] = field(default_factory=list)
    #: Context lengths in tokens at which both are timed besides, at eval.batch_size. A context repeats its prompt's
    #: tokens, or keeps the last of them.
    context_lengths: list[int] = field(default_factory=list)
    #: Least number of prompts decoded at every such point, spread over the data; a larger batch repeats some.
    sweep_prompts: int = 16
    #: Also time transformers' `generate` at batch 1 on the same contexts. It is slow, and not the speed-up's baseline.
    generate_baseline: bool = False
    #: Prompts that are decoded once more after everything is timed, to show in the report who wrote each token: at most
    #: 128 tokens each. Report and page then hold the texts of these prompts; 0 leaves them out.
    samples: int = 3
    #: n-gram drafter: longest end of the context that is looked up in it.
    ngram_max: int = 4
    #: n-gram drafter: shortest end of the context that is looked up in it.
    ngram_min: int = 1


@dataclass
class TuneConfig:
    """What `headstart tune` searches, and how long it measures."""

    #: Batch sizes to choose a tree for.
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32, 64])
    #: Longest chain and deepest tree. A head with a fixed number of depths drafts at most those.
    depth: int = 8
    #: Dynamic trees: numbers of children per node to try.
    k: list[int] = field(default_factory=lambda: [4, 10])
    #: Trees: numbers of verified nodes to try, the root included.
    total_tokens: list[int] = field(default_factory=lambda: [8, 16, 24, 32, 48, 60])
    #: Prompts on which acceptance is recorded and the winner is measured, spread evenly over the data.
    prompts: int = 32
    #: Context length in tokens at which costs are measured; null takes the prompts' length plus half an answer.
    context: int | None = None
    #: Timed repetitions behind each cost.
    repeats: int = 5


def identity_of(config: EvalConfig) -> dict[str, Any]:
    """What a report depends on, as JSON values by which a finished evaluation is found again.

    Settings that earlier versions lacked are left out where they change no answer of such a version.
    """
    values = {**RETIRED, **asdict(config)}
    del values["refill"]
    if config.samples == EvalConfig.samples:
        del values["samples"]
    if not config.scheduler:
        del values["scheduler"]
    if config.temperature == 0 or config.verification == "token":
        del values["verification"]
    return values


def check_config(config: EvalConfig) -> None:
    """Check every value by itself. Raises ConfigError naming the field, what was found and what was expected."""
    for name, value, allowed in (
        ("eval.tree.kind", config.tree.kind, TREE_KINDS),
        ("eval.drafter", config.drafter, DRAFTER_SETTINGS),
        ("eval.acceptance", config.acceptance, ACCEPTANCE),
        ("eval.verification", config.verification, VERIFICATION),
        ("eval.engine", config.engine, ENGINES),
        ("eval.half", config.half, (None, *HALVES)),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}: found {value!r}, expected one of {[word or 'null' for word in allowed]}")
    if not isinstance(config.scheduler, bool):
        raise ConfigError(f"eval.scheduler: found {config.scheduler!r}, expected true (on) or false (off)")
    for name, number, low in (
        ("eval.tree.depth", config.tree.depth, 1),
        ("eval.tree.k", config.tree.k, 1),
        ("eval.tree.total_tokens", config.tree.total_tokens, 2),
        ("eval.max_new_tokens", config.max_new_tokens, 1),
        ("eval.batch_size", config.batch_size, 1),
        ("eval.ngram_min", config.ngram_min, 1),
        ("eval.ngram_max", config.ngram_max, config.ngram_min),
        ("eval.top_k", config.top_k, 0),
        ("eval.sweep_prompts", config.sweep_prompts, 1),
        ("eval.warmup_tokens", config.warmup_tokens, 0),
        ("eval.samples", config.samples, 0),
        ("eval.seed", config.seed, 0),
        *((f"eval.{n}", getattr(config, n), 1) for n in LIMITS if getattr(config, n) is not None),
        *((f"eval.batch_sizes[{n}]", size, 1) for n, size in enumerate(config.batch_sizes)),
        *((f"eval.context_lengths[{n}]", length, 2) for n, length in enumerate(config.context_lengths)),
    ):
        _check_whole(name, number, low)
    for name, holds, expected in (
        ("temperature", 0 <= config.temperature < math.inf, "a finite number of at least 0"),
        ("top_p", 0 < config.top_p <= 1, "0 < top_p ≤ 1 (1 keeps every token)"),
        ("min_p", 0 <= config.min_p < 1, "0 ≤ min_p < 1 (0 keeps every token)"),
        ("repetition_penalty", 0 < config.repetition_penalty < math.inf, "more than 0 (1 = off)"),
        ("typical_epsilon", 0 < config.typical_epsilon <= 1, "0 < epsilon ≤ 1"),
        ("typical_delta", 0 < config.typical_delta < math.inf, "more than 0"),
    ):
        if not holds:
            raise ConfigError(f"eval.{name}: found {getattr(config, name)}, expected {expected}")
    paths = config.tree.paths
    if paths is not None and not (
        isinstance(paths, list | tuple)
        and paths
        and all(isinstance(path, list | tuple) and path for path in paths)
        and all(type(rank) is int and 0 <= rank < MOST["total_tokens"] for path in paths for rank in path)
    ):
        raise ConfigError(f"eval.tree.paths: found {paths!r}, expected lists of ranks, e.g. [[0], [1], [0, 0]]")
    synthetic_rates(config)
    for name, sweep in (("batch_sizes", config.batch_sizes), ("context_lengths", config.context_lengths)):
        if len(set(sweep)) < len(sweep):
            raise ConfigError(f"eval.{name}: found {list(sweep)}, expected every value once")


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
    """As `check_config`, for the node `tune`."""
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
    """The tree's name in reports: `chain5`, `tree60`, `static63` or `plain`.

    Args: nodes: most nodes that the drafter drafts (a head may have fewer depths than `tree.depth`).
    """
    if nodes == 0:
        return "plain"
    if tree.kind in ("dynamic", "ddtree"):
        return f"{'tree' if tree.kind == 'dynamic' else tree.kind}{tree.total_tokens}"
    return f"{tree.kind}{nodes}"
