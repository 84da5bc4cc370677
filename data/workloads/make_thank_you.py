"""python data/workloads/make_thank_you.py [OUT_DIR]

Writes the prompts of the `thank_you` workload and lets the default target answer them greedily (float32, on a CPU).
One narrow task, a shop's thank-you notes, so that a few hundred conversations are enough to learn from.
Held-out prompts are about products that training never names; `thank_you_prompts` has no answers: to be
distilled live.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headstart.data.config import DistillConfig
from headstart.data.distilling.distill import distill
from headstart.data.prompts import Prompt
from headstart.heads.files import write_text
from headstart.heads.targets.load import load_target
from headstart.heads.targets.target import TargetConfig

EMAIL = "Write a short thank-you email to a customer who bought {}."
LOOKS = ("new", "red", "handmade", "vintage", "lightweight")
TRAIN = (
    "kettle", "teapot", "desk lamp", "bookshelf", "armchair", "coffee table", "picture frame", "wall clock", "doormat",
    "blanket", "pillow", "curtain", "mirror", "candle holder", "flower pot", "watering can", "garden bench", "hammock",
    "tent", "sleeping bag", "backpack", "suitcase", "umbrella", "raincoat", "scarf", "winter hat", "sweater", "belt",
    "wallet", "handbag", "necklace", "bracelet", "wristwatch", "notebook", "fountain pen", "sketchbook", "calendar",
    "board game", "puzzle", "kite", "skateboard", "scooter", "bicycle", "helmet", "tennis racket", "yoga mat", "guitar",
    "camera", "toolbox", "water bottle",
)  # fmt: skip
PROMPTS = ("sofa", "blender", "lantern", "apron")
HELD_OUT = ("toaster", "rug", "rucksack", "violin", "surfboard", "jacket", "vase", "telescope")


def make_prompts(products: tuple[str, ...]) -> list[Prompt]:
    """One prompt per product and look."""
    made = []
    for product in products:
        for look in LOOKS:
            text = EMAIL.format(f"a {look} {product}")
            made.append(Prompt.ask(f"thank_you/{look}-{product}".replace(" ", "-"), text, task="email"))
    return made


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    records = [{"id": p.id, "task": p.task, "prompt": p.first[0]["content"]} for p in make_prompts(PROMPTS)]
    write_text(folder / "thank_you_prompts.jsonl", "".join(json.dumps(record) + "\n" for record in records))
    target = load_target(TargetConfig(name="smollm2-135m-instruct", device="cpu", dtype="float32"))
    config = DistillConfig(max_new_tokens=96, batch_size=32)
    for name, products in (("heldout", HELD_OUT), ("train", TRAIN)):
        out = distill(
            target, make_prompts(products), config, folder / f"thank_you_{name}.jsonl",
            progress=lambda done, total, message: print(f"{done}/{total} {message}", file=sys.stderr),
        )  # fmt: skip
        print(out)


if __name__ == "__main__":
    main()
