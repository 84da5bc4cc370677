"""Headstart: train draft heads for a frozen language model and prove what they gain."""

__version__ = "0.1.0"
