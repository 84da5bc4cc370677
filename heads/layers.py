"""The blocks of draft heads: RMSNorm, the target's rope, MLP, attention projections, one decoder layer.

The caller passes the attention as `attend`, so that training (kernels/attention.py) and decoding (the drafter's cache)
run the same layer.
Shape legend: B batch, N rows, H head hidden, I input of the layer's attention, h query heads, g kv heads, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headstart.heads.dims import HeadDims
from headstart.heads.errors import ConfigError, FormatError
from headstart.heads.kernels.elementwise import gated_eager, rms_norm_eager, rotate, swiglu
from headstart.heads.rope import checked_rope

#: (q [B, h, N, d], k [B, g, N, d], v [B, g, N, d]) → context [B, h, N, d]; k and q are already rotated
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, float32 inside, the input's dtype outside (Llama's norm)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return rms_norm_eager(x, self.weight.to(x.dtype), self.eps)


def rope_frequencies(dims: HeadDims) -> tuple[Tensor, float]:
    """Inverse frequencies (float32 [rotary/2], CPU) and the factor on cos/sin, exactly as the target computes them.

    Of LongRoPE's two sets, the short one (rope.positions_with_one_rope).
    Raises: ConfigError for a rope that a draft layer does not know.
    """
    try:
        rope = checked_rope(dims.rope_parameters, f"the target ({dims.model_type})")
    except FormatError as error:
        raise ConfigError(
            f"{error}. Neither Headstart's draft layers nor engines know this rope: use a head without a draft layer "
            "(head.type=medusa)"
        ) from error
    kind = rope["rope_type"]
    if kind == "default":
        width = int(dims.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponent = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
        return 1.0 / (rope["rope_theta"] ** exponent), 1.0
    config = LlamaConfig(
        hidden_size=dims.num_heads * dims.head_dim,
        num_attention_heads=dims.num_heads,
        head_dim=dims.head_dim,
        max_position_embeddings=dims.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    with torch.device("cpu"):
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    return frequencies.float(), float(scaling)


class Rope(nn.Module):
    """Rotary position embedding with the target's theta, scaling and partial factor."""

    inverse_F: Tensor

    def __init__(self, dims: HeadDims):
        super().__init__()
        frequencies, self.scaling = rope_frequencies(dims)
        self.register_buffer("inverse_F", frequencies, persistent=False)

    def forward(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [...] → cos, sin, float32 [..., rotary]."""
        angle = position[..., None].float() * self.inverse_F.float()
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * self.scaling, angle.sin() * self.scaling


class Projections(nn.Module):
    """q/k/v/o projections without bias. `in_size` is H, or 2H for the concatenation of embedding and feature.

    Attributes:
        q_norm, k_norm: RMSNorms of each head's query and key before the rotation (Qwen3's); None without.
    """

    def __init__(self, in_size: int, hidden_size: int, dims: HeadDims, qk_norm: bool = False):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = dims.num_heads, dims.num_kv_heads, dims.head_dim
        self.q_proj = nn.Linear(in_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(in_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(in_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, dims.rms_norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, dims.rms_norm_eps) if qk_norm else None

    def rotated_queries(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Projected queries [..., h, d] → normed (where the layer has norms) and rotated."""
        return rotate(q if self.q_norm is None else self.q_norm(q), cos, sin)

    def rotated_keys(self, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As `rotated_queries`, for keys [..., g, d]."""
        return rotate(k if self.k_norm is None else self.k_norm(k), cos, sin)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[..., in] → rotated queries [..., h, d]; cos, sin [..., rotary]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return self.rotated_queries(q, cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[..., in] → rotated keys and values [..., g, d]."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))
        return self.rotated_keys(k, cos, sin), v


class MLP(nn.Module):
    """Gated MLP: down(act(gate(x)) · up(x)). Raises: ConfigError for an activation transformers does not know."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str):
        super().__init__()
        if activation not in ACT2FN:
            raise ConfigError(f"head.hidden_act: found {activation!r}, expected one of {', '.join(sorted(ACT2FN))}")
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act = None if activation in ("silu", "swish") else ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(swiglu(gate, up) if self.act is None else gated_eager(gate, up, self.act))


class DraftLayer(nn.Module):
    """One Llama decoder layer whose attention input the head prepares, H or 2H wide.

    Attributes:
        recompute: recompute the MLP's activations in the backward pass of training instead of keeping them.
    """

    recompute = False

    def __init__(
        self,
        in_size: int,
        hidden_size: int,
        intermediate_size: int,
        dims: HeadDims,
        activation: str,
        qk_norm: bool = False,
    ):
        super().__init__()
        self.self_attn = Projections(in_size, hidden_size, dims, qk_norm)
        self.mlp = MLP(hidden_size, intermediate_size, activation)
        self.post_attention_layernorm = RMSNorm(hidden_size, dims.rms_norm_eps)

    @property
    def hidden_size(self) -> int:
        """H, of the residual stream."""
        return self.self_attn.o_proj.out_features

    def kept_numbers(self, recompute: bool) -> float:
        """Numbers per row and depth that training keeps for the backward pass (Head.kept_numbers).

        4 · intermediate + 6 · hidden + queries, keys, values; with `recompute` without those of the MLP. q/k norms keep
        queries and keys once more.
        """
        attention = self.self_attn
        packed = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
        if attention.q_norm is not None:
            packed += (attention.heads + attention.kv_heads) * attention.head_dim
        return 6.0 * self.hidden_size + packed + (0 if recompute else 4 * self.mlp.gate_proj.out_features)

    def finish(self, context: Tensor, residual: Tensor) -> Tensor:
        """Attention context [..., h, d] and residual [..., H] → layer output [..., H]."""
        x = residual + self.self_attn.o_proj(context.flatten(-2))
        if self.recompute and torch.is_grad_enabled():
            # the MLP draws no random numbers, so no generator state is saved: a graph capture could not save one
            return x + checkpoint(self._mlp, x, use_reentrant=False, preserve_rng_state=False)
        return x + self._mlp(x)

    def _mlp(self, x: Tensor) -> Tensor:
        return self.mlp(self.post_attention_layernorm(x))

    def decode(self, x_BNI: Tensor, residual_BNH: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Run N rows with the caller's attention over its cache: x [B, N, I] → output [B, N, H]."""
        q = self.self_attn.queries(x_BNI, cos, sin)
        k, v = self.self_attn.keys_values(x_BNI, cos, sin)
        context = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.finish(context.transpose(1, 2), residual_BNH)


class LaterLayer(DraftLayer):
    """A decoder layer that stands on another one: it reads `input_layernorm` of that one's output, H wide."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, dims: HeadDims, activation: str, qk_norm: bool = False
    ):
        super().__init__(hidden_size, hidden_size, intermediate_size, dims, activation, qk_norm)
        self.input_layernorm = RMSNorm(hidden_size, dims.rms_norm_eps)
