"""One process of `headstart compare`: trains cells, and measures them when it is told to.

    python -m headstart.comparing.worker FOLDER/work.json NUMBER

It reads words from stdin: `measure` and `time`. It answers with a file, FOLDER/workers/NUMBER.json, which says what it
is at. When stdin ends, the command that started it is over: it saves and ends.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

from headstart.process_exit import ProcessExit

#: exit code after a signal
STOPPED = 130
#: seconds until a process that does not end is sent the signal again
AGAIN_S = 5.0


def main(arguments: list[str]) -> int:
    from headstart.comparing.cells import Work
    from headstart.comparing.work import LOST_CODE, CardLost, Worker
    from headstart.console import Console
    from headstart.heads.errors import HeadstartError
    from headstart.heads.files import write_json
    from headstart.heads.quiet import without_bars
    from headstart.sigterm import interruptible, stop_if_asked, terminable

    place, number = Path(arguments[0]), int(arguments[1])
    console = Console()
    note = place.parent / "workers" / f"{number}.json"
    told = {"cell": None, "phase": "train"}

    def begun(cell: str | None) -> None:
        told["cell"] = cell
        write_json(note, told)

    words: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(words,), daemon=True).start()
    try:
        with terminable(), interruptible(console.screen.ask), without_bars(("huggingface_hub", "transformers")):
            worker = Worker(Work.read(place), console, begun)
            phases = {"train": worker.train_all, "measure": worker.measure_all, "time": worker.time_all}
            word = "train"
            while word in phases:
                stop_if_asked()
                told["phase"] = word
                phases[word]()
                worker.drop_target()
                told["phase"] = f"{word} done"
                write_json(note, told)
                word = words.get()
    except KeyboardInterrupt:
        console.say("stopped; what was finished is kept, the same command continues")
        return STOPPED
    except CardLost as error:
        console.say(str(error))
        return LOST_CODE
    except HeadstartError as error:
        console.say(f"error: {error}")
        return error.exit_code
    return 0


def _listen(words: queue.Queue[str]) -> None:
    """Pass words on. At the end of stdin, end this process as SIGTERM does, unless it was told to leave."""
    for line in sys.stdin:
        words.put(line.strip())
        if line.strip() == "leave":
            return
    while True:  # a library may swallow the first
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(AGAIN_S)


if __name__ == "__main__":
    ending = ProcessExit()
    code = main(sys.argv[1:])
    ending.leave(code, at_once=code == STOPPED)
