"""The loss that bad workers cost: sixteen replicas, of which three or seven lie, under each
aggregation rule. Real exchanges in virtual time.

    python -m tests.bench.train_attacks [--rounds 40] [--steps 10] [--aggregate centered-clip] [--attack alie]

The text is the standard library's source. "plain mean" is a mean without any check or clipping;
"mean" and "centered-clip" are what a job gets that asks for them, with contributions checked and
clipped to their median norm. Prints a JSON object a run; ``ratio`` is of the validation loss to the
loss without bad workers.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from tests.support.training.attacks import ATTACKS, attack_job, sign_flip, train
from tests.support.training.workers import copy_sources

ROADS = ("centered-clip", "mean", "plain mean")
EVAL_BATCHES = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="inner steps of a round")
    parser.add_argument("--aggregate", nargs="+", choices=ROADS, default=ROADS)
    parser.add_argument("--attack", nargs="+", choices=tuple(ATTACKS), default=tuple(ATTACKS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small are slower with more
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_sources(folder)
        length = {"rounds": arguments.rounds, "steps": arguments.steps, "eval_batches": EVAL_BATCHES}
        clean = train(attack_job(folder, "mean", **length), folder, 0, sign_flip).loss
        print(json.dumps({"bench": "train_attacks", "clean_val_loss": round(clean, 4)}), flush=True)
        for road in arguments.aggregate:
            job = attack_job(folder, road.removeprefix("plain "), **length)
            rules = AggregationRules() if road == "plain mean" else None
            for attack in arguments.attack:
                for bad in (3, 7):
                    trained = train(job, folder, bad, ATTACKS[attack], rules=rules)
                    line: dict[str, object] = {"aggregate": road, "attack": attack, "bad": bad}
                    line |= {"val_loss": round(trained.loss, 4), "ratio": round(trained.loss / clean, 3)}
                    excluded = sorted({why for each in trained.excluded for why in each.values()})
                    print(json.dumps({"bench": "train_attacks"} | line | {"excluded": excluded}), flush=True)


if __name__ == "__main__":
    main()
