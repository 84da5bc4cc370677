"""Chat template → text → tokens, and which of them are answers.

chat.py begins. It renders the text (rendering.py), finds the answers in it (turns.py, one_pass.py, prompts_apart.py),
checks that nothing is missing (pieces.py), and finds the tokens of the answers (cutting.py) and their ends (ends.py).
answers.py goes the other way: a generated answer becomes a message.
"""
