"""The engine's side of the parity gate (vllm.py), run by the Python of vLLM's environment:

    python -P scripts/parity/engine.py JOB.json OUT.json

Nothing of Headstart is installed there, so this file imports the standard library and vLLM only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def decode(job_path: str, out_path: str) -> None:
    """Decode the job's prompts in vLLM and write `{version, repaired, answers: [{tokens, committed, counters}]}`.

    `committed`: number of tokens from every target forward after the prefill, cut at stop tokens and the length limit.
    `repaired`: what had to be replaced in vLLM, in words; null where nothing was.
    """
    from vllm import LLM, SamplingParams, __version__
    from vllm.sampling_params import RequestOutputKind

    job = json.loads(Path(job_path).read_text())
    repair = REPAIRS.get(job["speculative"]["method"])
    repaired = repair() if repair else None
    lora, adapted = None, {}
    if job.get("adapter"):
        from vllm.lora.request import LoRARequest

        lora, adapted = LoRARequest("tuned", 1, job["adapter"]), {"enable_lora": True, "max_lora_rank": job["rank"]}
    llm = LLM(
        model=job["target"],
        dtype="float32",
        model_impl=job["model_impl"],
        enforce_eager=True,
        max_model_len=job["max_model_len"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=job["speculative"],
        **adapted,
    )
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=job["max_new_tokens"],
        stop_token_ids=job["stop_token_ids"],
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    answers = []
    for number, prompt in enumerate(job["prompts"]):
        before = counters(llm)
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling, lora_request=lora)
        steps: list[list[int]] = []
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                if output.outputs[0].token_ids:
                    steps.append(list(output.outputs[0].token_ids))
        after = counters(llm)
        answers.append(
            {
                "tokens": [token for step in steps for token in step],
                "committed": [len(step) for step in steps[1:]],
                "counters": {name: subtract(after[name], before[name]) for name in after},
            }
        )
    Path(out_path).write_text(json.dumps({"version": __version__, "repaired": repaired, "answers": answers}))


def norm_context_keys_by_layer() -> str | None:
    """Normalise the context keys of a block drafter layer by layer, where this build cannot do it in one call.

    vLLM hands the keys of all draft layers, [layers, rows, heads, D], to one kernel, with a row of weights per layer.
    The kernel for GPUs takes each layer's row. That of the CPU build takes the first row for all layers, in silence.

    Returns: what was replaced; None where the kernel is right.
    """
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    keys, weights = torch.ones(2, 1, 1, 32), torch.tensor([[1.0], [2.0]]).expand(2, 32).contiguous()
    found = torch.empty_like(keys)
    _custom_ops.rms_norm(found, keys, weights, 1e-6)
    if torch.allclose(found[1], 2 * found[0]):
        return None

    def normalised(model: Any, all_k: Any) -> Any:
        out = torch.empty_like(all_k)
        for layer, weight in enumerate(model._k_norm_weights):
            _custom_ops.rms_norm(out[layer], all_k[layer], weight, model._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = normalised
    return "rms_norm for CPUs takes the first layer's k_norm for the context of all layers: it is called layer by layer"


#: method of the speculative config → what must be replaced in vLLM before it starts
REPAIRS: dict[str, Callable[[], str | None]] = {"dflash": norm_context_keys_by_layer}


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's cumulative speculation counters."""
    values: dict[str, Any] = dict.fromkeys(COUNTERS, 0)
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_").removesuffix("_total")
        if name in values:
            values[name] = list(metric.values) if hasattr(metric, "values") else metric.value
    return values


def subtract(after: Any, before: Any) -> Any:
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before or [0] * len(after), strict=True)]
    return after - before


if __name__ == "__main__":
    decode(*sys.argv[1:])
