"""Recipe node `export`."""

from __future__ import annotations

from dataclasses import dataclass, field

ENGINES = ("portable", "vllm", "sglang", "tgi", "tensorrt_llm")


@dataclass
class ExportConfig:
    """What `export` writes and where it goes."""

    #: portable (one directory for every engine that takes it), vllm, sglang, tgi, tensorrt_llm
    engines: list[str] = field(default_factory=lambda: ["portable"])
    #: bfloat16 | float16 | float32 of the exported weights
    dtype: str = "bfloat16"
    #: weights beyond this size go into several files with an index (14MB, 5GB, 512MiB); null: one file. The trained
    #: head is saved alike. TGI and TensorRT-LLM's Medusa converter read one file only
    max_shard_size: str | None = None
    #: write the export although a check failed; the report records it
    force: bool = False
    #: Hub repository (user/name) the export is uploaded to; null: stay local
    push_to_hub: str | None = None
    #: create the repository as a private one
    private: bool = False
    #: message of the Hub commit; null: names the head and its target
    commit_message: str | None = None
