"""Losses on draft logits. `eager` is the readable twin, `fused` the one training uses: same signatures, same values."""
