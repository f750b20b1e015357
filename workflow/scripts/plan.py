"""Plan the training: the samples of each optimizer step, and the length to which they are padded."""

import numpy as np

from lockstep import cli
from lockstep.config.kinds import Kind
from lockstep.data import plan, prepared
from lockstep.errors import BadInput
from lockstep.files import write_json
from lockstep.paths import data_folder, plan_file, plan_summary_file
from lockstep.run.progress import WARMUP_STEPS


def main() -> None:
    parser = cli.parser(__doc__)
    parser.add_argument("--plan", help="make only the plan with this name; by default those of all rows", default=None)
    arguments = parser.parse_args()
    config = cli.configuration(arguments)
    prepared.require(arguments.results)
    rows = [
        *(row for row, _ in config.order),
        *map(config.trial, config.rows.values()),
        *(reference for row in config.rows.values() for reference in config.references(row).values()),
        config.tried("base", {"strategy": "recipe"}),
        *map(config.profiled, config.rows.values() if config.profile.steps else ()),
    ]
    wanted = {row.plan_name: row for row in rows}
    if arguments.plan and arguments.plan not in wanted:
        raise BadInput(f"--plan {arguments.plan}: no row has it. There are: {', '.join(wanted)}.")
    lengths = plan.load_lengths(data_folder(arguments.results))
    # Plans of the proof come last, so that rows can be trained even if there are too few samples for the proof.
    for name, row in sorted(wanted.items(), key=lambda item: item[1].kind is Kind.TRIAL):
        if arguments.plan in (None, name):
            train = row.train
            if row.kind is Kind.TRIAL and len(lengths) < train.global_batch:
                raise BadInput(
                    f"the training split has only {len(lengths)} samples, but the proof trains steps of"
                    f" {train.global_batch}. Give more data, or train rows without the proof, by launch.py; their plans"
                    " are written."
                )
            row_plan = plan.of_training(train, lengths, config.data.max_length)
            if row.excerpt:
                row_plan = row_plan.excerpt(WARMUP_STEPS, row.excerpt)
            row_plan.save(plan_file(arguments.results, name))
            efficiency = row_plan.padding_efficiency(lengths)
            summary = {
                "name": name,
                "steps": row_plan.steps,
                "samples": len(row_plan.ids),
                "global_batch": train.global_batch,
                "padding_efficiency": efficiency,
                "dropped": row_plan.dropped.tolist(),
                "hash": row_plan.hash,
            }
            write_json(plan_summary_file(arguments.results, name), summary)
            print(
                f"{name}: {row_plan.steps} steps of {train.global_batch}, {len(row_plan.dropped)} samples dropped at"
                f" the ends of epochs, {efficiency:.1%} of the tokens in the padded batches are text"
                f"{_tokens(row_plan, len(lengths) // train.global_batch)}"
            )


def _tokens(of: plan.Plan, epoch: int) -> str:
    """The tokens of an epoch of so many steps, by those that are planned; nothing for images, which have none."""
    if of.widths.max() <= 1:
        return ""
    return f"; an epoch has {epoch * np.mean(np.diff(of.starts) * of.widths):,.0f} tokens with padding"


if __name__ == "__main__":
    cli.run(main)
