"""What trains, by hand: the samples of each conversation as text, the assistant's own characters between ⟦ and ⟧.

Own is what the model says: its words, thoughts, calls, and the token that ends its turn. The header before it belongs
to the prompt, and so does what the template writes behind the end token. A text stands alone where the template writes
a history in another way than the answer itself. A reason instead of samples: the conversation is refused.
"""

from __future__ import annotations

TOOL = (
    '{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string", "description": "Name"}}, "required": ["city"]}}}'
)
TOOL_ON_LINES = """{
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {
                    "type": "string",
                    "description": "Name"
                }
            },
            "required": [
                "city"
            ]
        }
    }
}"""
ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo"}'
NO_TOOLS = "the chat template leaves out the tools"
NO_CALLS = "the chat template leaves out the tool calls of an answer"
NO_THOUGHTS = "the chat template leaves out the reasoning of an answer"

CHATML_CHAT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n⟦Hello there.<|im_end|>⟧\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n⟦Bye bye<|im_end|>⟧\n"
)


def llama3(date: str) -> dict[str, object]:
    def header(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    about = "Cutting Knowledge Date: December 2023\nToday Date: " + date + "\n\n"
    return {
        "chat": [
            "<|begin_of_text|>" + header("system") + about + "Be brief.<|eot_id|>" + header("user") + "Hi<|eot_id|>"
            + header("assistant") + "⟦Hello there.<|eot_id|>⟧" + header("user") + "Bye<|eot_id|>"
            + header("assistant") + "⟦Bye bye<|eot_id|>⟧"
        ],
        "parallel": "the chat template refuses it: This model only supports single tool-calls at once!",
        "calls": [
            "<|begin_of_text|>" + header("system") + "Environment: ipython\n" + about + "<|eot_id|>" + header("user")
            + "Given the following functions, please respond with a JSON for a function call with its proper arguments "
            "that best answers the given prompt.\n\nRespond in the format {\"name\": function name, \"parameters\": "
            "dictionary of argument name and its value}.Do not use variables.\n\n" + TOOL_ON_LINES + "\n\n"
            "Weather in Rome and Oslo?<|eot_id|>" + header("assistant")
            + '⟦{"name": "weather", "parameters": {"city": "Rome"}}<|eot_id|>⟧'
            + header("ipython") + '"12 C"<|eot_id|>' + header("assistant")
            + '⟦{"name": "weather", "parameters": {"city": "Oslo"}}<|eot_id|>⟧'
            + header("ipython") + '"3 C"<|eot_id|>' + header("assistant") + "⟦Rome 12, Oslo 3.<|eot_id|>⟧"
        ],
        "thoughts": NO_THOUGHTS,
        "thoughts and a call": NO_THOUGHTS,
    }  # fmt: skip


LLAMA4_TOOLS = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments "
    "that best answers the given prompt.\n\nRespond in the format {\"name\": function name, \"parameters\": "
    "dictionary of argument name and its value}.Do not use variables.\n\n"
)  # fmt: skip
LLAMA4_USER, LLAMA4_SAID = "<|header_start|>user<|header_end|>\n\n", "<|header_start|>assistant<|header_end|>\n\n"
LLAMA4_FOUND = "<|header_start|>ipython<|header_end|>\n\n"

QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n" + TOOL + "\n</tools>\n\nFor each function call, return a "
    "json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
QWEN_DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
QWEN_ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
QWEN_OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
QWEN_ASK = "<|im_start|>user\nWeather in Rome and Oslo?<|im_end|>\n"
QWEN_FOUND = (
    "<|im_start|>user\n<tool_response>\n12 C\n</tool_response>\n<tool_response>\n3 C\n</tool_response><|im_end|>\n"
)
QWEN_12 = "<|im_start|>user\n<tool_response>\n12 C\n</tool_response><|im_end|>\n"
QWEN_3 = "<|im_start|>user\n<tool_response>\n3 C\n</tool_response><|im_end|>\n"
SAYS, THANKS = "<|im_start|>assistant\n", "<|im_start|>user\nThanks<|im_end|>\n"
EMPTY = "<think>\n\n</think>\n\n"


def qwen3(before: str, after: str) -> dict[str, object]:
    """Args: before: of the empty thoughts, what the prompt holds; after: what the model says."""
    start = "<|im_start|>system\n" + QWEN_TOOLS + QWEN_ASK
    both = QWEN_ROME + "\n" + QWEN_OSLO + "<|im_end|>"
    system = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n" + SAYS
    return {
        "chat": [
            system + before + "⟦" + after + "Hello there.<|im_end|>⟧\n",
            system + "Hello there.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            + SAYS + before + "⟦" + after + "Bye bye<|im_end|>⟧\n",
        ],
        "parallel": [
            start + SAYS + before + "⟦" + after + both + "⟧\n",
            start + SAYS + both + "\n" + QWEN_FOUND + SAYS + before + "⟦" + after + "Rome 12, Oslo 3.<|im_end|>⟧\n",
            start + SAYS + both + "\n" + QWEN_FOUND + SAYS + "Rome 12, Oslo 3.<|im_end|>\n" + THANKS
            + SAYS + before + "⟦" + after + "Bye<|im_end|>⟧\n",
        ],
        "calls": [
            start + SAYS + before + "⟦" + after + QWEN_ROME + "<|im_end|>⟧\n",
            start + SAYS + QWEN_ROME + "<|im_end|>\n" + QWEN_12 + SAYS + before
            + "⟦" + after + QWEN_OSLO + "<|im_end|>⟧\n",
            start + SAYS + QWEN_ROME + "<|im_end|>\n" + QWEN_12 + SAYS + QWEN_OSLO + "<|im_end|>\n" + QWEN_3
            + SAYS + before + "⟦" + after + "Rome 12, Oslo 3.<|im_end|>⟧\n",
        ],
    }  # fmt: skip


GEMMA_CHAT = (
    "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello there.<end_of_turn>⟧\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n⟦Bye bye<end_of_turn>⟧\n"
)
GEMMA_REFUSES = "the chat template refuses it: Conversation roles must alternate user/assistant/user/assistant/..."


def mistral(space: str) -> dict[str, object]:
    """Args: space: what v3 writes behind its marks, and Tekken does not."""
    tools = "[AVAILABLE_TOOLS]" + space + "[" + TOOL + "][/AVAILABLE_TOOLS]"
    asked = "[INST]" + space + "Weather in Rome and Oslo?[/INST]"
    rome = '{"name": "weather", "arguments": {"city": "Rome"}, "id": "romerome1"}'
    oslo = '{"name": "weather", "arguments": {"city": "Oslo"}, "id": "oslooslo2"}'
    both = "[TOOL_CALLS]" + space + "[" + rome + ", " + oslo + "]</s>"
    found = "[TOOL_RESULTS]" + space + '{"content": 12 C, "call_id": "romerome1"}[/TOOL_RESULTS]'
    also = "[TOOL_RESULTS]" + space + '{"content": 3 C, "call_id": "oslooslo2"}[/TOOL_RESULTS]'
    return {
        "chat": [  # the system message stands in the last question alone
            "<s>[INST]" + space + "Be brief.\n\nHi[/INST]⟦" + space + "Hello there.</s>⟧",
            "<s>[INST]" + space + "Hi[/INST]" + space + "Hello there.</s>"
            "[INST]" + space + "Be brief.\n\nBye[/INST]⟦" + space + "Bye bye</s>⟧",
        ],
        "parallel": [  # and so do the tools
            "<s>" + tools + asked + "⟦" + both + "⟧" + found + also + "⟦" + space + "Rome 12, Oslo 3.</s>⟧",
            "<s>" + asked + both + found + also + space + "Rome 12, Oslo 3.</s>"
            + tools + "[INST]" + space + "Thanks[/INST]⟦" + space + "Bye</s>⟧",
        ],
        "calls": [
            "<s>" + tools + asked + "⟦[TOOL_CALLS]" + space + "[" + rome + "]</s>⟧" + found
            + "⟦[TOOL_CALLS]" + space + "[" + oslo + "]</s>⟧" + also + "⟦" + space + "Rome 12, Oslo 3.</s>⟧"
        ],
        "thoughts": NO_THOUGHTS,
        "thoughts and a call": NO_THOUGHTS,
    }  # fmt: skip


V7_TOOLS = "[AVAILABLE_TOOLS][" + TOOL + "][/AVAILABLE_TOOLS]"
V7_ROME = "[TOOL_CALLS]weather[CALL_ID]romerome1[ARGS]" + ROME
V7_OSLO = "[TOOL_CALLS]weather[CALL_ID]oslooslo2[ARGS]" + OSLO
V7_FOUND = "[TOOL_RESULTS]romerome1[TOOL_CONTENT]12 C[/TOOL_RESULTS]"
V7_ALSO = "[TOOL_RESULTS]oslooslo2[TOOL_CONTENT]3 C[/TOOL_RESULTS]"
V7_SYSTEM = "<s>[SYSTEM_PROMPT]You are Mistral Small 3.[/SYSTEM_PROMPT]"

PHI_MINI_TOOL = (
    '<|system|><|tool|>{"name": "weather", "description": "Weather of a city", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string", "description": "Name"}}, "required": ["city"]}}'
    "<|/tool|><|end|>"
)
PHI_MINI_ROME = '<|tool_call|>{"name": "weather", "arguments": {"city": "Rome"}}<|/tool_call|>'
PHI_MINI_OSLO = '<|tool_call|>{"name": "weather", "arguments": {"city": "Oslo"}}<|/tool_call|>'
PHI_MINI_ASK = "<|user|>Weather in Rome and Oslo?<|end|>"
PHI_MINI_12, PHI_MINI_3 = '<|tool_response|>"12 C"<|end|>', '<|tool_response|>"3 C"<|end|>'

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SEEK_ROME = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>'
SEEK_OSLO = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜>'
CALLS, CALLED = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>" + EOS
FOUND, ALL = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUT_12, OUT_3 = "<｜tool▁output▁begin｜>12 C<｜tool▁output▁end｜>", "<｜tool▁output▁begin｜>3 C<｜tool▁output▁end｜>"
SEEK_ASK = BOS + "<｜User｜>Weather in Rome and Oslo?<｜Assistant｜>"
V31_ROME = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>" + ROME + "<｜tool▁call▁end｜>"
V31_OSLO = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>" + OSLO + "<｜tool▁call▁end｜>"
BEGUN = "chat template: its prompt begins the model's thoughts, and the answer has none"
CLOSED = "chat template: its prompt closes the model's thoughts, and the answer has some"

OSS_SYSTEM = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2026-01-31\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
    "included for every message."
)
OSS_TOOLS = (
    "\nCalls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|>"
    "# Tools\n\n## functions\n\nnamespace functions {\n\n// Weather of a city\ntype weather = (_: {\n// Name\n"
    "city: string,\n}) => any;\n\n} // namespace functions<|end|>"
)
OSS_ROME = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
OSS_OSLO = ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
OSS_12 = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"12 C"<|end|>'
OSS_3 = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"3 C"<|end|>'
OSS_ASK = OSS_SYSTEM + OSS_TOOLS + "<|start|>user<|message|>Weather in Rome and Oslo?<|end|>"
OSS_CHAT = (
    OSS_SYSTEM + "<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
    "<|start|>user<|message|>Hi<|end|><|start|>assistant"
)
OSS_PLAIN = OSS_SYSTEM + "<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
OSS_LOOK = OSS_SYSTEM + OSS_TOOLS + "<|start|>user<|message|>Weather in Rome?<|end|><|start|>assistant"

GLM_TOOLS = (
    "[gMASK]<sop><|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>\n" + TOOL + "\n</tools>\n\nFor each "
    "function call, output the function name and arguments within the following XML format:\n<tool_call>"
    "{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}"
    "</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
GLM_ROME = "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
GLM_OSLO = "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
GLM_12, GLM_3 = "\n<tool_response>\n12 C\n</tool_response>", "\n<tool_response>\n3 C\n</tool_response>"


def glm46(question: str, before: str, after: str) -> dict[str, object]:
    """Args: question: what stands behind one; before, after: as in `qwen3`."""
    ask = GLM_TOOLS + "<|user|>\nWeather in Rome and Oslo?" + question + "<|assistant|>" + before + "⟦" + after
    hi = "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi" + question + "<|assistant|>" + before + "⟦" + after
    return {
        "chat": [  # the token that begins the next message ends the answer
            hi + "\nHello there.<|user|>⟧\nBye" + question + "<|assistant|>" + before + "⟦" + after
            + "\nBye bye<|user|>⟧"
        ],
        "parallel": [
            ask + GLM_ROME + GLM_OSLO + "<|observation|>⟧" + GLM_12 + GLM_3 + "<|assistant|>" + before + "⟦" + after
            + "\nRome 12, Oslo 3.<|user|>⟧\nThanks" + question + "<|assistant|>" + before + "⟦" + after
            + "\nBye<|user|>⟧"
        ],
        "calls": [
            ask + GLM_ROME + "<|observation|>⟧" + GLM_12 + "<|assistant|>" + before + "⟦" + after + GLM_OSLO
            + "<|observation|>⟧" + GLM_3 + "<|assistant|>" + before + "⟦" + after + "\nRome 12, Oslo 3.<|user|>⟧"
        ],
    }  # fmt: skip


TURN, OVER = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
COHERE_TOOLS = (
    "<BOS_TOKEN>" + TURN + "<|SYSTEM_TOKEN|># User Preamble\nYou help people answer their questions.\n\n## Available "
    "Tools\nHere is a list of tools that you have available to you:\n\n```python\ndef weather(city: str) -> List[Dict]:"
    '\n    """Weather of a city\n    """\n    pass\n```' + OVER
)
COHERE_ASK = TURN + "<|USER_TOKEN|>Weather in Rome and Oslo?" + OVER
COHERE_FOOT = TURN + "<|SYSTEM_TOKEN|>Write 'Action:' followed by a json-formatted list of actions." + OVER
BOT = TURN + "<|CHATBOT_TOKEN|>"
COHERE_ROME = """    {
        "tool_name": "weather",
        "parameters": {
            "city": "Rome"
        }
    }"""
COHERE_OSLO = """    {
        "tool_name": "weather",
        "parameters": {
            "city": "Oslo"
        }
    }"""
COHERE_12 = TURN + "<|SYSTEM_TOKEN|><results>\n12 C</results>" + OVER
COHERE_3 = TURN + "<|SYSTEM_TOKEN|><results>\n3 C</results>" + OVER
ACTION, DONE = "\nAction:\n```json\n[\n", "\n]```"

#: family → conversation → its samples, or the reason of the refusal
EXPECTED: dict[str, dict[str, object]] = {
    "chatml": {"chat": [CHATML_CHAT], "parallel": NO_TOOLS, "calls": NO_TOOLS, "thoughts": NO_THOUGHTS},
    "llama2": {
        "chat": [
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]⟦ Hello there. </s>⟧"
            "<s>[INST] Bye [/INST]⟦ Bye bye </s>⟧"
        ],
        "parallel": GEMMA_REFUSES,
        "thoughts": NO_THOUGHTS,
    },
    "llama3.1": llama3("26 Jul 2024"),
    "llama3.2": llama3("31 Jan 2026"),
    "llama4": {
        "chat": [
            "<|begin_of_text|><|header_start|>system<|header_end|>\n\nBe brief.<|eot|>" + LLAMA4_USER + "Hi<|eot|>"
            + LLAMA4_SAID + "⟦Hello there.<|eot|>⟧" + LLAMA4_USER + "Bye<|eot|>" + LLAMA4_SAID + "⟦Bye bye<|eot|>⟧"
        ],
        "parallel": [
            "<|begin_of_text|>" + LLAMA4_USER + LLAMA4_TOOLS + TOOL_ON_LINES + "\n\nWeather in Rome and Oslo?<|eot|>"
            + LLAMA4_SAID + '⟦<|python_start|><|python_end|>{"name": "weather", "parameters": {"city": "Rome"}}'
            '{"name": "weather", "parameters": {"city": "Oslo"}}<|eot|>⟧'
            + LLAMA4_FOUND + '"12 C"<|eot|>' + LLAMA4_FOUND + '"3 C"<|eot|>'
            + LLAMA4_SAID + "⟦Rome 12, Oslo 3.<|eot|>⟧" + LLAMA4_USER + "Thanks<|eot|>" + LLAMA4_SAID + "⟦Bye<|eot|>⟧"
        ],
        "calls": [
            "<|begin_of_text|>" + LLAMA4_USER + LLAMA4_TOOLS + TOOL_ON_LINES + "\n\nWeather in Rome and Oslo?<|eot|>"
            + LLAMA4_SAID + '⟦<|python_start|><|python_end|>{"name": "weather", "parameters": {"city": "Rome"}}<|eot|>⟧'
            + LLAMA4_FOUND + '"12 C"<|eot|>'
            + LLAMA4_SAID + '⟦<|python_start|><|python_end|>{"name": "weather", "parameters": {"city": "Oslo"}}<|eot|>⟧'
            + LLAMA4_FOUND + '"3 C"<|eot|>' + LLAMA4_SAID + "⟦Rome 12, Oslo 3.<|eot|>⟧"
        ],
        "thoughts": NO_THOUGHTS,
    },
    "qwen2.5": {
        "chat": [CHATML_CHAT],
        # without words beside the call, the newline before it is the prompt's
        "parallel": [
            "<|im_start|>system\n" + QWEN_DEFAULT + "\n\n" + QWEN_TOOLS + QWEN_ASK
            + SAYS + "⟦" + QWEN_ROME + "\n" + QWEN_OSLO + "<|im_end|>⟧\n" + QWEN_FOUND
            + SAYS + "⟦Rome 12, Oslo 3.<|im_end|>⟧\n" + THANKS + SAYS + "⟦Bye<|im_end|>⟧\n"
        ],
        "calls": [
            "<|im_start|>system\n" + QWEN_DEFAULT + "\n\n" + QWEN_TOOLS + QWEN_ASK
            + SAYS + "⟦" + QWEN_ROME + "<|im_end|>⟧\n" + QWEN_12 + SAYS + "⟦" + QWEN_OSLO + "<|im_end|>⟧\n" + QWEN_3
            + SAYS + "⟦Rome 12, Oslo 3.<|im_end|>⟧\n"
        ],
        "thoughts": NO_THOUGHTS,
    },
    "qwen3": qwen3("", EMPTY) | {
        "thoughts": [
            "<|im_start|>user\nHi<|im_end|>\n" + SAYS + "⟦<think>\nGreet.\n</think>\n\nHello there.<|im_end|>⟧\n",
            "<|im_start|>user\nHi<|im_end|>\n" + SAYS + "Hello there.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            + SAYS + "⟦<think>\nPart.\n</think>\n\nBye bye<|im_end|>⟧\n",
        ],
        "thoughts and a call": [  # both answer the last question, so both keep their thoughts
            "<|im_start|>system\n" + QWEN_TOOLS + "<|im_start|>user\nWeather in Rome?<|im_end|>\n"
            + SAYS + "⟦<think>\nLook.\n</think>\n\n" + QWEN_ROME + "<|im_end|>⟧\n" + QWEN_12
            + SAYS + "⟦<think>\nIt is 12.\n</think>\n\nRome 12.<|im_end|>⟧\n"
        ],
    },
    # the prompt closes the empty thoughts; served so, the model has none
    "qwen3 without thinking": qwen3(EMPTY, "") | {"thoughts": CLOSED, "thoughts and a call": CLOSED},
    "gemma3": {"chat": [GEMMA_CHAT], "parallel": GEMMA_REFUSES, "calls": GEMMA_REFUSES, "thoughts": NO_THOUGHTS},
    "mistral v3": mistral(" "),
    "mistral tekken": mistral(""),
    "mistral v7": {
        "chat": [
            "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]⟦Hello there.</s>⟧"
            "[INST]Bye[/INST]⟦Bye bye</s>⟧"
        ],
        "parallel": [
            V7_SYSTEM + V7_TOOLS + "[INST]Weather in Rome and Oslo?[/INST]⟦" + V7_ROME + V7_OSLO + "</s>⟧"
            + V7_FOUND + V7_ALSO + "⟦Rome 12, Oslo 3.</s>⟧",
            V7_SYSTEM + "[INST]Weather in Rome and Oslo?[/INST]" + V7_ROME + V7_OSLO + "</s>"
            + V7_FOUND + V7_ALSO + "Rome 12, Oslo 3.</s>" + V7_TOOLS + "[INST]Thanks[/INST]⟦Bye</s>⟧",
        ],
        "calls": [
            V7_SYSTEM + V7_TOOLS + "[INST]Weather in Rome and Oslo?[/INST]⟦" + V7_ROME + "</s>⟧" + V7_FOUND
            + "⟦" + V7_OSLO + "</s>⟧" + V7_ALSO + "⟦Rome 12, Oslo 3.</s>⟧"
        ],
        "thoughts": NO_THOUGHTS,
    },
    "phi3": {  # the end of text behind the last message is no server's
        "chat": [
            "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello there.<|end|>⟧\n"
            "<|user|>\nBye<|end|>\n<|assistant|>\n⟦Bye bye<|end|>⟧\n"
        ],
        "parallel": NO_TOOLS,
        "thoughts": NO_THOUGHTS,
    },
    "phi4": {
        "chat": [
            "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
            "<|im_start|>assistant<|im_sep|>⟦Hello there.<|im_end|>⟧<|im_start|>user<|im_sep|>Bye<|im_end|>"
            "<|im_start|>assistant<|im_sep|>⟦Bye bye<|im_end|>⟧"
        ],
        "parallel": NO_TOOLS,
        "thoughts": NO_THOUGHTS,
    },
    "phi4 mini": {
        "chat": [
            "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>⟦Hello there.<|end|>⟧"
            "<|user|>Bye<|end|><|assistant|>⟦Bye bye<|end|>⟧"
        ],
        "parallel": [
            PHI_MINI_TOOL + PHI_MINI_ASK + "<|assistant|>⟦" + PHI_MINI_ROME + PHI_MINI_OSLO + "<|end|>⟧"
            + PHI_MINI_12 + PHI_MINI_3 + "<|assistant|>⟦Rome 12, Oslo 3.<|end|>⟧<|user|>Thanks<|end|>"
            "<|assistant|>⟦Bye<|end|>⟧"
        ],
        "calls": [
            PHI_MINI_TOOL + PHI_MINI_ASK + "<|assistant|>⟦" + PHI_MINI_ROME + "<|end|>⟧" + PHI_MINI_12
            + "<|assistant|>⟦" + PHI_MINI_OSLO + "<|end|>⟧" + PHI_MINI_3 + "<|assistant|>⟦Rome 12, Oslo 3.<|end|>⟧"
        ],
        "thoughts": NO_THOUGHTS,
    },
    # DeepSeek's templates write calls and results, but no list of tools
    "deepseek v3": {
        "chat": [
            BOS + "Be brief.<｜User｜>Hi<｜Assistant｜>⟦Hello there." + EOS
            + "⟧<｜User｜>Bye<｜Assistant｜>⟦Bye bye" + EOS + "⟧"
        ],
        "parallel": [
            SEEK_ASK + "⟦" + CALLS + SEEK_ROME + "\n" + SEEK_OSLO + CALLED + "⟧" + FOUND + OUT_12 + "\n" + OUT_3 + ALL
            + "⟦Rome 12, Oslo 3." + EOS + "⟧<｜User｜>Thanks<｜Assistant｜>⟦Bye" + EOS + "⟧"
        ],
        "calls": [
            SEEK_ASK + "⟦" + CALLS + SEEK_ROME + CALLED + "⟧" + FOUND + OUT_12 + ALL
            + "⟦" + CALLS + SEEK_OSLO + CALLED + "⟧" + FOUND + OUT_3 + ALL + "⟦Rome 12, Oslo 3." + EOS + "⟧"
        ],
        "thoughts": NO_THOUGHTS,
    },
    "deepseek v3.1": {
        "chat": [
            BOS + "Be brief.<｜User｜>Hi<｜Assistant｜></think>⟦Hello there." + EOS + "⟧"
            "<｜User｜>Bye<｜Assistant｜></think>⟦Bye bye" + EOS + "⟧"
        ],
        "parallel": [
            SEEK_ASK + "</think>⟦" + CALLS + V31_ROME + V31_OSLO + CALLED + "⟧" + OUT_12 + OUT_3
            + "⟦Rome 12, Oslo 3." + EOS + "⟧<｜User｜>Thanks<｜Assistant｜></think>⟦Bye" + EOS + "⟧"
        ],
        "calls": [
            SEEK_ASK + "</think>⟦" + CALLS + V31_ROME + CALLED + "⟧" + OUT_12
            + "⟦" + CALLS + V31_OSLO + CALLED + "⟧" + OUT_3 + "⟦Rome 12, Oslo 3." + EOS + "⟧"
        ],
        "thoughts": NO_THOUGHTS,
    },
    # the prompt opens the thoughts, and the template writes none into a history
    "deepseek v3.1 thinking": {
        "chat": BEGUN,
        "thoughts": [
            BOS + "<｜User｜>Hi<｜Assistant｜><think>⟦Greet.</think>Hello there." + EOS + "⟧",
            BOS + "<｜User｜>Hi<｜Assistant｜></think>Hello there." + EOS
            + "<｜User｜>Bye<｜Assistant｜><think>⟦Part.</think>Bye bye" + EOS + "⟧",
        ],
    },
    "deepseek r1": {
        "chat": BEGUN,
        "parallel": BEGUN,
        "thoughts": [
            BOS + "<｜User｜>Hi<｜Assistant｜><think>\n⟦Greet.\n</think>\n\nHello there." + EOS + "⟧",
            BOS + "<｜User｜>Hi<｜Assistant｜>Hello there." + EOS
            + "<｜User｜>Bye<｜Assistant｜><think>\n⟦Part.\n</think>\n\nBye bye" + EOS + "⟧",
        ],
    },
    "gpt-oss": {
        "chat": [
            OSS_CHAT + "⟦<|channel|>final<|message|>Hello there.<|return|>⟧",
            OSS_CHAT + "<|channel|>final<|message|>Hello there.<|end|><|start|>user<|message|>Bye<|end|>"
            "<|start|>assistant⟦<|channel|>final<|message|>Bye bye<|return|>⟧",
        ],
        "parallel": NO_CALLS,  # the template writes the first call only
        "calls": [
            OSS_ASK + "<|start|>assistant⟦" + OSS_ROME + "⟧" + OSS_12 + "<|start|>assistant⟦" + OSS_OSLO + "⟧" + OSS_3
            + "<|start|>assistant⟦<|channel|>final<|message|>Rome 12, Oslo 3.<|return|>⟧"
        ],
        "thoughts": [
            OSS_PLAIN + "⟦<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Hello there.<|return|>⟧",
            OSS_PLAIN + "<|channel|>final<|message|>Hello there.<|end|><|start|>user<|message|>Bye<|end|>"
            "<|start|>assistant⟦<|channel|>analysis<|message|>Part.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Bye bye<|return|>⟧",
        ],
        # the prompt of the answer still holds the thoughts before the call, so both share a text
        "thoughts and a call": [
            OSS_LOOK + "⟦<|channel|>analysis<|message|>Look.<|end|><|start|>assistant" + OSS_ROME + "⟧" + OSS_12
            + "<|start|>assistant⟦<|channel|>analysis<|message|>It is 12.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Rome 12.<|return|>⟧"
        ],
    },
    "glm4": {
        "chat": [
            "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>⟦\nHello there.<|user|>⟧\nBye<|assistant|>"
            "⟦\nBye bye<|user|>⟧"
        ],
        "parallel": NO_TOOLS,
        "thoughts": NO_THOUGHTS,
    },
    "glm4.6": glm46("", "", "\n<think></think>") | {
        "thoughts": [
            "[gMASK]<sop><|user|>\nHi<|assistant|>⟦\n<think>Greet.</think>\nHello there.<|user|>⟧",
            "[gMASK]<sop><|user|>\nHi<|assistant|>\n<think></think>\nHello there.<|user|>\nBye<|assistant|>"
            "⟦\n<think>Part.</think>\nBye bye<|user|>⟧",
        ],
        "thoughts and a call": [
            GLM_TOOLS + "<|user|>\nWeather in Rome?<|assistant|>⟦\n<think>Look.</think>" + GLM_ROME + "<|observation|>⟧"
            + GLM_12 + "<|assistant|>⟦\n<think>It is 12.</think>\nRome 12.<|user|>⟧"
        ],
    },
    "glm4.6 without thinking": glm46("/nothink", "\n<think></think>", "") | {"thoughts": CLOSED},
    "command r": {
        "chat": [
            "<BOS_TOKEN>" + TURN + "<|SYSTEM_TOKEN|>Be brief." + OVER + TURN + "<|USER_TOKEN|>Hi" + OVER
            + BOT + "⟦Hello there." + OVER + "⟧" + TURN + "<|USER_TOKEN|>Bye" + OVER + BOT + "⟦Bye bye" + OVER + "⟧"
        ],
        # an instruction stands behind the last message, so every prompt is written otherwise once it is answered;
        # no token ends a call
        "parallel": [
            COHERE_TOOLS + COHERE_ASK + COHERE_FOOT + BOT + "⟦" + ACTION + COHERE_ROME + ",\n" + COHERE_OSLO + DONE
            + "⟧\n",
            COHERE_TOOLS + COHERE_ASK + BOT + ACTION + COHERE_ROME + ",\n" + COHERE_OSLO + DONE + "\n" + COHERE_12
            + COHERE_3 + COHERE_FOOT + BOT + "⟦Rome 12, Oslo 3." + OVER + "⟧",
            COHERE_TOOLS + COHERE_ASK + BOT + ACTION + COHERE_ROME + ",\n" + COHERE_OSLO + DONE + "\n" + COHERE_12
            + COHERE_3 + BOT + "Rome 12, Oslo 3." + OVER + TURN + "<|USER_TOKEN|>Thanks" + OVER + COHERE_FOOT
            + BOT + "⟦Bye" + OVER + "⟧",
        ],
        "thoughts": NO_THOUGHTS,
    },
}  # fmt: skip
