"""Text → tokens, many texts at once, and the token that begins at a character."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.data.chat.rendering import RefusedError

#: to find the token at a character, the text is tokenised again from this many words before it. One word would do for
#: tokenizers that look ahead by a word
WORDS_BEFORE = 4
#: of strings of a few words, those up to this many characters are kept with their tokens, and this many of them
LONGEST_WORDS, MOST_WORDS = 256, 1024
#: what is put in front of a piece of text and taken away again. SentencePiece tokenizers put a space in front of a
#: text, so that the piece alone would become another text
ANCHORS = ("", ".", "0", "a")
#: characters that are tokenised together: enough for many threads. Their tokens take some 10 MB
BATCH = 1 << 18
#: among so many tokens at most, a token is found by looking at all
FEW_TOKENS = 2048
#: arguments of a tokenizer that gives ids alone; what else is needed is asked of its encodings
PLAIN = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}


class _Offsets(Sequence[tuple[int, int]]):
    """The characters of each token, asked one by one: few are needed, and a list of all takes long to make."""

    def __init__(self, encoding: Any):
        self._encoding = encoding

    def __len__(self) -> int:
        return len(self._encoding)

    def __getitem__(self, token: Any) -> Any:
        return self._encoding.token_to_chars(token)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._encoding.offsets)

    def first_at(self, character: int, first: int) -> int | None:
        """Index of the first token from `first` on that begins at `character` or later; None where that takes long."""
        count = len(self)
        if not first < count <= FEW_TOKENS:
            return None
        if self[count - 1][0] < character:
            return count
        token = self._encoding.char_to_token(character)  # looks at all tokens, one after another
        if token is None or token < first:
            return None
        token += self[token][0] < character
        return token if token == first or self[token - 1][0] < character <= self[token][0] else None


@dataclass(frozen=True)
class Tokens:
    """A tokenised text.

    Attributes:
        ids, offsets: token ids, and the characters of each token.
        words: number of the word of each token; a tokenizer splits a text into words before it looks for tokens.
        starts: the first token of every answer.
        origins: for every answer, the character and the token at which its piece of the text begins. A piece is
            tokenised on its own.
        anchor: what stood in front of the pieces when they were tokenised, the first apart.
    """

    ids: list[int]
    offsets: Sequence[tuple[int, int]]
    words: list[int | None]
    starts: list[int] = field(default_factory=list)
    origins: list[tuple[int, int]] = field(default_factory=list)
    anchor: str = ""

    def after(self, character: int, first: int) -> int:
        """Index of the first token from `first` on that begins at `character` or later."""
        found = self.offsets.first_at(character, first) if isinstance(self.offsets, _Offsets) else None
        return bisect_left(self.offsets, (character,), first) if found is None else found

    def word_before(self, character: int, origin: int = 0) -> int:
        """The token that begins the word WORDS_BEFORE words before `character`; `origin` if that comes later."""
        token = min(self.after(character, origin), len(self.ids) - 1)
        seen = 0
        while token > origin and seen < WORDS_BEFORE:
            token -= 1
            seen += self.words[token] is None or self.words[token] != self.words[token - 1]
        return max(token, origin)


class Cutter:
    """A fast transformers tokenizer, and how it cuts texts."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        return self.encode([text])["input_ids"][0]

    def tokens(self, texts: Sequence[str], pool: Executor | None = None) -> Iterator[Tokens]:
        """The tokens of each text; as many texts are tokenised together as BATCH characters hold.

        Args: pool: tokenises the first of them while the caller does something else.
        """
        groups: list[list[str]] = [[]]
        size = 0
        for text in texts:
            if size >= BATCH:
                groups.append([])
                size = 0
            groups[-1].append(text)
            size += len(text)
        begun = pool.submit(self.encode, groups[0]) if pool is not None and texts else None
        return self._read(groups if texts else [], begun)

    def _read(self, groups: Sequence[list[str]], begun: Future[Any] | None) -> Iterator[Tokens]:
        for group in groups:
            made = self.encode(group) if begun is None else begun.result()
            begun = None
            for ids, encoding in zip(made["input_ids"], made.encodings, strict=True):
                yield Tokens(ids, _Offsets(encoding), encoding.word_ids)

    def encode(self, texts: Sequence[str]) -> Any:
        return self.tokenizer(list(texts), **PLAIN)

    def starts(self, whole: Tokens, text: str, answers: Sequence[Sequence[int]]) -> list[int]:
        """Finds the token at which each answer of `text` begins; returns which turns' prompts have other ids alone.

        Before such a turn, one token holds characters of both sides: the prompt ends with a newline, and the answer
        begins with one.

        Args:
            whole: the text, tokenised; it takes the starts.
            answers: for every turn, the characters at which its answers begin.
        """
        apart = []
        for number, characters in enumerate(answers):
            shared = [self.shared(text, whole, character) for character in characters]
            if not all(all_shared for _, all_shared in shared):
                apart.append(number)
            whole.starts.extend(first for first, _ in shared)
            whole.origins.extend((0, 0) for _ in shared)
        return apart

    def split(self, text: str, starts: Sequence[int], whole: Tokens) -> Tokens:
        """Tokens of `text`, tokenised apart before and behind each character of `starts` (ascending).

        Raises: RefusedError where the sides together are another text.
        """
        expected = self._decode(whole.ids)
        for anchor in ANCHORS:
            made = self._apart(text, starts, anchor)
            if made is not None and self._decode(made.ids) == expected:
                return made
        raise RefusedError(
            "a token reaches over the start of an answer and the tokenizer cannot encode the sides apart"
        )

    def _apart(self, text: str, starts: Sequence[int], anchor: str) -> Tokens | None:
        """The tokens of both sides, each behind `anchor`; None where the anchor's own tokens change."""
        made, before = Tokens([], [], [], anchor=anchor), self._words(anchor) if anchor else []
        offsets: list[tuple[int, int]] = []
        for begin, stop in zip([0, *starts], [*starts, len(text)], strict=True):
            front, skipped = (anchor, before) if begin else ("", [])
            (piece,) = self.tokens([front + text[begin:stop]])
            if piece.ids[: len(skipped)] != skipped:
                return None
            made.ids.extend(piece.ids[len(skipped) :])
            shift = begin - len(front)
            offsets.extend((max(a + shift, begin), b + shift) for a, b in list(piece.offsets)[len(skipped) :])
            made.words.extend(piece.words[len(skipped) :])
            made.starts.append(len(made.ids))
        made.starts.pop()
        made.origins.extend(zip(starts, made.starts, strict=True))
        return replace(made, offsets=offsets)

    def shared(self, text: str, tokens: Tokens, position: int, origin: tuple[int, int] = (0, 0)) -> tuple[int, bool]:
        """How many first tokens `text[:position]` has in common with `text`, and whether these are all that it has.

        Only the last words before `position` are tokenised again, because what comes before a word does not change its
        tokens. If even the first of their tokens differs, this tokenizer does not split texts into words; then
        everything from `origin` on is tokenised again.

        Args: origin: the character, and its token, at which this piece of the text begins.
        """
        begun, first = origin
        # a piece that was tokenised behind an anchor is tokenised so again
        anchor, skipped = (tokens.anchor, len(self._words(tokens.anchor))) if begun and tokens.anchor else ("", 0)
        token = tokens.word_before(position, first)
        # the offsets of some tokenizers leave out the space before a word, so begin where the token before ends
        tries = [(tokens.offsets[token - 1][1], token, "", 0)] if token > first else []
        for begin, token, front, dropped in [*tries, (begun, first, anchor, skipped)]:
            mine = self._words(front + text[begin:position])[dropped:]
            there = tokens.ids[token : token + len(mine)]
            alike = len(mine) if mine == there else len(os.path.commonprefix([mine, there]))
            if alike:
                break
        return token + alike, alike == len(mine)

    def _words(self, text: str) -> list[int]:
        """Token ids of a few words. Most prompts end with the same words, which are tokenised once."""
        ids = self._known.get(text)
        if ids is None:
            ids = self.ids(text)
            if len(text) <= LONGEST_WORDS:
                if len(self._known) >= MOST_WORDS:
                    self._known.clear()
                self._known[text] = ids
        return ids

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
