"""`python -m headstart.train RECIPE`: see headstart.ranks, whose imports take seconds."""

from __future__ import annotations

import os

from headstart.early import EarlyStop
from headstart.ending import Ending

if __name__ == "__main__":
    launcher, early, ending = os.getppid(), EarlyStop(), Ending()
    from headstart.ranks import main
    from headstart.train.sharing.distributed import is_distributed

    code = main(early=early, launcher=launcher)
    # taking down the process group of a launch that failed would wait for the rank that is gone
    ending.leave(code, early.over, at_once=bool(code) and is_distributed())
