"""Why a target cannot be fused."""

from __future__ import annotations


class Unfusable(Exception):
    """The model has a structure that the fused layers do not cover; the message names it."""
