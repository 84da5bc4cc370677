"""The target's dimensions that a head is built from."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.heads.errors import ConfigError, TargetError
from headstart.heads.rope import drafted_rope, positions_with_one_rope


@dataclass(frozen=True)
class HeadDims:
    """The target's dimensions that a head is built from (no weights).

    Attributes:
        hidden_act: activation of a draft layer's MLP if the head's config names none. It is not taken from the target:
            engines compute silu in every draft layer.
        rope_parameters: the part of the target's rope that a draft layer uses (rope.drafted_rope), in the form of
            transformers v5: rope_type, rope_theta, factor, partial_rotary_factor, …
        sliding_window: positions that every layer of the target sees; None where one layer sees all. Draft layers have
            no window: this tells what an engine does with such a target.
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    tie_word_embeddings: bool = False
    model_type: str = "llama"
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    sliding_window: int | None = None

    def with_key_heads(self, count: int | None) -> HeadDims:
        """The dimensions of draft layers with `count` key and value heads (`head.num_key_value_heads`); null = as here.

        Raises: ConfigError for a number that does not divide the query heads.
        """
        if count is None:
            return self
        if count < 1 or self.num_heads % count:
            raise ConfigError(
                f"head.num_key_value_heads: found {count}, expected a divisor of the {self.num_heads} query heads "
                "of the target: set another, or null for the target's own number"
            )
        return replace(self, num_kv_heads=count)

    @classmethod
    def from_hf_config(cls, config: Any) -> HeadDims:
        """Read the dimensions from a transformers config (the text part of a multimodal one).

        Raises: TargetError for a config that lacks the sizes of a decoder.
        """
        config = config.get_text_config()

        def given(name: str) -> Any:
            """A field of the config. Where each layer has its own (Gemma 4): the first layer's."""
            try:
                value = getattr(config, name, None)
            except Exception:  # transformers 5.24 raises an error class that older versions lack
                value = getattr(config.per_layer_config[0], name, None)
            return value[0] if name in needed and isinstance(value, list) and len(set(value)) == 1 else value

        needed = (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
            "max_position_embeddings",
        )  # fmt: skip
        sizes = {name: given(name) for name in needed}
        if sizes["intermediate_size"] is None and given("moe_intermediate_size") is not None:
            # all layers have experts alone (Qwen3.5-MoE): as wide as those that one token passes through
            routed = given("moe_intermediate_size") * (given("num_experts_per_tok") or 1)
            sizes["intermediate_size"] = routed + (given("shared_expert_intermediate_size") or 0)
        if odd := {name: value for name, value in sizes.items() if type(value) is not int}:
            missing = [name for name, value in odd.items() if value is None]
            said = f"has no {', '.join(missing)}" if missing else f"says {odd}, no whole numbers"
            raise TargetError(
                f"target of type {config.model_type}: its config {said}; draft layers are built from those: expected "
                "a decoder such as Llama, Qwen, Mistral, Gemma or gpt-oss"
            )
        rope = given("rope_parameters") or {}
        if rope and all(isinstance(v, dict) or v is None for v in rope.values()):
            # one rope per attention kind (Gemma 3): a draft layer attends globally
            rope = rope.get("full_attention") or next(filter(None, rope.values()), {})
        rope = dict(rope)
        rope.setdefault("rope_theta", float(given("rope_theta") or 10000.0))
        rope.setdefault("partial_rotary_factor", given("partial_rotary_factor"))
        heads, kv_heads, head_dim = sizes["num_attention_heads"], given("num_key_value_heads"), given("head_dim")
        window, kinds = given("sliding_window"), set(given("layer_types") or [])
        windowed = given("use_sliding_window") is not False and kinds <= {"sliding_attention"}
        return cls(
            hidden_size=sizes["hidden_size"],
            vocab_size=sizes["vocab_size"],
            num_layers=sizes["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=kv_heads if type(kv_heads) is int and kv_heads else heads,
            head_dim=head_dim if type(head_dim) is int and head_dim else sizes["hidden_size"] // heads,
            intermediate_size=sizes["intermediate_size"],
            rms_norm_eps=given("rms_norm_eps") or 1e-6,
            max_position_embeddings=sizes["max_position_embeddings"],
            rope_parameters=drafted_rope(rope),
            tie_word_embeddings=bool(given("tie_word_embeddings")),
            model_type=config.model_type,
            bos_token_id=given("bos_token_id"),
            eos_token_id=given("eos_token_id"),
            sliding_window=window if type(window) is int and windowed else None,
        )

    @property
    def positions(self) -> int:
        """Most tokens of a context with its answer, such that one set of rope frequencies applies to all of them."""
        return min(self.max_position_embeddings, positions_with_one_rope(self.rope_parameters) or sys.maxsize)
