"""Convert a checkpoint into a plain Hugging Face folder: model.safetensors, config, tokenizer.

    python workflow/scripts/convert.py results/runs/ddp/n2/rep1                                   a run's checkpoint
    python workflow/scripts/convert.py results/runs/ddp/n2/rep1 --snapshot 3                      the one of epoch 3
    python workflow/scripts/convert.py --model FOLDER --weights THEIRS --output NEW [--labels A,B]    anybody's

FOLDER holds a model of the same class and size. THEIRS may be a state dict (.pt, .bin, .safetensors), also nested like
{"model": ...} or with the names that DDP, torch.compile or Fabric give; or a folder with a checkpoint of transformers,
DeepSpeed or PyTorch's distributed checkpoints (FSDP). It is read as values only; code in it is never run.
"""

import argparse
from pathlib import Path

from lockstep import cli, paths
from lockstep.errors import BadInput
from lockstep.proof import conversion


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a run's folder, such as results/runs/ddp/n2/rep1")
    cli.add_snapshot(parser)
    cli.add_model(parser)
    parser.add_argument("--output", type=Path, help="the folder to create, with --weights")
    arguments = parser.parse_args()
    if arguments.run and not (arguments.model or arguments.weights):
        run = arguments.run if arguments.snapshot is None else cli.snapshot(arguments.run, arguments.snapshot)
        model = run / paths.MODEL
        weights = conversion.convert(run, model)
        print(f"{model}: equal to the live weights, value by value (sha256 {weights[:16]})")
        return
    if (
        arguments.run
        or arguments.snapshot is not None
        or not (arguments.model and arguments.weights and arguments.output)
    ):
        raise BadInput(
            "Give a run's folder, with or without --snapshot, or --model FOLDER, --weights FILE and --output FOLDER."
        )
    cli.must_be_new(arguments.output)
    from lockstep.proof import foreign

    for note in foreign.convert(arguments.weights, arguments.model, arguments.output, cli.labels(arguments)):
        print(f"note: {note}")
    print(f"{arguments.output}: the weights of {arguments.weights}, all of them")


if __name__ == "__main__":
    cli.run(main)
