"""The serving engines that Headstart writes for and checks for, by their names in `export.engines`."""

from __future__ import annotations

from headstart.heads.formats import llama_cpp, sglang, tensorrt_llm, tgi, vllm
from headstart.heads.formats.format import Format

FORMATS: dict[str, Format] = {
    engine.key: engine for engine in (vllm.FORMAT, sglang.FORMAT, tgi.FORMAT, tensorrt_llm.FORMAT, llama_cpp.FORMAT)
}
