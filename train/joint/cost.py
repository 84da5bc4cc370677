"""What the target costs in joint training: its parameters, and the numbers that its backward pass needs.

Shape legend: R rows of a pack, C rows of a chunk, V target vocabulary.
"""

from __future__ import annotations

from headstart.data.features import parameters_per_row
from headstart.heads.losses.fused import chunk_rows
from headstart.heads.targets.adapter import planned_parameters
from headstart.heads.targets.locate import text_decoder
from headstart.heads.targets.target import Target
from headstart.train.joint.config import JointConfig

#: a norm keeps its input in float32: two numbers of the compute dtype
NORM = 2
#: the mask of dropout has a byte per number
MASK = 0.5
#: numbers of the compute dtype per logit of a chunk: both distributions, or one with its float32 copies
LOGITS = {"kl": 2, "ce": 6}


def plain_parameters(target: Target) -> int:
    """Parameters of the target that every row passes through, those of an adapter left out."""
    named = text_decoder(target.model).named_parameters()
    return parameters_per_row(target) - sum(p.numel() for name, p in named if ".lora_" in name)


def layer_numbers(target: Target, joint: JointConfig) -> float:
    """Numbers per row that one decoder layer keeps, in a layer of Llama's shape.

    Two norms; queries, keys, values and the context; the MLP's gate, the activated gate and the up projection; and what
    the updates read: without dropout what is there anyway or shared, with dropout an input of its own for every update.
    """
    dims = target.dims
    attention, width, inner = dims.num_heads * dims.head_dim, dims.hidden_size, dims.intermediate_size
    numbers = 2 * NORM * width + 2 * attention + 2 * dims.num_kv_heads * dims.head_dim + 3 * inner
    inputs = update_inputs(target, joint)
    if joint.dropout > 0:
        return numbers + (1 + MASK) * inputs
    return numbers + min(inputs, 2 * width + inner)


def update_inputs(target: Target, joint: JointConfig) -> float:
    """Numbers per row and layer that go into the updates."""
    updates = planned_parameters(target.model, joint.lora)
    return sum(p.shape[1] for name, p in updates.items() if ".lora_A." in name) / target.dims.num_layers


def target_numbers(target: Target, joint: JointConfig, rows: float, recompute: bool) -> float:
    """Numbers, in the compute dtype, that the second stage keeps of the target for one pack's backward pass.

    With `recompute`, the input of every layer, the masks of dropout, and one layer whole.
    """
    layer, width, layers = layer_numbers(target, joint), target.dims.hidden_size, target.dims.num_layers
    masks = MASK * update_inputs(target, joint) * layers if joint.dropout > 0 else 0.0
    kept = width * layers + masks + layer if recompute else layer * layers
    states = (NORM + 2 + (joint.loss == "kl")) * width  # the last norm, its output and gradient, the original's output
    vocabulary = len(target.teacher.weight_VD)
    logits = chunk_rows(max(int(rows), 1), vocabulary) * vocabulary * LOGITS[joint.loss]
    return rows * (kept + states) + logits
