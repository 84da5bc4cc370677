"""The memory that a plan names for a CPU is what a run takes, and what does not fit is refused before it costs."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.train.plan import GIB

#: runs the command line, then prints the most memory that the process held, in bytes
CHILD = """
import sys
from headstart.cli import main
from headstart.heads.host_memory import peak_bytes
code = main(sys.argv[1:])
print("peak", peak_bytes())
sys.exit(code)
"""
EAGLE3 = "{type: eagle3, depth: 4, draft_vocab_size: %d, intermediate_size: 128}"
#: vocabulary, tokens of a pack, head. The first is Python alone; the others hold chunks of logits, the teacher's logits
#: of a whole pack, and four output matrices with their optimiser
RUNS = {
    "little": (1000, 256, EAGLE3 % 64),
    "logits": (50_000, 2048, EAGLE3 % 8000),
    "matrices": (60_000, 512, "{type: medusa, depth: 2}"),
}


@pytest.fixture
def recipe_of(recipe: Path, tiny_target: Path, tmp_path: Path) -> Callable[..., Path]:
    """A recipe with a target of another vocabulary, and answers that fill packs."""

    def make(vocab: int, pack: int, head: str) -> Path:
        place = tmp_path / "wide"
        place.mkdir()
        for file in (*tiny_target.glob("tokenizer*"), *tiny_target.glob("chat_template*")):
            (place / file.name).write_bytes(file.read_bytes())
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
                tie_word_embeddings=True,
            )
        ).save_pretrained(place)  # fmt: skip
        draw, talk = random.Random(0), tmp_path / "long.jsonl"
        with talk.open("w") as file:
            for number in range(24):
                answer = "".join(draw.choice("abcdefgh ") for _ in range(240))
                turns = [{"role": "user", "content": f"Say {number}"}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": turns}) + "\n")
        path = tmp_path / "wide.yaml"
        path.write_text(
            f"run_dir: {tmp_path}/wide-run\ntarget: {{name: {place}, device: cpu}}\nhead: {head}\n"
            f"data: {{sources: [{{path: {talk}}}], held_out_fraction: 0.1, pack_tokens: {pack}}}\n"
            "train: {steps: 2, tau_prompts: 0}\neval: {tree: {depth: 2}}\nexport: {engines: [portable]}\n"
        )
        return path

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_takes_what_its_plan_says(name: str, headstart: Callable, recipe_of: Callable) -> None:
    made = recipe_of(*RUNS[name])
    shown = headstart("plan", made, "--json")
    assert shown.code == 0, shown.err
    assert shown.json["layout"]["host"] and shown.json["fits"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, "train", str(made)], capture_output=True, text=True, env=alone, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    peak = int(ran.stdout.rsplit("peak ", 1)[1])
    assert shown.json["peak"] == pytest.approx(peak, rel=0.25), (shown.json["peak"] / GIB, peak / GIB)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(
    headstart: Callable, recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from headstart import fit

    monkeypatch.setattr("headstart.targets.load_target", lambda config: pytest.fail("the target was loaded"))
    monkeypatch.setattr(fit, "local_device_bytes", lambda device: 500 << 20)
    for verb in ("run", "train"):
        refused = headstart(verb, recipe, "target.device=cpu", "data.pack_tokens=262144")
        assert refused.code == 2, refused.err
        said = " ".join(refused.err.split())
        assert "GiB of memory, and 0.5 GiB are free on this machine. With train.activation_checkpointing=true" in said
        assert "data.pack_tokens=" in said and "train.accumulation=" in said
        assert "train.check_memory=false tries it all the same" in said
    assert not (tmp_path / "run" / "head").exists()


def test_the_settings_that_are_named_fit(headstart: Callable, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.plan.local_device_bytes", lambda device: 500 << 20)
    wide = ("target.device=cpu", "data.pack_tokens=262144")
    refused = headstart("plan", recipe, *wide)
    assert refused.code == 2
    said = " ".join(refused.err.split())
    named = said.split("With ", 1)[1].split(" it needs", 1)[0].split()
    accepted = headstart("plan", recipe, wide[0], *named, "--json")
    assert accepted.code == 0, accepted.err
    assert accepted.json["peak"] < 500 << 20 and accepted.json["device_bytes"] == 500 << 20


def test_features_of_all_data_count_where_they_are_held(headstart: Callable, recipe: Path) -> None:
    stated = ("--samples", "10000", "--mean-tokens", "100", "--gpus", "1", "--gpu-memory", "80")
    plan = headstart("plan", recipe, "--json", "data.features=memory", *stated).json
    # three layers' inputs and the last hidden state, 32 numbers of two bytes each, and 12 bytes a token
    assert plan["memory"]["features of all data"] == 10_000 * 100 * (4 * 32 * 2 + 12)
    assert "features of all data" not in headstart("plan", recipe, "--json", *stated).json["memory"]
    # the fixture's prompts wait for answers, of which nobody knows the length
    unknown = headstart("plan", recipe, "--json", "data.features=memory").json
    assert unknown["memory"]["features of all data"] == 0
    assert any("their size is known when the prompts are answered" in note for note in unknown["notes"])
