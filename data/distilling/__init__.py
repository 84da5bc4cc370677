"""The target answers prompts: distill.py begins; answering.py says what it asks of whatever answers."""
