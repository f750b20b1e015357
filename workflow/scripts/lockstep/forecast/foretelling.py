"""How long a step of each row takes on a machine of one's own, before the row has run there with several ranks.

A row's own code runs alone for some seconds (forecast/alone.py), the `network` rule has measured messages, and the
strategy declares which it sends (forecast/ranks.py).
"""

import math
from dataclasses import asdict, replace
from pathlib import Path

from lockstep import paths
from lockstep.config import registry
from lockstep.config.configuration import Config
from lockstep.config.resolving import resolve
from lockstep.config.row import Row
from lockstep.config.settings import in_one
from lockstep.data.plan import load_lengths
from lockstep.errors import BadInput, RunFailed
from lockstep.files import read_object
from lockstep.forecast import alone, ranks
from lockstep.forecast.ranks import NOTHING, Alone, Interval, Links, Shapes
from lockstep.run import seals

OTHERS = 0.1  # cores; a forecast says so if other programs took more while it was measured
RANKS = (2, 4)  # with which forecasts were held against runs
FASTEST = 1e9  # bits/s, the fastest link whose speed was named and on which forecasts were held against runs
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch normalisation, stored beside its weights


def foretell(config: Config, row: Row, results: Path, link: float | None) -> dict:
    """The forecast of a row's step: its seconds, their parts and what they are based on, or why there are none.

    link: bits/s of the network between machines, unless it was measured.
    """
    hardware = row.hardware
    link = link if hardware.nodes > 1 else None
    samples = len(load_lengths(paths.data_folder(results)))
    found = {"row": row.name, "strategy": row.strategy, "devices": hardware.devices, "ranks": hardware.processes}
    found |= {"global_batch": row.train.global_batch, "plan": row.plan_name, "settings": seals.settings_hash(row)}
    found |= {"epoch_steps": samples // row.train.global_batch}
    found |= {"seconds": None, "parts": {}, "known": "not foretold", "why": [], "disturbed": []}
    links = Links(hardware.processes, _measured(results, row), link, hardware.backend)
    if why := _not_foretold(row, links):
        return found | {"why": [why]}
    try:
        stored = weights(results)
        shapes = {name: shape for name, shape in stored.items() if not name.endswith(STATISTICS)}
        shapes, trained = (shapes, None) if not row.train.lora else with_lora(results, row)
        # On GPUs one copy is enough, since ranks there do not share cores to compute on.
        measured = alone.measure(config, row, results, hardware.processes_per_node if hardware.device == "cpu" else 1)
    except (BadInput, RunFailed) as error:
        return found | {"why": [f"it could not be measured alone: {error}"]}
    options, settings = _options(row), _settings(row)
    sends = registry.sends(row.strategy, settings) or []
    messages = ranks.messages(sends, shapes, options, row.train.accumulation, measured, hardware.device, trained)
    shared = registry.first(row.strategy, "SHARDS", settings) or []
    parts = ranks.step(measured, messages, links, shared, hardware.device)
    beyond = _extrapolated(row, links)
    if hardware.processes > 1 and len(stored) > len(shapes):
        beyond = [*beyond, "ranks send each other the statistics of batch normalisation, which are not counted"]
    found |= {"known": "extrapolated" if beyond else "foretold", "why": beyond, "alone": asdict(measured)}
    sent = sum(message.times * sum(message.sizes) for message in messages) if hardware.processes > 1 else 0
    found |= {"bytes": sent, "link": link, "disturbed": _disturbed(measured, links)}
    return found | {
        "seconds": _plain(sum(parts.values(), NOTHING), beyond),
        "parts": {name: _plain(part, beyond) for name, part in parts.items()},
    }


def _plain(seconds: Interval, beyond: list[str]) -> dict:
    """An interval as plain values; without its ends if it is extrapolated."""
    return asdict(seconds) | ({"low": None, "high": None} if beyond else {})


def on(row: Row, number: int | None) -> Row:
    """The row with this number of ranks, on this machine if it has enough devices, otherwise on several like it.

    A row that always trains on one device stays as it is. Raises BadInput if the number is not a multiple of a
    machine's devices. Row.refuse tells whether the row can have this many ranks.
    """
    if number is None or row.hardware.processes == 1:
        return row
    # A row with fewer processes of its own is on the same machine.
    here = max(row.hardware.processes_per_node, resolve(row.shared.hardware).devices)
    nodes, rest = divmod(number, here)
    if number <= here:
        row = replace(row, asked=replace(row.asked, processes=number, nodes=1))
    elif rest:
        raise BadInput(
            f"--gpus {number}: this machine has {here} devices by its configuration, and several like it would have a"
            f" multiple of that. Name {here * nodes} or {here * (nodes + 1)}; or set hardware.processes."
        )
    else:
        row = replace(row, asked=replace(row.asked, processes=here, nodes=nodes))
    if row.train.device_batch:
        row = replace(
            row, train=replace(row.train, global_batch=row.train.device_batch * row.replicas * row.train.accumulation)
        )
    return row


def weights(results: Path) -> Shapes:
    """The shapes of the model's weights by name, in the file's order. Tied weights are listed once."""
    from safetensors import safe_open

    files = sorted((paths.data_folder(results) / paths.WEIGHTS).glob("*.safetensors"))
    if not files:
        raise BadInput(f"{paths.data_folder(results) / paths.WEIGHTS}: has no weights in safetensors")
    shapes: Shapes = {}
    for file in files:
        with safe_open(file, "pt") as stored:
            shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()}  # noqa: SIM118
    return shapes


def with_lora(results: Path, row: Row) -> tuple[Shapes, Shapes]:
    """The shapes of all weights, and of those that are trained, of the model with LoRA's updates."""
    from lockstep.model import lora, models

    model = lora.put_into(models.load(paths.data_folder(results) / paths.WEIGHTS), row.train)
    named = dict(model.named_parameters())
    return (
        {name: tuple(weight.shape) for name, weight in named.items()},
        {name: tuple(weight.shape) for name, weight in named.items() if weight.requires_grad},
    )


def _measured(results: Path, row: Row) -> list[dict]:
    """What the network rule measured with a row's backend and device; empty if it measured nothing."""
    file = paths.network_file(results)
    measured = read_object(file, ("measured",))["measured"] if file.is_file() else []
    return [
        each for each in measured if (each["backend"], each["device"]) == (row.hardware.backend, row.hardware.device)
    ]


def _options(row: Row) -> dict:
    """A row's options. Those that its strategy does not inherit have the defaults of strategies/ddp.py."""
    return {name: option.get("default") for name, option in registry.literals("ddp")["OPTIONS"].items()} | row.options


def _settings(row: Row) -> dict:
    return in_one(_options(row), row.train, row.hardware, row.precision, row.shared.task)


def _not_foretold(row: Row, links: Links) -> str:
    """Why no time is foretold for a row; empty if a time is foretold."""
    if row.unavailable:
        return row.unavailable
    if row.study:
        return "it is somebody's published code"
    if row.hardware.processes == 1 == row.hardware.devices:
        return ""
    if registry.sends(row.strategy, _settings(row)) is None:
        return "its strategy does not declare what it sends with these options (SENDS)"
    if row.hardware.nodes > 1 and not links.link:
        return "what machines send to each other was not measured; name its speed: --network 25Gb"
    if not links.link and not links.measured:
        return "what messages cost was not measured; measure it: lockstep network"
    return ""


def _extrapolated(row: Row, links: Links) -> list[str]:
    """Why a row's forecast is beyond what forecasts were tested on; empty if it is not."""
    if row.hardware.processes == 1:
        return []
    beyond = links.extrapolated
    if row.hardware.processes not in RANKS:
        beyond = [*beyond, f"forecasts have been compared with runs of {' and '.join(map(str, RANKS))} ranks"]
    if links.link and links.link > FASTEST:
        beyond = [*beyond, "no forecast has been compared with runs on a network faster than 1 Gbit/s yet"]
    if row.hardware.device != "cpu":
        beyond = [*beyond, "no forecast has been compared with several GPUs yet"]
    if row.precision != "fp32":
        beyond = [*beyond, f"no forecast has been compared with runs in {row.precision} yet"]
    if row.hardware.nodes > 1 and row.hardware.processes_per_node > 1:
        beyond = [*beyond, "ranks of one machine share its network"]
    if row.train.lora:
        beyond = [*beyond, "no forecast has been compared with runs of LoRA yet"]
    return beyond


def _disturbed(measured: Alone, links: Links) -> list[str]:
    """Which other programs used the cores while the measurements behind a row's forecast were made."""
    found = (
        [f"other programs took {measured.others:.1f} cores from it while it ran alone"]
        if measured.others > OTHERS
        else []
    )
    if links.ranks > 1 and links.nearest and links.nearest.get("disturbed"):
        found.append(f"while messages were measured: {links.nearest['disturbed'][0]}")
    return found


def speedup(found: dict, single: dict | None) -> float | None:
    """How many times as many samples per second as `single` a row trains, by the forecasts of both."""
    if not single or not single["seconds"] or not found["seconds"]:
        return None
    ratio = single["seconds"]["value"] / found["seconds"]["value"]
    return ratio * found["global_batch"] / single["global_batch"] if math.isfinite(ratio) else None
