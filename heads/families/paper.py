"""Where a drafting method is published, for the citation in model cards."""

from __future__ import annotations

from typing import NamedTuple


class Paper(NamedTuple):
    """A paper on arXiv.

    Attributes:
        method: the method's usual name.
        authors: as BibTeX writes them.
        arxiv: number, such as 2401.10774; empty where it is published elsewhere.
        where: where else, ending in the year.
    """

    method: str
    title: str
    authors: str
    arxiv: str
    where: str = ""
