"""The draft vocabulary of a run's head: chosen from the target's choices before training, kept when the run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headstart.data.features import FeatureSource
from headstart.data.samples import Sample, token_counts
from headstart.data.teacher_choices import Votes, count_votes
from headstart.heads import vocab
from headstart.heads.base import Head, HeadConfig
from headstart.heads.checkpoints.raw import open_checkpoint
from headstart.heads.files import read_json, write_json
from headstart.heads.formats.loading import map_head
from headstart.heads.targets.target import Target
from headstart.pipeline.data import prepare, trained_samples
from headstart.pipeline.features import feature_source, features_kind
from headstart.pipeline.resampling import samples_with_copies
from headstart.pipeline.run import Run
from headstart.saved_heads import find_head
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


class KnownVocabulary(NamedTuple):
    """A draft vocabulary before training. ids_U: int64 [U], ascending. origin: who chose it, in words."""

    ids_U: Tensor
    origin: str


def vocabulary_ahead(run: Run, samples: Sequence[Sample]) -> KnownVocabulary | None:
    """The draft vocabulary that the run has chosen, or will choose as far as the data alone tells; None where the head
    drafts all of the target's tokens. Needs no weights.

    Args: samples: to train on.
    Raises: as training for a size that the target or the data does not allow, or for a `start_from` without a head.
    """
    recipe, target = run.recipe, run.either_target
    config, whole = recipe.head, target.dims.vocab_size
    if recipe.start_from is not None:
        mapped, _ = map_head(open_checkpoint(find_head(recipe.start_from, "start_from")), target.dims)
        ids_U = mapped.draft_ids_U
        return None if ids_U is None else KnownVocabulary(ids_U.to(torch.int64), "that of start_from")
    if config.draft_tokens(whole) >= whole:
        return None
    if (kept := _kept(run)) is not None:
        return KnownVocabulary(torch.tensor(kept), "chosen by this run")
    votes = count_votes(samples, None, False, whole, recipe.seed)
    origin = "chosen by the data's tokens; training asks the target"
    return KnownVocabulary(_most_voted(target, config, config.draft_tokens(whole), votes), origin)


def _most_voted(target: Target, config: HeadConfig, size: int, votes: Votes) -> Tensor:
    """The vocabulary that these votes lead to. Args: size: of a config that says no share."""
    always = forced_tokens(target, votes.count_V)
    if (share := config.vocabulary_share) is not None:
        size = vocab.size_for_share(votes.count_V, share, always)
    return vocab.choose_draft_vocab(votes.count_V, size, always)


def _chosen(run: Run, config: HeadConfig, sketch: Head) -> tuple[list[int], FeatureSource | None]:
    target, size = run.target, sketch.draft_vocab_size
    assert size is not None
    whole = target.dims.vocab_size
    if _earlier_version(run) and config.vocabulary_share is None:
        count_V = token_counts(prepare(run).train, whole)
        return vocab.choose_draft_vocab(count_V, size, target.stop_token_ids).tolist(), None
    samples, kind = trained_samples(run), features_kind(run)
    source: FeatureSource | None = None
    if not sketch.spec.tokens_alone:
        source = feature_source(run, samples_with_copies(run), "train", sketch, sketch.depth)
    votes = count_votes(samples, source, kind == "online", whole, run.recipe.seed, all_ranks())
    ids_U = _most_voted(target, config, size, votes)
    share = config.vocabulary_share
    asked = f" for a share of {share:g}" if share is not None else ""
    whose = "the target's choices" if votes.asked else "the data's tokens"
    part = f" (the target was asked on {votes.asked} of them)" if 0 < votes.asked < votes.rows else ""
    covered = vocab.coverage(votes.count_V, ids_U)
    run.console.say(
        f"draft vocabulary: {len(ids_U)} of {whole} tokens{asked}, {covered:.2%} of {whose} on "
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
    kept, whole = read_json(place), run.either_target.dims.vocab_size
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
