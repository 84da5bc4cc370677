"""The engine's side of the parity gate (parity_vllm.py), run by the Python of vLLM's environment:

    python -P scripts/parity_engine.py JOB.json OUT.json

Nothing of Headstart is installed there, so this file imports the standard library and vLLM only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos")


def decode(job_path: str, out_path: str) -> None:
    """Decode the job's prompts in vLLM and write `{version, answers: [{tokens, committed, counters}]}`.

    `committed`: number of tokens from every target forward after the prefill, cut at stop tokens and the length limit.
    """
    from vllm import LLM, SamplingParams, __version__
    from vllm.sampling_params import RequestOutputKind

    job = json.loads(Path(job_path).read_text())
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
    Path(out_path).write_text(json.dumps({"version": __version__, "answers": answers}))


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
