"""The step `features`: stores the target's hidden states of all samples, where the recipe asks for it."""

from __future__ import annotations

from typing import Any

from headstart.auto import held_or_live
from headstart.data.features import OnlineFeatures
from headstart.data.memory import MemoryFeatures
from headstart.data.samples import Sample
from headstart.data.store import StoredFeatures, build_store
from headstart.heads.base import Head
from headstart.pipeline.data import counted_samples, prepare
from headstart.pipeline.markers import Begin
from headstart.pipeline.resampling import samples_with_copies
from headstart.pipeline.run import Run
from headstart.pipeline.run_length import require_steps


def store_features(run: Run) -> None:
    """Store the hidden states of all samples under `data.features=stored`; otherwise do nothing."""
    if run.recipe.data.features != "stored":
        return
    store = run.dir / "features"
    if run.recipe.target.parallel == "fsdp2" and (store / "train" / "manifest.json").is_file():
        return  # training checks what it reads from the store
    run.require_one_process("the features are not stored yet", "set data.features=online")
    inputs = {"data": run.inputs.data, "feature_layers": list(run.feature_spec().layer_ids)}
    run.markers.do("features", inputs, [store / "train"], lambda begin: _store(run, begin), caches=[store])


def _store(run: Run, begin: Begin) -> dict[str, Any]:
    data, config, store = prepare(run), run.recipe.data, run.dir / "features"
    require_steps(run)
    spec = run.feature_spec()
    run.claim(begin)
    for name, samples in (("train", samples_with_copies(run)), ("held_out", data.held_out)):
        if not samples:
            continue
        with run.console.progress(f"features ({name})", "tokens") as advance:
            build_store(
                run.target, samples, spec, store / name, config.features_dtype, config.shard_tokens,
                config.pack_size, advance,
            )  # fmt: skip
    size = sum(path.stat().st_size for path in store.rglob("*.safetensors"))
    return {"path": str(store), "layer_ids": list(spec.layer_ids), "bytes": size}


def data_tokens(run: Run) -> int:
    """Tokens of the run's data, resampled copies and held-out samples included."""
    return sum(map(len, (*counted_samples(run), *prepare(run).held_out)))


def features_kind(run: Run) -> str:
    """`data.features`; what `auto` means where the data is known: online or memory. The head that is trained is the
    same."""
    if run.recipe.data.features != "auto":
        return run.recipe.data.features
    if run.features is None:
        alone = not run.on_rank and run.recipe.target.parallel == "none"
        run.features = held_or_live(run.recipe, run.planned, data_tokens(run)) if alone else "online"
        run.console.say(f"auto: data.features={run.features}")
    return run.features


def feature_source(
    run: Run, samples: list[Sample], name: str, head: Head, depth: int
) -> OnlineFeatures | StoredFeatures | MemoryFeatures:
    """Where training gets the features of these samples from (`data.features`).

    Args:
        name: "train" or "held_out".
        depth: largest depth that is supervised: the head's K, or the length of the measured chain.
    """
    kind, target = features_kind(run), run.target
    if kind == "memory":
        with run.console.progress(f"features ({name})", "tokens") as advance:
            if run.held is not None:
                return run.held.give(name, target, samples, head.spec, depth, advance)
            return MemoryFeatures(target, samples, head.spec, depth, progress=advance)
    if kind != "stored":
        return OnlineFeatures(target, samples, head.spec, depth)
    return StoredFeatures(run.dir / "features" / name, depth, target.device, head.spec, target.fingerprint(), samples)
