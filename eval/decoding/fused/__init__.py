"""A target whose decoder layers run our kernels. Entry: model.py."""
