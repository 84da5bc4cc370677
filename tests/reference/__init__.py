"""Naive per-position implementations that the fast code is tested against.

Written from the papers' maths alone, one position at a time, with no masks, no shifts by slicing and no packing.
Slow on purpose. All of it is differentiable, in whatever dtype the weights have (the tests use float64).
Shape legend (methods §0): T tokens, D target hidden, H head hidden, V target vocabulary, U draft vocabulary,
K depths, k feature streams, h query heads, g key/value heads, d head width.
"""
