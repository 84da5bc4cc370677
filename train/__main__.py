"""`python -m headstart.train RECIPE`: see headstart.train_on_ranks, whose imports take seconds."""

from __future__ import annotations

import os

from headstart.process_exit import ProcessExit
from headstart.sigterm import StartupStop
from headstart.threads import sleep_soon

if __name__ == "__main__":
    sleep_soon()
    launcher, startup, process_exit = os.getppid(), StartupStop(), ProcessExit()
    from headstart.train.sharing.distributed import is_distributed
    from headstart.train_on_ranks import main

    code = main(startup=startup, launcher=launcher)
    # taking down the process group of a launch that failed would wait for the rank that is gone
    process_exit.leave(code, startup.over, at_once=bool(code) and is_distributed())
