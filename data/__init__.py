"""From conversations to the packs of hidden states that a head trains on.

    sources.py, hub.py          files and Hub datasets → records
    records.py, messages.py     a record of any layout → Conversation
    prompts.py, distill.py      a Conversation → a prompt, which the target answers
    answering.py                what distillation asks of whatever answers; the target's own forward
    answer_file.py              the file of answers: written one by one, continued, shared by processes
    chat.py                     a Conversation → token ids, and which of them are supervised (the mask). It renders the
                                text (rendering.py), finds the answers in it (turns.py, one_pass.py), checks that
                                nothing is missing (pieces.py) and finds the tokens of the answers (cutting.py)
    encoding.py                 many Conversations at once, on one process or divided among the ranks of a launch
    prepare.py, samples.py      all of them → Samples, with a report of what is dropped or cut
    spool.py                    the tokens of many Samples, in a temporary file
    split.py, packing.py        Samples → training and held-out ones; which of them share a pack
    features.py                 a pack → FeatureBatch with the target's hidden states: live, from memory.py or store.py
"""
