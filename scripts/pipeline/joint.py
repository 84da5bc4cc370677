"""Joint training in a run: the head with the adapter of its target while it trains, and both as they are saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headstart.heads.base import Head
from headstart.heads.files import delete
from headstart.heads.published_names import name_of_target
from headstart.heads.targets.adapter import continue_adapter, remove_adapter, save_adapter
from headstart.heads.targets.tuned import ADAPTER, read_adapter, tuned_fingerprint
from headstart.pipeline.run import Run
from headstart.refusals import started_adapter
from headstart.train.joint.head import JointHead


@contextmanager
def trained_head(run: Run, head: Head) -> Iterator[Head]:
    """What trains: the head alone, or with the adapter of the run's target, which is taken out afterwards."""
    config, target = run.recipe.joint, run.target
    if not config.enabled:
        yield head
        return
    remove_adapter(target.model)
    try:
        if (start := started_adapter(run.recipe)) is not None:
            continue_adapter(target.model, config.lora, start)  # which JointHead then keeps
        joint = JointHead(head, target, config, run.recipe.seed)
        if joint.live is not None and joint.live.note is not None:
            run.console.say(f"joint training runs the target over padded documents: {joint.live.note}")
        if target.device.type == "cuda" and joint.capture_obstacle is not None:
            run.console.say(f"steps are not captured, which is slower: {joint.capture_obstacle}")
        yield joint
    finally:
        remove_adapter(target.model)


def save_adapter_of(run: Run) -> dict[str, Any]:
    """Write the adapter beside the run's head, before the head. Returns the fingerprint of the tuned target.

    Without joint training an adapter that lies there is of another run: it is deleted.
    """
    place, target = run.head_dir / ADAPTER, run.target
    delete(place)
    if not run.recipe.joint.enabled:
        return target.fingerprint()
    save_adapter(target.model, place, name_of_target(run.recipe.target.name))
    return tuned_fingerprint(target.fingerprint(), read_adapter(place))
