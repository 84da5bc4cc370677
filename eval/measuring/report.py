"""The report of an evaluation: one JSON (schema 1). Everything that is shown is rendered from it (rendering.py)."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from headstart.heads.errors import DataError
from headstart.heads.files import read_json, write_json
from headstart.heads.formats.flags import flag_of
from headstart.heads.published import published

SCHEMA = 1
#: files that are made from report.json
RENDERED = ("report.md", "report.html")


@dataclass
class Numbers:
    """What was measured on some prompts. τ is methods §0's: tokens committed per target forward after prefill.

    Attributes:
        per_position_acceptance: share of the drafts that were accepted up to depth d.
        per_position_conditional: the same among those that were accepted up to the depth before.
        baseline_tokens_per_s, tokens_per_s: decode phase only, plain and speculative, in the same loop.
        speedup: by the clock, places that stay empty included.
        speedup_ci95: over resampled prompts, at batch 1.
        row_speedup: by the time that rows spent decoding, as on a server that fills those places at once.
        latency: of "baseline" and "speculative" (None where it did not run): `first_token_p50_ms`, `first_token_p95_ms`
            (prefill; a batch's prompts wait together), `token_p50_ms`, `token_p95_ms` (a cycle's time ÷ its tokens).
    """

    prompts: int
    forwards: int
    tokens: int
    tau: float
    tau_ci95: list[float] | None
    per_position_acceptance: list[float]
    per_position_conditional: list[float | None]
    tokens_per_s: float | None
    baseline_tokens_per_s: float | None
    speedup: float | None
    latency: dict[str, dict[str, float | None] | None] | None = None
    speedup_ci95: list[float] | None = None
    row_speedup: float | None = None

    def numbers(self) -> dict[str, Any]:
        """The fields that sections and reports share, by name."""
        return {f.name: getattr(self, f.name) for f in fields(Numbers)}


@dataclass
class Section(Numbers):
    """Numbers of one task, or of all of them.

    Attributes:
        identity: {"sequences", "identical"} of speculative against plain, greedy runs with a baseline only.
    """

    identity: dict[str, int] | None = None


@dataclass(kw_only=True)
class Report(Numbers):
    """What an evaluation measured, over all tasks and for each, and how."""

    target: dict[str, Any]
    head: dict[str, Any] | None
    drafter: str
    data: dict[str, Any]
    dtype: str
    device: str
    temperature: float
    lossless: bool
    tree: dict[str, Any]
    batch_size: int
    max_new_tokens: int
    tasks: dict[str, Section]
    greedy_identity: dict[str, Any] | None
    timing: dict[str, float | None]
    sampling: dict[str, Any]
    recipe: dict[str, Any]
    versions: dict[str, str]
    git_revision: str
    notes: list[str] = field(default_factory=list)
    #: the running server that was measured (name, version, url, model), or None for Headstart's own loop
    engine: dict[str, Any] | None = None
    #: acceptance by level that eval.synthetic_acceptance asked for (τ is then not the head's), or None
    synthetic: list[float] | None = None
    #: the rule that accepted drafts: greedy, draw (one draw from the target, for drafts that were not drawn), block,
    #: token, typical or synthetic; None: plain decoding, a server, or a report from before block verification
    verification: str | None = None
    #: plain and speculative decoding over batch sizes ("batch") and context lengths ("context"), where asked for
    sweeps: dict[str, Any] | None = None
    #: milliseconds of a cycle's parts: draft_ms, verify_ms, rest_ms
    cycle: dict[str, float] | None = None
    #: with eval.scheduler: `verified_per_cycle` (rows of the target's forward that a sequence took in a cycle, its root
    #: included, on average over the tasks; None without a cycle), and `batches` (`ThroughputScheduler.to_json`, over
    #: all runs)
    scheduler: dict[str, Any] | None = None
    #: how the target ran: "fused" (our kernels) or "generic" (transformers' own forward); None: in a server
    engine_path: str | None = None
    #: why it ran slower than it could; None where it did not
    engine_note: str | None = None
    #: what that costs, in milliseconds of a plain cycle: {"wall_ms", "device_ms" (at most, the card works)}
    engine_cost: dict[str, float] | None = None
    #: HF generate at batch 1, where asked for; its label stands beside it
    generate: dict[str, Any] | None = None
    #: "cuda", "cpu", …; None: a server, or a report from before verdicts
    device_type: str | None = None
    #: answers that were decoded, and those that ended at `max_new_tokens`: {"answers", "cut"}; None in a server
    cut: dict[str, int] | None = None
    #: the same head on longer answers, where some were cut and the recipe asks for it (`longer_answers`):
    #: {"max_new_tokens", "tau", "tau_ci95", "answers", "cut"}
    longer: dict[str, Any] | None = None
    #: length of the chain → speed-up by the clock, where shorter chains were timed as well
    chain_speedups: dict[str, float] | None = None
    #: a few answers with every token's author (`samples.Sample` as JSON); None where none were recorded
    samples: list[dict[str, Any]] | None = None
    #: what the head's run recorded (scripts/training_record.py): `curves` {name: [[step, value], …]}, `seconds`, and
    #: `data`, numbers about the training data; None where the head does not lie in a run
    training: dict[str, Any] | None = None
    #: whether drafting pays (`Verdict.to_json`), or None in a report from before verdicts
    verdict: dict[str, Any] | None = None
    #: command line of the process that measured this
    command: str | None = None
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def published(self) -> Report:
        """The report with the paths, files and servers that others may see (`heads/published.py`)."""
        return Report.from_json(published(self.to_json()))

    @classmethod
    def from_json(cls, value: dict[str, Any], where: str = "report") -> Report:
        """Raises DataError when the schema is another or a field is missing."""
        if not isinstance(value, dict):
            raise DataError(f"{where}: found {type(value).__name__}, expected a JSON object")
        if value.get("schema") != SCHEMA:
            raise DataError(f"{where}: schema: found {value.get('schema')!r}, expected {SCHEMA}")
        kept = _known(cls, value, where)
        if not isinstance(kept["tasks"], dict):
            raise DataError(f"{where}: tasks: found {type(kept['tasks']).__name__}, expected a JSON object")
        kept["tasks"] = {
            name: Section(**_known(Section, section, f"{where}: tasks.{name}"))
            for name, section in kept["tasks"].items()
        }
        return cls(**kept)

    @classmethod
    def read(cls, directory: Path | str) -> Report:
        path = Path(directory) / "report.json"
        return cls.from_json(read_json(path), str(path))

    def save(self, directory: Path | str) -> Path:
        """Write report.json (atomically), as `published` makes it; returns its path."""
        directory = Path(directory)
        write_json(directory / "report.json", published(self.to_json()))
        for name in RENDERED:
            (directory / name).unlink(missing_ok=True)  # it shows an earlier measurement
        return directory / "report.json"

    @property
    def flag(self) -> str | None:
        """LOSSY or SYNTHETIC: what stands beside τ and speed-up; None where the output is the target's own."""
        return flag_of({"synthetic": self.synthetic, "lossless": self.lossless})

    @property
    def total(self) -> Section:
        identity = self.greedy_identity
        counts = {name: identity[name] for name in ("sequences", "identical")} if identity else None
        return Section(**self.numbers(), identity=counts)


def _known(cls: type, value: Any, where: str) -> dict[str, Any]:
    """The fields of a dataclass that a JSON object holds. Raises DataError when one without a default is missing."""
    if not isinstance(value, dict):
        raise DataError(f"{where}: found {type(value).__name__}, expected a JSON object")
    needed = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(needed - set(value)):
        raise DataError(f"{where}: fields missing: {missing}")
    return {f.name: value[f.name] for f in fields(cls) if f.name in value}
