"""The draft vocabulary of a run's head: chosen from the target's choices before training, kept when the run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.data.features import FeatureSource
from headstart.data.samples import token_counts
from headstart.data.teacher_choices import count_votes
from headstart.heads import vocab
from headstart.heads.base import Head, HeadConfig
from headstart.heads.files import read_json, write_json
from headstart.heads.targets.target import Target
from headstart.pipeline.data import prepare, trained_samples
from headstart.pipeline.features import feature_source
from headstart.pipeline.run import Run
from headstart.train.sharing.distributed import all_ranks, from_main


def choose_vocabulary(run: Run, config: HeadConfig, sketch: Head) -> tuple[list[int], FeatureSource | None]:
    """(ids of the draft vocabulary, the features of training if they were made for it). All ranks call it together.

    A run that goes on keeps its vocabulary. Says what was chosen and what it covers.

    Args: sketch: the head on the meta device, which has a draft vocabulary.
    Raises: ConfigError for a size that the target or the data does not allow.
    """
    ids, source = _kept(run), None
    if ids is None:
        ids, source = _chosen(run, config, sketch)
    return from_main(ids), source  # ranks whose devices round differently must not draft different tokens


def keep_vocabulary(run: Run, head: Head) -> None:
    """Write which tokens were chosen, for commands that continue the run."""
    if head.draft_ids_U is not None and run.recipe.start_from is None:
        write_json(_place(run), {**_asked(run), "ids": head.draft_ids_U.tolist()})


def _chosen(run: Run, config: HeadConfig, sketch: Head) -> tuple[list[int], FeatureSource | None]:
    target, size = run.target, sketch.draft_vocab_size
    assert size is not None
    whole = target.dims.vocab_size
    if _earlier_version(run) and config.vocabulary_share is None:
        count_V = token_counts(prepare(run).train, whole)
        return vocab.choose_draft_vocab(count_V, size, target.stop_token_ids).tolist(), None
    samples, kind = trained_samples(run), run.recipe.data.features
    source: FeatureSource | None = None
    if not sketch.spec.tokens_alone:
        source = feature_source(run, samples, "train", sketch, sketch.depth)
    votes = count_votes(samples, source, kind == "online", whole, run.recipe.seed, all_ranks())
    always = forced_tokens(target, votes.count_V)
    if (share := config.vocabulary_share) is not None:
        size = vocab.size_for_share(votes.count_V, share, always)
    ids_U = vocab.choose_draft_vocab(votes.count_V, size, always)
    asked = f" for a share of {share:g}" if share is not None else ""
    whose = "the target's choices" if votes.asked else "the data's tokens"
    part = f" (the target was asked on {votes.asked} of them)" if 0 < votes.asked < votes.rows else ""
    run.console.say(
        f"draft vocabulary: {size} of {whole} tokens{asked}, {vocab.coverage(votes.count_V, ids_U):.2%} of {whose} on "
        f"{votes.rows} rows of answers{part}"
    )
    return ids_U.tolist(), source


def forced_tokens(target: Target, count_V: Tensor) -> tuple[int, ...]:
    """What every draft vocabulary holds: stop tokens, and the tokenizer's added tokens that answers hold.

    The chat template marks thoughts, tool calls and turns with added tokens. Without them no draft could pass a mark.
    """
    added = sorted(getattr(target.tokenizer, "added_tokens_decoder", {}))
    said = [token for token in added if token < len(count_V) and count_V[token] > 0]
    return tuple(dict.fromkeys((*target.stop_token_ids, *said)))


def _earlier_version(run: Run) -> bool:
    """Whether the run has checkpoints to go on from and no file of its vocabulary: a version made them that chose it
    from the data's tokens."""
    return run.recipe.train.resume and not _place(run).is_file() and any((run.dir / "checkpoints").glob("step-*"))


def _kept(run: Run) -> list[int] | None:
    """The ids that the run chose for the same data and setting."""
    place = _place(run)
    if not place.is_file():
        return None
    kept, whole = read_json(place), run.target.dims.vocab_size
    if not isinstance(kept, dict) or {name: kept.get(name) for name in _asked(run)} != _asked(run):
        return None
    ids = kept.get("ids")
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        return None
    return ids if vocab.is_draft_vocab(torch.tensor(ids), whole) else None


def _asked(run: Run) -> dict[str, Any]:
    """What the choice depends on. Of a share, `size` is the most that it can lead to."""
    config, whole = run.recipe.head, run.either_target.dims.vocab_size
    return {"size": config.draft_tokens(whole), "share": config.vocabulary_share, "data": run.inputs.data}


def _place(run: Run) -> Path:
    return run.dir / "data" / "draft_vocab.json"
