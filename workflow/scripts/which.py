"""Which strategy, before it runs: how long a step of each row takes on your machines, or of a model on many GPUs.

Your own rows, on this machine or several like it, from the configuration and the prepared data:

    lockstep bench --until plan; lockstep network    # the data and the plan, and what messages between ranks cost
    lockstep which --gpus 4 --network 25Gb           # several machines, whose network has this speed
    lockstep which --seal                            # before the benchmark; its report then shows foretold and measured
    lockstep which --price .8                        # and what an epoch costs, at this price of a device for an hour
    lockstep which --memory 24GB --picture which.svg # and what each row needs of such a GPU, as a picture

Each row's own code runs alone for some seconds, with one rank's share of each batch, and its strategy says what it
sends. So it takes about ten seconds a row. --network stands for a network that was not measured, in place of one that
was. --memory and --picture also count each row's memory on GPUs, as `lockstep fits` does, which takes as long again.

Or fsdp, ddp and ZeRO on many GPUs, by a model's shape, without a GPU or data:

    lockstep which --model llama.yaml --gpus 8 64 512 --gpu h100 --length 2048 --batch 1024 --tokens 20e9 --price 3

--model is a config.json of transformers, its folder, or a YAML file with the same keys; nothing is downloaded. The time
is foretold for training in bf16, with rates that were found from published runs of fsdp on 8 to 512 GPUs, and an
interval from the errors on runs that had no part in them. What is beyond what was checked is "extrapolated", and has no
interval: so are all other strategies, and --lora, which freezes the model's own weights.

--cluster mine.yaml describes other machines than those of --gpu, with the keys that workflow/cards.yaml explains.
"""

import argparse
from pathlib import Path

from lockstep import cli
from lockstep.errors import BadInput
from lockstep.forecast import by_shape, clusters, own_rows, sharded

MOST = {"tokens": 1e18, "price": 1e6}  # beyond these a digit is too many
OF_A_SHAPE = ("gpu", "cluster", "length", "batch", "batch_tokens", "micro_batch", "checkpointing", "tokens")
OF_A_SHAPE += ("strategies", "lora")


def main() -> int:
    parser = cli.parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--gpus", type=int, nargs="+", metavar="N", help="how many devices train together")
    parser.add_argument(
        "--network",
        metavar="25Gb",
        help="of a machine, in Gbit/s (default with --model: the cluster's)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was foretold into a new file")
    parser.add_argument(
        "--price", type=float, metavar="3", help="of a GPU for an hour, in any currency (default: the cluster's)"
    )
    own = parser.add_argument_group("your own rows")
    own.add_argument("--rows", nargs="+", action="extend", metavar="ROW", help="by default all")
    own.add_argument(
        "--seal", action="store_true", help="keep what is foretold in the results, and note it in the journal"
    )
    own.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw each row's time against its memory on GPUs")
    own.add_argument("--memory", metavar="24GB", help="of a GPU: count what a row needs, and say what does not fit")
    shaped = parser.add_argument_group("many GPUs, by a model's shape")
    shaped.add_argument("--model", type=Path, metavar="FILE", help="a model by its shape")
    machines = shaped.add_mutually_exclusive_group()
    machines.add_argument("--gpu", type=str.lower, choices=clusters.cards(), help="in machines of workflow/cards.yaml")
    machines.add_argument("--cluster", type=Path, metavar="FILE", help="machines of your own, in YAML with such keys")
    shaped.add_argument("--length", type=int, metavar="N", help="tokens of a text (default: 2048)")
    batch = shaped.add_mutually_exclusive_group()
    batch.add_argument("--batch", type=int, metavar="N", help="texts of a step, on all GPUs together")
    batch.add_argument("--batch-tokens", type=int, metavar="N", help="the same in tokens")
    shaped.add_argument(
        "--micro-batch", type=int, metavar="N", help=f"texts of a GPU at a time (default: {by_shape.AT_A_TIME} tokens)"
    )
    shaped.add_argument("--checkpointing", action="store_true", help="compute activations again, in all layers")
    shaped.add_argument("--lora", action="store_true", help="the model's own weights are frozen (train.lora)")
    shaped.add_argument(
        "--strategies", nargs="+", choices=sharded.MANY, metavar="NAME", help="by default all that are known"
    )
    shaped.add_argument(
        "--tokens",
        type=float,
        metavar="20e9",
        help="of the whole training, or of an epoch (yours: results/logs/plan_*.log)",
    )
    arguments = parser.parse_args()
    cli.must_be_new(arguments.json, "--json", "file")
    cli.must_be_new(arguments.picture, "--picture", "file")
    for option, most in MOST.items():
        value = getattr(arguments, option)
        if value is not None and not 0 < value <= most:  # nor is it NaN
            raise BadInput(f"--{option} {value:g}: expected a number above 0, of at most {most:g}.")
    if arguments.model:
        return by_shape.tell(arguments)
    if given := [name for name in OF_A_SHAPE if getattr(arguments, name) not in (None, False)]:
        option = given[0].replace("_", "-")
        raise BadInput(f"--{option}: is for a model by its shape. Name it too, as in --model llama.yaml.")
    return own_rows.tell(cli.configuration(arguments, finished=True), arguments)


if __name__ == "__main__":
    cli.run(main)
