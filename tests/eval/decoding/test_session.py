"""A Decoder goes on where fusing, the fused form or a capture fails; only out of memory and demands end a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engine import tiny

from headstart.eval.config import EvalConfig, TreeConfig
from headstart.eval.decoding import graphs, session
from headstart.eval.decoding.engine import Engine
from headstart.eval.decoding.fused import proof
from headstart.eval.decoding.fused.model import FusedModel
from headstart.eval.decoding.session import Decoder
from headstart.eval.drafters import Drafter, build_drafter
from headstart.eval.kernels.capture import Uncapturable
from headstart.heads.errors import ConfigError
from headstart.heads.targets.target import Target

CONTEXTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 9, 8]]
CHAIN = TreeConfig(kind="chain", depth=3)


def target() -> Target:
    return Target.from_model(tiny("llama"))


def decoder(engine: str = "auto", temperature: float = 0.0) -> Decoder:
    """A decoder that fuses on a CPU as "auto" does on a GPU."""
    made = Decoder(target(), EvalConfig(engine="transformers", tree=CHAIN, temperature=temperature))
    made.config = EvalConfig(engine=engine, tree=CHAIN, temperature=temperature)
    made.fused = FusedModel(made.target.model, session.attention_windows(made.target.model.config))
    return made


def drafter() -> Drafter:
    built = build_drafter(None, EvalConfig(drafter="ngram", tree=CHAIN))
    assert built is not None
    return built


def answers(made: Decoder, drafts: bool = True) -> list[list[int]]:
    decoded = made.run(CONTEXTS, drafter() if drafts else None, 12, seed=4)
    return [answer.tokens for answer in decoded.answers]


def expected(temperature: float = 0.0) -> list[list[int]]:
    return answers(Decoder(target(), EvalConfig(engine="transformers", tree=CHAIN, temperature=temperature)), False)


@pytest.mark.parametrize(
    "error", [AttributeError("no layernorm"), RuntimeError("a kernel\nand more"), torch.OutOfMemoryError("no more")]
)
def test_whatever_fails_while_fusing_leaves_the_generic_path(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any) -> FusedModel:
        raise error

    monkeypatch.setattr(session, "FusedModel", fail)
    monkeypatch.setattr(session.Choices, "of", lambda *_, **__: None)
    monkeypatch.setattr(Target, "device", torch.device("cuda"), raising=False)
    made = Decoder.__new__(Decoder)
    made.target, made.config, made.unfused = target(), EvalConfig(), None
    assert made._fuse() is None
    assert made.unfused == f"{type(error).__name__}: {str(error).splitlines()[0]}"
    made.config = EvalConfig(engine="fused")
    with pytest.raises(ConfigError, match="eval.engine: found 'fused', but .*set eval.engine=transformers"):
        made._fuse()


def test_a_layer_without_memory_for_float32_leaves_the_generic_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.25 GiB.\nand more")

    made = decoder()
    monkeypatch.setattr(proof, "float_copy", no_memory)
    with monkeypatch.context() as card:
        card.setattr(session.Choices, "of", lambda *_, **__: None)
        card.setattr(Target, "device", torch.device("cuda"), raising=False)
        made.fused = made._fuse()
    assert made.path == "generic" and answers(made) == expected()
    assert made.slow is not None and "CUDA out of memory. Tried to allocate 5.25 GiB." in made.slow
    with pytest.raises(ConfigError, match="eval.engine: found 'fused', but .*out of memory"):
        Decoder(target(), EvalConfig(engine="fused", tree=CHAIN))


def test_a_fused_form_that_fails_while_it_decodes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = decoder()
    assert made.path == "fused" and made.slow is None
    layers, calls = made.fused.layers, []  # type: ignore[union-attr]
    forward = layers[0].forward

    def fails_later(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("no kernel image")
        return forward(*given, **named)

    monkeypatch.setattr(layers[0], "forward", fails_later)
    assert answers(made) == expected() and len(calls) == 6
    assert made.path == "generic" and made.slow is not None and "RuntimeError: no kernel image" in made.slow
    demanded = decoder("fused")
    monkeypatch.setattr(demanded.fused.layers[0], "forward", fails_later)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="no kernel image"):
        answers(demanded)


def test_an_error_that_the_fused_form_does_not_cause_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made, broken = decoder(), drafter()

    def fail(*_: Any) -> None:
        raise LookupError("the draft's own")

    monkeypatch.setattr(broken, "propose", fail)
    with pytest.raises(LookupError, match="the draft's own"):
        made.run(CONTEXTS, broken, 12, seed=0)
    memory = decoder()

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(FusedModel, "forward", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="no more"):
        answers(memory)
    assert memory.path == "fused"


def prompts_capture(monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    """Make new engines capture the chunks of their prompts, or not."""
    init = Engine.__init__

    def made(self: Engine, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.prompts.captures = captures

    monkeypatch.setattr(Engine, "__init__", made)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cycles_that_cannot_be_captured_run_one_by_one(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    """The capture fails after it has run cycles: the state, and what was drawn, are as before."""
    reference = answers(decoder(temperature=temperature), drafts=False)
    made = decoder(temperature=temperature)
    monkeypatch.setattr(
        Engine, "captures", property(lambda self: self.fused is not None and self.fused.uncaptured is None)
    )
    monkeypatch.setattr(graphs, "warm_up", lambda run, device: run())
    tries = []

    def capture(run: Any, *_: Any, restore: Any) -> Any:
        tries.append(1)
        run()
        restore()
        run()
        raise Uncapturable("it waits for the host")

    monkeypatch.setattr(graphs, "capture", capture)
    prompts_capture(monkeypatch, False)
    for _ in range(2):
        assert answers(made, drafts=False) == reference
    assert len(tries) == 1 and made.path == "fused"
    assert made.slow == "decoding cycles ran operation by operation, not as CUDA graphs: it waits for the host"


def test_prompts_that_cannot_be_captured_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.eval.decoding import prefill

    made = decoder()
    monkeypatch.setattr(prefill, "warm_up", lambda run, device: run())

    def capture(run: Any, *_: Any, pool: Any) -> Any:
        run()
        raise Uncapturable("it waits for the host")

    monkeypatch.setattr(prefill, "capture", capture)
    prompts_capture(monkeypatch, True)
    assert answers(made) == expected()
    prompts = made.engine.prompts  # type: ignore[union-attr]
    assert made.slow == "prompts ran operation by operation, not as CUDA graphs: it waits for the host"
    assert prompts.uncaptured == "it waits for the host" and not prompts.captures and not prompts.graphs


class WrongReplay:
    """A graph whose replays do nothing after the first `right` ones, as where a model works on the host."""

    def __init__(self, run: Any, right: int):
        self.run, self.right, self.table = run, right, torch.zeros_like(run()[0])

    def replay(self) -> None:
        self.right -= 1
        if self.right >= 0:
            self.table.copy_(self.run()[0])


@pytest.mark.parametrize("fails", ["capture", "replay", "second replay"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_transformers_own_forward_that_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch, temperature: float, fails: str
) -> None:
    made = Decoder(target(), EvalConfig(tree=CHAIN, temperature=temperature))
    assert made.path == "generic" and made.slow is None and not made._capturable
    made.unfused = "X lacks ['v_proj']"
    reference = answers(made, drafts=False)
    monkeypatch.setattr(Decoder, "_capturable", property(lambda self: self.uncaptured is None))
    monkeypatch.setattr(Engine, "captures", property(lambda self: self.capturable and self.uncaptured is None))
    monkeypatch.setattr(graphs, "warm_up", lambda run, device: run())
    tries = []

    def capture(run: Any, *_: Any, restore: Any) -> Any:
        tries.append(1)
        run()
        restore()
        if fails == "capture":
            raise Uncapturable("it waits for the host")
        graph = WrongReplay(run, int(fails == "second replay"))
        return graph, (graph.table, None)

    monkeypatch.setattr(graphs, "capture", capture)
    made.drop_buffers()
    for _ in range(2):
        assert answers(made, drafts=False) == reference
    assert len(tries) == 1 and made.slow is not None and made.slow.endswith(": X lacks ['v_proj']")
    assert ("it waits for the host" if fails == "capture" else "gave other tokens") in made.slow
