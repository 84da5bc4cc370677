"""Chat templates of public model families, written after their published formats, and what of their text trains.

Each writes what the published one writes, with shorter instructions in some: Command R's about tools, Mistral v7's and
Phi-4-mini's.

families.py   the templates, their special tokens, the conversations, tokenizers of four kinds
expected.py   the text of every conversation by hand, the assistant's own characters between ⟦ and ⟧
checking.py   compares a mask with both, without the code under test; `families_ok` counts
"""
