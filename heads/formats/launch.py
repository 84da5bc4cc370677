"""How serving engines are started with a head, and what `headstart tune` noted about it for that."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from headstart.heads.escape import table
from headstart.heads.repository import is_repository
from headstart.heads.rope import positions_with_one_rope
from headstart.heads.targets.fetch import TARGETS

#: engine key → its name in text
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tgi": "TGI", "tensorrt_llm": "TensorRT-LLM (PyTorch backend)"}


@dataclass(frozen=True)
class TunedBatch:
    """One choice of `headstart tune`.

    Attributes:
        chain: depth of the best chain, which is what engines draft; None where none was searched.
        chain_speedup: its predicted speed-up.
    """

    device: str
    batch: int
    label: str
    tau: float
    predicted: float
    measured: float
    speculate: bool
    chain: int | None
    chain_speedup: float | None


def tuned_batches(side: dict[str, Any]) -> list[TunedBatch]:
    """Every choice that headstart.json keeps, by card and batch; entries that are none are left out."""
    tuned = side.get("tuned")
    found = []
    for device, entry in tuned.items() if isinstance(tuned, dict) else []:
        batches = entry.get("batches") if isinstance(entry, dict) else None
        for batch, choice in batches.items() if isinstance(batches, dict) else []:
            try:
                best = choice if choice["tree"]["kind"] == "chain" else choice.get("best_chain")
                found.append(
                    TunedBatch(
                        str(device), int(batch), str(choice["label"]), float(choice["tau"]),
                        float(choice["predicted_speedup"]), float(choice["measured_speedup"]),
                        bool(choice["speculate"]), int(best["tree"]["depth"]) if best else None,
                        float(best["predicted_speedup"]) if best else None,
                    )
                )  # fmt: skip
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
    return sorted(found, key=lambda choice: (choice.device, choice.batch))


def tuned_chain(side: dict[str, Any]) -> TunedBatch | None:
    """The choice that launch commands follow: the smallest batch at which speculation pays, the fastest card first."""
    paying = [choice for choice in tuned_batches(side) if choice.speculate and choice.chain]
    return min(paying, key=lambda choice: (choice.batch, -choice.measured), default=None)


def drafted_tokens(side: dict[str, Any]) -> int:
    """Tokens that engines are to draft: the tuned chain's, else as many as the head trained for, 4 at most."""
    chosen = tuned_chain(side)
    depth = int(side["config"].get("depth") or 3)
    if chosen is not None and chosen.chain is not None:
        return min(chosen.chain, depth) if side["type"] == "medusa" else chosen.chain
    return min(depth, 4) if side["type"] != "eagle" else 3


def why_tokens(side: dict[str, Any], text: Callable[[str], str] = str) -> str:
    """Where the number of drafted tokens comes from, in a sentence; "" without a tuning.

    Args: text: writes a name of others in the language of the document.
    """
    chosen = tuned_chain(side)
    if chosen is not None:
        return (
            f"{drafted_tokens(side)} drafted tokens: the best chain at batch {chosen.batch} on {text(chosen.device)} "
            f"(`headstart tune`, {chosen.chain_speedup:.2f}× predicted)."
        )
    if tuned_batches(side):
        return "`headstart tune` found no batch size at which drafting pays: measure before you deploy it."
    return ""


def tuned_table(side: dict[str, Any]) -> str:
    """Markdown of every tuned batch size; "" without a tuning."""
    rows = []
    for choice in tuned_batches(side):
        chain = "–" if choice.chain is None else f"{choice.chain} ({choice.chain_speedup:.2f}×)"
        rows.append(
            (
                choice.device, str(choice.batch), choice.label, f"{choice.tau:.2f}", f"{choice.predicted:.2f}×",
                f"{choice.measured:.2f}×", "speculate" if choice.speculate else "decode plainly", chain,
            )
        )  # fmt: skip
    if not rows:
        return ""
    columns = ("card", "batch", "best tree", "τ", "predicted", "measured", "do", "best chain")
    said = "Speed-ups over plain decoding in Headstart's own loop; the tree is chosen by prediction and then measured."
    return "\n".join(["## Tuned trees", "", *table(columns, rows), "", said])


def hub_name(target: dict[str, Any]) -> str | None:
    """The target's Hub id where its name is one, or a registered one's."""
    name = str(target.get("hub_id") or target.get("name") or "")
    name = TARGETS[name].hub_id if name in TARGETS else name
    return name if is_repository(name) else None


def context_limit(side: dict[str, Any]) -> int | None:
    """Tokens that a context may hold where the engine is launched; None: as many as the target has positions.

    With LongRoPE engines turn by the long factors, at every position, once a longer context is allowed: the head and
    the features that it was trained on know the short ones alone (rope.positions_with_one_rope).
    """
    dims = side.get("dims")
    rope = dims.get("rope_parameters") if isinstance(dims, dict) else None
    try:
        return positions_with_one_rope(rope) if isinstance(rope, dict) else None
    except (KeyError, TypeError, ValueError):
        return None


def launch_commands(model: str, side: dict[str, Any], engines: list[str]) -> dict[str, str]:
    """Engine key → shell command that serves the target with this head, every word quoted as a shell needs it.

    Args:
        model: where engines find the head: directory or Hub id.
        side: headstart.json of the export.
        engines: keys of the engines that load it.
    """
    family, base, tokens = side["type"], hub_name(side.get("target") or {}) or "TARGET", drafted_tokens(side)
    commands = {}
    limit = context_limit(side)

    def context(option: str) -> list[str]:
        return [] if limit is None else [option, str(limit)]

    if "vllm" in engines:
        spec = json.dumps({"method": family, "model": model, "num_speculative_tokens": tokens}, ensure_ascii=False)
        serve = ["vllm", "serve", base, *context("--max-model-len"), "--speculative-config", spec]
        commands["vllm"] = shlex.join(serve)
    if "sglang" in engines:
        commands["sglang"] = shlex.join(
            [
                "python", "-m", "sglang.launch_server", "--model-path", base, "--speculative-algorithm",
                "EAGLE3" if family == "eagle3" else "EAGLE", "--speculative-draft-model-path", model,
                "--speculative-num-steps", str(tokens), "--speculative-eagle-topk", "1",
                "--speculative-num-draft-tokens", str(tokens + 1), *context("--context-length"),
            ]
        )  # fmt: skip
    if "tgi" in engines:
        launcher = ["text-generation-launcher", "--model-id", model, "--speculate", str(tokens)]
        commands["tgi"] = shlex.join([*launcher, *context("--max-total-tokens")])
    if "tensorrt_llm" in engines and family == "eagle3":
        settings = {"decoding_type": "Eagle3", "max_draft_len": tokens, "speculative_model": model}
        text = yaml.safe_dump({"speculative_config": settings}, sort_keys=False, allow_unicode=True, width=1000)
        serve = ["trtllm-serve", base, "--backend", "pytorch", *context("--max_seq_len")]
        serve += ["--extra_llm_api_options", "spec.yaml"]
        commands["tensorrt_llm"] = f"printf %s {shlex.quote(text)} > spec.yaml\n{shlex.join(serve)}"
    return commands
