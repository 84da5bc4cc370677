"""Recipe node `export`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ExportConfig:
    """What `export` writes and where it goes."""

    #: Engines to write for: portable (one directory for every engine that takes it), vllm, sglang, tgi,
    #: tensorrt_llm or llama_cpp.
    engines: list[str] = field(default_factory=lambda: ["portable"])
    #: Precision of the exported weights: bfloat16, float16 or float32.
    dtype: str = "bfloat16"
    #: Largest file of weights, e.g. 5GB or 512MiB; larger weights go into several files with an index. null writes one
    #: file. The trained head is saved in the same way. TGI and TensorRT-LLM's Medusa converter read one file only.
    max_shard_size: str | None = None
    #: How a tuned target is exported (joint training, target.adapter): merged writes it as a whole model into
    #: `export/target`, separate leaves it to the engine to apply `export/adapter` to the base (vLLM).
    adapter: str = "merged"
    #: Write the export although a check failed; the export records it.
    force: bool = False
    #: Hub repository (user/name) that the export is uploaded to; null uploads nothing.
    push_to_hub: str | None = None
    #: Create the repository as a private one.
    private: bool = False
    #: Message of the Hub commit; null names the head and its target.
    commit_message: str | None = None
