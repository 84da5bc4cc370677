"""The decode engine.

Read in this order: session.py (a target that decodes batch after batch), decode.py (one batch to its end), loop.py (one
cycle: propose, verify, commit), engine.py (the target's forward over a tree of drafts). The engine runs a target either
as fused/ (our kernels, captured as CUDA graphs) or as generic/ (transformers' own forward, for all other targets).
"""
