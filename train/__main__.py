"""`python -m headstart.train RECIPE`: see headstart.train_on_ranks, whose imports take seconds."""

from __future__ import annotations

import os

from headstart.process_exit import ProcessExit
from headstart.startup import StartupStop

if __name__ == "__main__":
    launcher, early, ending = os.getppid(), StartupStop(), ProcessExit()
    from headstart.train.sharing.distributed import is_distributed
    from headstart.train_on_ranks import main

    code = main(early=early, launcher=launcher)
    # taking down the process group of a launch that failed would wait for the rank that is gone
    ending.leave(code, early.over, at_once=bool(code) and is_distributed())
