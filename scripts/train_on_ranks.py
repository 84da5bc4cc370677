"""Train on one or many ranks.

The ranks first answer the prompts together, and rank 0 stores the features, where the recipe asks for it.

accelerate launch --multi_gpu --num_processes 4 -m headstart.train RECIPE [key=value …]
torchrun --nproc_per_node 2 -m headstart.train RECIPE target.device=cpu
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from accelerate import Accelerator

from headstart.auto import settled_on_ranks
from headstart.console import Console
from headstart.heads.errors import ConfigError, HeadstartError, explain_memory
from headstart.heads.escape import plain
from headstart.heads.quiet import without_bars
from headstart.heads.targets.load import present_device
from headstart.pipeline.data import prepare
from headstart.pipeline.distill import NO_PROMPTS, distill
from headstart.pipeline.features import store_features
from headstart.pipeline.run import Run
from headstart.pipeline.train import is_trained, require_layout, train_head, train_once
from headstart.recipes.load import load_recipe
from headstart.sigterm import terminable
from headstart.train.launching.rendezvous import StartupSignals
from headstart.train.launching.setup import make_accelerator
from headstart.train.launching.watch import Watch
from headstart.train.sharing.distributed import all_ranks, on_main, require_shared
from headstart.train.sharing.parallel import resolve_kind


def main(
    arguments: Sequence[str] | None = None, startup: StartupSignals | None = None, launcher: int | None = None
) -> int:
    """Train a recipe; returns the exit code.

    0: done, or stopped by a signal with everything saved, so that the same command continues (scripts/launch/slurm.sh
    puts it back in the queue). 1: failure. 2: wrong recipe or launch.

    Args:
        startup: what takes SIGTERM while this process starts; `over` is called when the ranks watch one another. None
            where the process does other work too, as in tests.
        launcher: id of the process that started this one.
    """
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m headstart.train", description=description)
    parser.add_argument("recipe", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.lr=1e-4")
    parser.add_argument("--only-distill", action="store_true", help="answer the recipe's prompts, and stop")
    options = parser.parse_args(arguments)
    rank, watch = "", Watch(launcher=launcher)
    try:
        recipe = load_recipe(options.recipe, options.overrides)
        accelerator = make_accelerator(present_device(recipe.target.device), startup)
        rank = f"rank {accelerator.process_index}: " if accelerator.num_processes > 1 else ""
        # from when the outcome is printed, a late signal must not change the exit code, which becomes the job's
        alone = startup is None and accelerator.num_processes == 1
        with terminable(None if alone else signal.SIG_IGN), watch:
            if startup is not None:
                startup.over()
            console = Console(silent=not accelerator.is_main_process)
            ranks = accelerator.num_processes
            node_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
            resolved, settled = settled_on_ranks(recipe, accelerator.device, ranks, node_ranks)
            run = Run(resolved, console, device=str(accelerator.device), ahead=("train",), settled=settled)
            working = console.phase("headstart.train", said=False, drawn=False)
            with working, without_bars(("huggingface_hub", "transformers")):
                train_ranks(run, accelerator, watch, options.only_distill)
        accelerator.end_training()
    except HeadstartError as error:
        print(f"{rank}error: {plain(str(error))}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if (full := explain_memory(error)) is not None:
            print(f"{rank}error: {full}", file=sys.stderr)
            return full.exit_code
        if not watch.reason(0.0):
            raise
        print(f"{rank}{'error: ' if watch.code else ''}{plain(watch.reason(0.0))}", file=sys.stderr)
        return watch.code
    except KeyboardInterrupt:
        print(f"{rank}stopped; what was finished is kept, the same command continues", file=sys.stderr)
    return 0


def train_ranks(run: Run, accelerator: Accelerator, watch: Watch, only_distill: bool = False) -> None:
    """The step `train` on every rank of this launch. All ranks answer prompts, tokenise and train; rank 0 does the
    rest, and writes.

    Args: only_distill: stop once the prompts are answered.
    """

    def begin() -> bool:
        done = is_trained(run)
        if not done:
            run.check()  # before the targets are loaded
        return done

    main, ranks = accelerator.is_main_process, accelerator.num_processes
    node_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    require_layout(run, ranks, node_ranks, resolve_kind(run.recipe.train, accelerator))
    require_shared(run.dir)
    with run.lock() if main else nullcontext():
        distill(run, all_ranks())
        if only_distill:
            if not run.recipe.data.distill.asks:
                raise ConfigError(f"--only-distill: {NO_PROMPTS}")
            return
        if on_main(begin):
            if main:
                run.save_recipe()
            return
        prepare(run, all_ranks())
        on_main(lambda: store_features(run))
        if main:
            train_once(run, accelerator, watch)
            run.save_recipe()
        else:
            train_head(run, accelerator, watch)
