"""Which conversations train and which are held out: gather.py begins, separate.py ends."""
