"""The parity gate: heads in vLLM and in llama.cpp against Headstart's own loop, token for token."""
