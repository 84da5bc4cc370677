"""The model card of a published head, written from its report.json and headstart.json.

Private facts are taken out of both (published.py). Text that others wrote (names of targets and tasks, notes) is
escaped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import yaml

from headstart.heads.counting import counted
from headstart.heads.escape import code, fenced, in_json, markdown, table
from headstart.heads.families import FAMILIES
from headstart.heads.formats.beside import NAMES
from headstart.heads.formats.engines import FORMATS
from headstart.heads.formats.flags import LOSSLESS_RULES, MEANINGS, flag_of
from headstart.heads.formats.launch import commented, launch_commands, tuned_table, why_doubt, why_tokens
from headstart.heads.formats.sidecar import SIDECAR, family_config, hub_name
from headstart.heads.formats.tuned_card import tuned_target_section
from headstart.heads.published import published
from headstart.heads.published_names import ANSWERS, HELD_OUT, OWN_DATA
from headstart.heads.targets.tuned import ADAPTER, is_tuned


def render_card(
    repo_id: str,
    side: dict[str, Any],
    report: dict[str, Any] | None,
    engines: list[str],
    license_id: str | None = None,
    plots: Sequence[str] = (),
) -> str:
    """README.md of the repository.

    Args:
        side: headstart.json of the exported head.
        report: report.json of its evaluation, or None (the card then says that nothing was measured).
        engines: keys of the engines that load it by their rules.
        license_id: licence of the target as the Hub names it; None points to the target's own.
        plots: file names of images beside the card.
    """
    side, report = published(side), None if report is None else published(report)
    family, target = side["type"], side.get("target") or {}
    parts = [
        _front_matter(family, target, license_id),
        f"# {markdown(repo_id.split('/')[-1])}",
        _summary(family, target, side, flag_of(report or {})),
        tuned_target_section(side),
        _results(report),
        *(f"![{name.removesuffix('.png')}]({name})" for name in plots),
        tuned_table(side),
        _use(repo_id, target, engines, side),
        _data(side),
        _training(side),
        _licence(target),
        _citation(family),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(family: str, target: dict[str, Any], license_id: str | None) -> str:
    base = hub_name(target)
    # the Hub lists the head on its base model's page by this field
    values: dict[str, Any] = {"base_model": [base]} if base else {}
    values |= {"license": license_id} if license_id else {"license": "other", "license_name": "as-the-base-model"}
    if not license_id and base:
        values["license_link"] = f"https://huggingface.co/{base}"
    values |= {
        "library_name": "headstart",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", family, "headstart"],
    }
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=1000)}---"


def _summary(family: str, target: dict[str, Any], side: dict[str, Any], flag: str | None) -> str:
    config = family_config(family, side.get("config") or {"type": family}, SIDECAR)
    known = FAMILIES[family].files.facts_of(config)
    facts = "; ".join(f"{key}: {value}" for key, value in known.items() if key != "method")
    revision = f" (revision {code(target['revision'])})" if target.get("revision") else ""
    layers = side.get("feature_layers")
    more = f" It reads `hidden_states` {layers}." if layers else ""
    if flag is not None:
        more += f" The results below were not measured so: they are {flag}."
    name = markdown(target.get("name", "an unnamed target"))
    tuned = "tuned " if is_tuned(target) else ""
    return (
        f"{FAMILIES[family].paper.method} draft head for **{name}**{revision}. It proposes tokens that the "
        f"{tuned}target verifies: with greedy or lossless sampled verification the output is the {tuned}target's own."
        f"{more}\n\n{facts}."
    )


def _results(report: dict[str, Any] | None) -> str:
    if report is None:
        return "## Results\n\nNot measured. Run `headstart eval` on your own prompts before you deploy it."
    rows = [("all", report), *sorted((report.get("tasks") or {}).items())]
    flag = flag_of(report)
    mark = f" ({flag})" if flag else ""
    columns = (
        "task", "prompts", f"τ{mark}", f"acceptance by position{mark}", "tokens/s plain", f"tokens/s drafted{mark}",
        f"speed-up (clock){mark}",
    )  # fmt: skip
    cells = []
    for name, row in rows:
        rates = " ".join(f"{rate:.3f}" for rate in row["per_position_acceptance"])
        speeds = (row["baseline_tokens_per_s"], row["tokens_per_s"], row["speedup"])
        shown = ("–" if value is None else f"{value:.2f}" for value in speeds)
        cells.append((name, str(row["prompts"]), f"{row['tau']:.3f}", rates, *shown))
    identity = report.get("greedy_identity")
    same = (
        f" Identical to plain decoding: {identity['identical']} of {counted(identity['sequences'], 'sequences')}."
        if identity
        else ""
    )
    tree = markdown(report["tree"]["label"] if isinstance(report["tree"], dict) else report["tree"])
    where = markdown(f"{report['dtype']}, batch {report['batch_size']}, {report['device']}")
    legend = "τ = tokens committed per target forward (plain decoding = 1)."
    rule = f"{rule} verification, " if (rule := report.get("verification")) in LOSSLESS_RULES else ""
    setting = f"{tree}, temperature {report['temperature']:g}, {rule}{where}."
    warning = f"**{MEANINGS[flag]}.** Lossless verification would give other numbers." if flag else ""
    notes = "\n".join(f"- {markdown(note)}" for note in report.get("notes") or [])
    parts = ("## Results", warning, "\n".join(table(columns, cells)), f"{legend} {setting}{same}", notes)
    return "\n\n".join(part for part in parts if part)


def _use(repo_id: str, target: dict[str, Any], engines: list[str], side: dict[str, Any]) -> str:
    base, folder = hub_name(target) or "TARGET", repo_id.split("/")[-1]
    commands = launch_commands(repo_id, side, engines, folder, folder)
    doubt = why_doubt(side)
    shown = [
        f"{FORMATS[engine].title}:\n\n{fenced(commented(engine, side['type'], command, doubt), 'bash')}"
        for engine, command in commands.items()
    ]
    if any(f"{folder}/{ADAPTER}" in command for command in commands.values()):
        fetch = shlex.join(["hf", "download", repo_id, "--include", f"{ADAPTER}/*", "--local-dir", folder])
        shown.insert(0, f"Engines apply the adapter to the base from a folder:\n\n{fenced(fetch, 'bash')}")
    if names := [name for name in NAMES if any(f"{folder}/{name}" in command for command in commands.values())]:
        fetch = shlex.join(["hf", "download", repo_id, *names, "--local-dir", folder])
        said = "Engines read what `headstart tune` measured from files beside the head"
        shown.insert(0, f"{said}:\n\n{fenced(fetch, 'bash')}")
    if shown and (why := why_tokens(side, markdown)):
        shown.insert(0, why)
    measure = shlex.join(["headstart", "eval", "--head", repo_id, "--target", base, "--data", "prompts.jsonl"])
    shown.append(f"Measure it on your own prompts:\n\n{fenced(measure, 'bash')}")
    return "## Use\n\n" + "\n\n".join(shown)


def _data(side: dict[str, Any]) -> str:
    """What the head was trained on, and on how much of it."""
    recipe, rest = side.get("recipe") or {}, side.get("provenance") or {}
    data = recipe.get("data") or {}
    lines = [f"- {_source(source)}" for source in data.get("sources") or []]
    prompts = (data.get("distill") or {}).get("prompts") or []
    lines += [f"- answers of the target itself to {_source(source)}" for source in prompts]
    if isinstance(written := (data.get("distill") or {}).get("written"), int) and written > 0:
        lines.append(f"- answers of the target itself to {counted(written, 'prompts', ',')} that it wrote, at most")
    found, trained = rest.get("data") or {}, rest.get("training") or {}
    facts = [
        counted(found[key], said, ",")
        for key, said in (("samples", "conversations"), ("supervised_tokens", "supervised tokens in them"))
        if isinstance(found.get(key), int)
    ]
    if isinstance(trained.get("supervised_tokens"), int) and isinstance(trained.get("step"), int):
        seen = counted(trained["supervised_tokens"], "supervised tokens", ",")
        facts.append(f"{seen} seen in {counted(trained['step'], 'steps', ',')}")
    parts = ["\n".join(lines), "; ".join(facts) + "." if facts else ""]
    return "\n\n".join(["## Data", *filter(None, parts)]) if lines or facts else ""


def _source(source: dict[str, Any]) -> str:
    name, digest = str(source.get("dataset") or source.get("path")), source.get("sha256")
    if source.get("dataset") and name != OWN_DATA:
        shown = f"[{markdown(name)}](https://huggingface.co/datasets/{quote(name)})"
    else:
        shown = name if name in (OWN_DATA, HELD_OUT, ANSWERS) else code(name)
    shown += f" (sha256 {code(str(digest)[:16])})" if digest else ""
    return shown + (f" (first {markdown(source['limit'])})" if source.get("limit") else "")


def _citation(family: str) -> str:
    _, title, authors, arxiv, where = FAMILIES[family].paper
    if not arxiv:
        return f"Method: *{title}*, {authors} ({where}). Trained with Headstart."
    fields = {"title": title, "author": authors, "journal": f"arXiv:{arxiv}", "year": f"20{arxiv[:2]}"}
    entry = ",\n".join([f"@article{{{family}-{arxiv}", *(f"  {key} = {{{value}}}" for key, value in fields.items())])
    said = f"Method: *{title}*, arXiv [{arxiv}](https://arxiv.org/abs/{arxiv}). Trained with Headstart."
    return f"## Citation\n\n{said}\n\n```bibtex\n{entry}\n}}\n```"


def _training(side: dict[str, Any]) -> str:
    rest = side.get("provenance") or {}
    kept = {key: rest[key] for key in ("git_revision", "versions", "device", "training", "data") if key in rest}
    blocks = []
    parity = rest.get("serving_parity") or {}
    if parity and not parity.get("passed", True):
        middle = ""
        if "median_tolerance" in parity:
            middle = f"; {parity['median']:.3g} in the median token, rounding explains {parity['median_tolerance']:g}"
        blocks.append(
            f"**Exported by force**: the decode loop's features differ from training's (relative {parity['worst']:.3g} "
            f"at {code(parity['where'])}, rounding explains {parity['tolerance']:g}{middle}); serving may accept "
            "less than training promised."
        )
    if side.get("recipe"):
        blocks.append(_folded("Recipe", side["recipe"]))
    if kept:
        blocks.append(_folded("Provenance", kept))
    return "## Training\n\n" + "\n\n".join(blocks) if blocks else ""


def _folded(title: str, value: dict[str, Any]) -> str:
    text = "\n".join(map(in_json, json.dumps(value, indent=1, ensure_ascii=False).split("\n")))
    return f"<details><summary>{title}</summary>\n\n{fenced(text, 'json')}\n\n</details>"


def _licence(target: dict[str, Any]) -> str:
    name = markdown(target.get("name", "its target"))
    return (
        f"## Licence\n\nThe head was trained on outputs and hidden states of {name} and may hold rows of its output "
        "matrix: the target's licence applies to it as well."
    )
