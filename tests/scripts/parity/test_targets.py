"""Small targets of the parity gates: the toy language, and a model that learns it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from headstart.heads.errors import ConfigError
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig
from headstart.parity.targets import Language, byte_tokenizer, chat, small_target, teach, untaught_model
from headstart.parity.vllm import with_shifted_layers


def test_three_words_in_four_follow_the_rule() -> None:
    language, chance = Language.of(0), random.Random(5)
    words = language.sentence(chance, 4000).split(" ")
    kept = sum(language.follower[a] == b for a, b in zip(words, words[1:], strict=False))
    # 1 in 24 of the exceptions is the follower by chance
    assert abs(kept / 3999 - (0.75 + 0.25 / 24)) < 0.03
    assert set(words) <= set(language.words) and len(set(language.follower.values())) == 24


def test_an_answer_goes_on_where_its_prompt_ended() -> None:
    language = Language.of(0)
    talks = language.talks(3)
    for _ in range(20):
        asked, answer = next(talks)
        assert language.follower[asked.split(" ")[-1]] == answer.split(" ")[0]


def test_teaching_lowers_the_loss_of_texts_that_were_not_taught() -> None:
    torch.manual_seed(0)
    model, tokenizer, language = untaught_model("Qwen3"), byte_tokenizer(), Language.of(0)
    held_out = torch.tensor([chat(tokenizer, *next(language.talks(9)))])

    def loss() -> float:
        with torch.no_grad():
            return float(model(input_ids=held_out, labels=held_out).loss)

    before = loss()
    assert teach(model, tokenizer, language, 12) < before - 2.0
    assert loss() < before - 2.0


def test_a_target_of_sizes_that_engines_accept_is_read_back(tmp_path: Path) -> None:
    files = small_target("Phi-3", tmp_path, steps=1, prompts=5)
    target = load_target(TargetConfig(name=str(files.target), dtype="float32", device="cpu"))
    dims = target.dims
    assert (dims.model_type, dims.vocab_size, dims.num_layers) == ("phi3", 320, 8)
    assert target.stop_token_ids == (2,)
    asked = [json.loads(line)["prompt"] for path in (files.prompts, files.held_out) for line in open(path)]
    assert len(asked) == 5 + 16
    made = (files.target / "model.safetensors").stat().st_mtime_ns
    assert small_target("Phi-3", tmp_path, steps=1, prompts=5) == files
    assert (files.target / "model.safetensors").stat().st_mtime_ns == made


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found 'Llamma'"):
        small_target("Llamma", tmp_path)


@pytest.mark.parametrize(
    "config",
    [{"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "x": 1}, {"nested": {"target_layer_ids": [1, 3, 4]}, "x": 1}],
)
def test_shifted_layers_stand_in_a_copy(config: dict[str, Any], tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    (head / "headstart.json").write_text(json.dumps({"feature_layers": [2, 4, 5]}))
    other = with_shifted_layers(head, 1)
    written = json.loads((other / "config.json").read_text())
    assert written == {**config, "eagle_aux_hidden_state_layer_ids": [3, 5, 6]}
    assert json.loads((head / "config.json").read_text()) == config


def test_a_window_that_all_layers_share_is_longer_than_the_texts() -> None:
    assert untaught_model("Phi-3").config.sliding_window == 1024
    assert untaught_model("Gemma 3").config.sliding_window == 12
