"""The samples that train with their resampled copies (`data.resampled_copies`)."""

from __future__ import annotations

from dataclasses import replace

from headstart.data.ranks import ALONE, Ranks
from headstart.data.resampling import resampled
from headstart.data.samples import Sample
from headstart.heads.files import sha256_text
from headstart.pipeline.data import trained_samples
from headstart.pipeline.run import Run


def samples_with_copies(run: Run) -> list[Sample]:
    """The training samples as the loop gets them, followed by their resampled copies. The first call makes the copies
    and says so."""
    if not run.recipe.data.resampled_copies:
        return trained_samples(run)
    if run.resampled is None:
        make_copies(run)
    assert run.resampled is not None
    return run.resampled


def make_copies(run: Run, ranks: Ranks = ALONE) -> None:
    """Make the copies, unless the recipe wants none. All of `ranks` call it together. Each makes all copies; where
    devices round differently, all then take those of the first rank."""
    if not run.recipe.data.resampled_copies:
        return
    if run.resampled is None:
        run.resampled = _made(run, trained_samples(run))
    if ranks.size == 1:
        return
    samples = run.resampled
    if len(set(ranks.gather(sha256_text("".join(sample.digest() for sample in samples))))) > 1:
        texts = ranks.gather([sample.token_ids for sample in samples] if ranks.rank == 0 else None)[0]
        first_copy = len(trained_samples(run))
        copies = zip(samples[first_copy:], texts[first_copy:], strict=True)
        run.resampled = [*samples[:first_copy], *(replace(copy, token_ids=text) for copy, text in copies)]


def _made(run: Run, originals: list[Sample]) -> list[Sample]:
    config, target = run.recipe.data, run.target
    token = run.recipe.head.placeholder_token if run.recipe.head.placeholder is not None else None
    kept = () if token is None else (token,)  # the head's own token, which no text may hold
    with run.console.progress("resampled copies", "tokens") as advance:
        made = resampled(
            originals, target, config.resampled_copies, config.resampled_share, run.recipe.seed, advance, kept
        )
    run.console.say(f"data: {made.line()}")
    return made.samples
