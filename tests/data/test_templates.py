"""Masks of public model families: against their text by hand, against served prompts, and against wrong masks."""

from __future__ import annotations

import pytest
from templates.checking import complaints_of, encode
from templates.expected import EXPECTED
from templates.families import FAMILIES, KINDS

from headstart.data.rendering import RefusedError

RIGHT = [(family, name) for family, found in EXPECTED.items() for name in found if isinstance(found[name], list)]
REFUSED = [(family, name) for family, found in EXPECTED.items() for name in found if isinstance(found[name], str)]


def test_every_family_is_tried():
    assert set(EXPECTED) == set(FAMILIES)
    assert all("chat" in found and len(found) > 1 for found in EXPECTED.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "conversation"), RIGHT)
def test_what_trains_is_the_text_by_hand_behind_the_served_prompt(family, conversation, kind):
    assert complaints_of(family, conversation, kind, encode(family, conversation, kind)) == []


@pytest.mark.parametrize(("family", "conversation"), REFUSED)
def test_what_a_template_cannot_show_is_refused_with_a_plain_reason(family, conversation):
    with pytest.raises(RefusedError) as refused:
        encode(family, conversation, "bytes")
    assert refused.value.reason == EXPECTED[family][conversation]
