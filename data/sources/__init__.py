"""Files and datasets become records, and bad rows are put aside: sources.py begins."""
