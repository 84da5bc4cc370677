"""Chat templates of several families, and a tokenizer whose tokens can be read."""

from __future__ import annotations

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]", "<think>", "</think>",
)  # fmt: skip
WORDS = (
    "system user assistant model Hi Hello there Bye bye now again Be brief be kind One two three think fast "
    "Question Answer How are you fine thanks done more"
).split()
#: a token is a run of newlines, a word with the space before it, or one other character
PIECES = r"\n+|[ ]?\w+|[^\w]"


def word_tokenizer(template: str | None = None, eos: str | None = None, pad: str | None = None, bos: str | None = None):
    """A fast tokenizer with one token per readable piece, so that expected masks can be written by hand."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        "\n",
        "\n\n",
        "\n\n\n",
        *" .,:!?#'-\"()",
        *WORDS,
        *(" " + w for w in WORDS),
        *map(str, range(10)),
    ]
    core = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    names = {k: v for k, v in (("eos_token", eos), ("pad_token", pad), ("bos_token", bos)) if v is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **names)
    tokenizer.chat_template = template
    return tokenizer


TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>"
        "\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # keeps the reasoning of answers after the last question, drops it from earlier ones
    "qwen3": (
        "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% else %}"
        "{% set content = m.content %}{% set reason = m.reasoning_content or '' %}"
        "{% if '</think>' in content %}{% set reason = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if loop.index0 > ns.last and (loop.last or reason) %}"
        "{{ '<|im_start|>assistant\n<think>\n' + reason.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
        "{% else %}{{ '<|im_start|>assistant\n' + content }}{% endif %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
        "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
        "{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for message in messages %}"
        "{% set role = 'model' if message.role == 'assistant' else message.role %}"
        "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"
    ),
    # the template says which part is the assistant's; the tag leaves the end of the turn outside
    "tagged": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}"
        "{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # the tag is drawn too wide at both ends
    "tagged_wide": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + message.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    # no token ends a turn
    "plain": (
        "{% for message in messages %}{{ message.role + ':' + message.content + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    ),
    # the prompt opens a thought that the rendered answer does not have
    "thinking_prompt": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
    ),
}
# loops over the parts of a content; text given as text vanishes
_PARTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content if part.type == 'text' %}"
    "{{ part.text }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES["parts"] = _PARTS
TEMPLATES["trimming"] = TEMPLATES["chatml"].replace("message['content'] +", "message['content'] | trim +")
# every question is numbered
TEMPLATES["numbered"] = (
    TEMPLATES["chatml"]
    .replace("'<|im_start|>' + message", "loop.index0 | string + '<|im_start|>' + message")
    .replace("{{ '<|im_start|>assistant", "{{ messages | length | string + '<|im_start|>assistant")
)
# an end of text stands behind the last message, whoever said it, as Phi-3 has it
TEMPLATES["phi3"] = (
    "{% for m in messages %}{{ '<s>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# the system message stands in the last question
TEMPLATES["late_system"] = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' }}{% if system and (loop.last or loop.index0 == messages | length - 2) %}"
    "{{ system + '\n\n' }}{% endif %}{{ m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
# only the last three questions are shown
TEMPLATES["forgetful"] = TEMPLATES["chatml"].replace(
    "for message in messages", "for message in messages[[0, (messages | length - 1) // 2 * 2 - 4] | max :]"
)
# tools and their calls, in the manner of Qwen2.5
TEMPLATES["tools"] = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    '{% for call in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' '
    "+ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: eos, bos and the tokens that stop generation
ENDS = {
    "chatml": ("<|im_end|>", None, ("<|im_end|>",)),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", ("<|eot_id|>",)),
    "qwen3": ("<|im_end|>", None, ("<|im_end|>",)),
    "gemma": ("<bos>", "<bos>", ("<end_of_turn>",)),
    "mistral": ("</s>", "<s>", ("</s>",)),
    "phi3": ("</s>", None, ("</s>", "<|im_end|>")),
    "tagged": ("<|im_end|>", None, ("<|im_end|>",)),
    "tagged_wide": ("<|im_end|>", None, ("<|im_end|>",)),
    "plain": (None, None, ()),
    "thinking_prompt": ("<|im_end|>", None, ("<|im_end|>",)),
}
ENDS |= {name: ENDS["chatml"] for name in ("parts", "trimming", "numbered", "forgetful", "tools")}
ENDS["late_system"] = ENDS["mistral"]
