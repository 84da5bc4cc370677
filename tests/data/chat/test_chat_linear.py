"""The fast way of finding turns against the definition, and what it costs."""

from __future__ import annotations

import math
import random
import time

import pytest
from chat_templates import ENDS, TEMPLATES, word_tokenizer
from reference.chat import encode_slowly

from headstart.data.chat import turns
from headstart.data.chat.chat import ChatFormat
from headstart.data.chat.rendering import RefusedError, Renderer
from headstart.data.chat.turns import stable_turns, turn_at, turns_in_one_pass

FAMILIES = ("chatml", "llama3", "qwen3", "gemma", "mistral", "tagged", "tagged_wide", "plain", "parts", "trimming",
            "numbered", "late_system", "forgetful", "tools", "phi3")  # fmt: skip
STABLE = ("chatml", "llama3", "gemma", "mistral", "tagged", "tagged_wide", "plain", "parts", "trimming", "tools",
          "phi3")  # fmt: skip
#: answers may begin and end with white space, hold empty lines, and repeat one another
TEXTS = (
    "Hi",
    "Hello there.",
    "Bye",
    "\nfast",
    "One two\n\nthree.",
    " think fast ",
    "now\n",
    "Be brief: be kind!",
    "1 2 3",
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def byte_tokenizer(template: str, special: list[str], eos, bos, trim: bool, metaspace: bool = False):
    """A small BPE tokenizer, of bytes (GPT-2's, whose offsets may leave out spaces) or of words with ▁ (Llama-2's)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    if metaspace:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.decoder = decoders.Replace("▁", " ")
        alphabet = sorted(set("".join(TEXTS) + "useraitnmodlyktf:▁\n"))
    else:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.post_processor = processors.ByteLevel(trim_offsets=trim)
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=list(alphabet), special_tokens=["<unk>"])
    core.train_from_iterator([*TEXTS, "user assistant model"] * 3, trainer)
    core.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    names = {k: v for k, v in (("eos_token", eos), ("bos_token", bos)) if v is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **names)
    tokenizer.chat_template = template
    return tokenizer


def make(family: str, kind: str) -> ChatFormat:
    from chat_templates import SPECIAL

    eos, bos, stops = ENDS[family]
    if kind == "words":
        tokenizer = word_tokenizer(TEMPLATES[family], eos, None, bos)
    else:
        tokenizer = byte_tokenizer(TEMPLATES[family], list(SPECIAL), eos, bos, kind == "trimmed", kind == "metaspace")
    return ChatFormat(tokenizer, tokenizer.convert_tokens_to_ids(list(stops)))


def conversation(rng: random.Random, family: str, count: int) -> list[dict]:
    """`count` questions and answers; with tool calls, thoughts and a system message where the family has them."""
    messages = []
    if family in ("chatml", "late_system", "tools", "parts") and rng.random() < 0.5:
        messages.append({"role": "system", "content": "Be kind"})
    for _ in range(count):
        messages.append({"role": "user", "content": rng.choice(TEXTS)})
        for number in range(rng.choice((0, 0, 1, 3)) if family == "tools" else 0):
            call = {"type": "function", "function": {"name": "weather", "arguments": {"day": str(number)}}}
            messages.append({"role": "assistant", "content": rng.choice(("", "Hi")), "tool_calls": [call]})
            messages += [{"role": "tool", "content": rng.choice(TEXTS)} for _ in range(rng.choice((1, 1, 2)))]
        answer = {"role": "assistant", "content": rng.choice(TEXTS)}
        if family == "qwen3" and rng.random() < 0.3:
            answer["reasoning_content"] = "Be brief"
        messages.append(answer)
    return messages


def outcome(encode, *arguments):
    """What is encoded, or why it is refused."""
    try:
        return encode(*arguments)
    except RefusedError as error:
        return next(words for words in ("apart", "leaves out") if words in str(error))


@pytest.mark.parametrize("kind", ["words", "bytes", "trimmed", "metaspace"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fast_equals_the_definition(monkeypatch, family, kind):
    chat, rng, fast = make(family, kind), random.Random(f"{family} {kind}"), 0
    run_once = chat.renderer.run_once
    for count in [*range(1, 8), 12]:
        messages = conversation(rng, family, count)
        tools = [WEATHER] if family == "tools" and rng.random() < 0.7 else []
        finish = rng.choice(("stop", "length"))
        for few, once in ((0, False), (8, False), (8, True)):
            monkeypatch.setattr(turns, "FEW_ANSWERS", few)
            monkeypatch.setattr(chat.renderer, "run_once", run_once if once else lambda *_: None)
            for which in ("all", "last"):
                made = outcome(chat.encode, messages, finish, which, tools)
                expected = outcome(encode_slowly, chat, messages, finish, which, tools)
                assert made == expected or (family == "forgetful" and made == "leaves out"), (few, messages)
        for encoded in made if isinstance(made, list) else ():
            pairs = zip(encoded.token_ids, encoded.turn_ids, encoded.turn_ids[1:] + [-1], strict=True)
            ends = [turn != following for token, turn, following in pairs if turn >= 0 and token in chat.stop_token_ids]
            assert all(ends), "a stop token ends its turn, so a turn has one"
        answers = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        found = stable_turns(chat.renderer, messages, answers, tools)
        fast += found is not None
        for turn in found or ():
            exact = turn_at(chat.renderer, messages, turn.index, tools)
            assert turn.text.startswith(exact.text) and (turn.end, turn.spans) == (exact.end, exact.spans)
    if family in STABLE:
        assert fast == 8, "an ordinary template needs no second look"


@pytest.mark.parametrize("way", ["one pass", "prefixes"])
@pytest.mark.parametrize("family", STABLE)
def test_cost_grows_with_the_length(monkeypatch, family, way):
    chat = make(family, "bytes")
    counted = {"rendered": 0, "tokenised": 0}
    render, once, encode = chat.renderer.render, chat.renderer.run_once, chat.cutter.encode

    def counting(name, work, size):
        def wrapped(*arguments, **kwargs):
            result = work(*arguments, **kwargs)
            counted[name] += size(arguments, result)
            return result

        return wrapped

    monkeypatch.setattr(chat.renderer, "render", counting("rendered", render, lambda _, result: len(result[0])))
    run = (lambda *_: None) if way == "prefixes" else once
    size = lambda _, result: len(result[0]) if result else 0  # noqa: E731
    monkeypatch.setattr(chat.renderer, "run_once", counting("rendered", run, size))
    monkeypatch.setattr(chat.cutter, "encode", counting("tokenised", encode, lambda given, _: sum(map(len, given[0]))))
    costs = []
    for count in (50, 100, 200):
        messages = conversation(random.Random(1), family, count)
        (encoded,) = chat.encode(messages)
        assert max(encoded.turn_ids) + 1 == sum(m["role"] == "assistant" for m in messages)
        size = len(chat.tokenizer.decode(encoded.token_ids))
        costs.append({name: value / size for name, value in counted.items()})
        counted.update(dict.fromkeys(counted, 0))
    for name in ("rendered", "tokenised"):
        assert costs[-1][name] < 1.3 * costs[0][name], f"{name} characters per character of the text: {costs}"
        assert costs[-1][name] < 25, costs


@pytest.mark.parametrize("kind", ["words", "bytes", "trimmed", "metaspace"])
@pytest.mark.parametrize("family", ["qwen3", "chatml", "numbered"])
def test_answers_behind_max_length_cost_no_whole_tokenising_and_change_nothing(monkeypatch, family, kind):
    chat, rng, tokenised = make(family, kind), random.Random(5), []
    encode = chat.cutter.encode
    monkeypatch.setattr(chat.cutter, "encode", lambda texts: tokenised.extend(map(len, texts)) or encode(texts))
    costs = {}
    for count in (10, 20, 40):
        messages = [m for m in conversation(rng, family, count) if m["role"] != "system"]
        whole = outcome(chat.encode, messages)
        for max_length in (16, 30, 1000):
            tokenised.clear()
            cut = outcome(chat.encode, messages, "stop", "all", (), max_length)
            costs[count, max_length] = sum(tokenised)
            if isinstance(whole, str):
                # a turn that is refused may begin behind max_length
                assert cut == whole or max(len(each.token_ids) for each in cut) > max_length
                continue
            for one, other in zip(whole, cut, strict=True):
                assert one.token_ids[:max_length] == other.token_ids[:max_length]
                assert one.turn_ids[:max_length] == other.turn_ids[:max_length]
                assert (len(one.token_ids) > max_length) == (len(other.token_ids) > max_length)
    if family == "qwen3" and kind == "words":
        assert costs[40, 30] < 1.3 * costs[20, 30] < 0.2 * costs[40, 1000]


#: what a template may be put together from: the first of each is plain, the others look further or write more
FAMILIES = (
    "", "{{ 'Be kind ' }}", "{{ messages | length }}", "{{ messages | length // 10 }}",
    "{% for m in messages if 'fast' in m.content and loop.first %}{{ 'fast' }}{% endfor %}",
)  # fmt: skip
LOOPS = ("messages", "messages[-6:]", "messages[[0, (messages | length - 1) // 2 * 2 - 8] | max :]")
BEGINS = (
    "<{{ m.role }}>", "{{ '\n' if not loop.first }}<{{ m.role }}>", "{{ loop.index0 // 8 }}<{{ m.role }}>",
    "{% if loop.first or messages[loop.index0 - 1].role != m.role %}<{{ m.role }}>{% else %} and {% endif %}",
    "{{ 'again' if m.role == 'user' and m.content == messages[0].content }}<{{ m.role }}>",
    "{{ 'now' if m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] }}<{{ m.role }}>",
)  # fmt: skip
CONTENTS = (
    "{{ m.content }}", "{{ m.content | trim }}", "{{ m.content if loop.last else m.content.split('fast')[-1] }}",
    "{{ m.content[:2] if loop.index0 < messages | length - 9 else m.content }}",
)  # fmt: skip
STOPS = ("<|im_end|>\n", "{{ '<|im_end|>' if m.role == 'assistant' }}", "{{ '<|im_end|>' if not loop.last }}")
FOOTS = (
    "<assistant>",
    "\n<assistant>",
    "{{ '<assistant>' if messages[-1].role != 'tool' }}",
    "{{ messages | length }}:",
)


@pytest.mark.parametrize("seed", range(4))
def test_no_template_fools_the_fast_way(seed):
    """Random templates: where the fast way finds turns at all, they are those of the definition."""
    rng, fast, in_one_pass = random.Random(seed), 0, 0

    def pick(choices):
        return choices[0] if rng.random() < 0.6 else rng.choice(choices)

    for _ in range(60):
        said = pick(CONTENTS) + pick(STOPS)
        if rng.random() < 0.25:
            tagged = f"{{% generation %}}{said}{{% endgeneration %}}"
            said = f"{{% if m.role == 'assistant' %}}{tagged}{{% else %}}{said}{{% endif %}}"
        foot = f"{{% if add_generation_prompt %}}{pick(FOOTS)}{{% endif %}}"
        template = f"{pick(FAMILIES)}{{% for m in {pick(LOOPS)} %}}{pick(BEGINS)}{said}{{% endfor %}}{foot}"
        renderer = Renderer(word_tokenizer(template, "<|im_end|>"))
        messages = []
        for _ in range(rng.choice((3, 6, 10))):
            messages += [{"role": "user", "content": rng.choice(TEXTS)} for _ in range(rng.choice((1, 1, 1, 2)))]
            for _ in range(rng.choice((0, 0, 1, 2))):
                messages.append({"role": "assistant", "content": rng.choice(TEXTS)})
                messages += [{"role": "tool", "content": rng.choice(TEXTS)} for _ in range(rng.choice((0, 1, 1, 2)))]
            messages.append({"role": "assistant", "content": rng.choice(TEXTS)})
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        found = stable_turns(renderer, messages, answers)
        for turn in found or ():
            exact = turn_at(renderer, messages, turn.index)
            assert turn.text.startswith(exact.text), (template, messages)
            assert (turn.begin, turn.end, turn.spans) == (exact.begin, exact.end, exact.spans), (template, messages)
        fast += found is not None
        once = turns_in_one_pass(renderer, messages, answers)
        for turn in once or ():
            exact = turn_at(renderer, messages, turn.index)
            assert turn.text.startswith(exact.text) and turn == exact.moved(0, turn.text, turn.index), template
        in_one_pass += once is not None
    assert 10 < fast < 55 and 5 < in_one_pass < 55, "all ways are tried"


@pytest.mark.parametrize("place", range(11))
def test_one_answer_that_is_rewritten_is_noticed_wherever_it_stands(place):
    """Its later form is as long as its first, so that only a look at the characters tells."""
    rewriting = "{{ m.content if loop.last else m.content | replace('fast', 'FAST') }}"
    template = "{% for m in messages %}<{{ m.role }}>" + rewriting + "{% endfor %}"
    renderer = Renderer(word_tokenizer(template + "{% if add_generation_prompt %}<assistant>{% endif %}", "<|im_end|>"))
    messages = [{"role": ("user", "assistant")[n % 2], "content": "Hi"} for n in range(24)]
    answers = list(range(1, 24, 2))
    assert stable_turns(renderer, messages, answers) is not None
    messages[answers[place]]["content"] = "think fast"
    assert stable_turns(renderer, messages, answers) is None


@pytest.mark.parametrize("family", ["chatml", "tools", "tagged"])
def test_ten_times_the_turns_take_at_most_thirteen_times_as_long(family):
    """Of this process's time, 400 turns beside 40: `chatml` in one run of the template, the others piece by piece."""
    chat, best = make(family, "bytes"), {40: math.inf, 400: math.inf}
    rows = {count: conversation(random.Random(1), family, count) for count in best}
    for _ in range(12):  # other processes disturb, and never make it faster
        for count, messages in rows.items():
            began = time.process_time()
            chat.encode(messages)
            best[count] = min(best[count], time.process_time() - began)
        if best[400] <= 13 * best[40]:
            return
    raise AssertionError(best)
