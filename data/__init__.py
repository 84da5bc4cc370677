"""From conversations to the packs of hidden states that a head trains on, in this order:

    sources/                files and datasets → records; bad rows are put aside
    records/                a record of any layout → Conversation
    prompts.py, distilling/ a Conversation → a prompt, which the target answers
    serving/                servers that answer for it
    chat/                   a Conversation → token ids, and which of them are supervised (the mask)
    encoding.py             many at once, on one process or divided among the ranks of a launch (ranks.py)
    choosing/               duplicates leave, caps and weights choose, a part is held out
    prepare.py, samples.py  all of these → Samples, with a report of what is dropped or cut
    spool.py                the tokens of many Samples, in a temporary file
    packing.py              which Samples share a pack
    features.py             a pack → FeatureBatch with the target's hidden states: live, from memory.py or store.py

inspection.py and statistics.py show what came of it. config.py holds the recipe's nodes `data` and `data.distill`.
"""
