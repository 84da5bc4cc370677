"""A target that runs transformers' own forward on our static buffers. Entry: model.py."""
