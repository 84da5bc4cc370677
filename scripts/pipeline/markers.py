"""Which steps of a run are finished. Each step has a marker, which holds the inputs that the step was done with.

    runs/NAME/steps/train.json   {"step", "status": "started" | "done", "inputs", "result", "seconds"}

A step that is done for equal inputs is skipped. A step that was started with equal inputs continues. It also continues
where only inputs changed that leave what it has made usable (`lasting`). Otherwise the step starts afresh: what it had
made moves to `runs/NAME/previous/`, and its caches are deleted.

A step first checks everything, then calls `begin`, then writes. Until `begin` the run directory stays as it was. If a
step fails after `begin` and what it has made is worth nothing, what was there before is put back.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from headstart.heads.errors import DataError, StorageError
from headstart.heads.files import delete, explain_disk, read_json, set_aside, write_json
from headstart.sigterm import stop_if_asked


def changed(old: Any, new: Any, key: str = "") -> Iterator[str]:
    """`key: old → new` for every leaf that differs.

    A setting that is null equals one that is not there: an older version did not have it.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from changed(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from changed(one, other, f"{key}[{index}]")
    elif old != new:
        yield f"{key}: {_short(old)} → {_short(new)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "…"


#: what a step calls once nothing can refuse any more, before it writes
Begin = Callable[[], None]


def no_begin() -> None:
    """A `Begin` for work that has no marker."""


class Markers:
    """The markers of one run directory.

    Args:
        say: receives one line for each step: that it is skipped, starts, continues or is done again.
        check: called once, before the first step that is not done; raises where a later step could not work.
        during: what a step is done inside, by its name.
    """

    def __init__(
        self,
        run_dir: Path,
        say: Callable[[str], None],
        check: Callable[[], None] | None = None,
        during: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ):
        self.run_dir, self.say, self._check, self._during = Path(run_dir), say, check, during

    def read(self, step: str) -> dict[str, Any]:
        """The step's marker, {} when there is none. Raises StorageError when it cannot be read."""
        path = self._path(step)
        if not path.exists():
            return {}
        try:
            marker = read_json(path)
        except (DataError, OSError) as error:
            marker = str(error)
        whole = isinstance(marker, dict) and isinstance(marker.get("inputs"), dict)
        whole = whole and isinstance(marker.get("seconds", 0), int | float)
        if not whole or (marker.get("status") == "done" and not isinstance(marker.get("result"), dict)):
            raise StorageError(
                f"{path}: found {_short(marker)}, expected a step's marker with status and inputs, and a result if the "
                f"step is done. Move it away and run the same command: {step} then goes on from what it has made"
            )
        return marker

    def _path(self, step: str) -> Path:
        return self.run_dir / "steps" / f"{step}.json"

    def is_done(self, step: str, inputs: dict[str, Any], outputs: Sequence[Path]) -> bool:
        """Whether the step finished with these inputs and its outputs are still there."""
        done = self.read(step).get("status") == "done"
        return done and self.same(step, inputs) and all(path.exists() for path in outputs)

    def same(self, step: str, inputs: dict[str, Any]) -> bool:
        """Whether the step was begun or finished with these inputs."""
        return not any(changed(self.read(step).get("inputs"), _through_json(inputs)))

    def do(
        self,
        step: str,
        inputs: dict[str, Any],
        outputs: Sequence[Path],
        work: Callable[[Begin], dict[str, Any]],
        leftovers: Sequence[Path] = (),
        caches: Sequence[Path] = (),
        lasting: Callable[[dict[str, Any]], Any] = lambda inputs: inputs,
        extends: bool = False,
        again: str = "",
        worth: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """Do the step unless it is done; returns its result (JSON values).

        Args:
            inputs: JSON values that the outputs depend on.
            outputs: files or directories that the step makes.
            work: does the step. It calls its argument once: when nothing can refuse any more, before it writes.
            leftovers: what else the step makes on the way (checkpoints); moved away with the outputs.
            caches: what the step can make again; deleted where it starts afresh.
            lasting: the part of the inputs that may not change while the step is under way.
            extends: a finished step continues as well, from its outputs, if `lasting` stayed the same.
            again: why the step must start afresh in any case; "" where it need not.
            worth: whether what a failed step has made is worth more than what was moved away for it. None: anything is.
        """
        inputs, marker = _through_json(inputs), self.read(step)
        if not again and self.is_done(step, inputs, outputs):
            self.say(f"{step}: finished before ({marker.get('seconds', 0):.0f} s), skipped")
            return marker["result"]
        stop_if_asked()
        if self._check is not None:
            check, self._check = self._check, None
            with self._during("checking the recipe and the data"):
                check()
        old = marker.get("inputs")
        goes_on = extends or marker.get("status") == "started"
        keeps = goes_on and isinstance(old, dict) and not any(changed(lasting(old), lasting(inputs)))
        afresh = self._starts_afresh(step, marker, inputs, outputs, keeps, again)
        clock, made = time.monotonic(), [*outputs, *leftovers]
        aside: Path | None = None
        begun = False

        def begin() -> None:
            nonlocal aside, begun
            if afresh:
                aside = self._set_aside(step, made, caches)
            write_json(self._path(step), {"step": step, "status": "started", "inputs": inputs})
            begun = True

        try:
            with self._during(step):
                result = _through_json(work(begin))
        except BaseException:
            if aside is not None and not (worth() if worth else any(path.exists() for path in made)):
                self._put_back(step, aside, made, marker)
            raise
        if not begun:
            raise RuntimeError(f"{step}: returned without calling begin")
        seconds = round(time.monotonic() - clock, 1)
        done = {"step": step, "status": "done", "inputs": inputs, "result": result, "seconds": seconds}
        write_json(self._path(step), done)
        return result

    def _starts_afresh(
        self,
        step: str,
        marker: dict[str, Any],
        inputs: dict[str, Any],
        outputs: Sequence[Path],
        keeps: bool,
        again: str,
    ) -> bool:
        """Whether the step must start without what it has made; says how the step begins.

        Args: keeps: what it has made stays usable although inputs changed.
        """
        differences = list(changed(marker.get("inputs"), inputs)) if marker else []
        listed = "; ".join([*differences[:3], *(["…"] if len(differences) > 3 else [])])
        if again or (differences and not keeps):
            self.say(f"{step}: done again, {again or f'its inputs changed ({listed})'}")
            return True
        if differences or marker.get("status") == "started":
            self.say(f"{step}: continues" + (f" with other settings ({listed})" if differences else ""))
        elif marker:
            self.say(f"{step}: done again, {next(path for path in outputs if not path.exists())} is gone")
        else:
            self.say(f"{step}: starts")
        return False

    def _set_aside(self, step: str, made: Sequence[Path], caches: Sequence[Path]) -> Path | None:
        with explain_disk(self.run_dir):
            for path in caches:
                if path.exists():
                    shutil.rmtree(path)
            place = set_aside(self.run_dir, step, made)
            if place is None:
                return None
            if self._path(step).is_file():
                shutil.copy(self._path(step), place / "step.json")
        self.say(f"{step}: what it had made is kept in {place}")
        return place

    def _put_back(self, step: str, place: Path, made: Sequence[Path], marker: dict[str, Any]) -> None:
        """Undo `_set_aside` after a failure."""
        with explain_disk(self.run_dir):
            for path in made:
                delete(path)
                if (place / path.name).exists():
                    shutil.move(place / path.name, path)
            write_json(self._path(step), marker)
            shutil.rmtree(place)
        self.say(f"{step}: it failed before it made anything of use; what was there before is back in its place")


def _through_json(value: Any) -> Any:
    """The value as it is read back from JSON, so that both sides of a comparison have the same types."""
    return json.loads(json.dumps(value, default=str))
