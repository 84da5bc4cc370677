"""`python -m headstart.train RECIPE`: see headstart.train.ranks, whose imports take seconds."""

from __future__ import annotations

import os

from headstart.early import EarlyStop
from headstart.ending import Ending

if __name__ == "__main__":
    launcher, early, ending = os.getppid(), EarlyStop(), Ending()
    from headstart.train.distributed import is_distributed
    from headstart.train.ranks import main

    code = main(early=early, launcher=launcher)
    # taking down the process group of a launch that failed would wait for the rank that is gone
    ending.leave(code, early.over, at_once=bool(code) and is_distributed())
