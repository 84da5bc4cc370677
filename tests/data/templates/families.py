"""Public model families: their chat template, special tokens and what their template takes; conversations."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
#: the day that templates with a date show
DATE = "2026-01-31"


@dataclass(frozen=True)
class Family:
    """A chat template and the tokenizer around it.

    Attributes:
        file: of the template; `tool_file` of the one for conversations with tools, if that is another one.
        special: tokens that the tokenizer splits off first.
        eos, bos: what the template writes for eos_token and bos_token.
        stops: tokens that end generation (the target's eos_token_id).
        variables: of the template.
        text_arguments, no_content: the form in which the template takes tool calls, for rendering without our code.
        keeps_space: the template writes an answer's white space as it is.
    """

    file: str
    special: tuple[str, ...]
    eos: str
    stops: tuple[str, ...]
    bos: str | None = None
    tool_file: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    text_arguments: bool = False
    no_content: bool = False
    keeps_space: bool = True

    def template(self, tagged: bool = False) -> str | dict[str, str]:
        """The Jinja text (by name, where there are two). Args: tagged: with {% generation %} tags."""
        named = {"default": self.file, "tool_use": self.tool_file}
        texts = {name: _read(file, tagged) for name, file in named.items() if file}
        return texts if len(texts) > 1 else texts["default"]


def _read(file: str, tagged: bool) -> str:
    text = (FOLDER / f"{file}.jinja").read_text(encoding="utf-8")
    if tagged:
        text = text.replace("{#-gen#}", "{%- generation %}").replace("{#-end#}", "{%- endgeneration %}")
    return text


IM = ("<|im_start|>", "<|im_end|>")
QWEN = (*IM, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
LLAMA4 = ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eot|>", "<|eom|>", "<|python_start|>",
          "<|python_end|>")  # fmt: skip
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
           "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[CALL_ID]", "[ARGS]",
           "[TOOL_CONTENT]")  # fmt: skip
PHI3 = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>",
        "<|tool_call|>", "<|/tool_call|>", "<|tool_response|>")  # fmt: skip
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>")  # fmt: skip
HARMONY = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>",
           "<|endoftext|>")  # fmt: skip
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>", "<think>",
       "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
       "<arg_value>", "</arg_value>", "/nothink")  # fmt: skip
COHERE = ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>",
          "<|CHATBOT_TOKEN|>")  # fmt: skip

#: tokens that published tokenizers do not call special
ORDINARY = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
            "</arg_key>", "<arg_value>", "</arg_value>"}  # fmt: skip

LLAMA3_ENDS = ("<|eot_id|>", "<|eom_id|>")
DEEPSEEK_ENDS = {"bos": DEEPSEEK[0], "eos": DEEPSEEK[1], "stops": DEEPSEEK[1:2]}
GLM_ENDS = {"eos": "<|endoftext|>", "stops": ("<|endoftext|>", "<|user|>", "<|observation|>")}
MISTRAL_ENDS = {"bos": "<s>", "eos": "</s>", "stops": ("</s>",)}

FAMILIES = {
    "chatml": Family("chatml", IM, "<|im_end|>", ("<|im_end|>",)),
    "llama2": Family("llama2", ("<s>", "</s>"), keeps_space=False, **MISTRAL_ENDS),
    "llama3.1": Family("llama3.1", LLAMA3, "<|eot_id|>", LLAMA3_ENDS, LLAMA3[0], keeps_space=False),
    "llama3.2": Family("llama3.2", LLAMA3, "<|eot_id|>", LLAMA3_ENDS, LLAMA3[0], keeps_space=False),
    "llama4": Family("llama4", LLAMA4, "<|eot|>", ("<|eot|>", "<|eom|>"), LLAMA4[0]),
    "qwen2.5": Family("qwen2.5", QWEN[:4], "<|im_end|>", ("<|im_end|>",)),
    "qwen3": Family("qwen3", QWEN, "<|im_end|>", ("<|im_end|>",), keeps_space=False),
    "qwen3 without thinking": Family(
        "qwen3", QWEN, "<|im_end|>", ("<|im_end|>",), variables={"enable_thinking": False}, keeps_space=False
    ),
    "gemma3": Family("gemma3", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>",
                     ("<eos>", "<end_of_turn>"), "<bos>", keeps_space=False),
    "mistral v3": Family("mistral_v3", MISTRAL, keeps_space=False, **MISTRAL_ENDS),
    "mistral tekken": Family("mistral_tekken", MISTRAL, **MISTRAL_ENDS),
    "mistral v7": Family("mistral_v7", MISTRAL, **MISTRAL_ENDS),
    "phi3": Family("phi3", PHI3[:5], "<|endoftext|>", ("<|endoftext|>", "<|end|>")),
    "phi4": Family("phi4", (*IM, "<|im_sep|>"), "<|im_end|>", ("<|im_end|>",)),
    "phi4 mini": Family("phi4_mini", PHI3, "<|endoftext|>", ("<|endoftext|>", "<|end|>")),
    "deepseek v3": Family("deepseek_v3", DEEPSEEK, text_arguments=True, **DEEPSEEK_ENDS),
    "deepseek v3.1": Family("deepseek_v3.1", DEEPSEEK, text_arguments=True, **DEEPSEEK_ENDS),
    "deepseek v3.1 thinking": Family(
        "deepseek_v3.1", DEEPSEEK, text_arguments=True, variables={"thinking": True}, **DEEPSEEK_ENDS
    ),
    "deepseek r1": Family("deepseek_r1", DEEPSEEK, text_arguments=True, **DEEPSEEK_ENDS),
    "gpt-oss": Family("gpt_oss", HARMONY, "<|return|>", ("<|return|>", "<|call|>", "<|endoftext|>")),
    "glm4": Family("glm4", GLM[:7], **GLM_ENDS),
    "glm4.6": Family("glm4.6", GLM, keeps_space=False, **GLM_ENDS),
    "glm4.6 without thinking": Family(
        "glm4.6", GLM, variables={"enable_thinking": False}, keeps_space=False, **GLM_ENDS
    ),
    "command r": Family("command_r", COHERE, "<|END_OF_TURN_TOKEN|>", ("<|END_OF_TURN_TOKEN|>",), COHERE[0],
                        tool_file="command_r.tool_use", keeps_space=False),
}  # fmt: skip

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name"}},
            "required": ["city"],
        },
    },
}


def said(content: str, thoughts: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"reasoning_content": thoughts} if thoughts else {})


def asked(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(*cities: str, thoughts: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": IDS[city], "type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        for city in cities
    ]
    return said("", thoughts) | {"tool_calls": calls}


def found(city: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": IDS[city], "content": content}


IDS = {"Rome": "romerome1", "Oslo": "oslooslo2"}
#: name → messages
CONVERSATIONS = {
    "chat": [{"role": "system", "content": "Be brief."}, asked("Hi"), said("Hello there."), asked("Bye"),
             said("Bye bye")],
    # two calls at once, then a question of another kind
    "parallel": [asked("Weather in Rome and Oslo?"), calling("Rome", "Oslo"), found("Rome", "12 C"),
                 found("Oslo", "3 C"), said("Rome 12, Oslo 3."), asked("Thanks"), said("Bye")],
    # one call after the other
    "calls": [asked("Weather in Rome and Oslo?"), calling("Rome"), found("Rome", "12 C"), calling("Oslo"),
              found("Oslo", "3 C"), said("Rome 12, Oslo 3.")],
    # thoughts in an earlier and in the last answer
    "thoughts": [asked("Hi"), said("Hello there.", "Greet."), asked("Bye"), said("Bye bye", "Part.")],
    "thoughts and a call": [asked("Weather in Rome?"), calling("Rome", thoughts="Look."), found("Rome", "12 C"),
                            said("Rome 12.", "It is 12.")],
}  # fmt: skip
#: conversations whose records hold the tools
WITH_TOOLS = ("parallel", "calls", "thoughts and a call")
CORPUS = (
    "system user assistant model functions Be brief. Hi Hello there. Bye bye Weather in Rome and Oslo? 12 C 3 C",
    "Rome 12, Oslo 3. Thanks Greet. Part. Look. It is 12.\n\nHi [/INST] Hello there. </s> assistant\n\n\nHello",
    '{"name": "weather", "arguments": {"city": "Rome"}} {"name": "weather", "parameters": {"city": "Oslo"}}\n\n\n\n',
    "Cutting Knowledge Date: December 2023\nToday Date: analysis commentary final json to=functions.weather [INST] Hi",
)
KINDS = ("bytes", "sentencepiece", "metaspace")
#: how Llama 3 and Qwen split a text into words: newlines keep together, whatever follows
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def tokenizer(family: str, kind: str, tagged: bool = False) -> Any:
    """A small BPE tokenizer with the family's special tokens and chat template.

    Args: kind: `bytes` (as Llama 3 and Qwen), `gpt2` (bytes too; two newlines are one token at the end of a text, and
        two before a word), `sentencepiece` (as Llama-2: every stretch of text between special tokens gets a ▁ in
        front, and is not split into words), or `metaspace` (only the first text gets one).
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from headstart.heads.targets.template_date import fix_dates

    known = FAMILIES[family]
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    alphabet = [chr(code) for code in range(32, 127)] + ["\n", "▁"]
    if kind in ("bytes", "gpt2"):
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "gpt2")
        split = [pre_tokenizers.Split(Regex(WORDS), "isolated")] if kind == "bytes" else []
        core.pre_tokenizer = pre_tokenizers.Sequence([*split, bytewise])
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        # words keep to themselves in training, as SentencePiece's do; runs of newlines are words
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex("\n+"), "isolated"), pre_tokenizers.Metaspace(prepend_scheme="never")]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=list(alphabet), special_tokens=["<unk>"], show_progress=False
    )
    core.train_from_iterator(CORPUS * 4, trainer)
    if kind == "sentencepiece":
        core.pre_tokenizer = None
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind == "metaspace":
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    if kind not in ("bytes", "gpt2"):
        core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    for name in known.special:
        special = name not in ORDINARY
        core.add_tokens([AddedToken(name, normalized=False, special=special)])
    names = {key: value for key, value in (("eos_token", known.eos), ("bos_token", known.bos)) if value}
    made = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **names)
    made.chat_template = known.template(tagged)
    fix_dates(made, DATE)
    return made
