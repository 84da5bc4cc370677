"""The verdict: made-up numbers, and the sentences that a person expects of them, stated by hand."""

from __future__ import annotations

from typing import Any

import pytest

from headstart.eval.measuring.verdict import (
    Training,
    interval_of,
    judge,
    lines_of,
    markdown_of,
    more_prompts,
    title_of,
    verdict_of_report,
)
from headstart.eval.tuning.verdict import verdict_of_tuning
from headstart.heads.escape import markdown


def report(**changes: Any) -> dict[str, Any]:
    """A chain of 3 with τ 2.5 on a card: a cycle takes τ ÷ speed-up = 1.25 plain steps, a level (1.25 − 1) ÷ 3."""
    return {
        "drafter": "eagle3", "head": {"type": "eagle3"}, "device": "H200", "device_type": "cuda", "batch_size": 1,
        "tree": {"kind": "chain", "depth": 3, "label": "chain3"}, "prompts": 20, "forwards": 100, "tau": 2.5,
        "tau_ci95": [2.25, 2.75], "per_position_acceptance": [0.75, 0.5, 0.25], "speedup": 2.0,
        "speedup_ci95": [1.75, 2.25], "lossless": True, "synthetic": None, "engine": None, "max_new_tokens": 128,
        "scheduler": None, "sweeps": None, "cut": {"answers": 20, "cut": 0}, "chain_speedups": None, **changes,
    }  # fmt: skip


TUNE = "To find the best draft for each batch size, run `headstart tune`."
TRAIN = "Train a head: `headstart run RECIPE`."
MORE_DATA = "Train on more conversations like those that you serve."
LOSES = {"speedup": 0.8, "speedup_ci95": [0.75, 0.85], "per_position_acceptance": [0.9, 0.8, 0.75]}
RISING = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
FLAT = [1.0, 1.2, 1.5, 1.5, 1.5, 1.5]
FALLING = [1.0, 1.5, 2.0, 2.0, 1.8, 1.8]


def point(batch: int, speedup: float | None, interval: list[float] | None = None) -> dict[str, Any]:
    """τ 2: the interval of the speed-up is that of τ, times the speed-up ÷ 2."""
    return {"batch": batch, "speedup": speedup, "tau": 2.0, "tau_ci95": interval}


#: (changes of the report, training, pays, says, next)
CASES: dict[str, tuple[dict[str, Any], Training | None, bool | None, list[str], list[str]]] = {
    "pays": ({}, None, True, [
        "It pays on H200 at batch 1: 2.00× plain decoding (95 %: 1.75–2.25) with a chain of 3."], [TUNE]),
    "a batch has no interval of its own": ({"batch_size": 8, "speedup_ci95": None, "speedup": 1.25}, None, True, [
        "It pays on H200 at batch 8: 1.25× plain decoding (95 %, by the interval of τ: 1.12–1.38) with a chain of 3."],
        [TUNE]),
    "a shorter chain is faster": ({"chain_speedups": {"1": 1.5, "2": 2.25, "3": 2.0}}, None, True, [
        "It pays on H200 at batch 1: 2.00× plain decoding (95 %: 1.75–2.25) with a chain of 3.",
        "By length of the chain (1: 1.50×, 2: 2.25×, 3: 2.00×), 2 is the fastest."],
        ["Draft a chain of 2, which is faster: eval.tree.depth=2."]),
    "a sweep": ({"sweeps": {"batch": {"points": [
        point(1, 2.0, [1.5, 2.5]), point(4, 1.5, [1.5, 2.5]), point(16, 1.0, [1.5, 2.5]), point(64, 0.5, [1.5, 2.5]),
        {"batch": 128, "out_of_memory": True}]}}}, None, True, [
        "It pays on H200 at batch 1: 2.00× plain decoding (95 %: 1.75–2.25) with a chain of 3.",
        "By batch size: it pays at 1 and 4; does not pay at 64; cannot be told at 16."], []),
    "cut, and longer answers": ({"cut": {"answers": 20, "cut": 20}, "longer": {
        "max_new_tokens": 512, "tau": 1.43, "tau_ci95": [1.37, 1.51], "answers": 20, "cut": 3}}, None, True, [
        "It pays on H200 at batch 1: 2.00× plain decoding (95 %: 1.75–2.25) with a chain of 3.",
        "20 of 20 answers were cut at 128 tokens; with up to 512 tokens (3 of 20 were cut again) τ is 1.43 (95 %: "
        "1.37–1.51)."], [TUNE]),
    "one answer, measured again longer": ({"cut": {"answers": 20, "cut": 1}, "longer": {
        "max_new_tokens": 512, "tau": 1.43, "tau_ci95": None, "answers": 1, "cut": 0}}, None, True, [
        "It pays on H200 at batch 1: 2.00× plain decoding (95 %: 1.75–2.25) with a chain of 3.",
        "1 of 20 answers was cut at 128 tokens; with up to 512 tokens (none was cut) τ is 1.43."], [TUNE]),
    "lossy and cut": ({"lossless": False, "cut": {"answers": 20, "cut": 5}}, None, True, [
        "It pays on H200 at batch 1: 2.00× plain decoding (95 %: 1.75–2.25) with a chain of 3.",
        "Acceptance was LOSSY: the answers are not the target's own, and a lossless run accepts less.",
        "5 of 20 answers were cut at 128 tokens; what whole answers give was not measured: eval.max_new_tokens=256 "
        "measures longer ones."], [TUNE]),
    "cannot be told yet": ({"speedup": 1.25, "speedup_ci95": [0.75, 1.75]}, None, None, [
        "It cannot be told yet on H200 at batch 1, because the interval holds 1: 1.25× plain decoding (95 %: "
        "0.75–1.75) with a chain of 3."],
        ["About 60 more prompts like these would tell, if the speed-up stays what it is.",
         "Draft a shorter chain, or train a smaller head: position 3 is accepted in 25% of the cycles, and a level "
         "costs 0.33 plain steps on average; try eval.tree.depth=2."]),
    "as fast as plain decoding": ({"speedup": 1.0, "speedup_ci95": [0.75, 1.25]}, None, None, [
        "It cannot be told yet on H200 at batch 1, because the interval holds 1: 1.00× plain decoding (95 %: "
        "0.75–1.25) with a chain of 3."],
        ["More prompts will hardly tell: it is about as fast as plain decoding.",
         "Draft a shorter chain, or train a smaller head: position 3 is accepted in 25% of the cycles, and a level "
         "costs 0.50 plain steps on average; try eval.tree.depth=2."]),
    "one prompt": ({"prompts": 1, "speedup_ci95": None, "tau_ci95": None}, None, None, [
        "One prompt has no interval, so it cannot be told on H200 at batch 1: 2.00× plain decoding with a chain of 3."],
        ["Give more prompts: an interval needs two or more."]),
    "does not pay": ({**LOSES}, None, False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."],
        [MORE_DATA]),
    "a level costs more than it brings": ({**LOSES, "per_position_acceptance": [0.5, 0.4, 0.3]}, None, False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."],
        ["Train a smaller head (fewer layers or a smaller head.draft_vocab_size): position 1 is accepted in 50% of the "
         "cycles, and a level costs 0.71 plain steps on average."]),
    "another length gains": ({**LOSES, "chain_speedups": {"1": 1.25, "2": 0.9, "3": 0.8}}, None, False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3.",
        "By length of the chain (1: 1.25×, 2: 0.90×, 3: 0.80×), 1 is the fastest."],
        ["Draft a chain of 1, which gained: eval.tree.depth=1."]),
    "no length gains": ({**LOSES, "chain_speedups": {"1": 0.95, "2": 0.9, "3": 0.8}}, None, False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3.",
        "By length of the chain (1: 0.95×, 2: 0.90×, 3: 0.80×), no length gains."], [MORE_DATA]),
    "another batch gains": ({**LOSES, "batch_size": 64, "sweeps": {"batch": {"points": [
        point(1, 2.0, [1.5, 2.5]), point(64, 0.5, [1.5, 2.5])]}}}, None, False, [
        "It does not pay on H200 at batch 64: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3.",
        "By batch size: it pays at 1; does not pay at 64."],
        ["Draft at batch 1, where it gains 2.00×, and decode plainly where it loses.",
         "Let the scheduler draft only what is expected to pay at this batch: eval.scheduler=on."]),
    "prompt lookup has no scheduler": ({**LOSES, "batch_size": 64, "drafter": "ngram", "head": None}, None, False, [
        "It does not pay on H200 at batch 64: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."], [TRAIN]),
    "prompt lookup has no head to train": ({**LOSES, "drafter": "ngram", "head": None,
        "per_position_acceptance": [0.5, 0.4, 0.3]}, Training(RISING), False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."], [TRAIN]),
    "prompt lookup, too long": ({**LOSES, "drafter": "ngram", "head": None,
        "per_position_acceptance": [0.9, 0.8, 0.3]}, None, False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."], [
        "Draft a shorter chain: position 3 is accepted in 30% of the cycles, and a level costs 0.71 plain steps on "
        "average; try eval.tree.depth=2."]),
    "the scheduler lost": ({**LOSES, "batch_size": 64, "scheduler": {}}, None, False, [
        "It does not pay on H200 at batch 64: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."], [MORE_DATA]),
    "others' answers, still rising": ({**LOSES}, Training(RISING, own_share=0.25), False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."],
        ["Let the target answer the prompts itself (data.distill.prompts): 25% of the answer tokens are its own greedy "
         "choice.",
         "Train longer (train.epochs): the accepted length in training went from 1.50 to 1.90 over the last third and "
         "still rises."]),
    "sampled answers, level": ({**LOSES}, Training(FLAT, True, 0.6), False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."],
        ["Let the target answer the prompts itself (data.distill.prompts), unless it sampled these answers: 60% of the "
         "answer tokens are its own greedy choice.",
         "Train on more conversations: the accepted length on held-out conversations went from 1.50 to 1.50 over the "
         "last third and rises no more."]),
    "learnt by heart": ({**LOSES}, Training(FALLING, True, 0.99), False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."],
        ["Train on more conversations: the accepted length on held-out conversations went from 2.00 to 1.80 over the "
         "last third, so it has learnt these by heart."]),
    "rising in training, not on held-out conversations": ({**LOSES}, Training(RISING, validated=1.62), False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."],
        ["Train on more conversations: the accepted length was 1.90 in training and 1.62 on held-out conversations, so "
         "it has learnt these by heart."]),
    "rising on both, ended by a clock": ({**LOSES, "recipe": {"train": {"epochs": 10.0, "max_seconds": 420.0}}},
        Training(RISING, validated=1.64), False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."],
        ["Train longer (train.epochs, train.max_seconds): the accepted length in training went from 1.50 to 1.90 over "
         "the last third and still rises."]),
    "too few records say nothing": ({**LOSES}, Training(RISING[:5]), False, [
        "It does not pay on H200 at batch 1: 0.80× plain decoding (95 %: 0.75–0.85) with a chain of 3."], [MORE_DATA]),
    "no baseline": ({"speedup": None, "speedup_ci95": None}, None, None, [
        "Plain decoding was not measured, so there is no speed-up."], ["Measure both ways: eval.baseline=true."]),
    "plain decoding": ({"drafter": "plain", "speedup": None}, None, None, [
        "Nothing drafted: plain decoding was measured."], ["Give a head: --head DIR."]),
    "synthetic": ({"synthetic": [0.8], "batch_size": 4}, None, None, [
        "Acceptance was set, not measured. This says what a head with τ 2.50 would gain: at batch 4 decoding would be "
        "2.00× as fast."], ["Train a head and measure it: `headstart run RECIPE`."]),
    "a server": ({"engine": {"name": "vllm"}, "speedup": None}, None, None, [
        "The server's counters say τ 2.50 (95 %: 2.25–2.75); they hold no speed of plain decoding to compare with."],
        ["Measure the same prompts on the server without speculation, and compare tokens/s."]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_branch_says_what_a_person_expects(name: str) -> None:
    changes, training, pays, says, following = CASES[name]
    found = verdict_of_report(report(**changes), training)
    assert (found.pays, found.says, found.next) == (pays, says, following)


CPU_FIRST = "The speed-up on a CPU (2.00×) says nothing about a card that serves; only τ carries over to it."
CPU_THEN = (
    ": a card gains where a cycle takes less time than that many plain steps. At Llama-3.1-8B sizes on an H100 at "
    "batch 1 a cycle with a chain of 3 took 1.25 plain steps, which "
)


@pytest.mark.parametrize(
    ("changes", "pays", "says"),
    [
        ({}, None, f"τ is 2.50 (95 %: 2.25–2.75){CPU_THEN}this τ exceeds."),
        ({"tau": 1.2, "tau_ci95": [1.1, 1.3]}, None,
         f"τ is 1.20 (95 %: 1.10–1.30){CPU_THEN}is not told apart from this τ."),
        ({"tau": 1.1, "tau_ci95": [1.05, 1.2]}, None, f"τ is 1.10 (95 %: 1.05–1.20){CPU_THEN}this τ does not reach."),
        ({"tau_ci95": None}, None, f"τ is 2.50{CPU_THEN}is not told apart from this τ."),
        ({"tau": 1.0, "tau_ci95": [1.0, 1.0]}, False,
         "No draft was accepted (τ 1.00): no card gains on such prompts."),
        ({"tau": 1.0, "tau_ci95": None}, None,
         "No draft was accepted (τ 1.00). One prompt has no interval, so more prompts must show whether that stays."),
        ({"tau": 1.0, "tau_ci95": [1.0, 1.0], "per_position_acceptance": []}, None,
         "Nothing was drafted here, so τ says nothing about a card either."),
        ({"tau": 1.0, "tau_ci95": [1.0, 1.0], "scheduler": {}}, None,
         "No draft was accepted (τ 1.00), but the scheduler drafts less on a CPU than on a card."),
        ({"tree": {"kind": "chain", "depth": 7, "label": "chain7"}}, None,
         f"τ is 2.50 (95 %: 2.25–2.75){CPU_THEN}this τ exceeds; with a chain of 7, as here, it takes longer."),
        ({"tree": {"kind": "dynamic", "depth": 3, "label": "dynamic60"}, "tau": 1.1, "tau_ci95": [1.05, 1.2]}, None,
         f"τ is 1.10 (95 %: 1.05–1.20){CPU_THEN}this τ does not reach; with dynamic60, as here, it takes longer."),
    ],
)  # fmt: skip
def test_a_cpu_is_judged_by_tau_alone(changes: dict[str, Any], pays: bool | None, says: str) -> None:
    found = verdict_of_report(report(device_type="cpu", **changes), Training(RISING))
    assert found.pays is pays and found.says == [CPU_FIRST, says]
    assert found.next[0] == "Measure it on the card that will serve." and found.next[1].startswith("Train longer")
    assert found.tokens is None and found.speedup is None, "no number of a CPU's clock goes into a launch command"


def test_a_cpu_says_that_acceptance_was_lossy() -> None:
    assert verdict_of_report(report(device_type="cpu", lossless=False)).says[2].startswith("Acceptance was LOSSY")


def test_the_title_names_the_batch_sizes_where_they_differ() -> None:
    both = [point(1, 0.5, [1.5, 2.5]), point(4, 2.0, [1.5, 2.5])]
    found = verdict_of_report(report(**LOSES, sweeps={"batch": {"points": both}}))
    assert found.pays is False
    assert lines_of(found.to_json())[0] == "Verdict: drafting does not pay at batch 1, but it pays at batch 4"
    again = [point(1, 2.0, [1.5, 2.5])]  # the sweep's few prompts say otherwise at the same batch size
    assert verdict_of_report(report(**LOSES, sweeps={"batch": {"points": again}})).title == "drafting does not pay"
    assert verdict_of_report(report()).title == title_of(True, [(1, True), (8, True)]) == "drafting pays"
    unsure = title_of(None, [(1, None), (4, True), (8, True), (16, False)])
    assert unsure == "it cannot be told whether drafting pays at batch 1, but it pays at batch 4 and 8"
    assert title_of(False, [(1, None), (4, False)]) == "drafting does not pay at batch 4"
    tuned = [choice(1, 2.0, [1.5, 2.5], 3), choice(16, 0.8, [1.8, 2.2], 0)]
    assert verdict_of_tuning({"device": "H200", "choices": tuned}).title == "drafting pays at batch 1"
    earlier = {key: value for key, value in found.to_json().items() if key != "title"}
    assert lines_of(earlier)[0] == "Verdict: drafting does not pay"


def test_which_length_engines_are_launched_with() -> None:
    assert verdict_of_report(report()).tokens == 3
    assert verdict_of_report(report(chain_speedups={"1": 1.5, "2": 2.25, "3": 2.0})).tokens == 2
    assert verdict_of_report(report(**LOSES)).tokens is None
    assert verdict_of_report(report(**LOSES, chain_speedups={"1": 1.25, "2": 0.9, "3": 0.8})).tokens == 1
    assert verdict_of_report(report(**LOSES, chain_speedups={"1": 0.9, "2": 0.9, "3": 0.8})).tokens is None
    assert verdict_of_report(report(tree={"kind": "dynamic", "depth": 6, "label": "dynamic"})).tokens is None
    assert verdict_of_report(report(scheduler={})).tokens is None


def test_intervals() -> None:
    assert judge([1.0, 1.5]) is None and judge([1.01, 1.5]) is True and judge([0.5, 0.99]) is False
    assert judge(None) is None
    tree = {"kind": "chain", "depth": 3, "label": "chain3, scheduled"}
    scheduled = verdict_of_report(report(tree=tree, scheduler={}))
    assert scheduled.says[0].endswith(" with chain3, scheduled.")
    assert interval_of({"tau": 2.0, "tau_ci95": [1.5, 2.5]}, 1.2) == pytest.approx([0.9, 1.5])
    assert interval_of({"tau": 2.0, "tau_ci95": None}, 1.2) is None
    # twice as near as the interval reaches: four times as many prompts
    assert more_prompts(10, 1.25, [0.75, 1.5]) == 30 and more_prompts(10, 0.75, [0.5, 1.25]) == 30
    assert more_prompts(10, 1.001, [0.5, 1.5]) is None


def choice(batch: int, speedup: float, interval: list[float] | None, launched: int, **more: Any) -> dict[str, Any]:
    return {
        "batch": batch, "measured_speedup": speedup, "measured_tau": 2.0, "label": "chain3", "launched": launched,
        "tree": {"kind": "chain", "depth": 3},
        "measured": {"tau": 2.0, "tau_ci95": interval, "prompts": 10}, "scheduled": None, **more,
    }  # fmt: skip


def test_a_tuning() -> None:
    choices = [
        choice(1, 2.0, [1.5, 2.5], 3), choice(4, 1.1, [1.6, 2.4], 2), choice(16, 0.8, [1.8, 2.2], 0),
        choice(64, 0.7, [1.8, 2.2], 0, scheduled={"measured_speedup": 1.05}),
    ]  # fmt: skip
    found = verdict_of_tuning({"device": "H200", "device_type": "cuda", "choices": choices})
    assert (found.pays, found.tokens, found.batch_size, found.speedup) == (True, 3, 1, 2.0)
    assert found.says == [
        "On H200. By batch size: it pays at 1; does not pay at 16 and 64; cannot be told at 4.",
        "Batch 1: 2.00× (95 %, by the interval of τ: 1.50–2.50) with a chain of 3; launch engines with 3 drafted "
        "tokens.",
        "Batch 4: 1.10× (95 %, by the interval of τ: 0.88–1.32) with a chain of 3; launch engines with 2 drafted "
        "tokens.",
        "Batch 16: 0.80× (95 %, by the interval of τ: 0.72–0.88) with a chain of 3; launch engines without drafting.",
        "Batch 64: 0.70× (95 %, by the interval of τ: 0.63–0.77) with a chain of 3; launch engines without drafting.",
    ]
    assert found.next == [
        "At batch 4 about 39 more prompts would tell: tune.prompts=49.",
        "Decode plainly at batch 16.",
        "At batch 64 eval.scheduler=on is faster: 1.05×.",
    ]


def test_a_tuning_that_finds_nothing() -> None:
    lost = verdict_of_tuning({"device": "H200", "device_type": "cuda", "choices": [choice(1, 0.8, [1.8, 2.2], 0)]})
    advice = "Train on more conversations like those that you serve, or train a smaller head."
    assert (lost.pays, lost.tokens, lost.next) == (False, None, ["Decode plainly at batch 1.", advice])
    open_ = verdict_of_tuning({"device": "H200", "device_type": "cuda", "choices": [choice(1, 1.2, None, 3)]})
    more = "At batch 1 give more prompts (tune.prompts): an interval needs two or more."
    assert (open_.pays, open_.tokens, open_.next) == (None, None, [more, advice])
    cpu = verdict_of_tuning({"device": "EPYC", "device_type": "cpu", "choices": [choice(1, 2.0, [1.5, 2.5], 3)]})
    assert (cpu.pays, cpu.tokens, cpu.next) == (None, None, ["Tune on the card that will serve."])
    assert cpu.says[1] == "The fastest draft at batch 1 was a chain of 3, with τ 2.00."


@pytest.mark.parametrize("name", CASES)
def test_a_terminal_of_80_columns_shows_it(name: str) -> None:
    changes, training, *_ = CASES[name]
    found = verdict_of_report(report(**changes), training).to_json()
    lines = lines_of(found)
    assert max(map(len, lines)) <= 80 and lines[0].startswith("Verdict: ")
    joined = " ".join(" ".join(lines).split())
    assert all(sentence in joined for sentence in [*found["says"], *found["next"]])


def test_markdown_escapes_what_others_wrote() -> None:
    found = verdict_of_report(report(device="<b>card</b>")).to_json()
    text = "\n".join(markdown_of(found, markdown))
    assert text.startswith("**Verdict: drafting pays.**\n\n- It pays on ") and "<b>" not in text
