"""The mask token of heads that draft several tokens at once: one that no text holds, from the target's tokenizer.

Heads that draft several tokens in one forward embed it in the places of the tokens to come. Where it also occurs in
texts, or ends them, its embedding means something else, and drafts get worse.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from headstart.heads.base import HeadConfig
from headstart.heads.errors import ConfigError

#: texts of tokens that are named for masking, in lower case and without marks: <|MASK|>, [MASK], <mask_token>
MASKING = re.compile(r"mask(_?token)?")
#: texts of tokens that no text holds: <|reserved_special_token_0|>, <unused12>, <extra_id_3>, <|dummy_7|>
RESERVED = re.compile(r"reserved|unused|placeholder|extra_id|dummy")
#: special tokens that a tokenizer names, by the name of its attribute
NAMED = ("pad", "eos", "bos", "unk", "sep", "cls")


@dataclass(frozen=True)
class Vocabulary:
    """What the tokenizer and the target say about the ids.

    Attributes:
        size: V, ids of the target.
        tokens: id → text, of the ids that have a token.
        special: ids of special tokens, ascending.
        taken: id → what it is: the tokenizer's padding, end, … token, or a token that ends the target's answers.
        template: the chat template, "" where there is none.
    """

    size: int
    tokens: dict[int, str]
    special: tuple[int, ...]
    taken: dict[int, str]
    template: str

    @classmethod
    def of(cls, tokenizer: Any, size: int, stop_ids: Iterable[int]) -> Vocabulary:
        """Args: tokenizer: of transformers. size: V. stop_ids: end an answer of the target."""
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {id for id, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        taken = dict.fromkeys(stop_ids, "a token that ends answers")
        for name in reversed(NAMED):
            if (id := getattr(tokenizer, f"{name}_token_id", None)) is not None:
                taken[id] = f"the tokenizer's {name} token"
        tokens = {id: text for text, id in tokenizer.get_vocab().items()}
        return cls(size, tokens, tuple(sorted(special)), taken, str(getattr(tokenizer, "chat_template", None) or ""))

    def shown(self, token: int) -> str:
        """The token as messages show it: its id and text."""
        return f"{token} ({self.tokens[token]!r})" if token in self.tokens else f"{token} (no token of the tokenizer)"


def choose(vocabulary: Vocabulary, used_V: Tensor | None, field: str) -> tuple[int, str]:
    """A token that no text holds, and why it was chosen.

    In this order: the first id below V that has no token, a special token named for masking, a reserved special token,
    another special token that the chat template does not write. The token is none of `taken`, and not of the data.

    Args:
        used_V: bool [V], ids that the data holds; None where the data is not read yet.
        field: of the recipe, for messages.
    Raises: ConfigError where there is none.
    """

    def free(token: int) -> bool:
        return 0 <= token < vocabulary.size and token not in vocabulary.taken and not _used(used_V, token)

    names = {token: re.sub(r"[^a-z0-9_]", "", vocabulary.tokens.get(token, "").lower()) for token in vocabulary.special}
    unwritten = [token for token in vocabulary.special if vocabulary.tokens.get(token, "") not in vocabulary.template]
    without = (token for token in range(vocabulary.size) if token not in vocabulary.tokens)
    kinds: list[tuple[str, Iterable[int]]] = [
        ("the first id that the tokenizer has no token for", without),
        ("a special token named for masking", (t for t, name in names.items() if MASKING.fullmatch(name))),
        ("a reserved special token", (t for t in unwritten if RESERVED.search(names[t]))),
        ("a special token that neither the chat template nor the data writes", unwritten),
    ]
    for why, tokens in kinds:
        if (token := next((t for t in tokens if free(t)), None)) is not None:
            return token, why
    raise ConfigError(
        f"{field}: found null, and no token of the target that no text holds: all {vocabulary.size} ids have tokens, "
        f"and its {len(vocabulary.special)} special tokens end or fill texts or occur in the chat template or the "
        f"data: set {field} to the id of a token that your texts never hold"
    )


def check(token: int, vocabulary: Vocabulary, used_V: Tensor | None, field: str) -> None:
    """Check a token that the recipe gives. Args: as `choose`. Raises: ConfigError where texts hold or end with it."""
    if not 0 <= token < vocabulary.size:
        raise ConfigError(f"{field}: found {token}, expected an id of the target, 0 … {vocabulary.size - 1}")
    if token in vocabulary.taken:
        reason = f"which is {vocabulary.taken[token]}"
    elif _used(used_V, token):
        reason = "which occurs in the training data"
    else:
        return
    raise ConfigError(
        f"{field}: found {vocabulary.shown(token)}, {reason}; expected a token that no text holds: set another id, or "
        f"{field}=null to have one found"
    )


def settle(
    config: HeadConfig, tokenizer: Any, size: int, stop_ids: Iterable[int], used_V: Tensor | None = None
) -> tuple[HeadConfig, str | None]:
    """(the config with its placeholder filled in; what was chosen, for the terminal, None where nothing was).

    Args: tokenizer: None where there is none; the config then stays as it is. The others as `Vocabulary.of`, `choose`.
    Raises: ConfigError for a given token that cannot be it, and where none can be found.
    """
    if config.placeholder is None or tokenizer is None:
        return config, None
    field, vocabulary = f"head.{config.placeholder}", Vocabulary.of(tokenizer, size, stop_ids)
    given = config.placeholder_token
    if given is not None:
        check(given, vocabulary, used_V, field)
        return config, None
    token, why = choose(vocabulary, used_V, field)
    return config.with_placeholder(token), f"{field}: {vocabulary.shown(token)}, {why}"


def _used(used_V: Tensor | None, token: int) -> bool:
    return used_V is not None and bool(used_V[token])
